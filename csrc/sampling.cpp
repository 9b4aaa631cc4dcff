#include "sampling.h"

#include <algorithm>
#include <bit>
#include <cfloat>
#include <climits>

namespace octavo {
namespace {

using Candidate = Scratch::Candidate;

constexpr int kBlock = 256;  // sums and passes go block by block; short last blocks are padded with -inf, weight 0
constexpr int kLanes = 16;   // independent maxima or sums within a block, for vectors of any width
constexpr int kRadixBits = 8;  // a selection's histogram has 256 bins
constexpr std::int32_t kInfinityKey = 0x7f800000;
constexpr std::int32_t kNoFloor = INT_MIN;

constexpr int blocks_of(int n) { return (n + kBlock - 1) / kBlock; }

// ---------------------------------------------------------------------------------------------------- exp, log, keys

constexpr double kLog2E = 0x1.71547652b82fep+0;
constexpr double kLn2High = 0x1.62e42fee00000p-1;  // its last 21 bits are 0: its product with a small integer is exact
constexpr double kLn2Low = 0x1.a39ef35793c76p-33;
constexpr double kRound = 0x1.8p+52;               // adding it leaves an integer in the low bits
constexpr double kSmallest = -708;

// `result` where x >= limit, else 0; by the sign of the difference, as GCC turns a comparison into a branch around x's
// arithmetic (which might trap), and then the loop around it is no vector code. No NaN.
inline double at_least(double x, double limit, double result) {
  const std::uint64_t keep = (std::bit_cast<std::uint64_t>(x - limit) >> 63) - 1;
  return std::bit_cast<double>(std::bit_cast<std::uint64_t>(result) & keep);
}

// exp(n ln 2 + r) = 2^n exp(r) with |r| <= ln 2 / 2, and exp(r) by its Taylor series up to r^12 / 12!, whose remainder
// is below 2^-52, added in pairs (Estrin) for short chains. What comes out below kSmallest is nonsense, and dropped.
inline double exponential(double x) {
  const double shifted = x * kLog2E + kRound;
  const double n = shifted - kRound;
  const double r = (x - n * kLn2High) - n * kLn2Low;
  const double r2 = r * r, r4 = r2 * r2;
  const double c2 = 0.5 + r * (1.0 / 6), c4 = 1.0 / 24 + r * (1.0 / 120), c6 = 1.0 / 720 + r * (1.0 / 5040);
  const double c8 = 1.0 / 40320 + r * (1.0 / 362880), c10 = 1.0 / 3628800 + r * (1.0 / 39916800);
  const double low = c2 + r2 * c4, middle = c6 + r2 * c8, high = c10 + r2 * (1.0 / 479001600);
  const double p = 1.0 + (r + r2 * (low + r4 * (middle + r4 * high)));
  const auto power = std::bit_cast<double>((std::bit_cast<std::uint64_t>(shifted) + 1023) << 52);
  return at_least(x, kSmallest, p * power);
}

// Orders as x does, with -0 equal to 0. NaN lies past the infinities.
inline std::int32_t order_key(float x) {
  const auto bits = std::bit_cast<std::int32_t>(x);
  const std::int32_t sign = bits >> 31;
  return ((bits & INT_MAX) ^ sign) - sign;
}

// ------------------------------------------------------------------------------------------------------------- passes

// The logits of block b, padded if it is the last.
const float* block_of(const float* logits, int n, int b, float* padded) {
  const float* begin = logits + static_cast<std::int64_t>(b) * kBlock;
  const int count = std::min(kBlock, n - b * kBlock);
  if (count == kBlock) return begin;
  std::fill(std::copy(begin, begin + count, padded), padded + kBlock, -std::bit_cast<float>(kInfinityKey));
  return padded;
}

struct Peak {
  int id;
  bool finite;
};

// The first of the largest logits; leaves the maximum of each 16 logits (one lane of a block) in scratch.maxima.
Peak find_peak(const float* logits, int n, Scratch& scratch) {
  float padded[kBlock];
  std::int32_t most = INT_MIN;
  std::int32_t nan = 0;  // its sign
  int block = 0;
  for (int b = 0; b < blocks_of(n); ++b) {
    const float* x = block_of(logits, n, b, padded);
    std::int32_t lane_max[kLanes], lane_nan[kLanes] = {};
    std::fill(lane_max, lane_max + kLanes, INT_MIN);
    for (int i = 0; i < kBlock; i += kLanes) {
      for (int j = 0; j < kLanes; ++j) {
        const std::int32_t key = order_key(x[i + j]);
        lane_nan[j] |= kInfinityKey - (std::bit_cast<std::int32_t>(x[i + j]) & INT_MAX);
        lane_max[j] = lane_max[j] > key ? lane_max[j] : key;
      }
    }
    std::copy(lane_max, lane_max + kLanes, &scratch.maxima[b * kLanes]);
    for (int j = 0; j < kLanes; ++j) nan |= lane_nan[j];
    const std::int32_t block_max = *std::max_element(lane_max, lane_max + kLanes);
    if (block_max > most) {
      most = block_max;
      block = b;
    }
  }
  int id = block * kBlock;
  if (nan < 0 || most >= kInfinityKey || most <= -kInfinityKey) return {id, false};
  while (order_key(logits[id]) != most) ++id;
  return {id, true};
}

double sum_block(const double* weights) {
  double lane[kLanes] = {};
  for (int i = 0; i < kBlock; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) lane[j] += weights[i + j];
  }
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int j = 0; j < width; ++j) lane[j] += lane[j + width];
  }
  return lane[0];
}

