// Paged attention (the rule is in kernels.h, above Attention), over tiles of query vectors (attention_tile.h).
//
// What multiplies is a parameter, `Products`: FmaProducts below, AMX's in tile_attention.h, VDPBF16PS's in dot_products.h. Keys and
// values in int8 are the matter of code_attention.h.
#pragma once

namespace octavo {
namespace {

// Products by the matrix rule on vectors of floats.
struct FmaProducts {
  static constexpr bool kWantsBits = false;

  static void begin(const Tile&) {}
  static void end() {}

  // Unscaled scores of all vectors with P panels, the first of which is `panel`. Invisible tokens' scores are whatever comes
  // out: a lane is a token's.
  template <int P>
  static void score(Tile& tile, const bf16* const* keys, int panel) {
    for_row_blocks<kBlockRows>(0, tile.count, [&]<int R>(std::int64_t first) {
      Vec acc[R][P];
      for (int r = 0; r < R; ++r)
        for (int p = 0; p < P; ++p) acc[r][p] = splat(0.0f);
      for (int d = 0; d < tile.dim; d += kChunk) {
        const bf16* w[P];
        for (int p = 0; p < P; ++p) w[p] = keys[panel + p] + d * kPanel;
        const int pairs = (tile.dim - d < kChunk ? tile.dim - d : kChunk) / 2;
        add_chunk<R, P>(acc, tile.query + first * tile.dim + d, tile.dim, w, 2 * kPanel, pairs);
      }
      for (int r = 0; r < R; ++r)
        for (int p = 0; p < P; ++p) store(tile.scores + (first + r) * kPiece + (panel + p) * kPanel, acc[r][p]);
    });
  }

