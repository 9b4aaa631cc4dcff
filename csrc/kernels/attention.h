// Paged attention (the rule is in kernels.h, above Attention).
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

constexpr int kTile = 24;
constexpr int kMaxHeadDim = 256;
constexpr int kAhead = 8 * kPanel;  // positions between what is fetched and what is used

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
  int count = 0;                      // vectors
  Span visible[kTile];                // positions each sees
  int row[kTile], column[kTile];      // where each stands in q and in out
  float query[kTile * kMaxHeadDim];   // [vector][head_dim]
  float scores[kTile * kPiece];       // [vector][position in the piece]: scores, then weights
  float piece[kTile * kMaxHeadDim];   // the piece's weighted sums of values
  float result[kTile * kMaxHeadDim];  // those of all pieces so far
  float piece_largest[kTile], piece_total[kTile];  // of the piece: greatest score, sum of weights
  float largest[kTile], total[kTile];              // of all pieces so far
  bool started[kTile];                // whether a piece has been taken
};

inline const bf16* key_panel(const Attention& a, int head, int position) {
  const KvCache& c = a.cache;
  return c.keys + c.offset(a.block_table[position / c.block_size], head, position % c.block_size / kPanel);
}
inline const bf16* value_panel(const Attention& a, int head, int position) {
  const KvCache& c = a.cache;
  return c.values + c.offset(a.block_table[position / c.block_size], head, position % c.block_size / kPanel);
}

// Vectors first .. of the list that starts at row_begin; returns the positions that any of them sees.
inline Span fill_tile(const Attention& a, Tile& tile, int row_begin, int kv_head, std::int64_t first, int count) {
  const int dim = a.cache.head_dim, group = a.heads / a.cache.kv_heads;
  Span all;
  tile.count = count;
  for (int v = 0; v < count; ++v) {
    const int row = row_begin + static_cast<int>((first + v) / group);
    const int head = kv_head * group + static_cast<int>((first + v) % group);
    const int position = a.position + row;
    const int begin = a.window > 0 && position >= a.window ? position - a.window + 1 : 0;
    tile.visible[v] = {begin, position + 1};
    tile.row[v] = a.first + row;
    tile.column[v] = head * dim;
    tile.started[v] = false;
    widen(a.q.row(tile.row[v]) + tile.column[v], tile.query + v * dim, dim);
    if (v == 0) all = tile.visible[v];
    all = {all.begin < begin ? all.begin : begin, position + 1};
  }
  return all;
}

// Scores of R vectors with the tokens of P key panels. Invisible tokens' scores are whatever comes out: a lane is a token's.
template <int R, int P>
inline void score_panels(const Attention& a, Tile& tile, int first, const bf16* const (&keys)[P], int column) {
  const int dim = a.cache.head_dim;
  Vec acc[R][P];
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p) acc[r][p] = splat(0.0f);
  for (int d = 0; d < dim; d += kChunk) {
    const bf16* w[P];
    for (int p = 0; p < P; ++p) w[p] = keys[p] + d * kPanel;
    const int pairs = (dim - d < kChunk ? dim - d : kChunk) / 2;
    add_chunk<R, P>(acc, tile.query + first * dim + d, dim, w, 2 * kPanel, pairs);
  }
  for (int r = 0; r < R; ++r) {
    for (int p = 0; p < P; ++p) {
      Vec score = acc[r][p] * splat(a.scale);
      if (a.softcap != 0.0f) score = soft_cap(score, splat(a.softcap));
      store(tile.scores + (first + r) * kPiece + column + p * kPanel, score);
    }
  }
}

// Lanes of `x` whose positions from `position` on are in the span; `other` elsewhere.
OCTAVO_INLINE Vec inside(Span span, int position, Vec x, Vec other) {
  const Vec lane = lane_numbers();
  const Vec before_end = select_less(lane, splat(static_cast<float>(span.end - position)), x, other);
  return select_less(lane, splat(static_cast<float>(span.begin - position)), other, before_end);
}