// Fills weights and block_sums; returns the total. `scale` is 1 / temperature.
double weigh(const float* logits, int n, double peak, double scale, double min_p, Scratch& scratch) {
  float padded[kBlock];
  double total = 0;
  for (int b = 0; b < blocks_of(n); ++b) {
    const float* x = block_of(logits, n, b, padded);
    double* weights = &scratch.weights[b * kBlock];
    for (int i = 0; i < kBlock; ++i) {
      const double weight = exponential((static_cast<double>(x[i]) - peak) * scale);
      weights[i] = at_least(weight, min_p, weight);
    }
    scratch.block_sums[b] = sum_block(weights);
    total += scratch.block_sums[b];
  }
  return total;
}

// ---------------------------------------------------------------------------------------------------------- selection

// A place in the order (key descending, id ascending): all larger keys come before it, and `ties` of the equal ones.
struct Cut {
  std::int32_t key;
  int ties;
};

// The shortest beginning of that order, of at least one candidate, whose amounts sum to at least `wanted`; all where
// that is never reached. Candidates stand in the order of ids. A histogram of the keys' range finds the bin where the
// sum gets there, and that bin is looked at again, 256 times as closely, until it holds one key.
template <class Amount, class AmountOf>
Cut shortest_prefix(const Candidate* candidates, int n, Amount wanted, AmountOf amount_of, Candidate* boundary) {
  Amount sum = 0;
  while (true) {
    std::int32_t low = INT_MAX, high = INT_MIN;
    for (int i = 0; i < n; ++i) {
      low = std::min(low, candidates[i].key);
      high = std::max(high, candidates[i].key);
    }
    if (low == high) {
      int ties = 0;
      do sum += amount_of(candidates[ties++]);
      while (sum < wanted && ties < n);
      return {low, ties};
    }
    const auto distance = [high](std::int32_t key) {
      return static_cast<std::uint32_t>(high) - static_cast<std::uint32_t>(key);
    };
    const int shift = std::max(0, static_cast<int>(std::bit_width(distance(low))) - kRadixBits);
    Amount bins[1 << kRadixBits] = {};
    for (int i = 0; i < n; ++i) bins[distance(candidates[i].key) >> shift] += amount_of(candidates[i]);
    const std::uint32_t last = distance(low) >> shift;
    std::uint32_t bin = 0;
    while (bin < last && sum + bins[bin] < wanted) sum += bins[bin++];
    int inside = 0;
    for (int i = 0; i < n; ++i) {
      boundary[inside] = candidates[i];  // written in any case: no branch to guess
      inside += distance(candidates[i].key) >> shift == bin;
    }
    candidates = boundary;
    n = inside;
  }
}

// Drops what lies behind the cut; returns how many stay, in the order of ids.
int keep(Candidate* candidates, int n, Cut cut) {
  int count = 0;
  for (int i = 0; i < n; ++i) {
    const Candidate c = candidates[i];
    const bool tie = c.key == cut.key;
    candidates[count] = c;
    count += (c.key > cut.key) | (tie & (cut.ties > 0));
    cut.ties -= tie;
  }
  return count;
}

Cut cut_after(const Candidate* candidates, int n, int k, Scratch& scratch) {
  return shortest_prefix(candidates, n, k, [](const Candidate&) { return 1; }, scratch.boundary.get());
}

