// Attention over keys and values in int8 (the rule is in kernels.h, above Attention): both products are of whole numbers, so that
// no order is left open, and what a table has for products of bytes does the work. Queries and weights are whole numbers of two
// bytes, upper and lower ones apart; keys and values are bytes plus 128, which the sums start without:
//
//   scores   sum of (128 * upper + lower) * (u - 128) over dimensions: quads of a key panel, 16 tokens side by side
//   mix      likewise over all tokens of a piece: quads of a value panel, 16 dimensions side by side; weights of tokens that are
//            not seen are zero, whatever their values hold
#pragma once

namespace octavo {
namespace {

// What is held in registers while the vectors of a tile pass by: quads of two panels (or of two sixteens of dimensions), which share
// what they are multiplied with.
constexpr int kManyQuads = 8, kFewQuads = kPanel / 4;
constexpr float kMostOfTwo = 127.0f * 128.0f;

inline std::int32_t sum(Ints x) {
  std::int32_t lanes[kLanes], total = 0;
  store_ints(lanes, x);
  for (const std::int32_t lane : lanes) total += lane;
  return total;
}

// `count` numbers, a multiple of 16, none larger than `largest` in size, as whole ones and the scale that is returned; `sums` of the
// upper bytes and of the lower ones. With one byte a number it is the lower one. Where `largest` is not finite, the scale is NaN and
// all else zero.
template <int Bytes>
inline float to_codes(const float* x, int count, float largest, std::int8_t* upper, std::int8_t* lower, std::int32_t (&sums)[2]) {
  constexpr float kMost = Bytes == 2 ? kMostOfTwo : 127.0f;
  const bool is_finite = largest <= 0x1.fffffep127f;
  sums[0] = sums[1] = 0;
  if (!is_finite || largest < 0x1p-100f) {
    for (int i = 0; i < count; ++i) lower[i] = 0;
    if (Bytes == 2)
      for (int i = 0; i < count; ++i) upper[i] = 0;
    return is_finite ? 0.0f : widen_one(kNanBits);
  }
  const Vec inverse = splat(kMost / largest);
  Ints uppers = splat_int(0), lowers = uppers;
  for (int i = 0; i < count; i += kLanes) {
    Ints low = to_ints(load(x + i) * inverse);
    if constexpr (Bytes == 2) {
      const Ints up = upper_byte(low);
      low = lower_byte(low, up);
      store_bytes(upper + i, up);
      uppers = uppers + up;
    }
    store_bytes(lower + i, low);
    lowers = lowers + low;
  }
  sums[0] = sum(uppers);
  sums[1] = sum(lowers);
  return largest / kMost;
}

inline float largest_size(const float* x, int count) {
  Vec sizes = splat(0.0f);
  for (int i = 0; i < count; i += kLanes) sizes = max_or_nan(sizes, abs(load(x + i)));
  return max_lane_or_nan(sizes);
}

// Hadamard, within sixteens and then between them (kernels.h, above KvCache).
inline void turn(float* x, int dim) {
  for (int i = 0; i < dim; i += kLanes) {
    Vec v = load(x + i);
    v = sums_and_differences<2>(sums_and_differences<1>(v));
    store(x + i, sums_and_differences<8>(sums_and_differences<4>(v)));
  }
  for (int half = kLanes; half < turn_width(dim); half *= 2) {
    for (int first = 0; first < dim; first += 2 * half) {
      for (int i = first; i < first + half; i += kLanes) {
        const Vec a = load(x + i), b = load(x + i + half);
        store(x + i, a + b);
        store(x + i + half, a - b);
      }
    }
  }
}

inline float quantize_head(const bf16* x, int head_dim, std::int8_t* codes) {
  alignas(64) float wide[kMaxHeadDim];
  alignas(64) std::int8_t bytes[kMaxHeadDim];
  std::int32_t sums[2];
  widen(x, wide, head_dim);
  turn(wide, head_dim);
  const float scale = to_codes<1>(wide, head_dim, largest_size(wide, head_dim), nullptr, bytes, sums);
  std::memcpy(codes, bytes, static_cast<std::size_t>(head_dim));
  return scale;
}

// Vector v's query, from what it is as floats.
inline void take_query_codes(Tile& tile, int v) {
  const int at = v * tile.dim;
  std::int32_t sums[2];
  float* query = tile.query + at;
  turn(query, tile.dim);
  tile.query_scale[v] =
      to_codes<2>(query, tile.dim, largest_size(query, tile.dim), tile.query_upper + at, tile.query_lower + at, sums);
  for (int i = 0; i < 2; ++i) tile.query_initial[v][i] = -128 * sums[i];
}

// Sums of one vector and P panels: what its upper bytes come to, and its lower ones.
template <int P>
struct TwoSums {
  Ints upper[P], lower[P];
};
template <int P>
OCTAVO_INLINE TwoSums<P> start_sums(const std::int32_t (&initial)[2]) {
  TwoSums<P> sums;
  for (int p = 0; p < P; ++p) sums.upper[p] = splat_int(initial[0]), sums.lower[p] = splat_int(initial[1]);
  return sums;
}
// On their way from some quads to the next ones.
template <int P>
OCTAVO_INLINE TwoSums<P> load_sums(const Tile& tile, int v) {
  TwoSums<P> sums;
  for (int p = 0; p < P; ++p) sums.upper[p] = load_ints(tile.sums[v][p][0]), sums.lower[p] = load_ints(tile.sums[v][p][1]);
  return sums;
}
template <int P>
OCTAVO_INLINE void store_sums(Tile& tile, int v, const TwoSums<P>& sums) {
  for (int p = 0; p < P; ++p) store_ints(tile.sums[v][p][0], sums.upper[p]), store_ints(tile.sums[v][p][1], sums.lower[p]);
}

template <int P, int Quads>
OCTAVO_INLINE void add_quads(TwoSums<P>& sums, const Bytes (&quads)[P][Quads], const std::int8_t* upper, const std::int8_t* lower) {
#pragma GCC unroll 8
  for (int i = 0; i < Quads; ++i) {
#pragma GCC unroll 2
    for (int p = 0; p < P; ++p) sums.upper[p] = dot<false>(sums.upper[p], quads[p][i], upper + 4 * i);
#pragma GCC unroll 2
    for (int p = 0; p < P; ++p) sums.lower[p] = dot<false>(sums.lower[p], quads[p][i], lower + 4 * i);
  }
}

// Calls f<Quads>(i) for i from 0, and on by Quads, until `count` quads have had their turn.
template <class F>
OCTAVO_INLINE void for_quads(int count, F&& f) {
  int i = 0;
  for (; i + kManyQuads <= count; i += kManyQuads) f.template operator()<kManyQuads>(i);
  for (; i < count; i += kFewQuads) f.template operator()<kFewQuads>(i);
}

OCTAVO_INLINE Vec scales(const std::uint8_t* panel, int dim) { return load(reinterpret_cast<const float*>(panel + kPanel * dim)); }

// Scores of all vectors with P panels. Those of tokens that are not seen may be anything.
template <int P>
inline void score_codes(const Attention& a, Tile& tile, const std::uint8_t* const* keys, int panel) {
  const float scale = a.scale / static_cast<float>(turn_width(tile.dim));
  for_quads(tile.dim / 4, [&]<int Quads>(int first) {
    Bytes quads[P][Quads];
    for (int p = 0; p < P; ++p)
      for (int i = 0; i < Quads; ++i) quads[p][i] = load_bytes(keys[panel + p] + (first + i) * 64);
    const bool is_last = 4 * (first + Quads) == tile.dim;
    for (int v = 0; v < tile.count; ++v) {
      const int at = v * tile.dim + 4 * first;
      TwoSums<P> sums = first == 0 ? start_sums<P>(tile.query_initial[v]) : load_sums<P>(tile, v);
      add_quads(sums, quads, tile.query_upper + at, tile.query_lower + at);
      if (!is_last) {
        store_sums(tile, v, sums);
        continue;
      }
      for (int p = 0; p < P; ++p) {
        Vec score = to_float(join(sums.upper[p], sums.lower[p])) * scales(keys[panel + p], tile.dim) * splat(tile.query_scale[v] * scale);
        if (a.softcap != 0.0f) score = soft_cap(score, splat(a.softcap));
        store(tile.scores + v * kPiece + (panel + p) * kPanel, score);
      }
    }
  });
}

// Scores of vector v become weights exp(s - max) * value scale, and these whole numbers, for panels [begin, end) of the piece; zero
// where it sees nothing. Leaves the greatest score and the sum of exp(s - max).
inline void weigh_codes(Tile& tile, const std::uint8_t* const* values, int v, Span span, int piece_begin, int begin, int end) {
  float* scores = tile.scores + v * kPiece - piece_begin;  // by position
  const Vec none = splat(-__builtin_inff());
  const int from = span.begin / kPanel * kPanel;
  Vec top = none;
  for (int t = from; t < span.end; t += kPanel) {
    const Vec score = load(scores + t);
    top = max(top, span.covers(t, t + kPanel) ? score : inside(span, t, score, none));
  }
  const float largest = max_lane(top);
  for (int t = piece_begin + begin * kPanel; t < from; t += kPanel) store(scores + t, splat(0.0f));
  Vec sums = splat(0.0f), heaviest = sums;
  for_shares(scores, span, largest, [&](int t, Vec share) {
    if (!span.covers(t, t + kPanel)) share = inside(span, t, share, splat(0.0f));
    Vec weight = share * scales(values[(t - piece_begin) / kPanel], tile.dim);
    if (!span.covers(t, t + kPanel)) weight = inside(span, t, weight, splat(0.0f));  // scales there may be anything
    store(scores + t, weight);
    sums = sums + share;
    heaviest = max_or_nan(heaviest, weight);
  });
  const int past = (span.end + kPanel - 1) / kPanel * kPanel;
  for (int t = past < from ? from : past; t < piece_begin + end * kPanel; t += kPanel) store(scores + t, splat(0.0f));
  tile.piece_largest[v] = largest;
  tile.piece_total[v] = sum(sums);
  const int at = v * kPiece + begin * kPanel;
  std::int32_t code_sums[2];
  tile.weight_scale[v] =
      to_codes<2>(tile.scores + at, (end - begin) * kPanel, max_lane_or_nan(heaviest), tile.weight_upper + at, tile.weight_lower + at,
                  code_sums);
  for (int i = 0; i < 2; ++i) tile.weight_initial[v][i] = -128 * code_sums[i];
}

// P sixteens of dimensions, from d on, of all vectors: weights x values of panels [begin, end).
template <int P>
inline void mix_codes(Tile& tile, const std::uint8_t* const* values, int begin, int end, int d) {
  for_quads((end - begin) * kFewQuads, [&]<int Quads>(int first) {
    const int panel = begin + first / kFewQuads;
    Bytes quads[P][Quads];
    for (int p = 0; p < P; ++p)
      for (int i = 0; i < Quads; ++i)
        quads[p][i] = load_bytes(values[panel + i / kFewQuads] + 4 * (i % kFewQuads * tile.dim + d + p * kLanes));
    const bool is_last = first + Quads == (end - begin) * kFewQuads;
    for (int v = 0; v < tile.count; ++v) {
      const int at = v * kPiece + panel * kPanel;
      TwoSums<P> sums = first == 0 ? start_sums<P>(tile.weight_initial[v]) : load_sums<P>(tile, v);
      add_quads(sums, quads, tile.weight_upper + at, tile.weight_lower + at);
      if (!is_last) {
        store_sums(tile, v, sums);
        continue;
      }
      float* out = tile.piece + v * tile.dim + d;
      for (int p = 0; p < P; ++p)
        store(out + p * kLanes, to_float(join(sums.upper[p], sums.lower[p])) * splat(tile.weight_scale[v]));
    }
  });
}

// As attend_piece, which calls it.
inline void attend_codes(const Attention& a, Tile& tile, const std::uint8_t* const* keys, const std::uint8_t* const* values, Span seen,
                         int piece_begin, int begin, int end) {
  for (int panel = begin; panel < begin + kAhead && panel < end; ++panel) fetch(keys[panel], tile.dim);
  for (int panel = begin; panel < end; panel += 2) {
    for (int ahead = panel + kAhead; ahead < panel + kAhead + 2 && ahead < end; ++ahead) fetch(keys[ahead], tile.dim);
    if (panel + 1 < end) {
      score_codes<2>(a, tile, keys, panel);
    } else {
      score_codes<1>(a, tile, keys, panel);
    }
  }
  for (int panel = begin; panel < end; ++panel) fetch(values[panel], tile.dim);
  for (int v = 0; v < tile.count; ++v) weigh_codes(tile, values, v, intersect(tile.visible[v], seen), piece_begin, begin, end);
  int d = 0;
  for (; d + 2 * kLanes <= tile.dim; d += 2 * kLanes) mix_codes<2>(tile, values, begin, end, d);
  if (d < tile.dim) mix_codes<1>(tile, values, begin, end, d);
}

}  // namespace
}  // namespace octavo
