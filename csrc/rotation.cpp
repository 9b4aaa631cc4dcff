#include "rotation.h"

namespace octavo {

namespace {

// pi / 2 in three parts of 33 bits and the rest: a product of the first two with an integer below 2^20 is exact.
constexpr double kHalfPi1 = 0x1.921fb544p+0;
constexpr double kHalfPi2 = 0x1.0b4611a6p-34;
constexpr double kHalfPi3 = 0x1.3198a2e037073p-69;
constexpr double kTwoOverPi = 0x1.45f306dc9c883p-1;

// Taylor series at 0, good to 2^-53 for |r| <= pi / 4: each coefficient is 1 / n!, with its sign.
double sin_series(double r) {
  constexpr double c[] = {-1.0 / 6, 1.0 / 120, -1.0 / 5040, 1.0 / 362880, -1.0 / 39916800, 1.0 / 6227020800,
                          -1.0 / 1307674368000};
  const double z = r * r;
  double sum = c[6];
  for (int i = 5; i >= 0; --i) sum = sum * z + c[i];
  return r + r * z * sum;
}

double cos_series(double r) {
  constexpr double c[] = {-1.0 / 2, 1.0 / 24, -1.0 / 720, 1.0 / 40320, -1.0 / 3628800, 1.0 / 479001600,
                          -1.0 / 87178291200, 1.0 / 20922789888000};
  const double z = r * r;
  double sum = c[7];
  for (int i = 6; i >= 0; --i) sum = sum * z + c[i];
  return 1.0 + z * sum;
}

}  // namespace

SinCos sin_cos(double x) {
  const auto quarter = static_cast<std::int64_t>(x * kTwoOverPi + (x < 0 ? -0.5 : 0.5));
  const auto k = static_cast<double>(quarter);
  const double r = ((x - k * kHalfPi1) - k * kHalfPi2) - k * kHalfPi3;
  const double s = sin_series(r), c = cos_series(r);
  switch (quarter & 3) {
    case 0: return {s, c};
    case 1: return {c, -s};
    case 2: return {-s, -c};
    default: return {-c, s};
  }
}

void rotate_row(std::int32_t position, const float* frequencies, int half, float factor, float* cos, float* sin) {
  for (int i = 0; i < half; ++i) {
    const float angle = static_cast<float>(position) * frequencies[i];
    const SinCos turned = sin_cos(static_cast<double>(angle));
    cos[i] = static_cast<float>(turned.cos) * factor;
    sin[i] = static_cast<float>(turned.sin) * factor;
  }
}

}  // namespace octavo