// Collects, in the order of ids, the candidates whose value is at least `floor`.
template <class Value, class ValueOf, class Make>
int gather(int n, Value floor, ValueOf value_of, Make make, Candidate* candidates) {
  int count = 0;
  for (int begin = 0; begin < n; begin += kLanes) {
    const int end = std::min(begin + kLanes, n);
    if (end - begin == kLanes) {
      int any = 0;
      for (int j = 0; j < kLanes; ++j) any |= value_of(begin + j) >= floor;
      if (!any) continue;
    }
    for (int i = begin; i < end; ++i) {
      candidates[count] = make(i);
      count += value_of(i) >= floor;
    }
  }
  return count;
}

// The k most likely tokens as candidates, in the order of ids; after find_peak of the same logits. As each of the k
// largest maxima stands for a logit, the k-th of them is a floor for the k largest logits, and few others reach it.
int most_likely(const float* logits, int n, int k, Scratch& scratch) {
  Candidate* candidates = scratch.candidates.get();
  std::int32_t floor = kNoFloor;
  const int groups = blocks_of(n) * kLanes;
  if (k < groups && groups <= n) {
    for (int i = 0; i < groups; ++i) candidates[i] = {i, scratch.maxima[i], 0.0};
    floor = cut_after(candidates, groups, k, scratch).key;
  }
  const auto key_of = [logits](int i) { return order_key(logits[i]); };
  const auto make = [logits](int i) { return Candidate{i, order_key(logits[i]), 0.0}; };
  const int count = gather(n, floor, key_of, make, candidates);
  return k < count ? keep(candidates, count, cut_after(candidates, count, k, scratch)) : count;
}

// The fewest most likely tokens that hold top_p of the total, as candidates in the order of ids; after `weigh`. All
// that weigh less than (1 - top_p) * total / n hold less than (1 - top_p) * total together: none is needed.
int nucleus(const float* logits, int n, double top_p, double total, Scratch& scratch) {
  Candidate* candidates = scratch.candidates.get();
  const double* weights = scratch.weights.get();
  const double floor = std::max(0.999 * (1.0 - top_p) * total / n, DBL_MIN);
  const auto weight_of = [weights](int i) { return weights[i]; };
  const auto make = [logits, weights](int i) { return Candidate{i, order_key(logits[i]), weights[i]}; };
  const int count = gather(n, floor, weight_of, make, candidates);
  const auto amount_of = [](const Candidate& c) { return c.weight; };
  return keep(candidates, count,
              shortest_prefix(candidates, count, top_p * total, amount_of, scratch.boundary.get()));
}

// ----------------------------------------------------------------------------------------------------- draw, logprobs

// The first index at which the sum of weights exceeds u * total. As u is at most 1 - 2^-53, u * total is less than the
// total, so some block passes it; should rounding keep the sum within that block from doing so, its last weight is it.
int index_at(int n, double u, const Scratch& scratch) {
  double total = 0;
  for (int b = 0; b < blocks_of(n); ++b) total += scratch.block_sums[b];
  const double wanted = u * total;
  int block = 0;
  double sum = 0;
  while (sum + scratch.block_sums[block] <= wanted) sum += scratch.block_sums[block++];
  int last = 0;
  for (int i = block * kBlock; i < std::min(n, (block + 1) * kBlock); ++i) {
    if (scratch.weights[i] == 0) continue;
    sum += scratch.weights[i];
    last = i;
    if (sum > wanted) break;
  }
  return last;
}

// Puts the candidates' weights in the place of the row's.
void weigh_only(const Candidate* candidates, int n, Scratch& scratch) {
  for (int i = 0; i < n; ++i) scratch.weights[i] = candidates[i].weight;
  std::fill(&scratch.weights[n], &scratch.weights[blocks_of(n) * kBlock], 0.0);
  for (int b = 0; b < blocks_of(n); ++b) scratch.block_sums[b] = sum_block(&scratch.weights[b * kBlock]);
}

int draw(const float* logits, int n, double peak, const SamplingRow& row, Scratch& scratch) {
  const bool cut = row.top_k > 0 && row.top_k < n;
  if (cut) {
    n = most_likely(logits, n, row.top_k, scratch);
    for (int i = 0; i < n; ++i) {
      scratch.ids[i] = scratch.candidates[i].id;
      scratch.logits[i] = logits[scratch.ids[i]];
    }
    logits = scratch.logits.get();
  }
  const double scale = std::clamp(1.0 / row.temperature, DBL_MIN, DBL_MAX);  // no 0 * infinity
  const double total = weigh(logits, n, peak, scale, std::min(1.0, row.min_p), scratch);
  const double u = uniform(row.seed, row.choice, row.position);
  int index;
  if (row.top_p < 1) {
    const int count = nucleus(logits, n, std::max(0.0, row.top_p), total, scratch);
    weigh_only(scratch.candidates.get(), count, scratch);
    index = scratch.candidates[index_at(count, u, scratch)].id;
  } else {
    index = index_at(n, u, scratch);
  }
  return cut ? scratch.ids[index] : index;
}

