// Sixteen float lanes in one 512-bit register. With AVX512_BF16 the conversion to bfloat16 is an instruction, of the same
// result; its dot product, which sums in another order, is for fast_math only (dot_products.h).
#pragma once

// GCC 12 takes the undefined operands that its own header passes to masked instructions for a mistake of ours.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>

#include "kernels/vec_common.h"

namespace octavo {
namespace {

constexpr int kBlockRows = 4;  // rows whose sums (of two panels) stay in registers
constexpr int kTogether = 6;   // up to so many sums, evens and odds go side by side: more of them hide the FMA's latency

struct Vec {
  __m512 v;
};

OCTAVO_INLINE Vec splat(float x) { return {_mm512_set1_ps(x)}; }
OCTAVO_INLINE Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
OCTAVO_INLINE Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
OCTAVO_INLINE Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
OCTAVO_INLINE Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
OCTAVO_INLINE Vec sqrt(Vec x) { return {_mm512_sqrt_ps(x.v)}; }

// a * b + c, for products of two bfloat16 numbers only (they are exact).
OCTAVO_INLINE Vec mul_add(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }

// x < y ? a : b; false where either is NaN.
OCTAVO_INLINE Vec select_less(Vec x, Vec y, Vec a, Vec b) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(x.v, y.v, _CMP_LT_OQ), b.v, a.v)};
}
OCTAVO_INLINE Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }  // b where one is NaN
OCTAVO_INLINE Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }

OCTAVO_INLINE Vec abs(Vec x) { return {_mm512_abs_ps(x.v)}; }
// Of numbers that are not negative: a NaN is the greatest.
OCTAVO_INLINE Vec max_or_nan(Vec a, Vec b) {
  return {_mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(a.v), _mm512_castps_si512(b.v)))};
}
OCTAVO_INLINE Vec copy_sign(Vec x, Vec sign) {
  const __m512 bit = _mm512_set1_ps(-0.0f);
  return {_mm512_or_ps(_mm512_andnot_ps(bit, x.v), _mm512_and_ps(bit, sign.v))};
}

// x * 2^n for whole n in -252 .. 254, in two steps so that neither factor leaves float32's range; `n_magic` is n + kMagic.
OCTAVO_INLINE __m512 power_of_two(__m512i n) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23));
}
OCTAVO_INLINE Vec scale(Vec x, Vec n_magic) {
  const __m512i n = _mm512_sub_epi32(_mm512_castps_si512(n_magic.v), _mm512_set1_epi32(kMagicBits));
  const __m512i half = _mm512_srai_epi32(n, 1);
  return {_mm512_mul_ps(_mm512_mul_ps(x.v, power_of_two(half)), power_of_two(_mm512_sub_epi32(n, half)))};
}

// x * 2^n where 2^n is a normal float32: the low bits of n_magic are n.
OCTAVO_INLINE Vec scale_normal(Vec x, Vec n_magic) {
  const __m512i power = _mm512_add_epi32(_mm512_slli_epi32(_mm512_castps_si512(n_magic.v), 23), _mm512_set1_epi32(127 << 23));
  return {_mm512_mul_ps(x.v, _mm512_castsi512_ps(power))};
}

// Lane i of the result is lane i ^ Half.
template <int Half>
OCTAVO_INLINE Vec swapped(Vec x) {
  if constexpr (Half == 8) return {_mm512_shuffle_f32x4(x.v, x.v, 0x4e)};
  if constexpr (Half == 4) return {_mm512_shuffle_f32x4(x.v, x.v, 0xb1)};
  return {_mm512_permute_ps(x.v, Half == 2 ? 0x4e : 0xb1)};
}
// Lanes i and i + Half of each 2 * Half become their sum and their difference.
template <int Half>
OCTAVO_INLINE Vec sums_and_differences(Vec x) {
  constexpr __mmask16 kUpper[] = {0, 0xaaaa, 0xcccc, 0, 0xf0f0, 0, 0, 0, 0xff00};
  const Vec other = swapped<Half>(x);
  return {_mm512_mask_sub_ps((x + other).v, kUpper[Half], other.v, x.v)};
}
OCTAVO_INLINE float first_lane(Vec x) { return _mm512_cvtss_f32(x.v); }

OCTAVO_INLINE Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
OCTAVO_INLINE void store(float* p, Vec x) { _mm512_storeu_ps(p, x.v); }

OCTAVO_INLINE Vec widen(__m256i bits) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
}
OCTAVO_INLINE Vec load(const bf16* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }

// Of sixteen pairs of bfloat16, the first of each and the second of each.
OCTAVO_INLINE Vec load_even(const bf16* p) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16))}; }
OCTAVO_INLINE Vec load_odd(const bf16* p) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), upper))};
}

// The nearest bfloat16's bits, ties to even; NaN becomes kNanBits and a subnormal becomes zero of its sign.
OCTAVO_INLINE __m256i bf16_bits(Vec x) {
  const __mmask16 is_nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
#if defined(__AVX512BF16__)
  const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(x.v);
#else
  const __m512i u = _mm512_castps_si512(x.v);
  const __mmask16 is_subnormal = _mm512_testn_epi32_mask(u, _mm512_set1_epi32(kInfinityBits));
  const __m512i last_bit = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  const __m512i sum = _mm512_add_epi32(u, _mm512_add_epi32(last_bit, _mm512_set1_epi32(0x7fff)));
  const __m512i flushed = _mm512_mask_and_epi32(sum, is_subnormal, sum, _mm512_set1_epi32(static_cast<int>(kSignBit)));
  const __m256i rounded = _mm512_cvtepi32_epi16(_mm512_srli_epi32(flushed, 16));
#endif
  return _mm256_mask_mov_epi16(rounded, is_nan, _mm256_set1_epi16(kNanBits));
}
OCTAVO_INLINE Vec round_to_bf16(Vec x) { return widen(bf16_bits(x)); }
OCTAVO_INLINE void store(bf16* p, Vec x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), bf16_bits(x)); }

}  // namespace
}  // namespace octavo
