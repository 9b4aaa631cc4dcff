// From float32 logits to tokens and logprobs, the same bits on every machine: the native twin of octavo/sampling.
//
// One row is sampled by inverting its cumulative distribution, taken in the order of token ids, at one random number:
//
//   logits    ──> w_i = exp((x_i - max) / temperature), in double; w_i < min_p becomes 0
//   top_k     ──> the k largest logits stay                                      ┐ both are a cut in the order (logit
//   top_p     ──> of those, the fewest most likely that hold top_p of the sum    ┘ descending, id ascending)
//   draw      ──> the first id at which the sum of weights, in the order of ids, exceeds u * total
//
// Bits. Only + - * / and comparisons of doubles and integers, in an order that depends on the row alone: compiled once
// for the baseline, without contraction. Logits are compared as integers (so that neither the thread's handling of
// subnormals nor -0 matters), and no double here is subnormal where it could change a result.
//
// Rounding. A sum of weights is off by less than (vocab_size + 64) * 2^-52 of the total, the errors of exp and of its
// argument included. So the token is that of exact arithmetic unless u * total lies that close to a boundary between
// two tokens, top_p * total that close to one between two nuclei, or a weight that close to min_p. A logprob is off by
// less than that much plus 2^-51 of itself.
//
// Cost. Nothing is sorted but the reported top lists, and nothing is allocated once a Scratch has seen the vocabulary.
// Greedy rows take one pass of integer maxima; a draw adds a pass of exponentials; cuts are found by selection.
#pragma once

#include <cstdint>
#include <memory>

namespace octavo {

// What to do with one row; the fields of octavo.sampling.SamplingRows.
struct SamplingRow {
  double temperature = 0;  // 0 is greedy: of equals the lower id; else above 0 and finite
  double top_p = 1;        // in [0, 1]; 1 keeps all, 0 only the most likely
  double min_p = 0;        // in [0, 1]; 0 keeps all, 1 only the most likely and its equals
  std::int32_t top_k = 0;  // 0 and less keeps all
  std::uint64_t seed = 0, choice = 0, position = 0;  // the key of the random number
  std::int32_t num_logprobs = -1;  // the most likely tokens to report beside the chosen one; -1 reports nothing
  std::int32_t target = -1;        // -1 samples; else the token below vocab_size whose logprob is asked for
};

constexpr std::int32_t kNotFinite = -1;  // instead of a token: the largest logit is infinite, or one is no number

// The answer. Logprobs are natural, of the logits as they are: before temperature and filters. They are written only
// where num_logprobs >= 0 and the token is not kNotFinite; num_top is 0 otherwise.
struct SampledRow {
  std::int32_t token = kNotFinite;
  std::int32_t rank = 0;  // 1 is the most likely; ties go to the lower id
  double logprob = 0;
  std::int32_t num_top = 0;             // min(num_logprobs, vocab_size)
  std::int32_t* top_ids = nullptr;      // caller's memory for num_top entries, most likely first; may be null for none
  double* top_logprobs = nullptr;
};

// Working memory of one thread. It grows to the widest row that it has seen: about 44 bytes a token of the vocabulary,
// of which a greedy row touches a quarter byte.
class Scratch {
 public:
  struct Candidate {
    std::int32_t id;
    std::int32_t key;  // orders as the logit does
    double weight;
  };

  void reserve(int vocab_size);

  std::unique_ptr<double[]> weights;       // [round_up(vocab_size, 256)]
  std::unique_ptr<double[]> block_sums;    // one per 256 weights
  std::unique_ptr<float[]> logits;         // [vocab_size]: those that top_k left
  std::unique_ptr<std::int32_t[]> ids;     // [vocab_size]: theirs
  std::unique_ptr<std::int32_t[]> maxima;  // 16 per 256 logits
  std::unique_ptr<Candidate[]> candidates, boundary;  // [vocab_size]

 private:
  int capacity_ = 0;
};

// logits [vocab_size], any alignment. Safe to call from many threads, each with its own Scratch.
void sample_row(const float* logits, int vocab_size, const SamplingRow& row, Scratch& scratch, SampledRow& out);

// The pieces that have bounds of their own.

// In [0, 1), on the grid of 2^-53: octavo/sampling/random.py, bit for bit.
double uniform(std::uint64_t seed, std::uint64_t choice, std::uint64_t position);
// exp(x[i]) for x[i] <= 709: off by less than 2^-51 of itself down to -708, and 0 below. No NaN.
void exponentials(const double* x, double* y, int count);
// log(x) of a positive, finite, normal x: off by less than 2^-51 of itself.
double logarithm(double x);

}  // namespace octavo
