// The ops between the workers that share a model. One thread calls the exchange while the others wait:
//
//   worker 0   ... matmul ── exchange ── sum_ranks ── add ...         each has all partial sums then, and adds them
//   worker 1   ... matmul ── exchange ── sum_ranks ── add ...         in rank order: the same bits everywhere
#pragma once

#include "ops.h"

namespace octavo {

class ExchangeOp final : public Op {
 public:
  ExchangeOp(Exchange what, View x, int width) : what_(what), x_(x), width_(width) {}
  Cut cut(const Runtime&) const override { return Cut::kUnits; }
  void run(const Runtime& runtime, Share share) override;
  std::string kind() const override;
  std::string shape(const Runtime&) const override { return std::to_string(width_); }
  Work work(const Runtime& runtime) const override;

 private:
  ExchangeRows rows(const Runtime& runtime) const;
  Exchange what_;
  View x_;  // of kGather: none, it is the slice of logits
  int width_;
};

// The partial sums of all ranks, added in rank order in float32, and rounded once where `out` is of bfloat16.
class SumRanksOp final : public RowOp {
 public:
  SumRanksOp(int width, View out) : RowOp(out), width_(width) {}
  std::string kind() const override { return "sum_ranks"; }
  std::string shape(const Runtime&) const override { return std::to_string(width_); }
  Work work(const Runtime& runtime) const override;

 private:
  void run_rows(const Runtime& runtime, std::int64_t begin, std::int64_t end) override;
  int width_;
};

}  // namespace octavo
