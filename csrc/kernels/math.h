// exp, tanh and the activations, as our own polynomials: every table computes the same operations in the same order, and
// no libm (whose results differ between machines) comes in. Only add, subtract, multiply and divide, never an FMA.
//
// The coefficients are minimax fits of the relative error over the reduced range (Lawson's iteration on Chebyshev
// nodes), rounded to float32; their own error is below a tenth of half an ulp, the rest is rounding.
#pragma once

namespace octavo {
namespace {

// P: e^r = 1 + r + r^2 P(r) for |r| <= ln 2 / 2.
constexpr int kExpTerms = 5;
constexpr float kExp[kExpTerms] = {1.38131424e-3f, 8.36941879e-3f, 4.16684560e-2f, 1.66665152e-1f, 4.99999940e-1f};

// e^x within 1 ulp. 0 below -87.33 (where the result nears the subnormals), infinity above 88.73; NaN stays NaN.
// x = n ln 2 + r with |r| <= ln 2 / 2; e^r = 1 + r + r^2 P(r); the two parts of ln 2 make n * ln 2 exact.
//
// Of N vectors side by side, each step for all of them before the next one: by itself each is a long chain, and a core would wait
// for most of it. Without Positive, for x <= 0 (or NaN) only, the same bits in fewer operations: 2^n stays normal, so that one
// factor will do.
constexpr int kSideBySide = 4;  // so many
template <bool Positive, int N>
OCTAVO_INLINE void exp_each(Vec (&x)[N]) {
  const Vec lowest = splat(-87.33f);
  Vec n_magic[N], r[N], p[N];
#define OCTAVO_EACH(statement) _Pragma("GCC unroll 4") for (int i = 0; i < N; ++i) statement
  OCTAVO_EACH(r[i] = Positive ? min(splat(89.0f), max(lowest, x[i])) : max(lowest, x[i]));
  OCTAVO_EACH(n_magic[i] = r[i] * splat(1.44269504f) + splat(kMagic));
  OCTAVO_EACH(p[i] = n_magic[i] - splat(kMagic));
  OCTAVO_EACH(r[i] = (r[i] - p[i] * splat(0.693359375f)) - p[i] * splat(-2.12194440e-4f));
  OCTAVO_EACH(p[i] = splat(kExp[0]));
#pragma GCC unroll 4
  for (int k = 1; k < kExpTerms; ++k) OCTAVO_EACH(p[i] = p[i] * r[i] + splat(kExp[k]));
  OCTAVO_EACH(p[i] = ((r[i] * r[i]) * p[i] + r[i]) + splat(1.0f));
  OCTAVO_EACH(p[i] = Positive ? scale(p[i], n_magic[i]) : scale_normal(p[i], n_magic[i]));
  OCTAVO_EACH(x[i] = select_less(x[i], lowest, splat(0.0f), p[i]));
#undef OCTAVO_EACH
}
template <int N>
OCTAVO_INLINE void exp_of_negative(Vec (&x)[N]) {
  exp_each<false>(x);
}
OCTAVO_INLINE Vec exp(Vec x) {
  Vec one[1] = {x};
  exp_each<true>(one);
  return one[0];
}

// tanh(x) within 2 ulp; the sign of x stays, NaN stays NaN.
// |x| < 0.625: x + x^3 P(x^2); above: 1 - 2 / (e^(2|x|) + 1), which is 1 from 9.02 on.
OCTAVO_INLINE Vec tanh(Vec x) {
  const Vec a = abs(x);
  const Vec z = x * x;
  Vec p = splat(-5.70497848e-3f);
  p = p * z + splat(2.06390787e-2f);
  p = p * z + splat(-5.37397098e-2f);
  p = p * z + splat(1.33314422e-1f);
  p = p * z + splat(-3.33332807e-1f);
  const Vec small = (p * z) * a + a;
  const Vec large = splat(1.0f) - splat(2.0f) / (exp(a + a) + splat(1.0f));
  return copy_sign(select_less(a, splat(0.625f), small, large), x);
}

// x * sigmoid(x) as x / (1 + e^-x); -0 below -88.73, where the value is under 3e-37.
template <int N>
OCTAVO_INLINE void silu(Vec (&x)[N]) {
  Vec e[N];
  for (int i = 0; i < N; ++i) e[i] = splat(0.0f) - x[i];
  exp_each<true>(e);
  for (int i = 0; i < N; ++i) x[i] = x[i] / (splat(1.0f) + e[i]);
}

// The tanh form: x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))).
template <int N>
OCTAVO_INLINE void gelu(Vec (&x)[N]) {
  for (Vec& v : x) {
    const Vec inner = splat(0.797884561f) * (v + splat(0.044715f) * ((v * v) * v));
    v = (splat(0.5f) * v) * (splat(1.0f) + tanh(inner));
  }
}

OCTAVO_INLINE Vec soft_cap(Vec x, Vec cap) { return tanh(x / cap) * cap; }

}  // namespace
}  // namespace octavo
