// What a program's ops cost: time, arithmetic and memory traffic, gathered over the steps that run while it is on.
//
// An op's time goes from the end of the op before it to the barrier after it, so waiting for the slowest thread counts;
// where the next op needs no barrier, it goes to the end of thread 0's own rows. No barrier is added: the times of all
// ops add up to the time that the pool ran.
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

// Filled by thread 0 alone.
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
