// Sixteen float lanes in two 256-bit registers.
#pragma once

#include <immintrin.h>

#include "kernels/vec_common.h"

namespace octavo {
namespace {

constexpr int kBlockRows = 2;  // rows whose sums stay in registers; more were measured to be slower
constexpr int kTogether = 2;   // up to so many sums, evens and odds go side by side

struct Vec {
  __m256 lo, hi;
};

OCTAVO_INLINE Vec splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
OCTAVO_INLINE Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
OCTAVO_INLINE Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
OCTAVO_INLINE Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
OCTAVO_INLINE Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
OCTAVO_INLINE Vec sqrt(Vec x) { return {_mm256_sqrt_ps(x.lo), _mm256_sqrt_ps(x.hi)}; }

// a * b + c, for products of two bfloat16 numbers only (they are exact).
OCTAVO_INLINE Vec mul_add(Vec a, Vec b, Vec c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}

// x < y ? a : b; false where either is NaN.
OCTAVO_INLINE __m256 select_less(__m256 x, __m256 y, __m256 a, __m256 b) {
  return _mm256_blendv_ps(b, a, _mm256_cmp_ps(x, y, _CMP_LT_OQ));
}
OCTAVO_INLINE Vec select_less(Vec x, Vec y, Vec a, Vec b) {
  return {select_less(x.lo, y.lo, a.lo, b.lo), select_less(x.hi, y.hi, a.hi, b.hi)};
}
OCTAVO_INLINE Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }  // b where
OCTAVO_INLINE Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }  // one is NaN

OCTAVO_INLINE Vec abs(Vec x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.lo), _mm256_andnot_ps(sign, x.hi)};
}
// Of numbers that are not negative: a NaN is the greatest.
OCTAVO_INLINE __m256 max_or_nan(__m256 a, __m256 b) {
  return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(a), _mm256_castps_si256(b)));
}
OCTAVO_INLINE Vec max_or_nan(Vec a, Vec b) { return {max_or_nan(a.lo, b.lo), max_or_nan(a.hi, b.hi)}; }
OCTAVO_INLINE Vec copy_sign(Vec x, Vec sign) {
  const __m256 bit = _mm256_set1_ps(-0.0f);
  return {_mm256_or_ps(_mm256_andnot_ps(bit, x.lo), _mm256_and_ps(bit, sign.lo)),
          _mm256_or_ps(_mm256_andnot_ps(bit, x.hi), _mm256_and_ps(bit, sign.hi))};
}

// x * 2^n for whole n in -252 .. 254, in two steps so that neither factor leaves float32's range; `n_magic` is n + kMagic.
OCTAVO_INLINE __m256 power_of_two(__m256i n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
OCTAVO_INLINE __m256 scale(__m256 x, __m256 n_magic) {
  const __m256i n = _mm256_sub_epi32(_mm256_castps_si256(n_magic), _mm256_set1_epi32(kMagicBits));
  const __m256i half = _mm256_srai_epi32(n, 1);
  return _mm256_mul_ps(_mm256_mul_ps(x, power_of_two(half)), power_of_two(_mm256_sub_epi32(n, half)));
}
OCTAVO_INLINE Vec scale(Vec x, Vec n_magic) { return {scale(x.lo, n_magic.lo), scale(x.hi, n_magic.hi)}; }

// x * 2^n where 2^n is a normal float32: the low bits of n_magic are n.
OCTAVO_INLINE __m256 scale_normal(__m256 x, __m256 n_magic) {
  const __m256i power = _mm256_add_epi32(_mm256_slli_epi32(_mm256_castps_si256(n_magic), 23), _mm256_set1_epi32(127 << 23));
  return _mm256_mul_ps(x, _mm256_castsi256_ps(power));
}
OCTAVO_INLINE Vec scale_normal(Vec x, Vec n_magic) {
  return {scale_normal(x.lo, n_magic.lo), scale_normal(x.hi, n_magic.hi)};
}

// Lane i of the result is lane i ^ Half.
template <int Half>
OCTAVO_INLINE __m256 swapped(__m256 x) {
  if constexpr (Half == 4) return _mm256_permute2f128_ps(x, x, 1);
  return _mm256_permute_ps(x, Half == 2 ? 0x4e : 0xb1);
}
template <int Half>
OCTAVO_INLINE Vec swapped(Vec x) {
  if constexpr (Half == 8) return {x.hi, x.lo};
  return {swapped<Half>(x.lo), swapped<Half>(x.hi)};
}
// Lanes i and i + Half of each 2 * Half become their sum and their difference.
template <int Half>
OCTAVO_INLINE Vec sums_and_differences(Vec x) {
  const Vec other = swapped<Half>(x), sum = x + other, difference = other - x;
  if constexpr (Half == 8) return {sum.lo, difference.hi};
  constexpr int kUpper = Half == 1 ? 0xaa : Half == 2 ? 0xcc : 0xf0;
  return {_mm256_blend_ps(sum.lo, difference.lo, kUpper), _mm256_blend_ps(sum.hi, difference.hi, kUpper)};
}
OCTAVO_INLINE float first_lane(Vec x) { return _mm256_cvtss_f32(x.lo); }

OCTAVO_INLINE Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
OCTAVO_INLINE void store(float* p, Vec x) {
  _mm256_storeu_ps(p, x.lo);
  _mm256_storeu_ps(p + 8, x.hi);
}

OCTAVO_INLINE __m256 widen8(const bf16* p) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
OCTAVO_INLINE Vec load(const bf16* p) { return {widen8(p), widen8(p + 8)}; }

// Of sixteen pairs of bfloat16, the first of each and the second of each.
OCTAVO_INLINE __m256i load_pairs(const bf16* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
OCTAVO_INLINE Vec load_even(const bf16* p) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(load_pairs(p), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(load_pairs(p + 16), 16))};
}
OCTAVO_INLINE Vec load_odd(const bf16* p) {
  const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  return {_mm256_castsi256_ps(_mm256_and_si256(load_pairs(p), upper)),
          _mm256_castsi256_ps(_mm256_and_si256(load_pairs(p + 16), upper))};
}

// The nearest bfloat16's bits in the lower half, ties to even; NaN becomes kNanBits and a subnormal zero of its sign.
OCTAVO_INLINE __m256i bf16_bits(__m256 x) {
  const __m256i u = _mm256_castps_si256(x);
  const __m256i magnitude = _mm256_and_si256(u, _mm256_set1_epi32(0x7fffffff));
  const __m256i last_bit = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  const __m256i rounded =
      _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(last_bit, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i is_subnormal = _mm256_cmpgt_epi32(_mm256_set1_epi32(kSmallestNormalBits), magnitude);
  const __m256i is_nan = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(kInfinityBits));
  const __m256i flushed = _mm256_andnot_si256(_mm256_and_si256(is_subnormal, _mm256_set1_epi32(0x7fff)), rounded);
  return _mm256_blendv_epi8(flushed, _mm256_set1_epi32(kNanBits), is_nan);
}
OCTAVO_INLINE Vec round_to_bf16(Vec x) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(bf16_bits(x.lo), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(bf16_bits(x.hi), 16))};
}
OCTAVO_INLINE void store(bf16* p, Vec x) {
  const __m256i packed = _mm256_packus_epi32(bf16_bits(x.lo), bf16_bits(x.hi));  // quarters: lo, hi, lo, hi
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}

}  // namespace
}  // namespace octavo
