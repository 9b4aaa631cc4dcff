#include "attention_plan.h"

#include <algorithm>

#include "runtime.h"

namespace octavo {

namespace {

constexpr int kQueryTile = 64;      // query rows of a unit
constexpr int kSharedVectors = 64;  // query vectors of a shared one; a tile that has so many by itself shares with nobody
constexpr int kShares = 4;          // units a thread, about, so that all finish together
// Floats of what parts leave, for one tile and KV head, and in all: beyond, they cost more memory than they are worth.
constexpr std::int64_t kMostPartials = 2 << 20, kMostPartialsOfAll = 64 << 20;

}  // namespace

void AttentionPlan::cut_rows(const Step& step) {
  for (int sequence = 0; sequence < step.num_sequences; ++sequence) {
    const int row = step.query_starts[sequence], count = step.query_starts[sequence + 1] - row;
    for (int begin = 0; begin < count; begin += kQueryTile) {
      const int end = std::min(count, begin + kQueryTile);
      const int position = step.positions[row] + begin, last = position + end - begin;  // one past what they see
      const int seen = window_ > 0 ? std::max(0, position - window_ + 1) : 0;
      Tile tile{sequence, begin, end, row + begin, position, seen / kPiece, (last + kPiece - 1) / kPiece, 0};
      tile.common = window_ > 0 ? 0 : (position + 1) / kPiece;
      tile.cost = std::int64_t{last - seen} * tile.rows();
      tiles_.push_back(tile);
    }
  }
}

// Tiles whose block tables begin alike come side by side; groups at a depth are then runs of neighbours.
void AttentionPlan::find_shared(const Step& step) {
  const int blocks_of_piece = kPiece / step.block_size;
  if (blocks_of_piece == 0 || kPiece % step.block_size != 0) return;  // a block reaches over pieces
  const int most_rows = (kSharedVectors - 1) / (heads_ / kv_heads_);
  const auto table = [&](int tile) { return step.table(group_, tiles_[tile].sequence); };
  for (int i = 0; i < static_cast<int>(tiles_.size()); ++i)
    if (tiles_[i].common > 0 && tiles_[i].rows() <= most_rows) shared_.push_back(i);
  std::sort(shared_.begin(), shared_.end(), [&](int a, int b) {
    const std::int32_t *left = table(a), *right = table(b);
    return std::lexicographical_compare(left, left + tiles_[a].common * blocks_of_piece, right,
                                        right + tiles_[b].common * blocks_of_piece);
  });
  for (std::size_t i = 0; i + 1 < shared_.size(); ++i) {
    const Tile &a = tiles_[shared_[i]], &b = tiles_[shared_[i + 1]];
    const int most = std::min(a.common, b.common);
    const std::int32_t* left = table(shared_[i]);
    const auto differ = std::mismatch(left, left + most * blocks_of_piece, table(shared_[i + 1])).first;
    alike_.push_back(static_cast<int>((differ - left) / blocks_of_piece));
  }
  alike_.push_back(0);
  for (std::size_t i = 0; i + 1 < shared_.size(); ++i) {
    for (const int tile : {shared_[i], shared_[i + 1]}) tiles_[tile].shared = std::max(tiles_[tile].shared, alike_[i]);
  }
}

// Tiles that share, or take more than their fair share of time, become joins; the rest are whole units.
void AttentionPlan::add_joins(std::int64_t fair_cost) {
  const int group = heads_ / kv_heads_;
  for (Tile& tile : tiles_) {
    const std::int64_t head_stride = tile.last * group * partial_floats(head_dim_);
    const std::int64_t floats = head_stride * kv_heads_ * tile.rows();
    const bool fits = floats <= kMostPartials * kv_heads_ && floats_ + floats <= kMostPartialsOfAll;
    if (!fits) tile.shared = 0;
    const int begin = std::max(tile.first, tile.shared), pieces = tile.last - begin;
    const std::int64_t own_cost = tile.cost * pieces / std::max(1, tile.last - tile.first);
    int wanted = static_cast<int>(std::min<std::int64_t>(pieces, (own_cost + fair_cost - 1) / fair_cost));
    if (tile.shared == 0 && (wanted < 2 || !fits)) {
      for (int head = 0; head < kv_heads_; ++head) {
        units_.push_back({tile.sequence, head, tile.row_begin, tile.row_end, 0, 0, 0, 0, tile.cost});
      }
      continue;
    }
    if (pieces > 0) wanted = std::max(wanted, 1);
    const int first_row = static_cast<int>(rows_.size()), end_row = first_row + tile.rows();
    for (int i = 0; i < tile.rows(); ++i) {
      rows_.push_back({tile.row + i, tile.position + i, nullptr, head_stride});
      offsets_.push_back(floats_ + i * head_stride * kv_heads_);
    }
    floats_ += floats;
    tile.join = static_cast<int>(joins_.size());
    joins_.push_back({tile.sequence, first_row, end_row, wanted});
    const int join = static_cast<int>(joins_of_.size());
    joins_of_.push_back(tile.join);
    for (int part = 0; part < wanted; ++part) {
      const int from = begin + pieces * part / wanted, to = begin + pieces * (part + 1) / wanted;
      for (int head = 0; head < kv_heads_; ++head) {
        units_.push_back({tile.sequence, head, first_row, end_row, from, to, join, join + 1, own_cost / wanted});
      }
    }
  }
}

// At each depth, every run of neighbours that have the piece in common, a few of them at a time.
void AttentionPlan::add_shared_units() {
  const int group = heads_ / kv_heads_;
  const int deepest = alike_.empty() ? 0 : *std::max_element(alike_.begin(), alike_.end());
  for (int piece = 0; piece < deepest; ++piece) {
    for (std::size_t i = 0; i < shared_.size();) {
      std::size_t end = i + 1;
      while (alike_[end - 1] > piece) ++end;  // the last of alike_ is 0
      if (end == i + 1) {
        ++i;
        continue;
      }
      while (i < end) {
        AttentionUnit unit{tiles_[shared_[i]].sequence, 0, static_cast<int>(rows_.size()), 0, piece, piece + 1,
                           static_cast<int>(joins_of_.size()), 0, 0};
        int rows = 0;
        for (; i < end && (rows == 0 || (rows + tiles_[shared_[i]].rows()) * group <= kSharedVectors); ++i) {
          const Tile& tile = tiles_[shared_[i]];
          if (tile.shared <= piece) continue;  // it would have taken too much memory
          AttentionJoin& join = joins_[tile.join];
          for (int row = join.row_begin; row < join.row_end; ++row) {
            rows_.push_back(rows_[row]);
            offsets_.push_back(offsets_[row]);
          }
          ++join.parts;
          joins_of_.push_back(tile.join);
          rows += tile.rows();
        }
        if (rows == 0) continue;
        unit.row_end = static_cast<int>(rows_.size());
        unit.join_end = static_cast<int>(joins_of_.size());
        unit.cost = std::int64_t{rows} * kPiece;
        shared_positions_ += std::int64_t{unit.join_end - unit.join_begin - 1} * kPiece;
        for (unit.head = 0; unit.head < kv_heads_; ++unit.head) units_.push_back(unit);
      }
    }
  }
}

// A steady state allocates nothing.
void AttentionPlan::place_partials() {
  if (floats_ > capacity_) {
    capacity_ = 0;  // should memory run out, the next step starts over
    partials_ = std::make_unique_for_overwrite<float[]>(2 * floats_);
    capacity_ = 2 * floats_;
  }
  for (std::size_t i = 0; i < rows_.size(); ++i) rows_[i].partials = partials_.get() + offsets_[i];
  const std::size_t count = joins_.size() * kv_heads_;
  if (count > num_done_) {
    num_done_ = 0;
    done_ = std::make_unique<std::atomic<int>[]>(2 * count);
    num_done_ = 2 * count;
  }
  for (std::size_t i = 0; i < count; ++i) done_[i].store(0, std::memory_order_relaxed);
}

void AttentionPlan::make(const Step& step, int num_threads, bool cascade) {
  tiles_.clear();
  shared_.clear();
  alike_.clear();
  units_.clear();
  joins_.clear();
  joins_of_.clear();
  rows_.clear();
  offsets_.clear();
  floats_ = 0;
  shared_positions_ = 0;

  cut_rows(step);
  if (cascade) find_shared(step);
  std::int64_t total = 0;
  for (const Tile& tile : tiles_) total += tile.cost * kv_heads_;
  add_joins(num_threads == 1 ? total : std::max<std::int64_t>(kPiece, total / (kShares * num_threads)));
  add_shared_units();
  std::stable_sort(units_.begin(), units_.end(),
                   [](const AttentionUnit& a, const AttentionUnit& b) { return a.cost > b.cost; });
  place_partials();
}

}  // namespace octavo
