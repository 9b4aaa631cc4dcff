#include "attention_plan.h"

#include <algorithm>

#include "runtime.h"

namespace octavo {

namespace {

constexpr int kQueryTile = 64;                        // query rows of a unit
constexpr int kShares = 4;                            // units a thread, about, so that all finish together
constexpr std::int64_t kMostPartials = 2 << 20;       // floats: beyond, a split would cost more memory than it is worth

}  // namespace

// A unit of more than its fair share is cut into runs of pieces.
void AttentionPlan::split(const AttentionUnit& whole, std::int64_t fair_cost) {
  const int pieces = whole.piece_end - whole.piece_begin;
  const auto wanted = static_cast<int>(std::min<std::int64_t>(pieces, (whole.cost + fair_cost - 1) / fair_cost));
  const std::int64_t vectors = std::int64_t{whole.row_end - whole.row_begin} * (heads_ / kv_heads_);
  const std::int64_t floats = whole.piece_end * vectors * partial_floats(head_dim_);
  if (wanted < 2 || floats > kMostPartials) {
    units_.push_back(whole);
    return;
  }
  for (int part = 0; part < wanted; ++part) {
    AttentionUnit unit = whole;
    unit.piece_begin = whole.piece_begin + pieces * part / wanted;
    unit.piece_end = whole.piece_begin + pieces * (part + 1) / wanted;
    unit.split = static_cast<int>(splits_.size());
    unit.cost = whole.cost / wanted;
    units_.push_back(unit);
  }
  splits_.push_back({size_, wanted});
  size_ += floats;
}

void AttentionPlan::make(const Step& step, int num_threads) {
  units_.clear();
  whole_.clear();
  splits_.clear();
  size_ = 0;
  std::int64_t total = 0;
  for (int sequence = 0; sequence < step.num_sequences; ++sequence) {
    const int first = step.query_starts[sequence], count = step.query_starts[sequence + 1] - first;
    for (int row = 0; row < count; row += kQueryTile) {
      const int end = std::min(count, row + kQueryTile);
      const int last = step.positions[first] + end;  // one past it
      const int begin = window_ > 0 ? std::max(0, step.positions[first] + row - window_ + 1) : 0;
      const std::int64_t cost = std::int64_t{last - begin} * (end - row);
      for (int head = 0; head < kv_heads_; ++head) {
        whole_.push_back({sequence, row, end, head, begin / kPiece, (last + kPiece - 1) / kPiece, -1, cost});
      }
      total += cost * kv_heads_;
    }
  }
  const std::int64_t fair_cost = num_threads == 1 ? total : std::max<std::int64_t>(kPiece, total / (kShares * num_threads));
  for (const AttentionUnit& unit : whole_) split(unit, fair_cost);
  std::stable_sort(units_.begin(), units_.end(),
                   [](const AttentionUnit& a, const AttentionUnit& b) { return a.cost > b.cost; });
  if (size_ > capacity_) {
    capacity_ = 0;  // should memory run out, the next step starts over
    partials_ = std::make_unique_for_overwrite<float[]>(2 * size_);
    capacity_ = 2 * size_;
  }
  if (splits_.size() > num_done_) {
    num_done_ = 0;
    done_ = std::make_unique<std::atomic<int>[]>(2 * splits_.size());
    num_done_ = 2 * splits_.size();
  }
  for (std::size_t i = 0; i < splits_.size(); ++i) done_[i].store(0, std::memory_order_relaxed);
}

}  // namespace octavo
