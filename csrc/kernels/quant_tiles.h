// Products with weights in few bits on AMX tiles, for activations in whole numbers: TDPBSUD sums bytes exactly, so which rows come here is
// free. The codes of some chunks of a panel are unpacked once for up to 128 rows; each group of k's is one tile product, whose
// whole numbers then take the group's scale.
//
//                  B: tmm6             a group's quads: 8 (or 4) rows of 64 bytes
//   A: tmm4          tmm0              rows 0 .. 15: 32 (or 16) codes each
//      tmm5          tmm1              rows 16 .. 31 (absent when 16 rows or fewer are left)
#pragma once

namespace octavo {
namespace {

constexpr int kUnpacked = 16;         // chunks: whole super-blocks
constexpr std::int64_t kBlock = 128;  // rows

struct UnpackedChunks {
  alignas(64) std::uint8_t codes[kUnpacked][kQuads * kQuadBytes];
  float scale[kUnpacked][2][kPanel];
  float minimum[kUnpacked][2][kPanel];
};

template <class F>
inline void unpack_chunks(const QuantWeight& w, const std::uint8_t* data, int count, UnpackedChunks& out) {
  const int scales = w.format.code_bytes(), minima = scales + w.format.scale_bytes();
  const std::uint8_t* factors = data;
  for (int chunk = 0; chunk < count; ++chunk, data += w.format.chunk_bytes()) {
    if (chunk % kSuperChunks == 0) {
      factors = data;
      data += w.format.factor_bytes();
    }
    Bytes u[kQuads];
    unpack<F::kCodes>(data, u);
    for (int q = 0; q < kQuads; ++q) _mm512_store_si512(out.codes[chunk] + q * kQuadBytes, u[q].v);
    for (int g = 0; g < F::kGroups; ++g) {
      store(out.scale[chunk][g], load_scales(data + scales, g, w.format.scales, factors));
      if constexpr (F::kHasMinimum)
        store(out.minimum[chunk][g], load_scales(data + minima, g, w.format.scales, factors + 2 * kPanel));
    }
  }
}

// Products of one group with `rows` rows (32 or fewer, as configured); x is the first row's chunk.
struct TileInts {
  alignas(64) std::int32_t row[2 * kTileRows][kPanel];
};
inline void tile_products(const std::int8_t* codes, std::int64_t stride, int rows, TileInts& out) {
  _tile_zero(0);
  _tile_loadd(4, codes, stride);
  _tile_dpbsud(0, 4, 6);
  _tile_stored(0, out.row[0], 64);
  if (rows > kTileRows) {
    _tile_zero(1);
    _tile_loadd(5, codes + kTileRows * stride, stride);
    _tile_dpbsud(1, 5, 6);
    _tile_stored(1, out.row[kTileRows], 64);
  }
}

// Adds `count` chunks to the sums of `rows` rows; x is the first row's first chunk.
template <class F, Activations A>
inline void add_tiles(const UnpackedChunks& w, int count, const QuantChunk* x, std::int64_t stride, int rows, PanelSums* sums, int p) {
  TileInts upper, lower;  // one byte a number: the first alone
  const std::int64_t bytes = stride * static_cast<std::int64_t>(sizeof(QuantChunk));
  for (int chunk = 0; chunk < count; ++chunk, x += chunks_each(A)) {
    for (int g = 0; g < F::kGroups; ++g) {
      const int first = g * kChunk / F::kGroups;
      _tile_loadd(6, w.codes[chunk] + first * kPanel, kQuadBytes);
      tile_products(x[0].codes + first, bytes, rows, upper);
      if constexpr (A == Activations::kInt16) tile_products(x[1].codes + first, bytes, rows, lower);
      const Vec scale = load(w.scale[chunk][g]);
      for (int r = 0; r < rows; ++r) {
        const QuantChunk* own = x + r * stride;
        float* sum = sums[r / kSumRows].sum[p][r % kSumRows];
        Ints whole = {_mm512_add_epi32(_mm512_load_si512(upper.row[r]), _mm512_set1_epi32(own[0].initial[g]))};
        if constexpr (A == Activations::kInt16)
          whole = join(whole, {_mm512_add_epi32(_mm512_load_si512(lower.row[r]), _mm512_set1_epi32(own[1].initial[g]))});
        Vec acc = load(sum) + scale * splat(own->scale) * to_float(whole);
        if constexpr (F::kHasMinimum) acc = acc + load(w.minimum[chunk][g]) * splat(own->sums[g]);
        store(sum, acc);
      }
    }
  }
}

// Blocks of `rows` rows, all of one tile shape.
template <class F, Activations A>
inline void quant_blocks(const QuantMatmul& m, std::int64_t begin, std::int64_t end, int rows, int panel_begin, int panel_end) {
  constexpr int kBytes = kChunk / F::kGroups;
  const int upper = rows < kTileRows ? rows : kTileRows, lower = rows - upper;
  configure_tiles({upper, lower, 0, 0, upper, lower, kBytes / 4, 0}, {64, 64, 0, 0, kBytes, kBytes, 64, 0});
  UnpackedChunks w;
  PanelSums sums[kBlock / kSumRows];
  const int chunks = m.w.chunks();
  for (int panel = panel_begin; panel < panel_end; panel += 2) {
    const bool pair = panel + 1 < panel_end;
    for (std::int64_t block = begin; block < end; block += kBlock) {
      const std::int64_t block_end = block + kBlock < end ? block + kBlock : end;
      for (PanelSums& each : sums) each = {};
      for (int p = 0; p < 1 + pair; ++p) {
        for (int chunk = 0; chunk < chunks; chunk += kUnpacked) {
          const int count = chunks - chunk < kUnpacked ? chunks - chunk : kUnpacked;
          unpack_chunks<F>(m.w, m.w.panel(panel + p) + m.w.format.super_offset(chunk), count, w);
          for (std::int64_t row = block; row < block_end; row += rows)
            add_tiles<F, A>(w, count, m.x.row(row) + chunk * chunks_each(A), m.x.stride, rows, sums + (row - block) / kSumRows, p);
        }
      }
      for (std::int64_t row = block; row < block_end; row += kSumRows) {
        const int count = static_cast<int>(block_end - row < kSumRows ? block_end - row : kSumRows);
        finish_rows(m.m, row, count, panel, pair, sums[(row - block) / kSumRows]);
      }
    }
  }
  _tile_release();
}

inline void quant_matmul_amx(const QuantMatmul& m, std::int64_t row_begin, std::int64_t row_end, int panel_begin, int panel_end) {
  if (m.activations == Activations::kBfloat16) {
    quant_matmul(m, row_begin, row_end, panel_begin, panel_end);
    return;
  }
  const std::int64_t tail = row_end - (row_end - row_begin) % (2 * kTileRows);
  const int left = static_cast<int>(row_end - tail);
  const auto run = [&]<class F, Activations A>() {
    if (tail > row_begin) quant_blocks<F, A>(m, row_begin, tail, 2 * kTileRows, panel_begin, panel_end);
    if (left >= kFewestTileRows) quant_blocks<F, A>(m, tail, row_end, left, panel_begin, panel_end);
  };
  with_format(m.w.format, [&]<class F>() {
    if (m.activations == Activations::kInt8) {
      run.template operator()<F, Activations::kInt8>();
    } else {
      run.template operator()<F, Activations::kInt16>();
    }
  });
  if (left > 0 && left < kFewestTileRows) quant_matmul(m, tail, row_end, panel_begin, panel_end);
}

}  // namespace
}  // namespace octavo
