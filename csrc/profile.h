// What a program's ops cost: time, arithmetic and memory traffic, gathered over the steps that run while it is on.
//
// An op's time goes from the end of the op before it to its own on the slowest thread: the last to arrive at the barrier
// after it looks at the clock. While a profile is taken every op has such a barrier, also those that could do without.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace octavo {

// One run of an op. A value is counted where it is read and where it is written, a weight or a visible key or value once,
// however often caches serve it again.
struct Work {
  double flops = 0;        // an FMA is two; conversions, exp and the like are not counted
  double weight_bytes = 0; // as packed, norm weights and biases too
  double kv_bytes = 0;     // keys and values read, or written
  double other_bytes = 0;  // activations, tables, logits

  Work& operator+=(const Work& more) {
    flops += more.flops;
    weight_bytes += more.weight_bytes;
    kv_bytes += more.kv_bytes;
    other_bytes += more.other_bytes;
    return *this;
  }
};

struct OpProfile {
  std::string kind, shape;  // "matmul+silu_mul", "576 x 3072"
  std::int64_t runs = 0;
  double seconds = 0;
  Work work;
};

// Filled by one thread at a time.
class Profile {
 public:
  explicit Profile(std::vector<OpProfile> ops) : ops_(std::move(ops)) {}
  const std::vector<OpProfile>& ops() const { return ops_; }

  void add(std::size_t op, const Work& work) { ops_[op].work += work; }
  void start() { last_ = Clock::now(); }
  void finished(std::size_t op) {
    const Clock::time_point now = Clock::now();
    ops_[op].seconds += std::chrono::duration<double>(now - last_).count();
    ++ops_[op].runs;
    last_ = now;
  }

 private:
  using Clock = std::chrono::steady_clock;
  std::vector<OpProfile> ops_;
  Clock::time_point last_;
};

}  // namespace octavo
