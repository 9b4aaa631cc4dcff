// Attention's products on AMX tiles. Rows are the query vectors of a tile, 16 in an upper and up to 16 in a lower half.
//
//   scores   A: 32 dimensions of the queries    B: a key panel as it is, 16 pairs of dimensions by 16 tokens
//   mix      A: 16 tokens' weights              B: a value panel, 8 pairs of tokens by 16 dimensions
//
//   tmm  0 1  sums        2 3  A of 64 bytes a row, tmm 4 its B        5 6  A of 32 bytes a row, tmm 7 its B
#pragma once

namespace octavo {
namespace {

struct TileProducts {
  static constexpr bool kWantsBits = true;

  // Shapes for as many vectors as there are, for the tile's whole way through its pieces.
  static void begin(const Tile& tile) {
    const int upper = tile.count < kTileRows ? tile.count : kTileRows;
    const int lower = tile.count - upper;
    const int rows[8] = {upper, lower, upper, lower, kTileRows, upper, lower, kTileRows / 2};
    const int bytes[8] = {64, 64, 64, 64, 64, 32, 32, 64};
    configure_tiles(rows, bytes);
  }
  static void end() { _tile_release(); }

  template <int P>
  static void score(Tile& tile, const bf16* const* keys, int panel) {
    for (int p = panel; p < panel + P; ++p) {
      if (tile.count > kTileRows) {
        score_panel<true>(tile, keys[p], p);
      } else {
        score_panel<false>(tile, keys[p], p);
      }
    }
  }

  static void mix(Tile& tile, const bf16* const* values, int first, int count, int begin, int end) {
    if (count < tile.count || begin >= end) {
      FmaProducts::mix(tile, values, first, count, begin, end);  // the same bits
    } else if (count > kTileRows) {
      mix_panels<true>(tile, values, begin, end);
    } else {
      mix_panels<false>(tile, values, begin, end);
    }
  }

 private:
  template <bool Lower>
  static void score_panel(Tile& tile, const bf16* keys, int panel) {
    const std::int64_t stride = tile.dim * static_cast<std::int64_t>(sizeof(bf16));
    const bf16* lower = tile.query_bits + kTileRows * tile.dim;
    _tile_zero(0);
    if constexpr (Lower) _tile_zero(1);
    int d = 0;
    for (; d + kChunk <= tile.dim; d += kChunk) {
      _tile_loadd(4, keys + d * kPanel, 64);
      _tile_loadd(2, tile.query_bits + d, stride);
      _tile_dpbf16ps(0, 2, 4);
      if constexpr (Lower) {
        _tile_loadd(3, lower + d, stride);
        _tile_dpbf16ps(1, 3, 4);
      }
    }
    if (d < tile.dim) {
      _tile_loadd(7, keys + d * kPanel, 64);
      _tile_loadd(5, tile.query_bits + d, stride);
      _tile_dpbf16ps(0, 5, 7);
      if constexpr (Lower) {
        _tile_loadd(6, lower + d, stride);
        _tile_dpbf16ps(1, 6, 7);
      }
    }
    float* scores = tile.scores + panel * kPanel;
    _tile_stored(0, scores, kPiece * sizeof(float));
    if constexpr (Lower) _tile_stored(1, scores + kTileRows * kPiece, kPiece * sizeof(float));
  }

  // The sums of 16 dimensions stay in tiles over all panels.
  template <bool Lower>
  static void mix_panels(Tile& tile, const bf16* const* values, int begin, int end) {
    const std::int64_t out_stride = tile.dim * static_cast<std::int64_t>(sizeof(float));
    const std::int64_t value_stride = 2 * tile.dim * static_cast<std::int64_t>(sizeof(bf16));
    constexpr std::int64_t kWeightStride = kPiece * sizeof(bf16);
    for (int d = 0; d < tile.dim; d += kLanes) {
      float* upper = tile.piece + d;
      float* lower = upper + kTileRows * tile.dim;
      _tile_loadd(0, upper, out_stride);
      if constexpr (Lower) _tile_loadd(1, lower, out_stride);
      for (int panel = begin; panel < end; ++panel) {
        if (d == 0 && panel + kAhead < end) fetch(values[panel + kAhead], tile.dim);
        const bf16* weights = tile.weight_bits + panel * kPanel;
        _tile_loadd(7, values[panel] + 2 * d, value_stride);
        _tile_loadd(5, weights, kWeightStride);
        _tile_dpbf16ps(0, 5, 7);
        if constexpr (Lower) {
          _tile_loadd(6, weights + kTileRows * kPiece, kWeightStride);
          _tile_dpbf16ps(1, 6, 7);
        }
      }
      _tile_stored(0, upper, out_stride);
      if constexpr (Lower) _tile_stored(1, lower, out_stride);
    }
  }
};

}  // namespace
}  // namespace octavo
