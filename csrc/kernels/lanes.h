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

// Joins the lanes by the fixed tree: 8 and 8, 4 and 4, 2 and 2, 1 and 1.
template <class F>
OCTAVO_INLINE float fold(Vec x, F&& f) {
  x = f(x, swapped<8>(x));
  x = f(x, swapped<4>(x));
  x = f(x, swapped<2>(x));
  return first_lane(f(x, swapped<1>(x)));
}
OCTAVO_INLINE float sum(Vec x) {
  return fold(x, [](Vec a, Vec b) { return a + b; });
}
OCTAVO_INLINE float max_lane(Vec x) {
  return fold(x, [](Vec a, Vec b) { return max(a, b); });
}
// Of lanes that are not negative: a NaN is the greatest.
OCTAVO_INLINE float max_lane_or_nan(Vec x) {
  return fold(x, [](Vec a, Vec b) { return max_or_nan(a, b); });
}

// 0, 1, .. 15
inline Vec lane_numbers() {
  constexpr float numbers[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return load(numbers);
}

}  // namespace
}  // namespace octavo
