// Every kernel of every table this machine runs, without Python: see testing.h. Ends with one digest of the portable
// table's results, the same on every architecture.
#include <algorithm>
#include <cinttypes>

#include "float_mode.h"
#include "pack.h"
#include "tests/testing.h"

namespace octavo::testing {
namespace {

constexpr Range kSomeRows{1, 5};  // of six: what is before and after must stay

template <class F>
void in_pieces(Random& random, F&& call) {
  for (const Range& rows : cut(random, kSomeRows)) call(rows.begin, rows.end);
}

// ---------------------------------------------------------------------------------------------------------- conversion

void test_to_bf16(Test& t) {
  t.begin("to_bf16");
  constexpr std::uint32_t kEdges[] = {0x00000000, 0x00000001, 0x007fffff, 0x00800000, 0x00808000,
                                      0x7f7fffff, 0x7f7f7fff, 0x7f7f8000, 0x7f800000, 0x7f800001,
                                      0x7f80ffff, 0x7fc00000, 0x7fffffff};
  Random random(1);
  Buffer<float> x;
  for (const std::uint32_t edge : kEdges)
    for (const std::uint32_t sign : {0u, 0x80000000u}) x.push_back(std::bit_cast<float>(edge | sign));
  for (int i = 0; i < 4000; ++i) {
    const auto bits = static_cast<std::uint32_t>(random.bits());
    const std::uint32_t tie = (bits & 0xffff0000u) | 0x8000u;
    for (const std::uint32_t b : {bits, tie - 1, tie, tie + 1}) x.push_back(std::bit_cast<float>(b));
  }
  const int count = static_cast<int>(x.size()) - 5;  // a ragged end, and more memory behind it
  Buffer<bf16> y(x.size(), kPoison);
  t.kernels.to_bf16(x.data(), y.data(), count);
  for (int i = 0; i < static_cast<int>(x.size()); ++i) {
    t.result(y[i]);
    t.same(y[i], i < count ? nearest_bf16(x[i]) : kPoison, "the rule", i, 0);
    t.same(round_to_bf16(x[i]), nearest_bf16(x[i]), "round_to_bf16 of pack.h", i, 0);
  }
}

// ------------------------------------------------------------------------------------------------- row by row

// Weights that put a row's results of one group beside ties of bfloat16 (odd multiples of 2^-8 in 1 .. 2), where the
// last bits of 1 / rms decide what they round to.
template <class T>
std::vector<float> telling_weights(Random& random, const Matrix<T>& x, int row, int width, float eps) {
  double squares = 0;
  for (int i = 0; i < width; ++i) squares += std::pow(static_cast<double>(widen(x.at(row, i))), 2);
  const double rms = std::sqrt(squares / width + eps);
  std::vector<float> weights;
  for (int i = 0; i < width; ++i) {
    const double tie = 1 + (2 * random.below(128) + 1) * 0x1p-8, value = widen(x.at(row, i));
    weights.push_back(value == 0 ? 1.0f : static_cast<float>(tie * rms / value));
  }
  return weights;
}

// In units of roundoff, the sum of squares is off by its products' 1, a lane's additions and the tree's 4, then the
// mean by 1 and eps by 1 more; the root halves that and adds 1, its inverse 1, two products 2.
template <class T>
void test_rms_norm(Test& t, int groups, int width, bool in_place, int seed = 0) {
  t.begin("rms_norm groups=%d width=%d of %zu bytes in_place=%d seed=%d", groups, width, sizeof(T), in_place, seed);
  Random random(1000 * width + seed);
  const int columns = groups * width;
  Matrix<T> x = input<T>(random, 6, columns, 4);
  const Matrix<T> original = x;
  Matrix<bf16> out(6, columns);
  constexpr float kEps = 1e-2f;
  const std::vector<float> weight = telling_weights(random, x, kSomeRows.begin, width, kEps);
  RmsNorm n{{}, view(out), {}, weight.data(), groups, width, kEps};
  if constexpr (sizeof(T) == 2) {
    if (in_place) out = x;
    n.x = in_place ? view(out) : view(x);
    n.out = view(out);
  } else {
    n.x_float = view(x);
  }
  const Matrix<bf16> before = out;
  in_pieces(random, [&](int begin, int end) { t.kernels.rms_norm(n, begin, end); });
  visit(t, before, out, kSomeRows, {0, columns}, [&](int row, int column, bf16 got) {
    const auto at = [&](int i) { return widen(original.at(row, column / width * width + i)); };
    const float x = widen(original.at(row, column)), w = weight[column % width];
    const float mean = lane_sum(width, [&](int i) { return at(i) * at(i); }) / static_cast<float>(width);
    t.same(got, nearest_bf16(x * (1 / std::sqrt(mean + n.eps)) * w), "the rule", row, column);
    double squares = 0;
    for (int i = 0; i < width; ++i) squares += static_cast<double>(at(i)) * at(i);
    const double exact = x / std::sqrt(squares / width + n.eps) * w;
    const double units = (1 + round_up(width, 16) / 16 + 4 + 2) / 2.0 + 4;
    t.near(widen(got), exact, rounded(exact, units * kUnit * kSlack * std::fabs(exact)), row, column);
  });
}

// One rounding, to float32.
void test_add(Test& t, int width, bool in_place) {
  t.begin("add width=%d in_place=%d", width, in_place);
  Random random(width);
  Matrix<float> a = input<float>(random, 6, width, 100), out(6, width);
  Matrix<bf16> b = input(random, 6, width, 3, 32);
  const Matrix<float> before = in_place ? a : out, original = a;
  const Add add{view(a), view(b), in_place ? view(a) : view(out), width};
  in_pieces(random, [&](int begin, int end) { t.kernels.add(add, begin, end); });
  visit(t, before, in_place ? a : out, kSomeRows, {0, width}, [&](int row, int column, float got) {
    const float x = original.at(row, column), y = widen(b.at(row, column));
    t.same(got, x + y, "the rule", row, column);
    const double exact = static_cast<double>(x) + y;
    t.near(got, exact, kUnit * std::fabs(exact), row, column);
  });
}

// a' = bf16(a * cos - b * sin), b' = bf16(b * cos + a * sin): two roundings on the products, one on their sum.
void test_rope(Test& t, int heads, int head_dim, int half, bool in_place) {
  t.begin("rope heads=%d head_dim=%d half=%d in_place=%d", heads, head_dim, half, in_place);
  Random random(head_dim + half);
  const int width = heads * head_dim;
  Matrix<bf16> x = input(random, 6, width, 2), out(6, width);
  const Matrix<bf16> before = in_place ? x : out, original = x;
  std::vector<float> cos, sin;
  for (int i = 0; i < 6 * half; ++i) {
    cos.push_back(random.real());
    sin.push_back(random.real());
  }
  const Rope r{view(x), in_place ? view(x) : view(out), cos.data(), sin.data(), heads, head_dim, half};
  in_pieces(random, [&](int begin, int end) { t.kernels.rope(r, begin, end); });
  visit(t, before, in_place ? x : out, kSomeRows, {0, width}, [&](int row, int column, bf16 got) {
    const int d = column % head_dim, i = d % half;
    if (d >= 2 * half) return t.same(got, original.at(row, column), "copied", row, column);
    const float a = widen(original.at(row, column - d + i)), b = widen(original.at(row, column - d + half + i));
    const float c = cos[row * half + i], s = sin[row * half + i];
    t.same(got, nearest_bf16(d < half ? a * c - b * s : b * c + a * s), "the rule", row, column);
    const double p = static_cast<double>(d < half ? a : b) * c, q = static_cast<double>(d < half ? -b : a) * s;
    t.near(widen(got), p + q, rounded(p + q, 2 * kUnit * kSlack * (std::fabs(p) + std::fabs(q))), row, column);
  });
}

void test_gate_mul(Test& t, int width, Gate f) {
  t.begin("gate_mul width=%d f=%s", width, f == Gate::kSilu ? "silu" : "gelu");
  Random random(width);
  Matrix<bf16> gate = input(random, 6, width, 12), up = input(random, 6, width, 3, 32), out(6, width);
  for (int i = 0; i < width; i += 7) gate.at(2, i) = nearest_bf16(random.real(120));  // where exp runs out
  const Matrix<bf16> before = out;
  const GateMul g{view(gate), view(up), view(out), width, f};
  in_pieces(random, [&](int begin, int end) { t.kernels.gate_mul(g, begin, end); });
  visit(t, before, out, kSomeRows, {0, width}, [&](int row, int column, bf16 got) {
    const float x = widen(gate.at(row, column)), y = widen(up.at(row, column));
    t.same(got, nearest_bf16(gated_rule(f, x, y)), "the rule", row, column);
    const Gated want = gated(f, x, y);
    t.near(widen(got), want.exact, rounded(want.exact, want.bound), row, column);
  });
}

// tanh(x / cap) * cap: the division's rounding moves tanh by no more than itself (y sech(y)^2 / tanh(y) <= 1), tanh
// adds 2 ulps, which is 4 units, the product 1.
void test_softcap(Test& t, float cap) {
  t.begin("softcap %g", static_cast<double>(cap));
  constexpr int kCount = 1003;
  Random random(9);
  Buffer<float> x{0.0f, -0.0f, INFINITY, -INFINITY, 1e-20f, 1e30f, -1e30f};
  while (x.size() < kCount) x.push_back(random.real(4 * cap));
  x.push_back(poison<float>());
  const Buffer<float> before = x;
  t.kernels.softcap(x.data(), kCount, cap);
  for (int i = 0; i < kCount; ++i) {
    const double exact = std::tanh(static_cast<double>(before[i]) / cap) * cap;
    t.result(x[i]);
    t.same(x[i], softcap_rule(before[i], cap), "the rule", i, 0);
    t.near(x[i], exact, 6 * kUnit * kSlack * std::fabs(exact), i, 0);
    t.check(std::signbit(x[i]) == std::signbit(before[i]), "the sign", i);
    t.check(std::fabs(x[i]) <= cap, "the cap", i);
  }
  t.check(bits_of(x[kCount]) == bits_of(before[kCount]), "was written", kCount);
  float nan = poison<float>();
  t.kernels.softcap(&nan, 1, cap);
  t.check(std::isnan(nan), "NaN stays NaN");
}

void test_rows(Test& t) {
  test_to_bf16(t);
  for (const bool in_place : {false, true}) {
    for (const auto& [groups, width] : {std::pair{1, 576}, {1, 37}, {3, 64}, {5, 16}, {2, 40}, {1, 1}})
      test_rms_norm<bf16>(t, groups, width, in_place);
    for (const int width : {1, 16, 31, 576}) test_add(t, width, in_place);
    for (const auto& [head_dim, half] : {std::pair{64, 32}, {16, 8}, {80, 40}, {48, 20}, {256, 32}})
      test_rope(t, 3, head_dim, half, in_place);
  }
  for (const auto& [groups, width] : {std::pair{1, 576}, {1, 37}, {3, 64}})
    test_rms_norm<float>(t, groups, width, false);
  // The order of a sum shows in few rows only.
  for (int seed = 0; seed < 40; ++seed) test_rms_norm<float>(t, 1, 200, false, seed);
  for (const int width : {1, 16, 45, 200})
    for (const Gate f : {Gate::kSilu, Gate::kGelu}) test_gate_mul(t, width, f);
  for (const float cap : {1.0f, 30.0f}) test_softcap(t, cap);
}

// ------------------------------------------------------------------------------------------------------- all of them

// Reads a subnormal, and makes one, at run time.
float half_of(float x) {
  volatile float operand = x;
  return operand * 0.5f;
}

void test_float_mode(Test& t) {
  t.begin("FlushSubnormals");
  constexpr float kSmallest = 0x1p-126f;
  t.check(half_of(kSmallest) > 0, "subnormals must be there before");
  {
    const FlushSubnormals mode;
    t.check(half_of(kSmallest) == 0, "a result must be flushed");
    volatile float subnormal = 0x1p-127f;
    t.check(subnormal * 0x1p20f == 0, "an operand must be flushed");
  }
  t.check(half_of(kSmallest) > 0, "subnormals must be back after");
}

bool report(const Test& t) {
  std::printf("kernels_test: %s: %ld results, %ld failures\n", t.kernels.name, t.results(), t.failures());
  return t.failures() == 0;
}

// What belongs to the table; returns the digest of its results.
std::uint64_t test_kernels(Test& t) {
  test_rows(t);
  test_matmul(t);
  test_quant(t);
  test_attention(t);
  return t.digest();
}

bool passes() {
  constexpr int kMost = 8;
  const Kernels* tables[kMost];
  const int count = available(tables, kMost);
  Test portable(*tables[0]);
  test_float_mode(portable);
  const FlushSubnormals mode;  // as the pool's threads have it; the rules that the tests restate are under it, too
  const std::uint64_t digest = test_kernels(portable);
  test_packing(portable);
  test_rotation(portable);
  test_sampling(portable);
  bool passed = report(portable);
  for (int i = 1; i < count; ++i) {
    Test t(*tables[i]);
    const bool same = test_kernels(t) == digest;
    t.begin("all results together");
    t.check(same, "the bits are not the portable table's");
    passed = report(t) && passed;
  }
  std::printf("kernels_test: digest %016" PRIx64 "\n", portable.digest());
  return passed;
}

}  // namespace
}  // namespace octavo::testing

int main() { return octavo::testing::passes() ? 0 : 1; }
