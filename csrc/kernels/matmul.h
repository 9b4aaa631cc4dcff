// x @ w^T with its epilogue. Pairs of panels are the outer loop, so that a weight comes from memory once for all rows; inside,
// a block of rows shares each load of weights, and the sums stay in registers.
#pragma once

namespace octavo {
namespace {

// Writes N rows of a gate: what panels first and first + 1 came to.
template <int N>
OCTAVO_INLINE void finish_gate(const Matmul& m, std::int64_t row, int first, Vec (&gate)[N], const Vec (&up)[N]) {
  for (Vec& g : gate) g = round_to_bf16(g);
  m.epilogue == Epilogue::kSiluMul ? silu(gate) : gelu(gate);
  const int column = first / 2 * kPanel;
  if (column >= m.out_width) return;
  for (int r = 0; r < N; ++r) store(m.out.row(row + r) + column, gate[r] * round_to_bf16(up[r]), m.out_width - column);
}

// Writes R rows' sums of panels first .. first + P - 1; sum(r, p) gives them.
template <int R, int P, class Sum>
OCTAVO_INLINE void finish(const Matmul& m, std::int64_t row, int first, Sum&& sum) {
  const auto y = [&](std::int64_t r, int p) { return m.bias ? sum(r, p) + load(m.bias + (first + p) * kPanel) : sum(r, p); };
  if (m.epilogue == Epilogue::kSiluMul || m.epilogue == Epilogue::kGeluMul) {
    if constexpr (P == 2) {
      for_row_blocks<kSideBySide>(0, R, [&]<int N>(std::int64_t r) {
        Vec gate[N], up[N];
        for (int i = 0; i < N; ++i) gate[i] = y(r + i, 0), up[i] = y(r + i, 1);
        finish_gate(m, row + r, first, gate, up);
      });
    }
    return;
  }
  for (int r = 0; r < R; ++r) {
    for (int p = 0; p < P; ++p) {
      const int column = (first + p) * kPanel;
      const int width = m.out_width - column;
      if (width <= 0) break;
      if (m.epilogue == Epilogue::kFloat) {
        store(m.out_float.row(row + r) + column, y(r, p), width);
      } else if (m.epilogue == Epilogue::kAdd) {
        store(m.out_float.row(row + r) + column, load(m.residual.row(row + r) + column, width) + round_to_bf16(y(r, p)), width);
      } else {
        store(m.out.row(row + r) + column, y(r, p), width);
      }
    }
  }
}

// Sums of R rows and P panels.
template <int R, int P>
OCTAVO_INLINE void sum_panels(const Matmul& m, std::int64_t row, int panel, Vec (&acc)[R][P]) {
  const bf16* w[P];
  for (int p = 0; p < P; ++p) w[p] = m.w.panel(panel + p);
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p) acc[r][p] = splat(0.0f);

  const int padded_k = m.w.padded_k();
  for (int k = 0; k < padded_k; k += kChunk) {
    float x[R * kChunk];
    for (int r = 0; r < R; ++r) widen(m.x.row(row + r) + k, x + r * kChunk, kChunk);
    add_chunk<R, P>(acc, x, kChunk, w, 2 * kPanel, kChunk / 2);
    for (int p = 0; p < P; ++p) w[p] += kChunk * kPanel;
  }
}

// One panel after the other, which is the order of memory: best where weights come from there and are used once.
template <int R, int P>
inline void multiply_streaming(const Matmul& m, std::int64_t row, int panel) {
  Vec acc[R][P];
  for (int p = 0; p < P; ++p) {
    Vec one[R][1];
    sum_panels<R, 1>(m, row, panel + p, one);
    for (int r = 0; r < R; ++r) acc[r][p] = one[r][0];
  }
  finish<R, P>(m, row, panel, [&](std::int64_t r, int p) { return acc[r][p]; });
}

// Panels side by side, so that each activation that is read serves them all: best where weights are in the cache.
template <int R, int P>
inline void multiply_blocked(const Matmul& m, std::int64_t row, int panel) {
  Vec acc[R][P];
  sum_panels<R, P>(m, row, panel, acc);
  finish<R, P>(m, row, panel, [&](std::int64_t r, int p) { return acc[r][p]; });
}

template <int P>
inline void multiply_rows(const Matmul& m, std::int64_t row_begin, std::int64_t row_end, int panel) {
  const bool once = row_end - row_begin <= kBlockRows;
  for_row_blocks<kBlockRows>(row_begin, row_end, [&]<int R>(std::int64_t row) {
    if (once) {
      multiply_streaming<R, P>(m, row, panel);
    } else {
      multiply_blocked<R, P>(m, row, panel);
    }
  });
}

inline void matmul(const Matmul& m, std::int64_t row_begin, std::int64_t row_end, int panel_begin, int panel_end) {
  int panel = panel_begin;
  for (; panel + 2 <= panel_end; panel += 2) multiply_rows<2>(m, row_begin, row_end, panel);
  if (panel < panel_end) multiply_rows<1>(m, row_begin, row_end, panel);
}

}  // namespace
}  // namespace octavo
