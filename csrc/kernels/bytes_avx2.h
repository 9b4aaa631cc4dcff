// Codes of weights in pairs of 256-bit registers: one quad (kernels.h) each.
#pragma once

#include <cstring>

#include "kernels/vec_avx2.h"

namespace octavo {
namespace {

constexpr int kQuantRows = 4;  // rows that share a chunk's codes; more spill

struct Bytes {
  __m256i lo, hi;
};
struct Ints {
  __m256i lo, hi;
};

OCTAVO_INLINE Bytes load_bytes(const std::uint8_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32))};
}
OCTAVO_INLINE __m256i high_nibbles(__m256i x) { return _mm256_and_si256(_mm256_srli_epi16(x, 4), _mm256_set1_epi8(15)); }
OCTAVO_INLINE Bytes high_nibbles(Bytes x) { return {high_nibbles(x.lo), high_nibbles(x.hi)}; }
OCTAVO_INLINE Bytes low_nibbles(Bytes x) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(x.lo, mask), _mm256_and_si256(x.hi, mask)};
}
// x | (plane << Shift & Mask); a negative Shift goes right. No bit of Mask may come from a neighbouring byte.
template <int Shift, int Mask>
OCTAVO_INLINE __m256i with_bits(__m256i x, __m256i plane) {
  if constexpr (Shift > 0) plane = _mm256_slli_epi16(plane, Shift);
  if constexpr (Shift < 0) plane = _mm256_srli_epi16(plane, -Shift);
  return _mm256_or_si256(x, _mm256_and_si256(plane, _mm256_set1_epi8(Mask)));
}
template <int Shift, int Mask>
OCTAVO_INLINE Bytes with_bits(Bytes x, Bytes plane) {
  return {with_bits<Shift, Mask>(x.lo, plane.lo), with_bits<Shift, Mask>(x.hi, plane.hi)};
}
OCTAVO_INLINE Bytes look_up(Bytes nibbles, const std::uint8_t (&table)[16]) {
  const __m256i all = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  return {_mm256_shuffle_epi8(all, nibbles.lo), _mm256_shuffle_epi8(all, nibbles.hi)};
}

OCTAVO_INLINE Ints splat_int(std::int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
OCTAVO_INLINE Ints operator+(Ints a, Ints b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
OCTAVO_INLINE Ints load_ints(const std::int32_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8))};
}
OCTAVO_INLINE void store_ints(std::int32_t* p, Ints x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.lo);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), x.hi);
}
OCTAVO_INLINE Vec to_float(Ints x) { return {_mm256_cvtepi32_ps(x.lo), _mm256_cvtepi32_ps(x.hi)}; }
// Byte I of each column's four, as numbers.
template <int I>
OCTAVO_INLINE __m256 byte_of(__m256i x) {
  return _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(x, 8 * I), _mm256_set1_epi32(255)));
}
template <int I>
OCTAVO_INLINE Vec byte_of(Bytes x) {
  return {byte_of<I>(x.lo), byte_of<I>(x.hi)};
}

// sum + u . x over the four k's of each column. VPMADDUBSW adds pairs of products in 16 bits and saturates: codes below 128
// (Small) cannot make it; others go as their lower seven bits and their top bit.
template <bool Small>
OCTAVO_INLINE __m256i dot(__m256i sum, __m256i u, __m256i x) {
  const __m256i ones = _mm256_set1_epi16(1), top = _mm256_set1_epi8(-128);
  const __m256i low = Small ? u : _mm256_andnot_si256(top, u);
  sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(low, x), ones));
  if (Small) return sum;
  const __m256i high = _mm256_maddubs_epi16(_mm256_and_si256(top, u), x);
  return _mm256_add_epi32(sum, _mm256_madd_epi16(high, ones));
}
template <bool Small>
OCTAVO_INLINE Ints dot(Ints sum, Bytes u, const std::int8_t* x) {
  std::int32_t four;
  std::memcpy(&four, x, sizeof four);
  const __m256i quad = _mm256_set1_epi32(four);
  return {dot<Small>(sum.lo, u.lo, quad), dot<Small>(sum.hi, u.hi, quad)};
}

// The largest size of 32 activations, as bits of bfloat16.
OCTAVO_INLINE int largest_bits(const bf16* x) {
  const __m256i all = _mm256_set1_epi16(0x7fff);
  const __m256i half = _mm256_max_epu16(_mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)), all),
                                        _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + 16)), all));
  const __m128i quarter = _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  const __m128i least = _mm_minpos_epu16(_mm_xor_si128(quarter, _mm_set1_epi16(-1)));
  return _mm_extract_epi16(least, 0) ^ 0xffff;
}
// Sixteen numbers as whole ones, below 2^22 in size; such a number as 128 * upper + lower; and those as bytes, also with their sum.
OCTAVO_INLINE Ints to_ints(Vec x) {
  return {_mm256_cvtps_epi32(x.lo), _mm256_cvtps_epi32(x.hi)};  // to nearest even, as the mode is
}
OCTAVO_INLINE __m256i upper_byte(__m256i x) { return _mm256_srai_epi32(_mm256_add_epi32(x, _mm256_set1_epi32(64)), 7); }
OCTAVO_INLINE Ints upper_byte(Ints x) { return {upper_byte(x.lo), upper_byte(x.hi)}; }
OCTAVO_INLINE Ints lower_byte(Ints x, Ints upper) {
  return {_mm256_sub_epi32(x.lo, _mm256_slli_epi32(upper.lo, 7)), _mm256_sub_epi32(x.hi, _mm256_slli_epi32(upper.hi, 7))};
}
OCTAVO_INLINE Ints join(Ints upper, Ints lower) {
  return {_mm256_add_epi32(_mm256_slli_epi32(upper.lo, 7), lower.lo), _mm256_add_epi32(_mm256_slli_epi32(upper.hi, 7), lower.hi)};
}
OCTAVO_INLINE __m128i store_bytes(std::int8_t* codes, Ints x) {
  const __m256i ordered = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.lo, x.hi), 0xd8);  // quarters had crossed
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1));
  _mm_store_si128(reinterpret_cast<__m128i*>(codes), bytes);
  return bytes;
}
OCTAVO_INLINE std::int32_t store_codes(std::int8_t* codes, Ints x) {
  const __m128i bytes = store_bytes(codes, x);
  const __m128i sums = _mm_sad_epu8(_mm_xor_si128(bytes, _mm_set1_epi8(-128)), _mm_setzero_si128());  // each plus 128
  return _mm_cvtsi128_si32(sums) + _mm_extract_epi32(sums, 2) - 16 * 128;
}

OCTAVO_INLINE Vec load_half(const std::uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
// Sixteen signed bytes.
OCTAVO_INLINE Ints load_ints(const std::uint8_t* p) {
  return {_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8)))};
}

}  // namespace
}  // namespace octavo
