// What follows from any Vec: partial loads and stores, reductions in the contract's order. Include a vec_*.h first.
#pragma once

namespace octavo {
namespace {

constexpr int kLanes = 16;

// The first n < 16 lanes; the rest are zero. Only ragged ends come here, so a loop will do.
template <class T>
inline Vec load_partial(const T* p, int n) {
  T lanes[kLanes] = {};
  for (int i = 0; i < n; ++i) lanes[i] = p[i];
  return load(lanes);
}
template <class T>
inline void store_partial(T* p, Vec x, int n) {
  T lanes[kLanes];
  store(lanes, x);
  for (int i = 0; i < n; ++i) p[i] = lanes[i];
}

template <class T>
OCTAVO_INLINE Vec load(const T* p, int n) {
  return n >= kLanes ? load(p) : load_partial(p, n);
}
template <class T>
OCTAVO_INLINE void store(T* p, Vec x, int n) {
  if (n >= kLanes) {
    store(p, x);
  } else {
    store_partial(p, x, n);
  }
}

// As of sixteen pairs of bfloat16, of sixteen firsts and sixteen seconds in int8.
OCTAVO_INLINE Vec load_even(const std::int8_t* p) { return load(p); }
OCTAVO_INLINE Vec load_odd(const std::int8_t* p) { return load(p + kLanes); }

// Sum of the lanes by the fixed tree: 8 + 8, 4 + 4, 2 + 2, 1 + 1.
inline float sum(Vec x) {
  float lanes[kLanes];
  store(lanes, x);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] = lanes[i] + lanes[i + width];
  return lanes[0];
}

inline float max_lane(Vec x) {
  float lanes[kLanes];
  store(lanes, x);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
  return lanes[0];
}

// 0, 1, .. 15
inline Vec lane_numbers() {
  constexpr float numbers[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return load(numbers);
}

}  // namespace
}  // namespace octavo
