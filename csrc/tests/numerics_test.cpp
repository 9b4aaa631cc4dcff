// What has no table of kernels: packing, rotation, sampling and the treatment of subnormals.
#include <algorithm>
#include <numeric>

#include "pack.h"
#include "rotation.h"
#include "sampling.h"
#include "tests/testing.h"

namespace octavo::testing {
namespace {

// ------------------------------------------------------------------------------------------------------------- packing

// Packed in two ranges, every `step`th panel: the panels between stay as they were.
template <class T>
void test_pack(Test& t, int n, int k, int step) {
  t.begin("pack n=%d k=%d step=%d of %zu bytes", n, k, step, sizeof(T));
  Random random(n + k);
  const int row_stride = k + 3, panels = (n + 15) / 16, padded_k = round_up(k, 32);
  std::vector<T> rows(n * row_stride, poison<T>());
  for (int i = 0; i < n; ++i)
    for (int j = 0; j < k; ++j)
      rows[i * row_stride + j] = sizeof(T) == 2 ? T(nearest_bf16(random.real())) : T(random.real());
  Buffer<bf16> out(panels * step * padded_k * 16, kPoison);
  pack_panels(rows.data(), row_stride, n, k, out.data(), 0, panels / 2, step);
  pack_panels(rows.data(), row_stride, n, k, out.data(), panels / 2, panels, step);
  for (std::int64_t i = 0; i < static_cast<std::int64_t>(out.size()); ++i) {
    const int place = static_cast<int>(i / (padded_k * 16)), within = static_cast<int>(i % (padded_k * 16));
    const int row = place / step * 16 + within % 32 / 2, column = within / 32 * 2 + within % 2;
    bf16 want = 0;
    if (row < n && column < k) {
      const T x = rows[row * row_stride + column];
      want = sizeof(T) == 2 ? static_cast<bf16>(x) : nearest_bf16(static_cast<float>(x));
    }
    if (place % step != 0) want = kPoison;
    t.result(out[i]);
    t.same(out[i], want, "the layout", row, column);
  }
}

// ------------------------------------------------------------------------------------------------------------ sampling

struct Row {
  std::vector<float> logits;
  int vocab_size() const { return static_cast<int>(logits.size()); }
  bool before(int a, int b) const { return logits[a] != logits[b] ? logits[a] > logits[b] : a < b; }
  int best() const {
    int best = 0;
    for (int i = 1; i < vocab_size(); ++i)
      if (before(i, best)) best = i;
    return best;
  }
  double log_total() const {
    const double top = logits[best()];
    double total = 0;
    for (float x : logits) total += std::exp(x - top);
    return std::log(total) + top;
  }
  // sampling.h promises (vocab_size + 64) 2^-52 and 2^-51 of itself; libm and the plain sum here are no better.
  double bound(double logprob) const { return (vocab_size() + 64) * 0x1p-51 + 0x1p-50 * std::fabs(logprob); }
};

// Values on a coarse grid, so that most have equals, zeros of both signs among them; or all different.
Row random_row(Random& random, int vocab_size, bool coarse) {
  Row row;
  for (int i = 0; i < vocab_size; ++i)
    row.logits.push_back(coarse ? static_cast<float>(random.below(4)) * (random.below(2) == 0 ? 1.0f : -1.0f)
                                : random.real(12));
  return row;
}

void test_greedy(Test& t, const Row& row) {
  constexpr int kTop = 5;
  std::int32_t top_ids[kTop];
  double top_logprobs[kTop];
  Scratch scratch;
  SampledRow out;
  out.top_ids = top_ids;
  out.top_logprobs = top_logprobs;
  SamplingRow what;
  what.num_logprobs = kTop;
  std::vector<int> order(row.logits.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int a, int b) { return row.before(a, b); });
  const double log_total = row.log_total();
  const auto expect = [&](int rank, int token, double logprob) {
    t.result(token);
    t.result(logprob);
    t.same(token, order[rank], "the token", rank, 0);
    const double exact = row.logits[token] - log_total;
    t.near(logprob, exact, row.bound(exact), rank, token);
  };

  sample_row(row.logits.data(), row.vocab_size(), what, scratch, out);
  expect(0, out.token, out.logprob);
  t.same(out.rank, 1, "rank", 0, 0);
  t.same(out.num_top, std::min(kTop, row.vocab_size()), "num_top", 0, 0);
  for (int i = 0; i < out.num_top; ++i) expect(i, top_ids[i], top_logprobs[i]);

