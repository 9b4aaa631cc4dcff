// Activations as int8: for each 32 k's of a row codes, their scale and their sums. Plain loops, which compilers turn into
// vectors; the sums are of whole numbers, and all else is one operation a number, so that no order is left open.
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
  std::int16_t most = 0;
  for (int i = 0; i < kChunk; ++i) {
    const auto size = static_cast<std::int16_t>(x[i] & 0x7fff);
    most = most > size ? most : size;
  }
  const float largest = widen_one(static_cast<std::uint32_t>(most));
  float inverse = 127.0f / largest;
  out->scale = largest / 127.0f;
  if (most < kTiny) inverse = out->scale = 0;
  if (most >= kInfinite) {
    inverse = 0;
    out->scale = widen_one(kNanBits);
  }
  std::int32_t codes[kChunk];
  for (int i = 0; i < kChunk; ++i) {
    const float whole = widen_one(x[i]) * inverse + kMagic;
    std::int32_t bits;
    std::memcpy(&bits, &whole, sizeof bits);
    codes[i] = bits - kMagicBits;
  }
  for (int i = 0; i < kChunk; ++i) out->codes[i] = static_cast<std::int8_t>(codes[i]);
  std::int32_t sums[2] = {0, 0};
  for (int i = 0; i < kChunk / 2; ++i) {
    sums[0] += out->codes[i];
    sums[1] += out->codes[i + kChunk / 2];
  }
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
