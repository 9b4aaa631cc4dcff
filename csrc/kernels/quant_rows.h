// Activations as whole numbers: for each 32 k's of a row codes, their scale and their sums. The sums are of whole numbers, and all else
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

// Where a chunk's integer sums start, and what its sums are worth. `sums`: of q, a half of the chunk each.
OCTAVO_INLINE void set_initial(const QuantFormat& format, const std::int32_t (&sums)[2], QuantChunk* out) {
  const std::int32_t whole = format.group == kChunk ? sums[1] : 0;
  out->initial[0] = -format.offset * (sums[0] + whole);
  out->initial[1] = -format.offset * sums[1];
}

// Bytes: 1, or 2 chunks side by side that hold the upper and the lower bytes.
template <int Bytes>
OCTAVO_INLINE void quantize_chunk(const bf16* x, const QuantFormat& format, QuantChunk* out) {
  constexpr float kMost = Bytes == 1 ? 127.0f : 127.0f * 128.0f;
  const int most = largest_bits(x);
  const float largest = widen_one(static_cast<std::uint32_t>(most));
  float inverse = kMost / largest, scale = largest / kMost;
  if (most < kTiny) inverse = scale = 0;
  if (most >= kInfinite) {
    inverse = 0;  // whatever codes come of this, the scale makes them NaN
    scale = widen_one(kNanBits);
  }
  std::int32_t upper[2] = {}, lower[2] = {};
  for (int half = 0; half < 2; ++half) {
    const int first = half * kChunk / 2;
    const Ints whole = to_ints(load(x + first) * splat(inverse));
    if constexpr (Bytes == 1) {
      lower[half] = store_codes(out->codes + first, whole);
    } else {
      const Ints up = upper_byte(whole);
      upper[half] = store_codes(out[0].codes + first, up);
      lower[half] = store_codes(out[1].codes + first, lower_byte(whole, up));
    }
  }
  out->scale = scale;
  for (int g = 0; g < 2; ++g) {
    const std::int32_t own = 128 * upper[g] + lower[g], both = own + 128 * upper[1] + lower[1];
    out->sums[g] = scale * static_cast<float>(g == 0 && format.group == kChunk ? both : own);
  }
  if constexpr (Bytes == 2) set_initial(format, upper, out);
  set_initial(format, lower, out + Bytes - 1);
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
    for (int k = 0; k < q.k; k += kChunk, out += chunks_each(q.activations)) {
      // Another core wrote them, as a rule; of the next row.
      if (i + 1 < row_end) __builtin_prefetch(q.x.row(i + 1) + k, 0);
      if (q.activations == Activations::kInt8) {
        quantize_chunk<1>(x + k, q.format, out);
      } else if (q.activations == Activations::kInt16) {
        quantize_chunk<2>(x + k, q.format, out);
      } else if (q.format.has_minimum) {
        sum_groups(x + k, q.format, out);
      }
    }
  }
}

}  // namespace
}  // namespace octavo
