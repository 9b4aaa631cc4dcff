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

// Sixteen bytes: low nibbles are the first sixteen values, high ones the others.
void nibbles(Bytes q, std::uint8_t* codes) {
  for (int i = 0; i < 16; ++i) {
    codes[i] = q[i] & 15;
    codes[i + 16] = q[i] >> 4;
  }
}

// Of a block; formats with smaller scales inside it set those afterwards.
void set_scales(StoredGroup* out, float scale, float minimum = 0) {
  out->scale = scale;
  out->minimum = minimum;
  for (int i = 0; i < 2; ++i) out->scales[i] = out->minima[i] = 1;
}

// Blocks of 32; bit i of `high` is the fifth of value i.
template <bool HasFifthBit, bool HasMinimum>
void block_of_32(Bytes block, StoredGroup* out) {
  set_scales(out, half(block), HasMinimum ? half(block + 2) : 0.0f);
  Bytes q = block + (HasMinimum ? 4 : 2);
  if (!HasFifthBit) {
    nibbles(q, out->codes);
    return;
  }
  nibbles(q + 4, out->codes);
  for (int i = 0; i < kChunk; ++i) out->codes[i] = static_cast<std::uint8_t>(out->codes[i] | (q[i / 8] >> i % 8 & 1) << 4);
}

void q8_0(Bytes block, StoredGroup* out) {
  set_scales(out, half(block));
  for (int i = 0; i < kChunk; ++i) out->codes[i] = block[2 + i] ^ 0x80;  // plus 128
}

void iq4_nl(Bytes block, StoredGroup* out) {
  set_scales(out, half(block));
  nibbles(block + 2, out->codes);
}

// Q4_K and Q5_K: d, dmin, twelve bytes of scales and minima of eight groups of 32, and in Q5_K 32 bytes whose bit g is the
// fifth bit of group g. Two groups share 32 bytes: low nibbles, high nibbles.
template <bool HasFifthBit>
void super_block_k(Bytes block, StoredGroup* out) {
  const float d = half(block), lowest = -half(block + 2);
  Bytes scales = block + 4, high = block + 16, q = block + (HasFifthBit ? 48 : 16);
  for (int g = 0; g < 8; ++g) {
    const int scale = g < 4 ? scales[g] & 63 : (scales[g + 4] & 15) | (scales[g - 4] >> 6 << 4);
    const int minimum = g < 4 ? scales[g + 4] & 63 : (scales[g + 4] >> 4) | (scales[g] >> 6 << 4);
    set_scales(out + g, d, lowest);
    out[g].scales[0] = static_cast<std::int8_t>(scale);
    out[g].minima[0] = static_cast<std::int8_t>(minimum);
    const int shift = g % 2 * 4;
    for (int i = 0; i < kChunk; ++i) {
      const int fifth = HasFifthBit ? (high[i] >> g & 1) << 4 : 0;
      out[g].codes[i] = static_cast<std::uint8_t>((q[g / 2 * 32 + i] >> shift & 15) | fifth);
    }
  }
}

// Sixteen groups of 16 with a signed scale each. Each half of 128 values has 64 bytes of low nibbles (values 0 to 63, then the
// high ones 64 to 127) and 32 bytes of upper pairs of bits (values 0 to 31 in the lowest pair, and so on).
void q6_k(Bytes block, StoredGroup* out) {
  Bytes low = block, high = block + 128, scales = block + 192;
  const float d = half(block + 208);
  for (int g = 0; g < 8; ++g) {
    const int at = g % 4 * 32;  // in its half
    Bytes nibble = low + g / 4 * 64 + at % 64, pair = high + g / 4 * 32;
    for (int i = 0; i < kChunk; ++i) {
      out[g].codes[i] = static_cast<std::uint8_t>((nibble[i] >> (at / 64 * 4) & 15) | (pair[i] >> (at / 32 * 2) & 3) << 4);
    }
    set_scales(out + g, d);
    for (int i = 0; i < 2; ++i) out[g].scales[i] = static_cast<std::int8_t>(scales[2 * g + i]);
  }
}

// The value of each pair of bits of 64 bytes: each run of 32 bytes holds four planes of 32 values.
std::uint8_t pair_at(Bytes q, int g, int i) { return q[g / 4 * 32 + i] >> (g % 4 * 2) & 3; }

// Two bits, and groups of 16 with a nibble each for scale and minimum.
void q2_k(Bytes block, StoredGroup* out) {
  const float d = half(block + 80), lowest = -half(block + 82);
  for (int g = 0; g < 8; ++g) {
    set_scales(out + g, d, lowest);
    for (int i = 0; i < kChunk; ++i) out[g].codes[i] = pair_at(block + 16, g, i);
    for (int i = 0; i < 2; ++i) {
      out[g].scales[i] = block[2 * g + i] & 15;
      out[g].minima[i] = static_cast<std::int8_t>(block[2 * g + i] >> 4);
    }
  }
}

