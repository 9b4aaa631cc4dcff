#include "stored.h"

#include <array>
#include <bit>
#include <stdexcept>
#include <string>

namespace octavo {

namespace {

using Bytes = const std::uint8_t*;

// Half floats, little-endian. No subnormal float32 takes part, so that it makes no difference whether those are flushed.
float half(Bytes p) {
  const std::uint32_t h = p[0] | static_cast<std::uint32_t>(p[1]) << 8;
  const std::uint32_t sign = (h & 0x8000u) << 16, exponent = h >> 10 & 31u, mantissa = h & 0x3ffu;
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return sign == 0 ? magnitude : -magnitude;
  }
  return std::bit_cast<float>(sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | mantissa << 13);
}

void f16(Bytes block, float* out) { *out = half(block); }

void bf16(Bytes block, float* out) {
  *out = std::bit_cast<float>(static_cast<std::uint32_t>(block[0]) << 16 | static_cast<std::uint32_t>(block[1]) << 24);
}

// Blocks of 32: low nibbles are the first sixteen values, high ones the others; bit i of `high` is the fifth of value i.
template <int Offset, bool HasFifthBit, bool HasMinimum>
void block_of_32(Bytes block, float* out) {
  const float d = half(block), m = HasMinimum ? half(block + 2) : 0.0f;
  Bytes q = block + (HasMinimum ? 4 : 2);
  std::uint32_t high = 0;
  if (HasFifthBit) {
    for (int i = 0; i < 4; ++i) high |= static_cast<std::uint32_t>(q[i]) << (8 * i);
    q += 4;
  }
  for (int i = 0; i < 16; ++i) {
    const int low = (q[i] & 15) | (HasFifthBit ? static_cast<int>(high >> i & 1u) << 4 : 0);
    const int upper = (q[i] >> 4) | (HasFifthBit ? static_cast<int>(high >> (i + 16) & 1u) << 4 : 0);
    out[i] = static_cast<float>(low - Offset) * d;
    out[i + 16] = static_cast<float>(upper - Offset) * d;
  }
  if (HasMinimum) {
    for (int i = 0; i < 32; ++i) out[i] = out[i] + m;
  }
}

void q8_0(Bytes block, float* out) {
  const float d = half(block);
  for (int i = 0; i < 32; ++i) out[i] = static_cast<float>(static_cast<std::int8_t>(block[2 + i])) * d;
}

// Q4_K and Q5_K: d, dmin, twelve bytes of scales and minima of eight groups of 32, and in Q5_K 32 bytes whose bit g is the
// fifth bit of group g. Two groups share 32 bytes: low nibbles, high nibbles.
template <bool HasFifthBit>
void super_block_k(Bytes block, float* out) {
  const float d = half(block), dmin = half(block + 2);
  Bytes scales = block + 4, high = block + 16, q = block + (HasFifthBit ? 48 : 16);
  for (int g = 0; g < 8; ++g) {
    const int scale = g < 4 ? scales[g] & 63 : (scales[g + 4] & 15) | (scales[g - 4] >> 6 << 4);
    const int minimum = g < 4 ? scales[g + 4] & 63 : (scales[g + 4] >> 4) | (scales[g] >> 6 << 4);
    const float step = d * static_cast<float>(scale), offset = dmin * static_cast<float>(minimum);
    const int shift = g % 2 * 4;
    for (int i = 0; i < 32; ++i) {
      const int value = (q[g / 2 * 32 + i] >> shift & 15) | (HasFifthBit ? (high[i] >> g & 1) << 4 : 0);
      const float scaled = static_cast<float>(value) * step;
      out[32 * g + i] = scaled - offset;
    }
  }
}

// Sixteen groups of 16 with a signed scale each. Each half of 128 values has 64 bytes of low nibbles (values 0 to 63, then the
// high ones 64 to 127) and 32 bytes of upper pairs of bits (values 0 to 31 in the lowest pair, and so on).
void q6_k(Bytes block, float* out) {
  Bytes low = block, high = block + 128, scales = block + 192;
  const float d = half(block + 208);
  for (int g = 0; g < 16; ++g) {
    const float step = d * static_cast<float>(static_cast<std::int8_t>(scales[g]));
    for (int i = 0; i < 16; ++i) {
      const int at = g % 8 * 16 + i;  // in its half
      const int nibble = low[g / 8 * 64 + at % 64] >> (at / 64 * 4) & 15;
      const int pair = high[g / 8 * 32 + at % 32] >> (at / 32 * 2) & 3;
      out[16 * g + i] = static_cast<float>((nibble | (pair << 4)) - 32) * step;
    }
  }
}

constexpr std::array kFormats{
    StoredFormat{"F16", 1, 2, f16},
    StoredFormat{"BF16", 1, 2, bf16},
    StoredFormat{"Q4_0", 32, 18, block_of_32<8, false, false>},
    StoredFormat{"Q4_1", 32, 20, block_of_32<0, false, true>},
    StoredFormat{"Q5_0", 32, 22, block_of_32<16, true, false>},
    StoredFormat{"Q5_1", 32, 24, block_of_32<0, true, true>},
    StoredFormat{"Q8_0", 32, 34, q8_0},
    StoredFormat{"Q4_K", 256, 144, super_block_k<false>},
    StoredFormat{"Q5_K", 256, 176, super_block_k<true>},
    StoredFormat{"Q6_K", 256, 210, q6_k},
};

}  // namespace

std::span<const StoredFormat> stored_formats() { return kFormats; }

const StoredFormat& stored_format(std::string_view name) {
  for (const StoredFormat& format : kFormats) {
    if (name == format.name) return format;
  }
  throw std::invalid_argument("no stored format " + std::string(name));
}

}  // namespace octavo
