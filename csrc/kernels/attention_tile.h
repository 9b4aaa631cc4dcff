// What attention works on: a tile of query vectors.
//
// The query vectors of the rows and of the heads that share a KV head are one list, row by row; a tile of up to kTile of
// them goes through the pieces together, so that each load of keys and values serves them all, whatever the group's size:
//
//   rows      r0             r1             r2        ...      heads of the group: 3
//   vectors   0    1    2    3    4    5    6    7    8 ...
//             '------ tile ------'
#pragma once

namespace octavo {
namespace {

constexpr int kTile = 32;
constexpr int kPiecePanels = kPiece / kPanel;
constexpr int kAhead = 8;  // panels between what is fetched and what is used

// Positions [begin, end).
struct Span {
  int begin = 0, end = 0;
  bool empty() const { return begin >= end; }
  bool covers(int from, int to) const { return begin <= from && to <= end; }
};

OCTAVO_INLINE Span intersect(Span a, Span b) {
  return {a.begin > b.begin ? a.begin : b.begin, a.end < b.end ? a.end : b.end};
}

struct Tile {
  int count = 0, dim = 0;                          // vectors; head_dim
  Span visible[kTile];                             // positions each sees
  int row[kTile], column[kTile];                   // where each stands in q and in out
  alignas(64) float query[kTile * kMaxHeadDim];    // [vector][dim]
  alignas(64) float scores[kTile * kPiece];        // [vector][position in the piece]: scores, then weights
  alignas(64) float piece[kTile * kMaxHeadDim];    // the piece's weighted sums of values
  alignas(64) float result[kTile * kMaxHeadDim];   // those of all pieces so far
  alignas(64) bf16 query_bits[kTile * kMaxHeadDim];  // queries and weights once more, for Products that want bfloat16
  alignas(64) bf16 weight_bits[kTile * kPiece];
  // Of an attention in int8: queries and weights as whole numbers 128 * upper + lower, their scales, and where sums start.
  alignas(64) std::int8_t query_upper[kTile * kMaxHeadDim], query_lower[kTile * kMaxHeadDim];
  alignas(64) std::int8_t weight_upper[kTile * kPiece], weight_lower[kTile * kPiece];
  float query_scale[kTile], weight_scale[kTile];
  std::int32_t query_initial[kTile][2], weight_initial[kTile][2];
  alignas(64) std::int32_t sums[kTile][2][2][kPanel];
  float piece_largest[kTile], piece_total[kTile];  // of the piece: greatest score, sum of weights
  float largest[kTile], total[kTile];              // of all pieces so far
  bool started[kTile];                             // whether a piece has been taken
};

// A panel that will be read soon: blocks lie anywhere, so that no hardware foresees them. Into the second cache level only:
// of misses in the first one a core has few at a time, and they set the pace (half of this one, measured on Zen 4).
template <class Kv>
OCTAVO_INLINE void fetch(const Kv* panel, int dim) {
  constexpr KvType kType = sizeof(Kv) == 1 ? KvType::kInt8 : KvType::kBfloat16;
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(panel);
  for (int line = 0; line < KvCache::panel_bytes(kType, dim) / 64; ++line) __builtin_prefetch(bytes + line * 64, 0, 2);
}

// Lanes of `x` whose positions from `position` on are in the span; `other` elsewhere.
OCTAVO_INLINE Vec inside(Span span, int position, Vec x, Vec other) {
  const Vec lane = lane_numbers();
  const Vec before_end = select_less(lane, splat(static_cast<float>(span.end - position)), x, other);
  return select_less(lane, splat(static_cast<float>(span.begin - position)), other, before_end);
}

// Calls f(position, exp(score - largest)) for the panels of a piece that hold the positions of a span; `scores` by position.
template <class F>
OCTAVO_INLINE void for_shares(const float* scores, Span span, float largest, F&& f) {
  int t = span.begin / kPanel * kPanel;
  for (; t + kSideBySide * kPanel <= span.end; t += kSideBySide * kPanel) {
    Vec x[kSideBySide];
    for (int i = 0; i < kSideBySide; ++i) x[i] = load(scores + t + i * kPanel) - splat(largest);
    exp_of_negative(x);
#pragma GCC unroll 4
    for (int i = 0; i < kSideBySide; ++i) f(t + i * kPanel, x[i]);
  }
  for (; t < span.end; t += kPanel) {
    Vec x[1] = {load(scores + t) - splat(largest)};
    exp_of_negative(x);
    f(t, x[0]);
  }
}

}  // namespace
}  // namespace octavo
