// x @ w^T with its epilogue. Pairs of panels are the outer loop, so that a weight comes from memory once for all rows; inside,
// a block of rows shares each load of weights, and the sums stay in registers.
#pragma once

namespace octavo {
namespace {

// Writes one row's sums of panels first .. first + P - 1.
template <int P>
OCTAVO_INLINE void finish(const Matmul& m, std::int64_t row, int first, const Vec (&acc)[P]) {
  Vec y[P];
  for (int p = 0; p < P; ++p) y[p] = m.bias ? acc[p] + load(m.bias + (first + p) * kPanel) : acc[p];

  if (m.epilogue == Epilogue::kSiluMul || m.epilogue == Epilogue::kGeluMul) {
    if constexpr (P == 2) {
      const int column = first / 2 * kPanel;
      const Vec gate = round_to_bf16(y[0]), up = round_to_bf16(y[1]);
      const Vec gated = (m.epilogue == Epilogue::kSiluMul ? silu(gate) : gelu(gate)) * up;
      if (column < m.out_width) store(m.out.row(row) + column, gated, m.out_width - column);
    }
    return;
  }
  for (int p = 0; p < P; ++p) {
    const int column = (first + p) * kPanel;
    const int width = m.out_width - column;
    if (width <= 0) return;
    if (m.epilogue == Epilogue::kFloat) {
      store(m.out_float.row(row) + column, y[p], width);
    } else if (m.epilogue == Epilogue::kAdd) {
      store(m.out_float.row(row) + column, load(m.residual.row(row) + column, width) + round_to_bf16(y[p]), width);
    } else {
      store(m.out.row(row) + column, y[p], width);
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
  for (int r = 0; r < R; ++r) finish<P>(m, row + r, panel, acc[r]);
}

// Panels side by side, so that each activation that is read serves them all: best where weights are in the cache.
template <int R, int P>
inline void multiply_blocked(const Matmul& m, std::int64_t row, int panel) {
  Vec acc[R][P];
  sum_panels<R, P>(m, row, panel, acc);
  for (int r = 0; r < R; ++r) finish<P>(m, row + r, panel, acc[r]);
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
