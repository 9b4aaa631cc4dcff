// sin and cos of rotary embeddings, the same bits on every machine: no libm, only + - * and conversions of IEEE.
#pragma once

#include <cstdint>

namespace octavo {

struct SinCos {
  double sin, cos;
};

// For |x| up to 2^20 radians (no context is longer); off by less than 2^-50, so that a rounding to float32 is right but
// for one case in millions.
SinCos sin_cos(double x);

// Angles position * frequency (a float32 product), cos and sin rounded to float32 and multiplied by `factor`: [half] each.
void rotate_row(std::int32_t position, const float* frequencies, int half, float factor, float* cos, float* sin);

}  // namespace octavo
