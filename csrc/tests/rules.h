// The rules of kernels.h, a number at a time: slow, literal, and sharing nothing with the kernels. And how far a result
// that keeps them may be from float64.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels.h"

namespace octavo::testing {

// ---------------------------------------------------------------------------------------------------------- bfloat16

inline float widen(bf16 x) { return std::bit_cast<float>(std::uint32_t{x} << 16); }
inline float widen(float x) { return x; }

// By the definition of rounding: of the two neighbours the nearer one, and at equal distance the even one.
inline bf16 nearest_bf16(float x) {
  if (std::isnan(x)) return 0x7fc0;
  const auto bits = std::bit_cast<std::uint32_t>(x);
  const auto toward_zero = static_cast<bf16>(bits >> 16);
  if ((toward_zero & 0x7fff) < 0x0080) return toward_zero & 0x8000;  // a subnormal, or zero
  if (std::isinf(x)) return toward_zero;
  const auto away = static_cast<bf16>(toward_zero + 1);
  const double far = std::isinf(widen(away)) ? 0x1p128 : std::fabs(static_cast<double>(widen(away)));
  const double size = std::fabs(static_cast<double>(x));
  const double below = size - std::fabs(static_cast<double>(widen(toward_zero))), above = far - size;
  if (below == above) return toward_zero % 2 == 0 ? toward_zero : away;
  return below < above ? toward_zero : away;
}

// -------------------------------------------------------------------------------------------------------------- rules

// Even and odd k's of each chunk from zero and in order, then acc += even + odd.
inline float matrix_rule(const float* x, const float* w, int k, int chunk = kChunk) {
  float acc = 0;
  for (int begin = 0; begin < k; begin += chunk) {
    float sum[2] = {0, 0};
    for (int i = begin; i < k && i < begin + chunk; ++i) sum[i % 2] = sum[i % 2] + x[i] * w[i];
    acc = acc + (sum[0] + sum[1]);
  }
  return acc;
}

// Lane i % 16 takes term i, then the tree.
template <class F>
float lane_sum(int count, F&& term) {
  float lanes[16] = {};
  for (int i = 0; i < count; ++i) lanes[i % 16] = lanes[i % 16] + term(i);
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] = lanes[i] + lanes[i + width];
  return lanes[0];
}

// exp and tanh of kernels/math.h, a number at a time.
inline float exp_rule(float x) {
  if (std::isnan(x)) return x;
  if (x < -87.33f) return 0;
  x = x < 89.0f ? x : 89.0f;
  const float n = std::nearbyint(x * 1.44269504f);
  const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.38131424e-3f;
  for (const float c : {8.36941879e-3f, 4.16684560e-2f, 1.66665152e-1f, 4.99999940e-1f}) p = p * r + c;
  return std::ldexp((r * r * p + r) + 1.0f, static_cast<int>(n));
}
inline float tanh_rule(float x) {
  const float a = std::fabs(x), z = x * x;
  float p = -5.70497848e-3f;
  for (const float c : {2.06390787e-2f, -5.37397098e-2f, 1.33314422e-1f, -3.33332807e-1f}) p = p * z + c;
  return std::copysign(a < 0.625f ? p * z * a + a : 1.0f - 2.0f / (exp_rule(a + a) + 1.0f), x);
}
inline float softcap_rule(float x, float cap) { return tanh_rule(x / cap) * cap; }

// f(gate) * up, not yet rounded.
inline float gated_rule(Gate f, float gate, float up) {
  if (f == Gate::kSilu) return gate / (1.0f + exp_rule(0.0f - gate)) * up;
  const float inner = 0.797884561f * (gate + 0.044715f * (gate * gate * gate));
  return 0.5f * gate * (1.0f + tanh_rule(inner)) * up;
}

// A column of a weight in few bits: what its codes stand for, and the scale and minimum of each group.
struct Grouped {
  std::vector<int> whole;             // [k]: u - offset
  std::vector<float> scale, minimum;  // [k / group]
  int group = kChunk;
  bool has_minimum = false;
};

