// How a step's attention is cut for the threads.
//
//   whole units    some rows of a sequence for one KV head
//   split units    the same, for some pieces of 256 positions only; whoever finishes the last of a split joins its pieces
//
//   sequence 0  |== head 0 ==|== head 1 ==|                 short contexts: whole
//   sequence 1  |= head 0, pieces 0-3 =|= 4-7 =|= 8-11 =|   a long one: split, or one thread would still be at it when
//               |= head 1, pieces 0-3 =|= 4-7 =|= 8-11 =|   the others are done
//
// How a plan is cut never changes a result (kernels.h, above attention_pieces).
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels.h"

namespace octavo {

struct Step;

struct AttentionUnit {
  int sequence, row_begin, row_end, head;  // rows count from the sequence's first row
  int piece_begin, piece_end;
  int split;                               // which one it belongs to; -1: none, it is whole
  std::int64_t cost;                       // rows times positions, about
};

// Shared by all layers that cut alike; they run one after the other.
class AttentionPlan {
 public:
  AttentionPlan(int heads, int kv_heads, int head_dim, int window)
      : heads_(heads), kv_heads_(kv_heads), head_dim_(head_dim), window_(window) {}
  bool serves(int heads, int kv_heads, int head_dim, int window) const {
    return heads == heads_ && kv_heads == kv_heads_ && head_dim == head_dim_ && window == window_;
  }
  int window() const { return window_; }

  // Before a step, by one thread. Raises std::bad_alloc.
  void make(const Step& step, int num_threads);

  const std::vector<AttentionUnit>& units() const { return units_; }  // the costly ones first
  // Where the pieces of a split go.
  float* partials(int split) const { return partials_.get() + splits_[split].offset; }
  // True for the one call that comes last of those for a split's units: what they wrote is then visible.
  bool last_of(int split) const {
    const int parts = splits_[split].parts;
    return (done_[split].fetch_add(1, std::memory_order_acq_rel) + 1) % parts == 0;
  }

 private:
  struct Split {
    std::int64_t offset;
    int parts;
  };
  void split(const AttentionUnit& whole, std::int64_t fair_cost);

  int heads_, kv_heads_, head_dim_, window_;
  std::vector<AttentionUnit> units_, whole_;
  std::vector<Split> splits_;
  std::int64_t size_ = 0, capacity_ = 0;  // of partials_, floats
  std::unique_ptr<float[]> partials_;
  std::size_t num_done_ = 0;
  std::unique_ptr<std::atomic<int>[]> done_;  // units done, over all layers
};

}  // namespace octavo