// Scores of one vector become weights bf16(exp(s - max)), zero where invisible; gives the maximum and the weights' sum.
inline void weigh(Tile& tile, int v, Span span, int piece_begin, float& largest, float& total) {
  float* scores = tile.scores + v * kPiece - piece_begin;  // by position
  const int begin = span.begin / kPanel * kPanel;
  const Vec none = splat(-__builtin_inff());
  Vec top = none;
  for (int t = begin; t < span.end; t += kPanel) {
    const Vec score = load(scores + t);
    top = max(top, span.covers(t, t + kPanel) ? score : inside(span, t, score, none));
  }
  largest = max_lane(top);
  Vec sums = splat(0.0f);
  for (int t = begin; t < span.end; t += kPanel) {
    const Vec weight = round_to_bf16(exp(load(scores + t) - splat(largest)));
    const Vec seen = span.covers(t, t + kPanel) ? weight : inside(span, t, weight, splat(0.0f));
    store(scores + t, seen);
    sums = sums + seen;
  }
  total = sum(sums);
}

// piece[v] += weights x values of one panel, all of whose tokens these R vectors see; P * 16 dimensions from d on.
template <int R, int P>
OCTAVO_INLINE void mix_dimensions(int dim, Tile& tile, int first, const bf16* values, int column, int d) {
  Vec acc[R][P];
  const bf16* w[P];
  float* out = tile.piece + first * dim + d;
  for (int p = 0; p < P; ++p) {
    w[p] = values + 2 * (d + p * kLanes);
    for (int r = 0; r < R; ++r) acc[r][p] = load(out + r * dim + p * kLanes);
  }
  add_chunk<R, P>(acc, tile.scores + first * kPiece + column, kPiece, w, 2 * dim, kPanel / 2);
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p) store(out + r * dim + p * kLanes, acc[r][p]);
}

template <int R>
inline void mix_panel(const Attention& a, Tile& tile, int first, const bf16* values, int column) {
  const int dim = a.cache.head_dim;
  int d = 0;
  for (; d + 2 * kLanes <= dim; d += 2 * kLanes) mix_dimensions<R, 2>(dim, tile, first, values, column, d);
  if (d < dim) mix_dimensions<R, 1>(dim, tile, first, values, column, d);
}

// The same for one vector that sees tokens begin .. end - 1 of the panel only: the others' values are not touched.
inline void mix_part(const Attention& a, Tile& tile, int v, const bf16* values, int column, int begin, int end) {
  const int dim = a.cache.head_dim;
  const float* weights = tile.scores + v * kPiece + column;
  for (int d = 0; d < dim; d += kLanes) {
    Vec even = splat(0.0f), odd = splat(0.0f);
    for (int t = begin; t < end; ++t) {
      const bf16* pairs = values + t / 2 * 2 * dim + 2 * d;
      if (t % 2 == 0) {
        even = mul_add(splat(weights[t]), load_even(pairs), even);
      } else {
        odd = mul_add(splat(weights[t]), load_odd(pairs), odd);
      }
    }
    float* out = tile.piece + v * dim + d;
    store(out, load(out) + (even + odd));
  }
}

// One value panel (positions t .. t + 15) for vectors first .. first + R - 1, each as far as it sees it.
template <int R>
inline void mix_vectors(const Attention& a, Tile& tile, int first, const bf16* values, int t, int column) {
  bool whole = true;
  for (int v = first; v < first + R; ++v) whole = whole && tile.visible[v].covers(t, t + kPanel);
  if (whole) return mix_panel<R>(a, tile, first, values, column);
  for (int v = first; v < first + R; ++v) {
    const Span part = intersect(tile.visible[v], {t, t + kPanel});
    if (part.empty()) continue;
    if (part.covers(t, t + kPanel)) {
      mix_panel<1>(a, tile, v, values, column);
    } else {
      mix_part(a, tile, v, values, column, part.begin - t, part.end - t);
    }
  }
}

