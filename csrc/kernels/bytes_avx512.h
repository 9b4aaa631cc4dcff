// Codes of weights in 512-bit registers: one quad (kernels.h) each. With VNNI the byte product is an instruction.
#pragma once

#include <cstring>

#include "kernels/vec_avx512.h"

namespace octavo {
namespace {

constexpr int kQuantRows = 16;  // rows whose sums stay in registers beside a chunk's eight quads

struct Bytes {
  __m512i v;  // 64 unsigned bytes
};
struct Ints {
  __m512i v;  // 16 columns
};

OCTAVO_INLINE Bytes load_bytes(const std::uint8_t* p) { return {_mm512_loadu_si512(p)}; }
OCTAVO_INLINE Bytes low_nibbles(Bytes x) { return {_mm512_and_si512(x.v, _mm512_set1_epi8(15))}; }
OCTAVO_INLINE Bytes high_nibbles(Bytes x) {
  return {_mm512_and_si512(_mm512_srli_epi16(x.v, 4), _mm512_set1_epi8(15))};
}
// x | (plane << Shift & Mask); a negative Shift goes right. No bit of Mask may come from a neighbouring byte.
template <int Shift, int Mask>
OCTAVO_INLINE Bytes with_bits(Bytes x, Bytes plane) {
  __m512i moved = plane.v;
  if constexpr (Shift > 0) moved = _mm512_slli_epi16(moved, Shift);
  if constexpr (Shift < 0) moved = _mm512_srli_epi16(moved, -Shift);
  return {_mm512_ternarylogic_epi64(x.v, moved, _mm512_set1_epi8(Mask), 0xf8)};
}
OCTAVO_INLINE Bytes look_up(Bytes nibbles, const std::uint8_t (&table)[16]) {
  const __m512i all = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  return {_mm512_shuffle_epi8(all, nibbles.v)};
}

OCTAVO_INLINE Ints splat_int(std::int32_t x) { return {_mm512_set1_epi32(x)}; }
OCTAVO_INLINE Ints operator+(Ints a, Ints b) { return {_mm512_add_epi32(a.v, b.v)}; }
OCTAVO_INLINE Ints load_ints(const std::int32_t* p) { return {_mm512_loadu_si512(p)}; }
OCTAVO_INLINE void store_ints(std::int32_t* p, Ints x) { _mm512_storeu_si512(p, x.v); }
OCTAVO_INLINE Vec to_float(Ints x) { return {_mm512_cvtepi32_ps(x.v)}; }
// Byte I of each column's four, as numbers.
template <int I>
OCTAVO_INLINE Vec byte_of(Bytes x) {
  return {_mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(x.v, 8 * I), _mm512_set1_epi32(255)))};
}

// sum + u . x over the four k's of each column. Small: u is below 128, so that pairs of products fit into 16 bits.
template <bool Small>
OCTAVO_INLINE Ints dot(Ints sum, Bytes u, const std::int8_t* x) {
  std::int32_t four;
  std::memcpy(&four, x, sizeof four);
  const __m512i quad = _mm512_set1_epi32(four);
#if defined(__AVX512VNNI__)
  return {_mm512_dpbusd_epi32(sum.v, u.v, quad)};
#else
  const __m512i ones = _mm512_set1_epi16(1), top = _mm512_set1_epi8(-128);
  const __m512i low = Small ? u.v : _mm512_andnot_si512(top, u.v);
  sum.v = _mm512_add_epi32(sum.v, _mm512_madd_epi16(_mm512_maddubs_epi16(low, quad), ones));
  if (Small) return sum;
  const __m512i high = _mm512_maddubs_epi16(_mm512_and_si512(top, u.v), quad);
  return {_mm512_add_epi32(sum.v, _mm512_madd_epi16(high, ones))};
#endif
}

// The largest size of 32 activations, as bits of bfloat16.
OCTAVO_INLINE int largest_bits(const bf16* x) {
  const __m512i sizes = _mm512_and_si512(_mm512_loadu_si512(x), _mm512_set1_epi16(0x7fff));
  const __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(sizes), _mm512_extracti64x4_epi64(sizes, 1));
  const __m128i quarter = _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  const __m128i least = _mm_minpos_epu16(_mm_xor_si128(quarter, _mm_set1_epi16(-1)));
  return _mm_extract_epi16(least, 0) ^ 0xffff;
}
// Sixteen numbers as whole ones, below 2^22 in size; such a number as 128 * upper + lower; and those as bytes, also with their sum.
OCTAVO_INLINE Ints to_ints(Vec x) { return {_mm512_cvtps_epi32(x.v)}; }  // to nearest even, as the mode is
OCTAVO_INLINE Ints upper_byte(Ints x) { return {_mm512_srai_epi32(_mm512_add_epi32(x.v, _mm512_set1_epi32(64)), 7)}; }
OCTAVO_INLINE Ints lower_byte(Ints x, Ints upper) { return {_mm512_sub_epi32(x.v, _mm512_slli_epi32(upper.v, 7))}; }
OCTAVO_INLINE Ints join(Ints upper, Ints lower) { return {_mm512_add_epi32(_mm512_slli_epi32(upper.v, 7), lower.v)}; }
OCTAVO_INLINE __m128i store_bytes(std::int8_t* codes, Ints x) {
  const __m128i bytes = _mm512_cvtepi32_epi8(x.v);
  _mm_store_si128(reinterpret_cast<__m128i*>(codes), bytes);
  return bytes;
}
OCTAVO_INLINE std::int32_t store_codes(std::int8_t* codes, Ints x) {
  const __m128i bytes = store_bytes(codes, x);
  const __m128i sums = _mm_sad_epu8(_mm_xor_si128(bytes, _mm_set1_epi8(-128)), _mm_setzero_si128());  // each plus 128
  return _mm_cvtsi128_si32(sums) + _mm_extract_epi32(sums, 2) - 16 * 128;
}

OCTAVO_INLINE Vec load_half(const std::uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
// Sixteen signed bytes.
OCTAVO_INLINE Ints load_ints(const std::uint8_t* p) {
  return {_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}

}  // namespace
}  // namespace octavo
