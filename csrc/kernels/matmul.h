// x @ w^T with its epilogue. Panels are the outer loop, so that a weight comes from memory once for all rows; inside, a block
// of rows shares each load of weights, and the sums stay in registers.
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
      store(m.out_float + row * m.out_float_stride + column, y[p], width);
    } else if (m.epilogue == Epilogue::kAdd) {
      store(m.out.row(row) + column, round_to_bf16(y[p]) + load(m.residual.row(row) + column, width), width);
    } else {
      store(m.out.row(row) + column, y[p], width);
    }
  }
}

template <int R, int P>
inline void multiply(const Matmul& m, std::int64_t row, int panel) {
  Vec acc[R][P];
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
  for (int r = 0; r < R; ++r) finish<P>(m, row + r, panel, acc[r]);
}

template <int P>
inline void multiply_rows(const Matmul& m, std::int64_t row_begin, std::int64_t row_end, int panel) {
  for_row_blocks(row_begin, row_end, [&]<int R>(std::int64_t row) { multiply<R, P>(m, row, panel); });
}

inline void matmul(const Matmul& m, std::int64_t row_begin, std::int64_t row_end, int panel_begin, int panel_end) {
  int panel = panel_begin;
  for (; panel + 2 <= panel_end; panel += 2) multiply_rows<2>(m, row_begin, row_end, panel);
  if (panel < panel_end) multiply_rows<1>(m, row_begin, row_end, panel);
}

}  // namespace
}  // namespace octavo