// How many tokens come before this one, counting itself.
int rank_of(const float* logits, int n, int token) {
  const std::int32_t key = order_key(logits[token]);
  int before = 0;
  for (int i = 0; i < token; ++i) before += order_key(logits[i]) >= key;
  for (int i = token + 1; i < n; ++i) before += order_key(logits[i]) > key;
  return before + 1;
}

void report(const float* logits, int n, double peak, int num_logprobs, Scratch& scratch, SampledRow& out) {
  const double log_total = logarithm(weigh(logits, n, peak, 1.0, 0.0, scratch));
  const auto logprob = [=](int id) { return (static_cast<double>(logits[id]) - peak) - log_total; };
  out.logprob = logprob(out.token);
  out.rank = rank_of(logits, n, out.token);
  out.num_top = std::min(num_logprobs, n);
  if (out.num_top == 0) return;
  Candidate* top = scratch.candidates.get();
  most_likely(logits, n, out.num_top, scratch);
  std::sort(top, top + out.num_top, [](const Candidate& a, const Candidate& b) {
    return a.key != b.key ? a.key > b.key : a.id < b.id;
  });
  for (int i = 0; i < out.num_top; ++i) {
    out.top_ids[i] = top[i].id;
    out.top_logprobs[i] = logprob(top[i].id);
  }
}

std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

}  // namespace

void Scratch::reserve(int vocab_size) {
  if (vocab_size <= capacity_) return;
  const int blocks = blocks_of(vocab_size);
  weights = std::make_unique_for_overwrite<double[]>(blocks * kBlock);
  block_sums = std::make_unique_for_overwrite<double[]>(blocks);
  logits = std::make_unique_for_overwrite<float[]>(vocab_size);
  ids = std::make_unique_for_overwrite<std::int32_t[]>(vocab_size);
  maxima = std::make_unique_for_overwrite<std::int32_t[]>(blocks * kLanes);
  candidates = std::make_unique_for_overwrite<Candidate[]>(vocab_size);
  boundary = std::make_unique_for_overwrite<Candidate[]>(vocab_size);
  capacity_ = vocab_size;
}

void sample_row(const float* logits, int vocab_size, const SamplingRow& row, Scratch& scratch, SampledRow& out) {
  scratch.reserve(vocab_size);
  out.num_top = 0;
  const Peak peak = find_peak(logits, vocab_size, scratch);
  if (!peak.finite) {
    out.token = kNotFinite;
    return;
  }
  const double top = logits[peak.id];
  if (row.target >= 0) {
    out.token = row.target;
  } else {
    out.token = row.temperature > 0 ? draw(logits, vocab_size, top, row, scratch) : peak.id;
  }
  if (row.num_logprobs >= 0) report(logits, vocab_size, top, row.num_logprobs, scratch, out);
}

double uniform(std::uint64_t seed, std::uint64_t choice, std::uint64_t position) {
  constexpr std::uint64_t golden = 0x9E3779B97F4A7C15;  // as in octavo/sampling/random.py
  std::uint64_t bits = mix(seed + golden);
  bits = mix(bits + (choice + 1) * golden);
  bits = mix(bits + (position + 1) * golden);
  return static_cast<double>(bits >> 11) * 0x1p-53;
}

void exponentials(const double* x, double* y, int count) {
  for (int i = 0; i < count; ++i) y[i] = exponential(x[i]);
}

// x = 2^e m with m around 1, and log m = 2 artanh(s) with s = (m - 1) / (m + 1), |s| < 0.172: a series in s^2.
double logarithm(double x) {
  constexpr std::uint64_t sqrt_half = 0x3fe6a09e667f3bcd, one = 0x3ff0000000000000;
  const std::uint64_t bits = std::bit_cast<std::uint64_t>(x) + (one - sqrt_half);
  const double e = static_cast<double>(static_cast<std::int64_t>(bits >> 52) - 1023);
  const double m = std::bit_cast<double>((bits & 0x000fffffffffffff) + sqrt_half);
  const double s = (m - 1) / (m + 1);
  const double z = s * s;
  double series = 0;
  for (int k = 23; k >= 3; k -= 2) series = (series + 1.0 / k) * z;
  return e * kLn2High + (2 * s + (2 * s * series + e * kLn2Low));
}

}  // namespace octavo
