// The matrix rule, once: what matrix products, q . k and the weighted sum of values are made of.
#pragma once

namespace octavo {
namespace {

// The sums, from zero and in order, of one chunk's even (Odd = 0) or odd (Odd = 1) k's, for R rows times P panels.
template <int Odd, int R, int P, class W>
OCTAVO_INLINE void sum_chunk(Vec (&sum)[R][P], const float* x, std::int64_t x_stride, const W* const (&w)[P],
                             std::int64_t pair_stride, int pairs) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) sum[r][p] = splat(0.0f);
#pragma GCC unroll 1
  for (int j = 0; j < pairs; ++j) {
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
      const Vec column = Odd ? load_odd(w[p] + j * pair_stride) : load_even(w[p] + j * pair_stride);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) sum[r][p] = mul_add(splat(x[r * x_stride + 2 * j + Odd]), column, sum[r][p]);
    }
  }
}

// Both sums at once.
template <int R, int P, class W>
OCTAVO_INLINE void sum_chunk_together(Vec (&even)[R][P], Vec (&odd)[R][P], const float* x, std::int64_t x_stride,
                                      const W* const (&w)[P], std::int64_t pair_stride, int pairs) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) even[r][p] = odd[r][p] = splat(0.0f);
#pragma GCC unroll 1
  for (int j = 0; j < pairs; ++j) {
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
      const Vec first = load_even(w[p] + j * pair_stride), second = load_odd(w[p] + j * pair_stride);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        even[r][p] = mul_add(splat(x[r * x_stride + 2 * j]), first, even[r][p]);
        odd[r][p] = mul_add(splat(x[r * x_stride + 2 * j + 1]), second, odd[r][p]);
      }
    }
  }
}

// Adds one chunk to the sums of R rows times P panels: acc += (even + odd). Many evens and odds are two passes over the same
// 1 KiB of weights, so that each has all registers for its sums; few go side by side.
//
//   x   R rows of floats (each a bfloat16's value), x_stride apart: x[2j], x[2j + 1] belong to pair j
//   w   P panels of 16 columns; pair j of a panel is 32 elements (64 bytes) at w[p] + j * pair_stride:
//         w[2j][c] w[2j + 1][c] for c = 0 .. 15
template <int R, int P, class W>
OCTAVO_INLINE void add_chunk(Vec (&acc)[R][P], const float* x, std::int64_t x_stride, const W* const (&w)[P],
                             std::int64_t pair_stride, int pairs) {
  Vec even[R][P], odd[R][P];
  if constexpr (R * P <= kTogether) {
    sum_chunk_together<R, P>(even, odd, x, x_stride, w, pair_stride, pairs);
  } else {
    sum_chunk<0, R, P>(even, x, x_stride, w, pair_stride, pairs);
    sum_chunk<1, R, P>(odd, x, x_stride, w, pair_stride, pairs);
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) acc[r][p] = acc[r][p] + (even[r][p] + odd[r][p]);
}

// bfloat16 to float, count a multiple of 16.
OCTAVO_INLINE void widen(const bf16* x, float* y, int count) {
  for (int i = 0; i < count; i += kLanes) store(y + i, load(x + i));
}

// Calls f<R>(first) for blocks of Most rows and what is left, in order: the tail is one smaller block.
template <int R, class F>
OCTAVO_INLINE void last_rows(std::int64_t first, std::int64_t count, F&& f) {
  if constexpr (R > 0) {
    if (count == R) {
      f.template operator()<R>(first);
    } else {
      last_rows<R - 1>(first, count, f);
    }
  }
}
template <int Most, class F>
OCTAVO_INLINE void for_row_blocks(std::int64_t begin, std::int64_t end, F&& f) {
  std::int64_t row = begin;
  for (; row + Most <= end; row += Most) f.template operator()<Most>(row);
  last_rows<Most - 1>(row, end - row, f);
}

}  // namespace
}  // namespace octavo