// A chunk of activations as whole numbers up to `largest`.
struct WholeChunk {
  int q[kChunk] = {};
  float scale = 0;
};
inline WholeChunk whole_rule(const float* x, float largest) {
  WholeChunk chunk;
  float most = 0;
  for (int i = 0; i < kChunk; ++i) most = std::fmax(most, std::fabs(x[i]));
  if (most < 0x1p-100f) return chunk;
  const float inverse = largest / most;
  chunk.scale = most / largest;
  for (int i = 0; i < kChunk; ++i) chunk.q[i] = static_cast<int>(std::nearbyint(static_cast<double>(x[i] * inverse)));
  return chunk;
}

inline float whole_product_rule(const float* x, const Grouped& w, float largest) {
  float acc = 0;
  for (std::size_t g = 0; g < w.scale.size(); ++g) {
    const int first = static_cast<int>(g) * w.group;
    const WholeChunk chunk = whole_rule(x + first / kChunk * kChunk, largest);
    std::int64_t products = 0, sum = 0;
    for (int i = 0; i < w.group; ++i) {
      const int q = chunk.q[first % kChunk + i];
      products += std::int64_t{w.whole[first + i]} * q;
      sum += q;
    }
    acc = acc + (w.scale[g] * chunk.scale) * static_cast<float>(products);
    if (w.has_minimum) acc = acc + w.minimum[g] * (chunk.scale * static_cast<float>(sum));
  }
  return acc;
}

// With activations as they are.
inline float kept_product_rule(const float* x, const Grouped& w) {
  float acc = 0;
  const std::vector<float> ones(w.group, 1.0f);
  for (std::size_t g = 0; g < w.scale.size(); ++g) {
    const float* own = x + g * w.group;
    const std::vector<float> whole(w.whole.begin() + g * w.group, w.whole.begin() + (g + 1) * w.group);
    acc = acc + w.scale[g] * matrix_rule(own, whole.data(), w.group);
    if (w.has_minimum) acc = acc + w.minimum[g] * matrix_rule(own, ones.data(), w.group);
  }
  return acc;
}

// ------------------------------------------------------------------------------------------------------------- bounds

constexpr double kUnit = 0x1p-24;     // unit roundoff of float32
constexpr double kBf16Unit = 0x1p-8;  // of bfloat16
constexpr double kSlack = 1.001;      // for products of roundoffs, which the bounds leave out

// f(gate) * up in float64, and how far the kernels may be off before they round to bfloat16. In units of roundoff:
//   silu   exp is within 1 ulp, which is 2; 1 + exp adds 1, the division 1, the product 1: 5 of the result. Below -87
//          it drops to zero, and what is dropped is less than 1e-35.
//   gelu   x^3 is off by 2, its constant and product 2, the sum 1, the outer constant and product 2: the argument y by
//          7 of itself, which moves tanh by 7 y sech(y)^2 < 3.2; tanh adds 2 ulps, which is 4, and 1 + tanh another 2:
//          below 9.2 on a scale of |x / 2|, as 1 + tanh may cancel. The two products add 2 of the result, which is at
//          most |x|: below 7.
struct Gated {
  double exact, bound;
};
inline Gated gated(Gate f, double gate, double up) {
  if (f == Gate::kSilu) {
    const double exact = gate / (1 + std::exp(-gate)) * up;
    return {exact, 5 * kUnit * kSlack * std::fabs(exact) + 1e-35 * std::fabs(up)};
  }
  const double inner = std::sqrt(2 / 3.14159265358979323846) * (gate + 0.044715 * gate * gate * gate);
  return {gate / 2 * (1 + std::tanh(inner)) * up, 7 * kUnit * kSlack * std::fabs(gate * up)};
}

// What a rounding to bfloat16 adds to a bound.
inline double rounded(double exact, double bound) { return kSlack * (bound + kBf16Unit * (std::fabs(exact) + bound)); }

}  // namespace octavo::testing
