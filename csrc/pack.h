// From the rows of a weight to the panels of kernels.h.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace octavo {

// The nearest bfloat16, ties to even, as every kernel table rounds: NaN becomes 0x7fc0, a subnormal zero of its sign.
inline bf16 round_to_bf16(float x) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  const auto magnitude = static_cast<std::int32_t>(bits & 0x7fffffffu);
  std::uint32_t result = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  result = magnitude < 0x00800000 ? bits >> 16 & 0x8000u : result;
  result = magnitude > 0x7f800000 ? 0x7fc0u : result;
  return static_cast<bf16>(result);
}
inline bf16 round_to_bf16(bf16 x) { return x; }

// Packs panels panel_begin .. panel_end - 1 of a weight [n, k] (rows row_stride elements apart; float or bf16) into `out`:
// panel p goes to place p * step. Columns past n and k's past k become zero. Ranges may be packed by different threads.
//
// For kSiluMul and kGeluMul, gate and up take turns: gate is packed to out with step 2, up to out + one panel with step 2.
template <class T>
void pack_panels(const T* rows, std::int64_t row_stride, int n, int k, bf16* out, int panel_begin, int panel_end,
                 int step = 1) {
  const std::int64_t padded_k = PackedWeight{out, n, k}.padded_k();
  for (std::int64_t panel = panel_begin; panel < panel_end; ++panel) {
    bf16* place = out + panel * step * padded_k * kPanel;
    const int columns = static_cast<int>(std::min<std::int64_t>(kPanel, n - panel * kPanel));
    for (std::int64_t i = 0; i < padded_k; i += kChunk) {
      bf16 tile[kPanel][kChunk] = {};  // a chunk of k's of the panel's rows: rounded along rows, then turned in pairs
      const int width = static_cast<int>(std::min<std::int64_t>(kChunk, k - i));
      for (int c = 0; c < columns; ++c) {
        const T* row = rows + (panel * kPanel + c) * row_stride + i;
        for (int j = 0; j < width; ++j) tile[c][j] = round_to_bf16(row[j]);
      }
      for (int j = 0; j < kChunk; j += 2, place += 2 * kPanel) {
        for (int c = 0; c < kPanel; ++c) std::memcpy(place + 2 * c, &tile[c][j], 2 * sizeof(bf16));
      }
    }
  }
}

}  // namespace octavo
