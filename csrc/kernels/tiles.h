// Matrix products on AMX tiles: 32 rows by 2 panels at a time. TDPBF16PS is the matrix rule, so which rows come here is free.
//
//               B: tmm6   tmm7        a packed panel as it is: 16 pairs of k's by 64 bytes
//   A: tmm4       tmm0   tmm1         rows 0 .. 15
//      tmm5       tmm2   tmm3         rows 16 .. 31 (absent when 16 rows or fewer are left)
#pragma once

#include <immintrin.h>

namespace octavo {
namespace {

constexpr int kTileRows = 16;
constexpr int kFewestTileRows = 8;  // fewer rows are read at the speed of memory by AVX-512, too

// What LDTILECFG reads (Intel SDM, "Tile configuration").
struct alignas(64) TileConfig {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

// Shapes of the eight tiles; one without rows is not used.
inline void configure_tiles(const int (&rows)[8], const int (&row_bytes)[8]) {
  TileConfig config;
  for (int t = 0; t < 8; ++t) {
    config.rows[t] = static_cast<std::uint8_t>(rows[t]);
    config.row_bytes[t] = static_cast<std::uint16_t>(rows[t] > 0 ? row_bytes[t] : 0);
  }
  asm volatile("" ::: "memory");  // GCC 12 believes that only the first 8 bytes are read, and drops the other stores
  _tile_loadconfig(&config);
}

struct TileSums {
  alignas(64) float tile[4][kTileRows][kPanel];  // as drawn above: [2 * half + panel]
};

template <bool Lower, int P>
inline void sum_tiles(const Matmul& m, std::int64_t row, int panel, TileSums& sums) {
  const std::int64_t x_stride = m.x.stride * static_cast<std::int64_t>(sizeof(bf16));
  const bf16* upper = m.x.row(row);
  const bf16* lower = upper + kTileRows * m.x.stride;
  const bf16* w0 = m.w.panel(panel);
  const bf16* w1 = w0 + static_cast<std::int64_t>(m.w.padded_k()) * kPanel;  // read only if P == 2
  _tile_zero(0);
  if constexpr (P == 2) _tile_zero(1);
  if constexpr (Lower) _tile_zero(2);
  if constexpr (Lower && P == 2) _tile_zero(3);
  for (std::int64_t k = 0; k < m.w.padded_k(); k += kChunk) {
    _tile_loadd(4, upper + k, x_stride);
    _tile_loadd(6, w0 + k * kPanel, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (P == 2) {
      _tile_loadd(7, w1 + k * kPanel, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (Lower) {
      _tile_loadd(5, lower + k, x_stride);
      _tile_dpbf16ps(2, 5, 6);
    }
    if constexpr (Lower && P == 2) _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums.tile[0], 64);
  if constexpr (P == 2) _tile_stored(1, sums.tile[1], 64);
  if constexpr (Lower) _tile_stored(2, sums.tile[2], 64);
  if constexpr (Lower && P == 2) _tile_stored(3, sums.tile[3], 64);
}

// `rows` rows from `row` on (32 or fewer, as configured), P panels.
template <int P>
inline void multiply_tiles(const Matmul& m, std::int64_t row, int rows, int panel) {
  TileSums sums;
  if (rows > kTileRows) {
    sum_tiles<true, P>(m, row, panel, sums);
  } else {
    sum_tiles<false, P>(m, row, panel, sums);
  }
  for (int r = 0; r < rows; ++r) {
    Vec acc[P];
    for (int p = 0; p < P; ++p) acc[p] = load(sums.tile[r / kTileRows * 2 + p][r % kTileRows]);
    finish<1, P>(m, row + r, panel, [&](std::int64_t, int p) { return acc[p]; });
  }
}

// Blocks of `rows` rows, all of one tile shape.
inline void matmul_blocks(const Matmul& m, std::int64_t begin, std::int64_t end, int rows, int panel_begin, int panel_end) {
  const int upper = rows < kTileRows ? rows : kTileRows, lower = rows - upper;
  configure_tiles({upper, upper, lower, lower, upper, lower, kTileRows, kTileRows}, {64, 64, 64, 64, 64, 64, 64, 64});
  for (int panel = panel_begin; panel < panel_end; panel += 2) {
    for (std::int64_t row = begin; row < end; row += rows) {
      if (panel + 1 < panel_end) {
        multiply_tiles<2>(m, row, rows, panel);
      } else {
        multiply_tiles<1>(m, row, rows, panel);
      }
    }
  }
  _tile_release();
}

inline void matmul_amx(const Matmul& m, std::int64_t row_begin, std::int64_t row_end, int panel_begin, int panel_end) {
  const std::int64_t tail = row_end - (row_end - row_begin) % (2 * kTileRows);
  const int left = static_cast<int>(row_end - tail);
  if (tail > row_begin) matmul_blocks(m, row_begin, tail, 2 * kTileRows, panel_begin, panel_end);
  if (left >= kFewestTileRows) {
    matmul_blocks(m, tail, row_end, left, panel_begin, panel_end);
  } else if (left > 0) {
    matmul(m, tail, row_end, panel_begin, panel_end);
  }
}

}  // namespace
}  // namespace octavo