// A panel that will be read soon: blocks lie anywhere, so that no hardware foresees them. Into the second cache level only:
// of misses in the first one a core has few at a time, and they set the pace (half of this one, measured on Zen 4).
OCTAVO_INLINE void fetch(const bf16* panel, int dim) {
  for (int line = 0; line < dim / 2; ++line) __builtin_prefetch(panel + line * 32, 0, 2);
}

// Scores of all vectors with the panels of positions [begin, end); two panels at a time share each query that is read.
inline void score_piece(const Attention& a, Tile& tile, int kv_head, int begin, int end, int piece_begin) {
  for (int t = begin; t < begin + kAhead && t < end; t += kPanel) fetch(key_panel(a, kv_head, t), a.cache.head_dim);
  for (int t = begin; t < end; t += 2 * kPanel) {
    for (int ahead = t + kAhead; ahead < t + kAhead + 2 * kPanel && ahead < end; ahead += kPanel)
      fetch(key_panel(a, kv_head, ahead), a.cache.head_dim);
    const bf16* first = key_panel(a, kv_head, t);
    if (t + kPanel < end) {
      const bf16* keys[2] = {first, key_panel(a, kv_head, t + kPanel)};
      for_row_blocks(0, tile.count, [&]<int R>(std::int64_t v) {
        score_panels<R, 2>(a, tile, static_cast<int>(v), keys, t - piece_begin);
      });
    } else {
      const bf16* keys[1] = {first};
      for_row_blocks(0, tile.count, [&]<int R>(std::int64_t v) {
        score_panels<R, 1>(a, tile, static_cast<int>(v), keys, t - piece_begin);
      });
    }
  }
}

// Positions `seen` of one piece, which at least one vector of the tile sees: leaves tile.piece, and of each vector its greatest
// score and the sum of its weights; the sum is zero for a vector that sees none of them.
inline void attend_piece(const Attention& a, Tile& tile, int kv_head, Span seen, int piece_begin) {
  const int dim = a.cache.head_dim;
  const int begin = seen.begin / kPanel * kPanel;
  score_piece(a, tile, kv_head, begin, seen.end, piece_begin);
  for (int t = begin; t < begin + kAhead && t < seen.end; t += kPanel) fetch(value_panel(a, kv_head, t), dim);
  for (int v = 0; v < tile.count; ++v) {
    const Span span = intersect(tile.visible[v], seen);
    tile.piece_total[v] = 0.0f;
    if (!span.empty()) weigh(tile, v, span, piece_begin, tile.piece_largest[v], tile.piece_total[v]);
    for (int d = 0; d < dim; d += kLanes) store(tile.piece + v * dim + d, splat(0.0f));
  }
  for (int t = begin; t < seen.end; t += kPanel) {
    if (t + kAhead < seen.end) fetch(value_panel(a, kv_head, t + kAhead), dim);
    const bf16* values = value_panel(a, kv_head, t);
    for_row_blocks(0, tile.count, [&]<int R>(std::int64_t v) {
      mix_vectors<R>(a, tile, static_cast<int>(v), values, t, t - piece_begin);
    });
  }
}

// Joins one piece of vector v to what came before it.
inline void merge(Tile& tile, int v, int dim, const float* piece, float largest, float total) {
  float* result = tile.result + v * dim;
  if (!tile.started[v]) {
    for (int d = 0; d < dim; d += kLanes) store(result + d, load(piece + d));
    tile.started[v] = true;
    tile.largest[v] = largest;
    tile.total[v] = total;
    return;
  }
  const float top = largest > tile.largest[v] ? largest : tile.largest[v];
  const Vec before = exp(splat(tile.largest[v] - top)), now = exp(splat(largest - top));
  for (int d = 0; d < dim; d += kLanes) store(result + d, load(result + d) * before + load(piece + d) * now);
  float sums[kLanes];
  store(sums, splat(tile.total[v]) * before + splat(total) * now);
  tile.largest[v] = top;
  tile.total[v] = sums[0];
}

