// Paged attention (the rule is in kernels.h, above Attention).
//
// The query vectors of the rows and of the heads that share a KV head are one list, row by row; a tile of up to kTile of
// them goes through the pieces together, so that each load of keys and values serves them all, whatever the group's size:
//
//   rows      r0             r1             r2        ...      heads of the group: 3
//   vectors   0    1    2    3    4    5    6    7    8 ...
//             '------ tile ------'
//
// What multiplies is a parameter, `Products`: FmaProducts below, AMX's in tile_attention.h, VDPBF16PS's in dot_products.h. So is
// what the cache holds, `Kv`: bf16, or std::int8_t. Few vectors read codes as they are; for many, and for what multiplies bfloat16
// pairs, panels are widened first, once for all vectors of a tile.
#pragma once

namespace octavo {
namespace {

constexpr int kTile = 32;
constexpr int kPiecePanels = kPiece / kPanel;
constexpr int kAhead = 8;  // panels between what is fetched and what is used
constexpr int kFewVectors = kBlockRows;

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
  alignas(64) bf16 wide[kPiece * kMaxHeadDim];     // panels that were widened
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

// Of a panel's sixteen tokens.
OCTAVO_INLINE Vec scales(const std::int8_t* panel, int dim) { return load(reinterpret_cast<const float*>(panel + kPanel * dim)); }

// Calls f(panels) with panels [begin, end) as the products read them: as they are, or widened.
template <class Products, class Kv, class F>
OCTAVO_INLINE void as_read(Tile& tile, const Kv* const* panels, int begin, int end, F&& f) {
  if constexpr (sizeof(Kv) == 1) {
    if (Products::kWantsBits || tile.count > kFewVectors) {
      const bf16* widened[kPiecePanels];
      bf16* wide = tile.wide;
      for (int panel = begin; panel < end; ++panel) {
        widened[panel] = wide;
        const Kv* codes = panels[panel];
        if (panel + kAhead < end) fetch(panels[panel + kAhead], tile.dim);
        for (const Kv* stop = codes + kPanel * tile.dim; codes < stop; codes += 2 * kLanes, wide += 2 * kLanes)
          store_pairs(wide, load_even(codes), load_odd(codes));
      }
      f(widened);
      return;
    }
  }
  if constexpr (sizeof(Kv) > 1 || !Products::kWantsBits) f(panels);
}

// Products by the matrix rule on vectors of floats.
struct FmaProducts {
  static constexpr bool kWantsBits = false;

  static void begin(const Tile&) {}
  static void end() {}

  // Unscaled scores of all vectors with P panels, the first of which is `panel`. Invisible tokens' scores are whatever comes
  // out: a lane is a token's.
  template <int P, class Kv>
  static void score(Tile& tile, const Kv* const* keys, int panel) {
    for_row_blocks<kBlockRows>(0, tile.count, [&]<int R>(std::int64_t first) {
      Vec acc[R][P];
      for (int r = 0; r < R; ++r)
        for (int p = 0; p < P; ++p) acc[r][p] = splat(0.0f);
      for (int d = 0; d < tile.dim; d += kChunk) {
        const Kv* w[P];
        for (int p = 0; p < P; ++p) w[p] = keys[panel + p] + d * kPanel;
        const int pairs = (tile.dim - d < kChunk ? tile.dim - d : kChunk) / 2;
        add_chunk<R, P>(acc, tile.query + first * tile.dim + d, tile.dim, w, 2 * kPanel, pairs);
      }
      for (int r = 0; r < R; ++r)
        for (int p = 0; p < P; ++p) store(tile.scores + (first + r) * kPiece + (panel + p) * kPanel, acc[r][p]);
    });
  }

  // piece += weights x values of panels [begin, end), all of whose tokens `count` vectors from `first` on see.
  template <class Kv>
  static void mix(Tile& tile, const Kv* const* values, int first, int count, int begin, int end) {
    for (int panel = begin; panel < end; ++panel) {
      if (panel + kAhead < end) fetch(values[panel + kAhead], tile.dim);
      for_row_blocks<kBlockRows>(first, first + count, [&]<int R>(std::int64_t v) {
        int d = 0;
        for (; d + 2 * kLanes <= tile.dim; d += 2 * kLanes) mix_dimensions<R, 2>(tile, values[panel], v, panel, d);
        if (d < tile.dim) mix_dimensions<R, 1>(tile, values[panel], v, panel, d);
      });
    }
  }