  // piece += weights x values of panels [begin, end), all of whose tokens `count` vectors from `first` on see.
  static void mix(Tile& tile, const bf16* const* values, int first, int count, int begin, int end) {
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
  template <int R, int P>
  OCTAVO_INLINE static void mix_dimensions(Tile& tile, const bf16* values, std::int64_t first, int panel, int d) {
    Vec acc[R][P];
    const bf16* w[P];
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

// Vectors first .. of the rows that row_of(0), row_of(1) .. give; returns the positions that any of them sees.
template <class RowOf>
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
    if (v == 0) all = tile.visible[v];
    all = {all.begin < begin ? all.begin : begin, all.end > position ? all.end : position + 1};
  }
  return all;
}

template <class Products>
inline void read_queries(const Attention& a, Tile& tile) {
  for (int v = 0; v < tile.count; ++v) {
    float* wide = tile.query + v * tile.dim;
    widen(a.q.row(tile.row[v]) + tile.column[v], wide, tile.dim);
    if (a.cache.type == KvType::kInt8) take_query_codes(tile, v);
    if constexpr (Products::kWantsBits)
      for (int d = 0; d < tile.dim; d += kLanes) store(tile.query_bits + v * tile.dim + d, load(wide + d));
  }
}

// Products of one vector become scores and then weights bf16(exp(s - max)), zero where invisible; leaves the maximum and the
// weights' sum.
template <class Products>
inline void weigh(const Attention& a, Tile& tile, int v, Span span, int piece_begin) {
  float* scores = tile.scores + v * kPiece - piece_begin;  // by position
  const int begin = span.begin / kPanel * kPanel;
  const Vec none = splat(-__builtin_inff());
  Vec top = none;
  for (int t = begin; t < span.end; t += kPanel) {
    Vec score = load(scores + t) * splat(a.scale);
    if (a.softcap != 0.0f) score = soft_cap(score, splat(a.softcap));
    store(scores + t, score);
    top = max(top, span.covers(t, t + kPanel) ? score : inside(span, t, score, none));
  }
  const float largest = max_lane(top);
  Vec sums = splat(0.0f);
  for_shares(scores, span, largest, [&](int t, Vec share) {
    Vec weight = round_to_bf16(share);
    if (!span.covers(t, t + kPanel)) weight = inside(span, t, weight, splat(0.0f));
    store(scores + t, weight);
    if constexpr (Products::kWantsBits) store(tile.weight_bits + v * kPiece + t - piece_begin, weight);
    sums = sums + weight;
  });
  tile.piece_largest[v] = largest;
  tile.piece_total[v] = sum(sums);
}

// piece += weights x values of one panel, for a vector that sees tokens begin .. end - 1 of it only: the others' values are not
// touched.
inline void mix_part(Tile& tile, const bf16* values, int v, int panel, int begin, int end) {
  const float* weights = tile.scores + v * kPiece + panel * kPanel;
  for (int d = 0; d < tile.dim; d += kLanes) {
    Vec even = splat(0.0f), odd = splat(0.0f);
    for (int t = begin; t < end; ++t) {
      const bf16* pairs = values + t / 2 * 2 * tile.dim + 2 * d;
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
template <class Products>
inline void mix_edge(Tile& tile, const bf16* const* values, int piece_begin, int begin, int end) {
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

// The panels [begin, end) of a piece for keys and values in bfloat16.
template <class Products>
inline void attend_panels(const Attention& a, Tile& tile, const bf16* const* keys, const bf16* const* values, Span seen,
                          int piece_begin, int begin, int end) {
  for (int panel = begin; panel < begin + kAhead && panel < end; ++panel) fetch(keys[panel], tile.dim);
  for (int panel = begin; panel < end; panel += 2) {
    for (int ahead = panel + kAhead; ahead < panel + kAhead + 2 && ahead < end; ++ahead) fetch(keys[ahead], tile.dim);
    if (panel + 1 < end) {
      Products::template score<2>(tile, keys, panel);
    } else {
      Products::template score<1>(tile, keys, panel);
    }
  }

  for (int panel = begin; panel < begin + kAhead && panel < end; ++panel) fetch(values[panel], tile.dim);
  Span whole = {begin, end};  // panels that all vectors see all of
  for (int v = 0; v < tile.count; ++v) {
    const Span span = intersect(tile.visible[v], seen);
    tile.piece_total[v] = 0.0f;
    if (!span.empty()) weigh<Products>(a, tile, v, span, piece_begin);
    for (int d = 0; d < tile.dim; d += kLanes) store(tile.piece + v * tile.dim + d, splat(0.0f));
    whole = intersect(whole, {(span.begin - piece_begin + kPanel - 1) / kPanel, (span.end - piece_begin) / kPanel});
  }
  if (whole.empty()) whole = {end, end};
  mix_edge<Products>(tile, values, piece_begin, begin, whole.begin);
  Products::mix(tile, values, 0, tile.count, whole.begin, whole.end);
  mix_edge<Products>(tile, values, piece_begin, whole.end, end);
}

// Positions `seen` of one piece, which at least one vector of the tile sees: leaves tile.piece, and of each vector its greatest
// score and the sum of its weights; the sum is zero for a vector that sees none of them.
template <class Products>
inline void attend_piece(const Attention& a, Tile& tile, int kv_head, Span seen, int piece_begin) {
  const int begin = (seen.begin - piece_begin) / kPanel, end = (seen.end - piece_begin + kPanel - 1) / kPanel;
  const KvCache& c = a.cache;
  const auto attend = [&]<class Kv>(auto&& with) {
    const Kv *keys[kPiecePanels], *values[kPiecePanels];  // panels of the piece
    for (int panel = begin; panel < end; ++panel) {
      const int position = piece_begin + panel * kPanel;
      const std::int64_t offset = c.offset(a.block_table[position / c.block_size], kv_head, position % c.block_size / kPanel);
      keys[panel] = reinterpret_cast<const Kv*>(c.keys + offset);
      values[panel] = reinterpret_cast<const Kv*>(c.values + offset);
    }
    with(a, tile, keys, values, seen, piece_begin, begin, end);
  };
  if (c.type == KvType::kInt8) {
    attend.template operator()<std::uint8_t>(attend_codes);
  } else {
    attend.template operator()<bf16>(attend_panels<Products>);
  }
}

// Joins a piece, of each vector that saw any of it, to what came before; piece_of(v) is where its weighted sums lie.
template <class PieceOf>
inline void merge(Tile& tile, PieceOf piece_of) {
  alignas(64) float largest[kTile], total[kTile], before[kTile], now[kTile];
  for (int v = 0; v < tile.count; v += kLanes) {
    const Vec old = load(tile.largest + v), own = load(tile.piece_largest + v), top = max(own, old);
    Vec factors[2] = {old - top, own - top};
    exp_of_negative(factors);
    store(largest + v, top);
    store(total + v, load(tile.total + v) * factors[0] + load(tile.piece_total + v) * factors[1]);
    store(before + v, factors[0]);
    store(now + v, factors[1]);
  }
  for (int v = 0; v < tile.count; ++v) {
    if (tile.piece_total[v] == 0.0f) continue;
    const float* piece = piece_of(v);
    float* result = tile.result + v * tile.dim;
    if (!tile.started[v]) {
      for (int d = 0; d < tile.dim; d += kLanes) store(result + d, load(piece + d));
    } else {
      const Vec a = splat(before[v]), b = splat(now[v]);
      for (int d = 0; d < tile.dim; d += kLanes) store(result + d, load(result + d) * a + load(piece + d) * b);
    }
    tile.largest[v] = tile.started[v] ? largest[v] : tile.piece_largest[v];
    tile.total[v] = tile.started[v] ? total[v] : tile.piece_total[v];
    tile.started[v] = true;
  }
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
  for (int v = 0; v < kTile; ++v) tile.largest[v] = tile.total[v] = tile.piece_largest[v] = tile.piece_total[v] = 0.0f;
  for (std::int64_t first = 0; first < vectors; first += kTile) {
    const std::int64_t left = vectors - first;
    const Span all = fill_tile(a, tile, row_of, head, first, left < kTile ? static_cast<int>(left) : kTile);
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
      read_queries<Products>(a, tile);
      for (int begin = all.begin / kPiece * kPiece; begin < all.end; begin += kPiece) {
        attend_piece<Products>(a, tile, head, intersect(all, {begin, begin + kPiece}), begin);
        merge(tile, [&](int v) { return tile.piece + v * tile.dim; });
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
    read_queries<Products>(a, tile);
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
      const float* from[kTile];
      for (int v = 0; v < tile.count; ++v) {
        from[v] = partial(a, rows, head, piece, first + v);
        tile.piece_largest[v] = from[v][dim];
        tile.piece_total[v] = from[v][dim + 1];
      }
      merge(tile, [&](int v) { return from[v]; });
    }
    write_results(a, tile);
  });
}

}  // namespace
}  // namespace octavo
