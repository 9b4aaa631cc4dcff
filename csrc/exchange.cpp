#include "exchange.h"

#include "pack.h"

namespace octavo {

ExchangeRows ExchangeOp::rows(const Runtime& runtime) const {
  ExchangeRows rows;
  rows.width = width_;
  if (what_ == Exchange::kGather) {
    rows.count = runtime.logits_end - runtime.logits_begin;
    rows.mine = {runtime.logits, width_};
    rows.all = runtime.all_logits;
  } else {
    rows.count = runtime.rows(x_);
    rows.mine = runtime.stream_at(x_);
    rows.all = what_ == Exchange::kAllReduce ? runtime.gathered.as<float>() : nullptr;
  }
  return rows;
}

// Once one has failed, the step means nothing, and nobody is asked any more.
void ExchangeOp::run(const Runtime& runtime, Share share) {
  if (share.thread != 0 || runtime.exchange_error) return;
  try {
    runtime.exchange(what_, rows(runtime));
  } catch (...) {
    runtime.exchange_error = std::current_exception();
  }
}

std::string ExchangeOp::kind() const {
  switch (what_) {
    case Exchange::kAllReduce: return "all_reduce";
    case Exchange::kGather: return "gather";
    case Exchange::kSend: return "send";
    default: return "recv";
  }
}

Work ExchangeOp::work(const Runtime& runtime) const {
  const std::int64_t others = what_ == Exchange::kAllReduce ? runtime.num_ranks - 1 : 1;
  Work work;
  work.other_bytes = static_cast<double>(rows(runtime).count * width_ * others) * sizeof(float);
  return work;
}

void SumRanksOp::run_rows(const Runtime& runtime, std::int64_t begin, std::int64_t end) {
  const auto* gathered = runtime.gathered.as<float>();
  const std::int64_t rank_size = runtime.rows(out_) * width_;
  const bool stream = runtime.is_stream(out_);
  for (std::int64_t i = begin; i < end; ++i) {
    const float* first = gathered + i * width_;
    for (int k = 0; k < width_; ++k) {
      float sum = first[k];
      for (int rank = 1; rank < runtime.num_ranks; ++rank) sum = sum + first[rank * rank_size + k];
      if (stream) {
        runtime.stream_at(out_).row(i)[k] = sum;
      } else {
        runtime.at(out_).row(i)[k] = round_to_bf16(sum);
      }
    }
  }
}

Work SumRanksOp::work(const Runtime& runtime) const {
  const double numbers = static_cast<double>(runtime.rows(out_)) * width_;
  Work work;
  work.flops = numbers * (runtime.num_ranks - 1);
  work.other_bytes = numbers * sizeof(float) * (runtime.num_ranks + 1);
  return work;
}

}  // namespace octavo