 private:
  // P * 16 dimensions from d on of R vectors.
  template <int R, int P, class Kv>
  OCTAVO_INLINE static void mix_dimensions(Tile& tile, const Kv* values, std::int64_t first, int panel, int d) {
    Vec acc[R][P];
    const Kv* w[P];
    float* out = tile.piece + first * tile.dim + d;
    for (int p = 0; p < P; ++p) {
      w[p] = values + 2 * (d + p * kLanes);
      for (int r = 0; r < R; ++r) acc[r][p] = load(out + r * tile.dim + p * kLanes);
    }
    add_chunk<R, P>(acc, tile.scores + first * kPiece + panel * kPanel, kPiece, w, 2 * tile.dim, kPanel / 2);
    for (int r = 0; r < R; ++r)
      for (int p = 0; p < P; ++p) store(out + r * tile.dim + p * kLanes, acc[r][p]);
  }
};

template <int Half>
OCTAVO_INLINE void turn_level(float* x, int dim) {
  for (int first = 0; first < dim; first += 2 * Half) {
    for (int i = first; i < first + Half; ++i) {
      const float a = x[i], b = x[i + Half];
      x[i] = a + b;
      x[i + Half] = a - b;
    }
  }
}
// A head, to or from a cache in int8 (kernels.h, above KvCache).
inline void turn(float* x, int dim) {
  turn_level<1>(x, dim);
  turn_level<2>(x, dim);
  turn_level<4>(x, dim);
  turn_level<8>(x, dim);
  for (int half = 16; half < turn_width(dim); half *= 2) {
    for (int first = 0; first < dim; first += 2 * half) {
      for (int i = first; i < first + half; i += kLanes) {
        const Vec a = load(x + i), b = load(x + i + half);
        store(x + i, a + b);
        store(x + i + half, a - b);
      }
    }
  }
}

// Vectors first .. of the rows that row_of(0), row_of(1) .. give; returns the positions that any of them sees.
template <class Products, class RowOf>
inline Span fill_tile(const Attention& a, Tile& tile, RowOf row_of, int kv_head, std::int64_t first, int count) {
  const int dim = a.cache.head_dim, group = a.heads / a.cache.kv_heads;
  Span all;
  tile.count = count;
  tile.dim = dim;
  for (int v = 0; v < count; ++v) {
    const AttentionRow from = row_of(static_cast<int>((first + v) / group));
    const int head = kv_head * group + static_cast<int>((first + v) % group);
    const int position = from.position;
    const int begin = a.window > 0 && position >= a.window ? position - a.window + 1 : 0;
    tile.visible[v] = {begin, position + 1};
    tile.row[v] = from.row;
    tile.column[v] = head * dim;
    tile.started[v] = false;
    const bf16* query = a.q.row(tile.row[v]) + tile.column[v];
    float* wide = tile.query + v * dim;
    widen(query, wide, dim);
    if (a.cache.type == KvType::kInt8) {
      turn(wide, dim);
      for (int d = 0; d < dim; d += kLanes) store(wide + d, round_to_bf16(load(wide + d)));
    }
    if constexpr (Products::kWantsBits)
      for (int d = 0; d < dim; d += kLanes) store(tile.query_bits + v * dim + d, load(wide + d));
    if (v == 0) all = tile.visible[v];
    all = {all.begin < begin ? all.begin : begin, all.end > position ? all.end : position + 1};
  }
  return all;
}

// Lanes of `x` whose positions from `position` on are in the span; `other` elsewhere.
OCTAVO_INLINE Vec inside(Span span, int position, Vec x, Vec other) {
  const Vec lane = lane_numbers();
  const Vec before_end = select_less(lane, splat(static_cast<float>(span.end - position)), x, other);
  return select_less(lane, splat(static_cast<float>(span.begin - position)), other, before_end);
}

// Products of one vector become scores and then weights bf16(exp(s - max)), zero where invisible; leaves the maximum and the
// weights' sum. Keys and values: panels of the piece, for their scales.
template <class Products, class Kv>
inline void weigh(const Attention& a, Tile& tile, const Kv* const* keys, const Kv* const* values, int v, Span span,
                  int piece_begin) {
  float* scores = tile.scores + v * kPiece - piece_begin;  // by position
  const int begin = span.begin / kPanel * kPanel;
  const float scale = sizeof(Kv) == 1 ? a.scale / static_cast<float>(turn_width(tile.dim)) : a.scale;
  const Vec none = splat(-__builtin_inff());
  Vec top = none;
  for (int t = begin; t < span.end; t += kPanel) {
    Vec score = load(scores + t);
    if constexpr (sizeof(Kv) == 1) score = score * scales(keys[(t - piece_begin) / kPanel], tile.dim);
    score = score * splat(scale);
    if (a.softcap != 0.0f) score = soft_cap(score, splat(a.softcap));
    store(scores + t, score);
    top = max(top, span.covers(t, t + kPanel) ? score : inside(span, t, score, none));
  }
  const float largest = max_lane(top);
  Vec sums = splat(0.0f);
  for (int t = begin; t < span.end; t += kPanel) {
    Vec share = exp_of_negative(load(scores + t) - splat(largest)), weight = share;
    if constexpr (sizeof(Kv) == 1) weight = share * scales(values[(t - piece_begin) / kPanel], tile.dim);
    weight = round_to_bf16(weight);
    if constexpr (sizeof(Kv) > 1) share = weight;
    if (!span.covers(t, t + kPanel)) {
      share = inside(span, t, share, splat(0.0f));
      weight = inside(span, t, weight, splat(0.0f));
    }
    store(scores + t, weight);
    if constexpr (Products::kWantsBits) store(tile.weight_bits + v * kPiece + t - piece_begin, weight);
    sums = sums + share;
  }
  tile.piece_largest[v] = largest;
  tile.piece_total[v] = sum(sums);
}

// piece += weights x values of one panel, for a vector that sees tokens begin .. end - 1 of it only: the others' values are not
// touched.
template <class Kv>
inline void mix_part(Tile& tile, const Kv* values, int v, int panel, int begin, int end) {
  const float* weights = tile.scores + v * kPiece + panel * kPanel;
  for (int d = 0; d < tile.dim; d += kLanes) {
    Vec even = splat(0.0f), odd = splat(0.0f);
    for (int t = begin; t < end; ++t) {
      const Kv* pairs = values + t / 2 * 2 * tile.dim + 2 * d;
      if (t % 2 == 0) {
        even = mul_add(splat(weights[t]), load_even(pairs), even);
      } else {
        odd = mul_add(splat(weights[t]), load_odd(pairs), odd);
      }
    }
    float* out = tile.piece + v * tile.dim + d;
    store(out, load(out) + (even + odd));
  }
}

// Panels [begin, end), of which each vector may see all, some or nothing.
template <class Products, class Kv>
inline void mix_edge(Tile& tile, const Kv* const* values, int piece_begin, int begin, int end) {
  for (int panel = begin; panel < end; ++panel) {
    const int from = piece_begin + panel * kPanel, to = from + kPanel;
    for (int v = 0; v < tile.count;) {
      int next = v;
      while (next < tile.count && tile.visible[next].covers(from, to)) ++next;
      if (next > v) {
        Products::mix(tile, values, v, next - v, panel, panel + 1);
        v = next;
        continue;
      }
      const Span part = intersect(tile.visible[v], {from, to});
      if (!part.empty()) mix_part(tile, values[panel], v, panel, part.begin - from, part.end - from);
      ++v;
    }
  }
}

// Positions `seen` of one piece, which at least one vector of the tile sees: leaves tile.piece, and of each vector its greatest
// score and the sum of its weights; the sum is zero for a vector that sees none of them.
template <class Products, class Kv>
inline void attend_piece(const Attention& a, Tile& tile, int kv_head, Span seen, int piece_begin) {
  const int begin = (seen.begin - piece_begin) / kPanel, end = (seen.end - piece_begin + kPanel - 1) / kPanel;
  const KvCache& c = a.cache;
  const Kv *keys[kPiecePanels], *values[kPiecePanels];  // panels of the piece
  for (int panel = begin; panel < end; ++panel) {
    const int position = piece_begin + panel * kPanel;
    const std::int64_t offset = c.offset(a.block_table[position / c.block_size], kv_head, position % c.block_size / kPanel);
    keys[panel] = reinterpret_cast<const Kv*>(c.keys + offset);
    values[panel] = reinterpret_cast<const Kv*>(c.values + offset);
  }

  for (int panel = begin; panel < begin + kAhead && panel < end; ++panel) fetch(keys[panel], tile.dim);
  for (int panel = begin; panel < end; panel += 2) {
    for (int ahead = panel + kAhead; ahead < panel + kAhead + 2 && ahead < end; ++ahead) fetch(keys[ahead], tile.dim);
    as_read<Products>(tile, keys, panel, panel + 1 < end ? panel + 2 : end, [&](const auto* const* read) {
      if (panel + 1 < end) {
        Products::template score<2>(tile, read, panel);
      } else {
        Products::template score<1>(tile, read, panel);
      }
    });
  }

  for (int panel = begin; panel < begin + kAhead && panel < end; ++panel) fetch(values[panel], tile.dim);
  Span whole = {begin, end};  // panels that all vectors see all of
  for (int v = 0; v < tile.count; ++v) {
    const Span span = intersect(tile.visible[v], seen);
    tile.piece_total[v] = 0.0f;
    if (!span.empty()) weigh<Products>(a, tile, keys, values, v, span, piece_begin);
    for (int d = 0; d < tile.dim; d += kLanes) store(tile.piece + v * tile.dim + d, splat(0.0f));
    whole = intersect(whole, {(span.begin - piece_begin + kPanel - 1) / kPanel, (span.end - piece_begin) / kPanel});
  }
  if (whole.empty()) whole = {end, end};
  as_read<Products>(tile, values, begin, end, [&](const auto* const* read) {
    mix_edge<Products>(tile, read, piece_begin, begin, whole.begin);
    Products::mix(tile, read, 0, tile.count, whole.begin, whole.end);
    mix_edge<Products>(tile, read, piece_begin, whole.end, end);
  });
}

template <class Products>
inline void attend_piece(const Attention& a, Tile& tile, int kv_head, Span seen, int piece_begin) {
  if (a.cache.type == KvType::kInt8) {
    attend_piece<Products, std::int8_t>(a, tile, kv_head, seen, piece_begin);
  } else {
    attend_piece<Products, bf16>(a, tile, kv_head, seen, piece_begin);
  }
}

// Joins one piece of vector v to what came before it.
inline void merge(Tile& tile, int v, const float* piece, float largest, float total) {
  const int dim = tile.dim;
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

inline void write_results(const Attention& a, Tile& tile) {
  const int dim = tile.dim;
  const bool is_turned = a.cache.type == KvType::kInt8;
  const Vec back = splat(is_turned ? 1.0f / static_cast<float>(turn_width(dim)) : 1.0f);
  for (int v = 0; v < tile.count; ++v) {
    bf16* out = a.out.row(tile.row[v]) + tile.column[v];
    float* result = tile.result + v * dim;
    if (is_turned) turn(result, dim);
    for (int d = 0; d < dim; d += kLanes) store(out + d, (load(result + d) * back) / splat(tile.total[v]));
  }
}

// Calls f(tile, positions that it sees, number of its first vector) for the tiles of `rows` rows and one KV head, in order.
template <class Products, class RowOf, class F>
OCTAVO_INLINE void for_tiles(const Attention& a, RowOf row_of, int rows, int head, F&& f) {
  const std::int64_t vectors = static_cast<std::int64_t>(rows) * (a.heads / a.cache.kv_heads);
  Tile tile;
  for (std::int64_t first = 0; first < vectors; first += kTile) {
    const std::int64_t left = vectors - first;
    const Span all = fill_tile<Products>(a, tile, row_of, head, first, left < kTile ? static_cast<int>(left) : kTile);
    Products::begin(tile);
    f(tile, all, first);
    Products::end();
  }
}

template <class Products>
inline void attention(const Attention& a, int row_begin, int row_end, int head_begin, int head_end) {
  const auto row_of = [&](int i) { return AttentionRow{a.first + row_begin + i, a.position + row_begin + i}; };
  for (int head = head_begin; head < head_end; ++head) {
    for_tiles<Products>(a, row_of, row_end - row_begin, head, [&](Tile& tile, Span all, std::int64_t) {
      for (int begin = all.begin / kPiece * kPiece; begin < all.end; begin += kPiece) {
        attend_piece<Products>(a, tile, head, intersect(all, {begin, begin + kPiece}), begin);
        for (int v = 0; v < tile.count; ++v)
          if (tile.piece_total[v] != 0.0f)
            merge(tile, v, tile.piece + v * tile.dim, tile.piece_largest[v], tile.piece_total[v]);
      }
      write_results(a, tile);
    });
  }
}

// Where the partial result of one vector (numbered row by row) and one piece lies.
OCTAVO_INLINE float* partial(const Attention& a, const AttentionRow* rows, int head, int piece, std::int64_t vector) {
  const int group = a.heads / a.cache.kv_heads;
  const AttentionRow& row = rows[vector / group];
  return row.partials + head * row.head_stride + (piece * group + vector % group) * partial_floats(a.cache.head_dim);
}

template <class Products>
inline void attention_pieces(const Attention& a, const AttentionRow* rows, int count, int head, int piece_begin, int piece_end) {
  const int dim = a.cache.head_dim;
  const auto row_of = [&](int i) { return rows[i]; };
  for_tiles<Products>(a, row_of, count, head, [&](Tile& tile, Span all, std::int64_t first) {
    for (int piece = piece_begin; piece < piece_end; ++piece) {
      const Span seen = intersect(all, {piece * kPiece, (piece + 1) * kPiece});
      if (!seen.empty()) attend_piece<Products>(a, tile, head, seen, piece * kPiece);
      for (int v = 0; v < tile.count; ++v) {
        float* out = partial(a, rows, head, piece, first + v);
        out[dim] = tile.piece_largest[v];
        out[dim + 1] = seen.empty() ? 0.0f : tile.piece_total[v];
        for (int d = 0; d < dim; d += kLanes) store(out + d, load(tile.piece + v * dim + d));
      }
    }
  });
}

inline void attention_merge(const Attention& a, const AttentionRow* rows, int count, int head) {
  const int dim = a.cache.head_dim;
  const auto row_of = [&](int i) { return rows[i]; };
  for_tiles<FmaProducts>(a, row_of, count, head, [&](Tile& tile, Span all, std::int64_t first) {
    for (int piece = all.begin / kPiece; piece * kPiece < all.end; ++piece) {
      for (int v = 0; v < tile.count; ++v) {
        const float* from = partial(a, rows, head, piece, first + v);
        if (from[dim + 1] != 0.0f) merge(tile, v, from, from[dim], from[dim + 1]);
      }
    }
    write_results(a, tile);
  });
}

inline float quantize_head(const bf16* x, int head_dim, std::int8_t* codes) {
  alignas(64) float wide[kMaxHeadDim];
  widen(x, wide, head_dim);
  turn(wide, head_dim);
  Vec sizes = splat(0.0f), sum_of_none = splat(0.0f);
  for (int d = 0; d < head_dim; d += kLanes) {
    const Vec v = load(wide + d);
    sizes = max(sizes, abs(v));
    sum_of_none = sum_of_none + v * splat(0.0f);  // NaN where a number is not finite
  }
  const float largest = max_lane(sizes), nothing = sum(sum_of_none);
  const bool is_finite = nothing == nothing, is_zero = largest < 0x1p-100f;
  const float inverse = is_zero || !is_finite ? 0.0f : 127.0f / largest;
  for (int d = 0; d < head_dim; d += kLanes) {
    const Vec whole = (load(wide + d) * splat(inverse) + splat(kMagic)) - splat(kMagic);
    store(wide + d, is_finite ? whole : splat(0.0f));
  }
  for (int d = 0; d < head_dim; ++d) codes[d] = static_cast<std::int8_t>(wide[d]);
  if (!is_finite) return widen_one(kNanBits);
  return is_zero ? 0.0f : largest / 127.0f;
}

}  // namespace
}  // namespace octavo