  const int last = row.vocab_size() - 1;
  what.target = order[last];
  sample_row(row.logits.data(), row.vocab_size(), what, scratch, out);
  expect(last, out.token, out.logprob);
  t.same(out.rank, last + 1, "rank", last, 0);
}

// The token at which the sum of weights passes u * total: 2 (vocab_size + 64) 2^-52 of the total is what rounding may
// change.
void test_draw(Test& t, const Row& row, double temperature, std::uint64_t seed) {
  Scratch scratch;
  SampledRow out;
  SamplingRow what;
  what.temperature = temperature;
  what.seed = seed;
  what.position = 17;
  sample_row(row.logits.data(), row.vocab_size(), what, scratch, out);
  t.result(out.token);
  const double u = uniform(seed, 0, 17), top = row.logits[row.best()];
  t.result(u);
  t.check(0 <= u && u < 1 && std::floor(u * 0x1p53) == u * 0x1p53, "u is not on the grid");
  t.check(0 <= out.token && out.token < row.vocab_size(), "no token was drawn");
  double total = 0, below = 0, weight = 0;
  for (int i = 0; i < row.vocab_size(); ++i) {
    weight = std::exp((row.logits[i] - top) / temperature);
    if (i < out.token) below += weight;
    total += weight;
  }
  weight = std::exp((row.logits[out.token] - top) / temperature);
  const double slack = (row.vocab_size() + 64) * 0x1p-51 * total;
  t.check(below - slack <= u * total && u * total <= below + weight + slack, "another token is due", out.token);
  what.top_k = 1;
  sample_row(row.logits.data(), row.vocab_size(), what, scratch, out);
  t.same(out.token, row.best(), "top_k 1 is greedy", 0, 0);
}

void test_not_finite(Test& t) {
  Scratch scratch;
  SampledRow out;
  for (const float bad : {INFINITY, poison<float>()}) {
    const float logits[3] = {1, bad, 2};
    sample_row(logits, 3, {}, scratch, out);
    t.same(out.token, kNotFinite, "no token", 0, 0);
  }
  const float logits[3] = {1, -INFINITY, 2};
  sample_row(logits, 3, {}, scratch, out);
  t.same(out.token, 2, "minus infinity is never chosen", 0, 0);
}

// libm may be off by an ulp of double itself.
void test_double_functions(Test& t) {
  Random random(3);
  for (int i = 0; i < 2000; ++i) {
    const double x = -354 + 354 * static_cast<double>(random.real()) + 0x1p-30 * random.below(1 << 20);
    double y;
    exponentials(&x, &y, 1);
    t.result(y);
    t.near(y, std::exp(x), (0x1p-51 + 0x1p-52) * std::exp(x), i, 0);
    if (y == 0) continue;
    const double log = logarithm(y);
    t.result(log);
    t.near(log, std::log(y), (0x1p-51 + 0x1p-52) * std::fabs(std::log(y)), i, 1);
  }
}

}  // namespace

void test_packing(Test& t) {
  for (const auto& [n, k] : {std::pair{1, 1}, {16, 32}, {37, 45}, {50, 96}}) {
    for (const int step : {1, 2}) {
      test_pack<float>(t, n, k, step);
      test_pack<bf16>(t, n, k, step);
    }
  }
}

void test_rotation(Test& t) {
  Random random(5);
  t.begin("sin_cos");
  for (int i = 0; i < 4000; ++i) {
    const double x = static_cast<double>(random.real(static_cast<float>(1 << random.below(21)))) * (1 - 0x1p-40);
    const SinCos got = sin_cos(x);
    t.result(got.sin);
    t.result(got.cos);
    t.near(got.sin, std::sin(x), 0x1p-50, i, 0);
    t.near(got.cos, std::cos(x), 0x1p-50, i, 1);
  }
  t.begin("rotate_row");
  constexpr int kHalf = 37;
  constexpr float kFactor = 1.3f;
  float frequencies[kHalf], cos[kHalf], sin[kHalf];
  for (float& f : frequencies) f = 0.5f * (random.real() + 1);
  for (const int position : {0, 1, 4095, 1 << 19}) {
    rotate_row(position, frequencies, kHalf, kFactor, cos, sin);
    for (int i = 0; i < kHalf; ++i) {
      const double angle = static_cast<float>(position) * frequencies[i];  // the float32 product is the angle
      t.result(cos[i]);
      t.result(sin[i]);
      t.near(cos[i], std::cos(angle) * kFactor, (2 * kUnit + 0x1p-49) * kSlack * kFactor, position, i);
      t.near(sin[i], std::sin(angle) * kFactor, (2 * kUnit + 0x1p-49) * kSlack * kFactor, position, i);
    }
  }
}

void test_sampling(Test& t) {
  Random random(11);
  for (const int vocab_size : {1, 2, 15, 16, 256, 257, 5003}) {
    for (const bool coarse : {false, true, true, true, true}) {
      const Row row = random_row(random, vocab_size, coarse);
      t.begin("sampling of %d logits, coarse=%d", vocab_size, coarse);
      test_greedy(t, row);
      for (std::uint64_t seed = 0; seed < 4; ++seed) test_draw(t, row, seed % 2 == 0 ? 1.0 : 0.4, seed);
    }
  }
  t.begin("sampling of what is not finite");
  test_not_finite(t);
  t.begin("exponentials and logarithm");
  test_double_functions(t);
}

}  // namespace octavo::testing
