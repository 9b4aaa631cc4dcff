// Matrix products with VDPBF16PS: two products an instruction and lane, twice the speed of an FMA. It adds the odd product of
// each pair of k's, then the even one, to one running sum, which is not the matrix rule: so a table made of these gives other
// last bits than the tables of the contract. All else holds: a row's result depends on nothing but the row.
#pragma once

#include <cstring>

namespace octavo {
namespace {

constexpr int kDotRows = 8;  // rows whose sums (of two panels) stay in registers

OCTAVO_INLINE Vec dot(Vec sum, const bf16* pair, __m512i w) {
  std::int32_t bits;
  std::memcpy(&bits, pair, sizeof bits);
  return {_mm512_dpbf16_ps(sum.v, (__m512bh)_mm512_set1_epi32(bits), (__m512bh)w)};
}

// Adds `pairs` pairs of k's to the sums of R rows times P panels.
//
//   x   R rows of bfloat16, x_stride apart
//   w   P panels; pair j of a panel is 64 bytes at w[p] + j * pair_stride, as in products.h
template <int R, int P>
OCTAVO_INLINE void add_dots(Vec (&acc)[R][P], const bf16* x, std::int64_t x_stride, const bf16* const (&w)[P],
                            std::int64_t pair_stride, int pairs) {
#pragma GCC unroll 1
  for (int j = 0; j < pairs; ++j) {
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
      const __m512i column = _mm512_loadu_si512(w[p] + j * pair_stride);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) acc[r][p] = dot(acc[r][p], x + r * x_stride + 2 * j, column);
    }
  }
}

template <int R, int P>
OCTAVO_INLINE void sum_dots(const Matmul& m, std::int64_t row, int panel, Vec (&acc)[R][P]) {
  const bf16* w[P];
  for (int p = 0; p < P; ++p) {
    w[p] = m.w.panel(panel + p);
    for (int r = 0; r < R; ++r) acc[r][p] = splat(0.0f);
  }
  add_dots<R, P>(acc, m.x.row(row), m.x.stride, w, 2 * kPanel, m.w.padded_k() / 2);
}

// Few rows take one panel after the other, many take them side by side, for the reasons given in matmul.h.
template <int R, int P>
inline void multiply_dots(const Matmul& m, std::int64_t row, int panel) {
  Vec acc[R][P];
  if constexpr (R > kDotRows / 2) {
    sum_dots<R, P>(m, row, panel, acc);
  } else {
    for (int p = 0; p < P; ++p) {
      Vec one[R][1];
      sum_dots<R, 1>(m, row, panel + p, one);
      for (int r = 0; r < R; ++r) acc[r][p] = one[r][0];
    }
  }
  finish<R, P>(m, row, panel, [&](std::int64_t r, int p) { return acc[r][p]; });
}

inline void matmul_dots(const Matmul& m, std::int64_t row_begin, std::int64_t row_end, int panel_begin, int panel_end) {
  for (int panel = panel_begin; panel < panel_end; panel += 2) {
    for_row_blocks<kDotRows>(row_begin, row_end, [&]<int R>(std::int64_t row) {
      if (panel + 1 < panel_end) {
        multiply_dots<R, 2>(m, row, panel);
      } else {
        multiply_dots<R, 1>(m, row, panel);
      }
    });
  }
}

struct DotProducts {
  static constexpr bool kWantsBits = true;

  static void begin(const Tile&) {}
  static void end() {}

  template <int P>
  static void score(Tile& tile, const bf16* const* keys, int panel) {
    for_row_blocks<kDotRows>(0, tile.count, [&]<int R>(std::int64_t first) {
      Vec acc[R][P];
      const bf16* w[P];
      for (int p = 0; p < P; ++p) {
        w[p] = keys[panel + p];
        for (int r = 0; r < R; ++r) acc[r][p] = splat(0.0f);
      }
      add_dots<R, P>(acc, tile.query_bits + first * tile.dim, tile.dim, w, 2 * kPanel, tile.dim / 2);
      for (int r = 0; r < R; ++r)
        for (int p = 0; p < P; ++p) store(tile.scores + (first + r) * kPiece + (panel + p) * kPanel, acc[r][p]);
    });
  }

  static void mix(Tile& tile, const bf16* const* values, int first, int count, int begin, int end) {
    for (int panel = begin; panel < end && panel < begin + kAhead; ++panel) fetch(values[panel], tile.dim);
    for_row_blocks<kDotRows>(first, first + count, [&]<int R>(std::int64_t v) {
      int d = 0;
      for (; d + 2 * kLanes <= tile.dim; d += 2 * kLanes) mix_dimensions<R, 2>(tile, values, v, begin, end, d);
      if (d < tile.dim) mix_dimensions<R, 1>(tile, values, v, begin, end, d);
    });
  }

 private:
  // P * 16 dimensions from d on of R vectors: the sums stay in registers over all panels.
  template <int R, int P>
  OCTAVO_INLINE static void mix_dimensions(Tile& tile, const bf16* const* values, std::int64_t first, int begin, int end, int d) {
    Vec acc[R][P];
    float* out = tile.piece + first * tile.dim + d;
    for (int r = 0; r < R; ++r)
      for (int p = 0; p < P; ++p) acc[r][p] = load(out + r * tile.dim + p * kLanes);
    for (int panel = begin; panel < end; ++panel) {
      if (first == 0 && d == 0 && panel + kAhead < end) fetch(values[panel + kAhead], tile.dim);
      const bf16* w[P];
      for (int p = 0; p < P; ++p) w[p] = values[panel] + 2 * (d + p * kLanes);
      add_dots<R, P>(acc, tile.weight_bits + first * kPiece + panel * kPanel, kPiece, w, 2 * tile.dim, kPanel / 2);
    }
    for (int r = 0; r < R; ++r)
      for (int p = 0; p < P; ++p) store(out + r * tile.dim + p * kLanes, acc[r][p]);
  }
};

}  // namespace
}  // namespace octavo
