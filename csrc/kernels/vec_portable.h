// Sixteen float lanes out of four vectors of four, in the compilers' own vector notation: SSE2, NEON, or whatever the
// baseline has. Each vec_*.h defines the same names; the kernels are written once over them. All of it is in an unnamed
// namespace, as the kernels are, so that the linker can never hand code of one instruction set to another.
#pragma once

#include <cstring>

#include "kernels/vec_common.h"

namespace octavo {
namespace {

constexpr int kBlockRows = 2;  // rows whose sums stay in registers
constexpr int kTogether = 1;   // up to so many sums, evens and odds go side by side

using F4 = float __attribute__((vector_size(16)));
using U4 = std::uint32_t __attribute__((vector_size(16)));
using I4 = std::int32_t __attribute__((vector_size(16)));
using H4 = std::uint16_t __attribute__((vector_size(8)));

struct Vec {
  F4 v[4];
};

// The same expression for each quarter i.
#define OCTAVO_QUARTERS(expression)                                              \
  Vec result;                                                                    \
  _Pragma("GCC unroll 4") for (int i = 0; i < 4; ++i) result.v[i] = (expression); \
  return result

template <class To, class From>
OCTAVO_INLINE To bits_as(From x) {
  static_assert(sizeof(To) == sizeof(From));
  return (To)x;  // a cast between vectors of one size keeps the bits
}

OCTAVO_INLINE Vec splat(float x) { OCTAVO_QUARTERS((F4{x, x, x, x})); }
OCTAVO_INLINE Vec operator+(Vec a, Vec b) { OCTAVO_QUARTERS(a.v[i] + b.v[i]); }
OCTAVO_INLINE Vec operator-(Vec a, Vec b) { OCTAVO_QUARTERS(a.v[i] - b.v[i]); }
OCTAVO_INLINE Vec operator*(Vec a, Vec b) { OCTAVO_QUARTERS(a.v[i] * b.v[i]); }
OCTAVO_INLINE Vec operator/(Vec a, Vec b) { OCTAVO_QUARTERS(a.v[i] / b.v[i]); }

// a * b + c, for products of two bfloat16 numbers: they are exact, so it makes no difference that other tables use an FMA.
OCTAVO_INLINE Vec mul_add(Vec a, Vec b, Vec c) { OCTAVO_QUARTERS(a.v[i] * b.v[i] + c.v[i]); }

// x < y ? a : b; false where either is NaN.
OCTAVO_INLINE Vec select_less(Vec x, Vec y, Vec a, Vec b) { OCTAVO_QUARTERS(x.v[i] < y.v[i] ? a.v[i] : b.v[i]); }
OCTAVO_INLINE Vec min(Vec a, Vec b) { return select_less(a, b, a, b); }  // b where either is NaN
OCTAVO_INLINE Vec max(Vec a, Vec b) { return select_less(b, a, a, b); }

OCTAVO_INLINE Vec sqrt(Vec x) {
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 4; ++j) x.v[i][j] = __builtin_sqrtf(x.v[i][j]);
  return x;
}

OCTAVO_INLINE Vec abs(Vec x) { OCTAVO_QUARTERS(bits_as<F4>(bits_as<U4>(x.v[i]) & ~kSignBit)); }
// Of numbers that are not negative: a NaN is the greatest.
OCTAVO_INLINE Vec max_or_nan(Vec a, Vec b) { OCTAVO_QUARTERS(bits_as<I4>(a.v[i]) > bits_as<I4>(b.v[i]) ? a.v[i] : b.v[i]); }
OCTAVO_INLINE Vec copy_sign(Vec x, Vec sign) {
  OCTAVO_QUARTERS(bits_as<F4>((bits_as<U4>(x.v[i]) & ~kSignBit) | (bits_as<U4>(sign.v[i]) & kSignBit)));
}

// x * 2^n for whole n in -252 .. 254, in two steps so that neither factor leaves float32's range; `n_magic` is n + kMagic.
OCTAVO_INLINE F4 power_of_two(I4 n) { return bits_as<F4>((n + 127) << 23); }
OCTAVO_INLINE Vec scale(Vec x, Vec n_magic) {
  Vec y;
  for (int i = 0; i < 4; ++i) {
    const I4 n = bits_as<I4>(n_magic.v[i]) - kMagicBits;
    const I4 half = n >> 1;
    y.v[i] = x.v[i] * power_of_two(half) * power_of_two(n - half);
  }
  return y;
}

// x * 2^n where 2^n is a normal float32: the low bits of n_magic are n.
OCTAVO_INLINE Vec scale_normal(Vec x, Vec n_magic) {
  OCTAVO_QUARTERS(x.v[i] * bits_as<F4>((bits_as<U4>(n_magic.v[i]) << 23) + (127u << 23)));
}

// Lane i of the result is lane i ^ Half.
template <int Half>
OCTAVO_INLINE Vec swapped(Vec x) {
  if constexpr (Half == 8) return {x.v[2], x.v[3], x.v[0], x.v[1]};
  if constexpr (Half == 4) return {x.v[1], x.v[0], x.v[3], x.v[2]};
  OCTAVO_QUARTERS((F4{x.v[i][0 ^ Half % 4], x.v[i][1 ^ Half % 4], x.v[i][2 ^ Half % 4], x.v[i][3 ^ Half % 4]}));
}
// Lanes i and i + Half of each 2 * Half become their sum and their difference.
template <int Half>
OCTAVO_INLINE Vec sums_and_differences(Vec x) {
  const Vec other = swapped<Half>(x), difference = other - x;
  Vec result = x + other;
  for (int i = 0; i < 16; ++i)
    if (i & Half) result.v[i / 4][i % 4] = difference.v[i / 4][i % 4];
  return result;
}
OCTAVO_INLINE float first_lane(Vec x) { return x.v[0][0]; }

OCTAVO_INLINE Vec load(const float* p) {
  Vec x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
OCTAVO_INLINE void store(float* p, Vec x) { std::memcpy(p, &x, sizeof x); }

OCTAVO_INLINE Vec load(const bf16* p) {
  Vec x;
  for (int i = 0; i < 4; ++i) {
    H4 h;
    std::memcpy(&h, p + 4 * i, sizeof h);
    x.v[i] = bits_as<F4>(__builtin_convertvector(h, U4) << 16);
  }
  return x;
}

// Of sixteen pairs of bfloat16, the first of each and the second of each.
OCTAVO_INLINE U4 load_pairs(const bf16* p) {
  U4 u;
  std::memcpy(&u, p, sizeof u);
  return u;
}
OCTAVO_INLINE Vec load_even(const bf16* p) { OCTAVO_QUARTERS(bits_as<F4>(load_pairs(p + 8 * i) << 16)); }
OCTAVO_INLINE Vec load_odd(const bf16* p) { OCTAVO_QUARTERS(bits_as<F4>(load_pairs(p + 8 * i) & 0xffff0000u)); }

// The nearest bfloat16's bits, ties to even; NaN becomes kNanBits and a subnormal becomes zero of its sign.
OCTAVO_INLINE U4 bf16_bits(F4 x) {
  const U4 u = bits_as<U4>(x);
  const U4 magnitude = u & ~kSignBit;
  const U4 rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const U4 flushed = magnitude < kSmallestNormalBits ? rounded & 0x8000u : rounded;
  return magnitude > kInfinityBits ? U4{} + kNanBits : flushed;
}
OCTAVO_INLINE Vec round_to_bf16(Vec x) { OCTAVO_QUARTERS(bits_as<F4>(bf16_bits(x.v[i]) << 16)); }
OCTAVO_INLINE void store(bf16* p, Vec x) {
  for (int i = 0; i < 4; ++i) {
    const H4 h = __builtin_convertvector(bf16_bits(x.v[i]), H4);
    std::memcpy(p + 4 * i, &h, sizeof h);
  }
}

#undef OCTAVO_QUARTERS

}  // namespace
}  // namespace octavo
