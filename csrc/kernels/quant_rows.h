// Activations as int8: for each 32 k's of a row codes, their scale and their sums. The sums are of whole numbers, and all else
// is one operation a number, so that no order is left open.
#pragma once

#include <cstring>

namespace octavo {
namespace {

constexpr int kTiny = 0x0d80;      // bits of 2^-100 in bfloat16: chunks below it count as zero
constexpr int kInfinite = 0x7f80;  // of infinity; NaNs are above it

OCTAVO_INLINE float widen_one(std::uint32_t bits) {
  bits <<= 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

OCTAVO_INLINE void quantize_chunk(const bf16* x, const QuantFormat& format, QuantChunk* out) {
  const int most = largest_bits(x);
  const float largest = widen_one(static_cast<std::uint32_t>(most));
  float inverse = 127.0f / largest;
  out->scale = largest / 127.0f;
  if (most < kTiny) inverse = out->scale = 0;
  if (most >= kInfinite) {
    inverse = 0;  // whatever codes come of this, the scale makes them NaN
    out->scale = widen_one(kNanBits);
  }
  std::int32_t sums[2];
  for (int half = 0; half < 2; ++half) sums[half] = round_half(x + half * kChunk / 2, inverse, out->codes + half * kChunk / 2);
  if (format.group == kChunk) sums[0] += sums[1];
  for (int g = 0; g < 2; ++g) {
    out->initial[g] = -format.offset * sums[g];
    out->sums[g] = out->scale * static_cast<float>(sums[g]);
  }
}

// The sums of bfloat16 activations themselves, by the matrix rule.
inline void sum_groups(const bf16* x, const QuantFormat& format, QuantChunk* out) {
  for (int g = 0; g < format.groups(); ++g, x += format.group) {
    float even = 0, odd = 0;
    for (int i = 0; i < format.group; i += 2) {
      even = even + widen_one(x[i]);
      odd = odd + widen_one(x[i + 1]);
    }
    out->sums[g] = even + odd;
  }
}

inline void quantize(const Quantize& q, std::int64_t row_begin, std::int64_t row_end) {
  for (std::int64_t i = row_begin; i < row_end; ++i) {
    const bf16* x = q.x.row(i);
    QuantChunk* out = q.out.row(i);
    for (int k = 0; k < q.k; k += kChunk, ++out) {
      if (!q.keep) {
        quantize_chunk(x + k, q.format, out);
      } else if (q.format.has_minimum) {
        sum_groups(x + k, q.format, out);
      }
    }
  }
}

}  // namespace
}  // namespace octavo
