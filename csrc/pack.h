// From the rows of a weight to the panels of kernels.h.
#pragma once

#include <bit>
#include <cstdint>

#include "kernels.h"

namespace octavo {

// The nearest bfloat16, ties to even, as every kernel table rounds: NaN becomes 0x7fc0, a subnormal zero of its sign.
inline bf16 round_to_bf16(float x) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fc0;
  if (magnitude < 0x00800000u) return static_cast<bf16>(bits >> 16 & 0x8000u);
  return static_cast<bf16>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
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
  for (int panel = panel_begin; panel < panel_end; ++panel) {
    bf16* pair = out + panel * step * padded_k * kPanel;
    for (std::int64_t i = 0; i < padded_k; i += 2, pair += 2 * kPanel) {
      for (int c = 0; c < kPanel; ++c) {
        const std::int64_t row = std::int64_t{panel} * kPanel + c;
        const T* from = rows + row * row_stride + i;
        pair[2 * c] = row < n && i < k ? round_to_bf16(from[0]) : bf16{0};
        pair[2 * c + 1] = row < n && i + 1 < k ? round_to_bf16(from[1]) : bf16{0};
      }
    }
  }
}

}  // namespace octavo
