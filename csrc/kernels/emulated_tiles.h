// AMX's tile instructions in plain C++, by the matrix rule of kernels.h and as strict as the processor about shapes: with the
// CMake option OCTAVO_EMULATE_TILES, the amx table runs, and is tested, on machines without AMX. Slow; never in a release.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace octavo {
namespace {
namespace emulated {

struct Tile {
  int rows = 0, bytes = 0;
  unsigned char data[16][64] = {};
};
thread_local Tile tiles[8];
thread_local bool configured = false;

// Where the processor would raise #UD or #GP.
inline void require(bool holds) {
  if (!holds) __builtin_trap();
}

inline Tile& tile(int t) {
  require(configured && tiles[t].rows > 0);
  return tiles[t];
}

inline void load_config(const void* memory) {
  unsigned char c[64];
  std::memcpy(c, memory, sizeof c);
  require(c[0] == 1 && c[1] == 0);
  for (int i = 2; i < 16; ++i) require(c[i] == 0);
  for (int t = 0; t < 16; ++t) {
    const int bytes = c[16 + 2 * t] | c[17 + 2 * t] << 8, rows = c[48 + t];
    require(rows <= 16 && bytes <= 64 && (rows == 0) == (bytes == 0) && (t < 8 || rows == 0));
    if (t < 8) tiles[t] = {rows, bytes, {}};
  }
  configured = true;
}
inline void release() { configured = false; }

inline void zero(int t) { std::memset(tile(t).data, 0, sizeof tile(t).data); }

inline void load(int t, const void* base, std::int64_t stride) {
  zero(t);
  for (int r = 0; r < tile(t).rows; ++r)
    std::memcpy(tile(t).data[r], static_cast<const char*>(base) + r * stride, tile(t).bytes);
}
inline void store(int t, void* base, std::int64_t stride) {
  for (int r = 0; r < tile(t).rows; ++r)
    std::memcpy(static_cast<char*>(base) + r * stride, tile(t).data[r], tile(t).bytes);
}

// Pair k of a row of bfloat16 pairs, as floats.
struct FloatPair {
  float even, odd;
};
inline FloatPair pair_of(const unsigned char* row, int k) {
  std::uint32_t bits;
  std::memcpy(&bits, row + 4 * k, sizeof bits);
  const std::uint32_t low = bits << 16, high = bits & 0xffff0000u;
  FloatPair pair;
  std::memcpy(&pair.even, &low, sizeof low);
  std::memcpy(&pair.odd, &high, sizeof high);
  return pair;
}

inline void dot_products(int sums, int left, int right) {
  Tile &c = tile(sums), &a = tile(left), &b = tile(right);
  require(a.rows == c.rows && b.bytes == c.bytes && a.bytes / 4 <= b.rows);
  require(sums != left && sums != right && left != right);
  for (int m = 0; m < c.rows; ++m) {
    for (int n = 0; n < c.bytes / 4; ++n) {
      float even = 0, odd = 0, acc;
      for (int k = 0; k < a.bytes / 4; ++k) {
        const FloatPair x = pair_of(a.data[m], k), w = pair_of(b.data[k], n);
        even = even + x.even * w.even;
        odd = odd + x.odd * w.odd;
      }
      std::memcpy(&acc, c.data[m] + 4 * n, sizeof acc);
      acc = acc + (even + odd);
      std::memcpy(c.data[m] + 4 * n, &acc, sizeof acc);
    }
  }
}

// Signed bytes times unsigned ones, summed in 32 bits.
inline void byte_products(int sums, int left, int right) {
  Tile &c = tile(sums), &a = tile(left), &b = tile(right);
  require(a.rows == c.rows && b.bytes == c.bytes && a.bytes % 4 == 0 && a.bytes / 4 <= b.rows);
  require(sums != left && sums != right && left != right);
  for (int m = 0; m < c.rows; ++m) {
    for (int n = 0; n < c.bytes / 4; ++n) {
      std::int32_t acc;
      std::memcpy(&acc, c.data[m] + 4 * n, sizeof acc);
      for (int k = 0; k < a.bytes; ++k) acc += static_cast<signed char>(a.data[m][k]) * b.data[k / 4][4 * n + k % 4];
      std::memcpy(c.data[m] + 4 * n, &acc, sizeof acc);
    }
  }
}

}  // namespace emulated
}  // namespace
}  // namespace octavo

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbsud
#define _tile_loadconfig emulated::load_config
#define _tile_release emulated::release
#define _tile_zero emulated::zero
#define _tile_loadd emulated::load
#define _tile_stored emulated::store
#define _tile_dpbf16ps emulated::dot_products
#define _tile_dpbsud emulated::byte_products