// Three bits, and groups of 16 with a scale of six bits: eight bytes of low nibbles, four bytes of upper pairs.
void q3_k(Bytes block, StoredGroup* out) {
  Bytes third = block, q = block + 32, scales = block + 96;
  const float d = half(block + 108);
  for (int g = 0; g < 8; ++g) {
    set_scales(out + g, d);
    for (int i = 0; i < kChunk; ++i) {
      out[g].codes[i] = static_cast<std::uint8_t>(pair_at(q, g, i) | (third[i] >> g & 1) << 2);
    }
    for (int i = 0; i < 2; ++i) {
      const int s = 2 * g + i;
      const int scale = (scales[s % 8] >> (s / 8 * 4) & 15) | (scales[8 + s % 4] >> (s / 4 * 2) & 3) << 4;
      out[g].scales[i] = static_cast<std::int8_t>(scale - 32);
    }
  }
}

// d, upper pairs and low nibbles of eight scales of six bits, and sixteen bytes of nibbles a group.
void iq4_xs(Bytes block, StoredGroup* out) {
  const float d = half(block);
  const int high = block[2] | block[3] << 8;
  for (int g = 0; g < 8; ++g) {
    const int scale = (block[4 + g / 2] >> (g % 2 * 4) & 15) | (high >> (2 * g) & 3) << 4;
    set_scales(out + g, d);
    out[g].scales[0] = static_cast<std::int8_t>(scale - 32);
    nibbles(block + 8 + 16 * g, out[g].codes);
  }
}

constexpr bool kMinimum = true;

constexpr StoredFormat plain(const char* name, int bytes, void (*widen)(Bytes, float*)) {
  return {name, 1, bytes, {}, nullptr, widen};
}

constexpr std::array kFormats{
    plain("F16", 2, f16),
    plain("BF16", 2, bf16),
    StoredFormat{"Q4_0", 32, 18, {Codes::k4, 32, 8, !kMinimum, Scales::kHalf}, block_of_32<false, false>, nullptr},
    StoredFormat{"Q4_1", 32, 20, {Codes::k4, 32, 0, kMinimum, Scales::kHalf}, block_of_32<false, true>, nullptr},
    StoredFormat{"Q5_0", 32, 22, {Codes::k5, 32, 16, !kMinimum, Scales::kHalf}, block_of_32<true, false>, nullptr},
    StoredFormat{"Q5_1", 32, 24, {Codes::k5, 32, 0, kMinimum, Scales::kHalf}, block_of_32<true, true>, nullptr},
    StoredFormat{"Q8_0", 32, 34, {Codes::k8, 32, 128, !kMinimum, Scales::kHalf}, q8_0, nullptr},
    StoredFormat{"Q2_K", 256, 84, {Codes::k4, 16, 0, kMinimum, Scales::kWhole}, q2_k, nullptr},
    StoredFormat{"Q3_K", 256, 110, {Codes::k4, 16, 4, !kMinimum, Scales::kWhole}, q3_k, nullptr},
    StoredFormat{"Q4_K", 256, 144, {Codes::k4, 32, 0, kMinimum, Scales::kWhole}, super_block_k<false>, nullptr},
    StoredFormat{"Q5_K", 256, 176, {Codes::k5, 32, 0, kMinimum, Scales::kWhole}, super_block_k<true>, nullptr},
    StoredFormat{"Q6_K", 256, 210, {Codes::k6, 16, 32, !kMinimum, Scales::kWhole}, q6_k, nullptr},
    StoredFormat{"IQ4_NL", 32, 18, {Codes::kTable, 32, 128, !kMinimum, Scales::kHalf}, iq4_nl, nullptr},
    StoredFormat{"IQ4_XS", 256, 136, {Codes::kTable, 32, 128, !kMinimum, Scales::kWhole}, iq4_xs, nullptr},
};

}  // namespace

void StoredFormat::decode(const std::uint8_t* block, float* out) const {
  if (!quantised()) {
    widen(block, out);
    return;
  }
  StoredGroup groups[kMostGroups];
  read(block, groups);
  for (int i = 0; i < values; ++i) {
    const StoredGroup& group = groups[i / kChunk];
    const int at = i % kChunk, half = at / quant.group;
    const int code = quant.codes == Codes::kTable ? kNonLinear[group.codes[at]] : group.codes[at];
    out[i] = static_cast<float>(code - quant.offset) * group.scale_at(half);
    if (quant.has_minimum) out[i] = out[i] + group.minimum_at(half);
  }
}

std::span<const StoredFormat> stored_formats() { return kFormats; }

const StoredFormat& stored_format(std::string_view name) {
  for (const StoredFormat& format : kFormats) {
    if (name == format.name) return format;
  }
  throw std::invalid_argument("no stored format " + std::string(name));
}

}  // namespace octavo
