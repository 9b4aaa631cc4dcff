// Codes of weights in the compilers' own vectors: one quad (kernels.h) is sixteen columns of four bytes.
#pragma once

#include <cstring>

#include "kernels/vec_portable.h"

namespace octavo {
namespace {

constexpr int kQuantRows = 2;  // rows that share a chunk's codes

struct Bytes {
  U4 v[4];  // a column's first byte is the lowest, as on every machine that octavo runs on
};
struct Ints {
  I4 v[4];
};

OCTAVO_INLINE Bytes load_bytes(const std::uint8_t* p) {
  Bytes x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
OCTAVO_INLINE Bytes low_nibbles(Bytes x) {
  for (int i = 0; i < 4; ++i) x.v[i] = x.v[i] & 0x0f0f0f0fu;
  return x;
}
OCTAVO_INLINE Bytes high_nibbles(Bytes x) {
  for (int i = 0; i < 4; ++i) x.v[i] = x.v[i] >> 4 & 0x0f0f0f0fu;
  return x;
}
// x | (plane << Shift & Mask); a negative Shift goes right. No bit of Mask may come from a neighbouring byte.
template <int Shift, int Mask>
OCTAVO_INLINE Bytes with_bits(Bytes x, Bytes plane) {
  for (int i = 0; i < 4; ++i) {
    const U4 moved = Shift > 0 ? plane.v[i] << (Shift > 0 ? Shift : 0) : plane.v[i] >> (Shift < 0 ? -Shift : 0);
    x.v[i] = x.v[i] | (moved & Mask * 0x01010101u);
  }
  return x;
}
OCTAVO_INLINE Bytes look_up(Bytes nibbles, const std::uint8_t (&table)[16]) {
  std::uint8_t bytes[64];
  std::memcpy(bytes, &nibbles, sizeof bytes);
  for (std::uint8_t& byte : bytes) byte = table[byte];
  return load_bytes(bytes);
}

OCTAVO_INLINE Ints splat_int(std::int32_t x) {
  Ints result;
  for (int i = 0; i < 4; ++i) result.v[i] = I4{x, x, x, x};
  return result;
}
OCTAVO_INLINE Ints operator+(Ints a, Ints b) {
  for (int i = 0; i < 4; ++i) a.v[i] = a.v[i] + b.v[i];
  return a;
}
OCTAVO_INLINE Ints load_ints(const std::int32_t* p) {
  Ints x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
OCTAVO_INLINE void store_ints(std::int32_t* p, Ints x) { std::memcpy(p, &x, sizeof x); }
OCTAVO_INLINE Vec to_float(Ints x) {
  Vec result;
  for (int i = 0; i < 4; ++i) result.v[i] = __builtin_convertvector(x.v[i], F4);
  return result;
}
// Byte I of each column's four, as numbers.
template <int I>
OCTAVO_INLINE Vec byte_of(Bytes x) {
  Ints bytes;
  for (int i = 0; i < 4; ++i) bytes.v[i] = bits_as<I4>(x.v[i] >> 8 * I & 255u);
  return to_float(bytes);
}

// sum + u . x over the four k's of each column.
template <bool Small>
OCTAVO_INLINE Ints dot(Ints sum, Bytes u, const std::int8_t* x) {
  for (int i = 0; i < 4; ++i) {
    for (int k = 0; k < 4; ++k) sum.v[i] += bits_as<I4>(u.v[i] >> 8 * k & 255u) * x[k];
  }
  return sum;
}

// The largest size of 32 activations, as bits of bfloat16.
OCTAVO_INLINE int largest_bits(const bf16* x) {
  std::int16_t most = 0;
  for (int i = 0; i < kChunk; ++i) {
    const auto size = static_cast<std::int16_t>(x[i] & 0x7fff);
    most = most > size ? most : size;
  }
  return most;
}
// Sixteen numbers as whole ones, below 2^22 in size; such a number as 128 * upper + lower; and those as bytes, also with their sum.
OCTAVO_INLINE Ints to_ints(Vec x) {
  const Vec whole = x + splat(kMagic);
  Ints result;
  for (int i = 0; i < 4; ++i) result.v[i] = bits_as<I4>(whole.v[i]) - kMagicBits;
  return result;
}
OCTAVO_INLINE Ints upper_byte(Ints x) {
  for (int i = 0; i < 4; ++i) x.v[i] = (x.v[i] + 64) >> 7;
  return x;
}
OCTAVO_INLINE Ints lower_byte(Ints x, Ints upper) {
  for (int i = 0; i < 4; ++i) x.v[i] = x.v[i] - upper.v[i] * 128;
  return x;
}
OCTAVO_INLINE Ints join(Ints upper, Ints lower) {
  for (int i = 0; i < 4; ++i) upper.v[i] = upper.v[i] * 128 + lower.v[i];
  return upper;
}
OCTAVO_INLINE void store_bytes(std::int8_t* codes, Ints x) {
  for (int i = 0; i < 16; ++i) codes[i] = static_cast<std::int8_t>(x.v[i / 4][i % 4]);
}
OCTAVO_INLINE std::int32_t store_codes(std::int8_t* codes, Ints x) {
  store_bytes(codes, x);
  std::int32_t sum = 0;
  for (int i = 0; i < 16; ++i) sum += codes[i];
  return sum;
}

OCTAVO_INLINE Vec load_half(const std::uint16_t* p) {
  float lanes[16];
  for (int i = 0; i < 16; ++i) {
    const std::uint32_t sign = (p[i] & 0x8000u) << 16, exponent = p[i] >> 10 & 31u, mantissa = p[i] & 0x3ffu;
    const float small = static_cast<float>(mantissa) * 0x1p-24f;
    std::uint32_t bits = (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | mantissa << 13;
    if (exponent == 0) std::memcpy(&bits, &small, sizeof bits);
    bits |= sign;
    std::memcpy(lanes + i, &bits, sizeof bits);
  }
  return load(lanes);
}
// Sixteen signed bytes.
OCTAVO_INLINE Ints load_ints(const std::uint8_t* p) {
  Ints result;
  for (int i = 0; i < 16; ++i) result.v[i / 4][i % 4] = static_cast<std::int8_t>(p[i]);
  return result;
}

}  // namespace
}  // namespace octavo