inline void write_results(const Attention& a, const Tile& tile) {
  const int dim = a.cache.head_dim;
  for (int v = 0; v < tile.count; ++v) {
    bf16* out = a.out.row(tile.row[v]) + tile.column[v];
    for (int d = 0; d < dim; d += kLanes) store(out + d, load(tile.result + v * dim + d) / splat(tile.total[v]));
  }
}

// Calls f(tile, positions that it sees, number of its first vector) for the tiles of some rows and one KV head, in order.
template <class F>
OCTAVO_INLINE void for_tiles(const Attention& a, int row_begin, int row_end, int head, F&& f) {
  const std::int64_t vectors = static_cast<std::int64_t>(row_end - row_begin) * (a.heads / a.cache.kv_heads);
  Tile tile;
  for (std::int64_t first = 0; first < vectors; first += kTile) {
    const std::int64_t left = vectors - first;
    const Span all = fill_tile(a, tile, row_begin, head, first, left < kTile ? static_cast<int>(left) : kTile);
    f(tile, all, first);
  }
}

inline void attention(const Attention& a, int row_begin, int row_end, int head_begin, int head_end) {
  const int dim = a.cache.head_dim;
  for (int head = head_begin; head < head_end; ++head) {
    for_tiles(a, row_begin, row_end, head, [&](Tile& tile, Span all, std::int64_t) {
      for (int begin = all.begin / kPiece * kPiece; begin < all.end; begin += kPiece) {
        attend_piece(a, tile, head, intersect(all, {begin, begin + kPiece}), begin);
        for (int v = 0; v < tile.count; ++v)
          if (tile.piece_total[v] != 0.0f) merge(tile, v, dim, tile.piece + v * dim, tile.piece_largest[v], tile.piece_total[v]);
      }
      write_results(a, tile);
    });
  }
}

// Where the partial result of one vector and one piece lies.
OCTAVO_INLINE float* partial(const Attention& a, float* partials, int rows, int piece, std::int64_t vector) {
  const std::int64_t vectors = static_cast<std::int64_t>(rows) * (a.heads / a.cache.kv_heads);
  return partials + (piece * vectors + vector) * partial_floats(a.cache.head_dim);
}

inline void attention_pieces(const Attention& a, int row_begin, int row_end, int head, int piece_begin, int piece_end,
                             float* partials) {
  const int dim = a.cache.head_dim;
  for_tiles(a, row_begin, row_end, head, [&](Tile& tile, Span all, std::int64_t first) {
    for (int piece = piece_begin; piece < piece_end; ++piece) {
      const Span seen = intersect(all, {piece * kPiece, (piece + 1) * kPiece});
      if (!seen.empty()) attend_piece(a, tile, head, seen, piece * kPiece);
      for (int v = 0; v < tile.count; ++v) {
        float* out = partial(a, partials, row_end - row_begin, piece, first + v);
        out[dim] = tile.piece_largest[v];
        out[dim + 1] = seen.empty() ? 0.0f : tile.piece_total[v];
        for (int d = 0; d < dim; d += kLanes) store(out + d, load(tile.piece + v * dim + d));
      }
    }
  });
}

inline void attention_merge(const Attention& a, int row_begin, int row_end, int head, float* partials) {
  const int dim = a.cache.head_dim;
  for_tiles(a, row_begin, row_end, head, [&](Tile& tile, Span all, std::int64_t first) {
    for (int piece = all.begin / kPiece; piece * kPiece < all.end; ++piece) {
      for (int v = 0; v < tile.count; ++v) {
        const float* from = partial(a, partials, row_end - row_begin, piece, first + v);
        if (from[dim + 1] != 0.0f) merge(tile, v, dim, from, from[dim], from[dim + 1]);
      }
    }
    write_results(a, tile);
  });
}

}  // namespace
}  // namespace octavo
