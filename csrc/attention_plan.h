// How a step's attention is cut for the threads.
//
//   whole units    some rows of a sequence for one KV head
//   parts          some pieces of 256 positions, for one KV head and
//                    - some rows of a sequence, so that threads share a long context; or
//                    - rows of all sequences whose block tables begin alike, so that what they share is read once (cascade)
//
//   sequence 0  |== whole ==|
//   sequence 1  |================= 0-3 =|= 4-7 =|= 8-11 =|   long: several parts
//   sequence 2  |=== pieces 0, 1 ===|= 2 =|                  sequences 2 and 3 have pieces 0 and 1 in common:
//   sequence 3  |=== of both     ===|= 2 =|                  one part for both
//
// Rows that are computed in parts form a join; whoever finishes its last part for a KV head puts that head together. How a plan
// is cut never changes a result (kernels.h, above attention_pieces).
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels.h"

namespace octavo {

struct Step;

struct AttentionUnit {
  int sequence, head;              // whose block table
  int row_begin, row_end;          // whole: rows of the sequence; a part: of AttentionPlan::rows
  int piece_begin, piece_end;      // of a part
  int join_begin, join_end;        // of AttentionPlan::joins_of: what a part belongs to; none for a whole unit
  std::int64_t cost;               // rows times positions, about
  bool whole() const { return join_begin == join_end; }
};

// Rows of one sequence that are computed in parts.
struct AttentionJoin {
  int sequence;
  int row_begin, row_end;          // of AttentionPlan::rows
  int parts;                       // for each KV head
};

// Shared by all layers that cut alike; they run one after the other. Those without a window must be of one group, since what
// sequences share is read off its block tables; those with one share nothing, and so look into no table.
class AttentionPlan {
 public:
  AttentionPlan(int heads, int kv_heads, int head_dim, int window, int group)
      : heads_(heads), kv_heads_(kv_heads), head_dim_(head_dim), window_(window), group_(group) {}
  bool serves(int heads, int kv_heads, int head_dim, int window, int group) const {
    return heads == heads_ && kv_heads == kv_heads_ && head_dim == head_dim_ && window == window_ &&
           (window > 0 || group == group_);
  }
  int window() const { return window_; }
  int layers = 0;  // that it serves

  // Before a step, by one thread. Raises std::bad_alloc. Without `cascade`, sequences share nothing.
  void make(const Step& step, int num_threads, bool cascade);

  const std::vector<AttentionUnit>& units() const { return units_; }  // the costly ones first
  const AttentionRow* rows() const { return rows_.data(); }
  const AttentionJoin& join(int i) const { return joins_[joins_of_[i]]; }  // join_begin <= i < join_end
  // True for the one call that comes last of those for a join's parts of one KV head: what they wrote is then visible.
  bool last_of(int i, int head) const {
    const int number = joins_of_[i];
    return (done_[number * kv_heads_ + head].fetch_add(1, std::memory_order_acq_rel) + 1) % joins_[number].parts == 0;
  }
  std::int64_t shared_positions() const { return shared_positions_; }  // read once less, for each KV head

 private:
  struct Tile;
  void cut_rows(const Step& step);
  void find_shared(const Step& step);
  void add_joins(std::int64_t fair_cost);
  void add_shared_units();
  void place_partials();

  int heads_, kv_heads_, head_dim_, window_, group_;
  std::vector<Tile> tiles_;
  std::vector<int> shared_;                 // tiles that may share, sorted by their block tables
  std::vector<int> alike_;                  // pieces that tile shared_[i] has in common with shared_[i + 1]
  std::vector<AttentionUnit> units_;
  std::vector<AttentionJoin> joins_;
  std::vector<int> joins_of_;
  std::vector<AttentionRow> rows_;
  std::vector<std::int64_t> offsets_;       // of each row's partial results
  std::int64_t floats_ = 0, capacity_ = 0;  // of partials_
  std::unique_ptr<float[]> partials_;
  std::size_t num_done_ = 0;
  std::unique_ptr<std::atomic<int>[]> done_;  // parts done, over all layers
  std::int64_t shared_positions_ = 0;
};

// Rows of one sequence that are planned together.
struct AttentionPlan::Tile {
  int sequence, row_begin, row_end;  // rows count from the sequence's first
  int row, position;                 // of the first of them: in T, and in the sequence
  int first, last;                   // pieces [first, last) that they see
  int common;                        // leading pieces that the tile may share: all rows see all of each
  int shared = 0;                    // leading pieces that it does share
  int join = -1;
  std::int64_t cost = 0;
  int rows() const { return row_end - row_begin; }
};

}  // namespace octavo
