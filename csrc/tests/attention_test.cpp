// Paged attention against its rule and float64; independence of chunks, ranges, blocks and pieces.
#include <algorithm>

#include "tests/testing.h"

namespace octavo::testing {
namespace {

struct Shape {
  int group, kv_heads, head_dim, block_size;
  int position, count;  // of the query rows
  int window;
  float softcap;
  KvType type = KvType::kBfloat16;
};

// A token's head as it is stored: numbers that are bfloat16, and what they are to be multiplied with.
struct Head {
  std::vector<float> numbers;
  float scale = 1;
};
// Number i of n turned ones: what half = 1 joins is joined first.
float turned(const float* x, int n, int i) {
  if (n == 1) return x[0];
  const float lower = turned(x, n / 2, i % (n / 2)), upper = turned(x + n / 2, n / 2, i % (n / 2));
  return i < n / 2 ? lower + upper : lower - upper;
}
int turned_width(int dim) {
  int n = 16;
  while (dim % (2 * n) == 0) n *= 2;
  return n;
}
std::vector<float> turn(const float* x, int dim) {
  const int n = turned_width(dim);
  std::vector<float> result;
  for (int i = 0; i < dim; ++i) result.push_back(turned(x + i / n * n, n, i % n));
  return result;
}

// As whole numbers up to `most` in size.
Head codes_of(const std::vector<float>& x, float most) {
  Head head;
  float largest = 0;
  for (const float number : x) largest = std::fmax(largest, std::fabs(number));
  const bool small = largest < 0x1p-100f;
  for (const float number : x)
    head.numbers.push_back(small ? 0.0f : static_cast<float>(std::nearbyint(static_cast<double>(number * (most / largest)))));
  head.scale = small ? 0.0f : largest / most;
  return head;
}

Head stored_head(const float* x, int dim, KvType type) {
  return type == KvType::kInt8 ? codes_of(turn(x, dim), 127.0f) : Head{{x, x + dim}};
}

constexpr float kTwoBytes = 127 * 128;  // of queries and weights that meet codes
// The exact sum of products of whole numbers, rounded once.
float sum_of_codes(int count, auto&& product) {
  std::int64_t sum = 0;
  for (int i = 0; i < count; ++i) sum += product(i);
  return static_cast<float>(sum);
}

// Keys and values of one sequence, in random blocks of a cache whose other slots are all NaN. In int8, `keys` and `values` are
// codes of what they turned into.
struct Sequence {
  Sequence(Random& random, const Shape& s);
  // Puts the tokens from `seen` on into blocks of this size, one of which stays unused; what is before is NaN as well.
  void lay_out(Random& random, int block_size, int seen);
  float key(int token, int head, int d) const { return keys[(token * shape.kv_heads + head) * shape.head_dim + d]; }
  float value(int token, int head, int d) const { return values[(token * shape.kv_heads + head) * shape.head_dim + d]; }
  float key_scale(int token, int head) const { return key_scales[token * shape.kv_heads + head]; }
  float score_scale() const {  // of products of what is read
    return shape.type == KvType::kInt8 ? scale / static_cast<float>(turned_width(shape.head_dim)) : scale;
  }
  float value_scale(int token, int head) const { return value_scales[token * shape.kv_heads + head]; }
  Attention arguments(Matrix<bf16>& q, Matrix<bf16>& out);

  Shape shape;
  int tokens;
  float scale;
  std::vector<float> keys, values;              // [token][head][head_dim]
  std::vector<float> key_scales, value_scales;  // [token][head]
  Buffer<std::uint8_t> key_blocks, value_blocks;
  std::vector<std::int32_t> table;
};

Sequence::Sequence(Random& random, const Shape& s)
    : shape(s), tokens(s.position + s.count), scale(1.5f / std::sqrt(static_cast<float>(s.head_dim))) {
  for (int i = 0; i < tokens * s.kv_heads; ++i) {
    std::vector<float> x(s.head_dim);
    const float size = i % 50 == 7 ? 0.0f : 1.0f;  // a few heads are all zero
    for (float& number : x) number = random.real_bf16(size);
    const Head key = stored_head(x.data(), s.head_dim, s.type);
    for (float& number : x) number = random.real_bf16(2 * size);
    const Head value = stored_head(x.data(), s.head_dim, s.type);
    keys.insert(keys.end(), key.numbers.begin(), key.numbers.end());
    values.insert(values.end(), value.numbers.begin(), value.numbers.end());
    key_scales.push_back(key.scale);
    value_scales.push_back(value.scale);
  }
  lay_out(random, s.block_size, s.window > 0 ? s.position - s.window + 1 : 0);
}

void Sequence::lay_out(Random& random, int block_size, int seen) {
  shape.block_size = block_size;
  const int blocks = (tokens + block_size - 1) / block_size, dim = shape.head_dim, panels = block_size / 16;
  table.resize(blocks + 1);
  for (int i = 0; i <= blocks; ++i) table[i] = i;
  for (int i = blocks; i > 0; --i) std::swap(table[i], table[random.below(i + 1)]);
  table.resize(blocks);
  const bool codes = shape.type == KvType::kInt8;
  const std::int64_t panel_bytes = codes ? 16 * (dim + 4) : 32 * dim;
  key_blocks.assign((blocks + 1) * shape.kv_heads * panels * panel_bytes, 0xff);  // NaN, whatever it is read as
  value_blocks = key_blocks;
  for (int token = std::max(seen, 0); token < tokens; ++token) {
    const int slot = token % block_size % 16;
    for (int head = 0; head < shape.kv_heads; ++head) {
      const int panel = (table[token / block_size] * shape.kv_heads + head) * panels + token % block_size / 16;
      std::uint8_t *keys_of = &key_blocks[panel * panel_bytes], *values_of = &value_blocks[panel * panel_bytes];
      for (int d = 0; d < dim; ++d) {
        if (codes) {
          keys_of[d / 4 * 64 + slot * 4 + d % 4] = static_cast<std::uint8_t>(static_cast<int>(key(token, head, d)) + 128);
          values_of[slot / 4 * 4 * dim + d * 4 + slot % 4] =
              static_cast<std::uint8_t>(static_cast<int>(value(token, head, d)) + 128);
        } else {
          reinterpret_cast<bf16*>(keys_of)[d / 2 * 32 + slot * 2 + d % 2] = nearest_bf16(key(token, head, d));
          reinterpret_cast<bf16*>(values_of)[slot / 2 * 2 * dim + d * 2 + slot % 2] = nearest_bf16(value(token, head, d));
        }
      }
      if (codes) {
        reinterpret_cast<float*>(keys_of + 16 * dim)[slot] = key_scale(token, head);
        reinterpret_cast<float*>(values_of + 16 * dim)[slot] = value_scale(token, head);
      }
    }
  }
}

// All rows of q; it has as many as the sequence has query rows.
Attention Sequence::arguments(Matrix<bf16>& q, Matrix<bf16>& out) {
  Attention a;
  a.q = view(q);
  a.out = view(out);
  const std::int64_t panel_bytes = shape.type == KvType::kInt8 ? 16 * (shape.head_dim + 4) : 32 * shape.head_dim;
  const std::int64_t stride = shape.kv_heads * panel_bytes * (shape.block_size / 16);
  a.cache = {key_blocks.data(), value_blocks.data(), shape.kv_heads, shape.head_dim, shape.block_size, stride, shape.type};
  a.block_table = table.data();
  a.heads = shape.group * shape.kv_heads;
  a.count = shape.count;
  a.position = shape.position;
  a.window = shape.window;
  a.scale = scale;
  a.softcap = shape.softcap;
  return a;
}

int first_seen(const Sequence& s, int last) { return s.shape.window > 0 ? std::max(0, last - s.shape.window + 1) : 0; }

// What the pieces so far give: the greatest score, the sum of weights, the weighted sums of values.
struct Piece {
  float largest = 0, total = 0;
  std::vector<float> mixed;
};

// Positions first .. last of one piece, for a query vector of head_dim: floats, or what codes_of made of them.
Piece piece_rule(const Sequence& s, const Head& query, int kv_head, int first, int last) {
  const int dim = s.shape.head_dim, begin = first / kPiece * kPiece;
  const bool codes = s.shape.type == KvType::kInt8;
  float weights[kPiece] = {}, largest = -INFINITY;
  for (int t = first; t <= last; ++t) {
    const float* key = &s.keys[(t * s.shape.kv_heads + kv_head) * dim];
    float score = codes ? sum_of_codes(dim, [&](int d) { return static_cast<std::int64_t>(query.numbers[d] * key[d]); })
                        : matrix_rule(query.numbers.data(), key, dim);
    score = score * s.key_scale(t, kv_head);  // one in bfloat16, as a query's is
    score = score * (query.scale * s.score_scale());
    if (s.shape.softcap != 0) score = softcap_rule(score, s.shape.softcap);
    weights[t - begin] = score;
    largest = score > largest ? score : largest;
  }
  for (int t = first; t <= last; ++t) {
    const float weight = exp_rule(weights[t - begin] - largest);
    weights[t - begin] = codes ? weight : widen(nearest_bf16(weight));
  }
  Piece piece{largest, lane_sum(kPiece, [&](int i) { return weights[i]; }), {}};
  if (codes) {
    std::vector<float> scaled;
    for (int t = first; t <= last; ++t) scaled.push_back(weights[t - begin] * s.value_scale(t, kv_head));
    const Head whole = codes_of(scaled, kTwoBytes);
    for (int d = 0; d < dim; ++d) {
      const auto product = [&](int i) { return static_cast<std::int64_t>(whole.numbers[i] * s.value(first + i, kv_head, d)); };
      piece.mixed.push_back(sum_of_codes(last - first + 1, product) * whole.scale);
    }
    return piece;
  }
  for (int d = 0; d < dim; ++d) {
    float values[kPiece] = {};  // what is not seen has weight zero, and zero is all that it adds
    for (int t = first; t <= last; ++t) values[t - begin] = s.value(t, kv_head, d);
    piece.mixed.push_back(matrix_rule(weights, values, kPiece, kPanel));
  }
  return piece;
}

// One query vector that stands at position `last`: its head_dim results.
std::vector<bf16> attention_rule(const Sequence& s, const Head& query, int kv_head, int last) {
  Piece all;
  const int first = first_seen(s, last);
  for (int begin = first / kPiece * kPiece; begin <= last; begin += kPiece) {
    const Piece piece =
        piece_rule(s, query, kv_head, std::max(first, begin), std::min(last, begin + kPiece - 1));
    if (begin <= first) {
      all = piece;
      continue;
    }
    const float top = std::max(all.largest, piece.largest);
    const float before = exp_rule(all.largest - top), now = exp_rule(piece.largest - top);
    all.largest = top;
    all.total = all.total * before + piece.total * now;
    for (int d = 0; d < s.shape.head_dim; ++d) all.mixed[d] = all.mixed[d] * before + piece.mixed[d] * now;
  }
  std::vector<bf16> results;
  if (s.shape.type == KvType::kInt8) {
    all.mixed = turn(all.mixed.data(), s.shape.head_dim);
    for (float& mixed : all.mixed) mixed = mixed / static_cast<float>(turned_width(s.shape.head_dim));
  }
  for (const float mixed : all.mixed) results.push_back(nearest_bf16(mixed / all.total));
  return results;
}

struct Expected {
  double exact, bound;
};

// The same in float64.
//
// With units of roundoff u (float32) and b (bfloat16):
//   score    the product of the rule is off by (16 + chunks) u of the sum of sizes, the scale adds u of the score; a
//            soft-cap adds 6 u of the score (division, tanh's slope times that, tanh's 2 ulps, product): e in all,
//            absolute
//   weight   exp(s - m) is off by e, by the difference's u |s - m|, by exp's 2 u, and by its rounding b. The error of m
//            itself is common to all weights of a piece, but not to all pieces, whose factors exp(m - M) are off by as
//            much: relative d = b + 2 (e + u |s - m| + 2 u) a weight
//   sums     within a piece a total takes 16 + 4 roundings, a weighted sum 8 + 16; each merge adds exp's 2 u and 2
//            more, and the division 1: (25 + 4 pieces) u
// Result: a quotient of two sums whose terms are off by d each, so by 2 d (1 + d) of the sum of sizes; rounded once at
// the end. Weights under e^-87 are dropped, which is nothing next to b.
//
// In int8 the numbers as stored are exact, and a step is 1 / 16256 of the largest: of a query's numbers, each off by half a step
// times its key's, which comes to e; of a piece's weights, each off by half a step times its value's, which comes to the weighted
// sum, and b is not there. Products with scales add 3 u, which is less than what the other bounds have to spare.
std::vector<Expected> expect(const Sequence& s, const float* query, int kv_head, int last) {
  const int dim = s.shape.head_dim, first = first_seen(s, last);
  const double cap = s.shape.softcap;
  std::vector<double> weights;
  double lowest = INFINITY, top = -INFINITY, error = 0, half_step = 0;
  const bool codes = s.shape.type == KvType::kInt8;
  for (int d = 0; codes && d < dim; ++d) half_step = std::max(half_step, std::fabs(static_cast<double>(query[d])) / (2 * kTwoBytes));
  for (int t = first; t <= last; ++t) {
    double score = 0, size = 0, stepped = 0;
    for (int d = 0; d < dim; ++d) {
      const double key = static_cast<double>(s.key(t, kv_head, d)) * s.key_scale(t, kv_head), product = query[d] * key;
      score += product;
      size += std::fabs(product);
      stepped += half_step * std::fabs(key);
    }
    error = std::max(error, ((18 + (dim + 31) / 32) * kUnit * size + stepped) * s.score_scale());
    score *= s.score_scale();
    if (cap != 0) score = std::tanh(score / cap) * cap;
    weights.push_back(score);
    lowest = std::min(lowest, score);
    top = std::max(top, score);
  }
  if (cap != 0) error += 6 * kUnit * cap;
  double total = 0, heaviest = 0;
  for (int t = first; t <= last; ++t) {
    double& w = weights[t - first];
    total += w = std::exp(w - top);
    heaviest = std::max(heaviest, w * s.value_scale(t, kv_head));
  }
  half_step = codes ? heaviest / (2 * kTwoBytes) : 0;

  const double relative = (codes ? 0 : kBf16Unit) + 2 * (error + kUnit * (top - lowest) + 2 * kUnit);
  const double sums = (25 + 4 * (last / kPiece - first / kPiece + 1)) * kUnit;
  std::vector<double> exacts, sizes, steps;
  for (int d = 0; d < dim; ++d) {
    double exact = 0, size = 0, stepped = 0;
    for (int t = first; t <= last; ++t) {
      const double value = static_cast<double>(s.value(t, kv_head, d)) * s.value_scale(t, kv_head);
      exact += weights[t - first] * value / total;
      size += weights[t - first] * std::fabs(value) / total;
      stepped += half_step * std::fabs(static_cast<double>(s.value(t, kv_head, d))) / total;
    }
    exacts.push_back(exact);
    sizes.push_back(size);
    steps.push_back(stepped);
  }
  std::vector<Expected> expected;
  for (int d = 0; d < dim; ++d) {
    double exact = exacts[d], size = sizes[d], stepped = 0;
    if (codes) {  // turned back by the definition; what all numbers are off by adds up, and ten roundings
      const int n = turned_width(dim), first_of = d / n * n;
      exact = size = 0;
      for (int i = 0; i < n; ++i) stepped += 1.1 * steps[first_of + i] / n;
      for (int i = 0; i < n; ++i) {
        exact += (__builtin_popcount(i & (d % n)) % 2 == 0 ? 1 : -1) * exacts[first_of + i] / n;
        size += 1.1 * sizes[first_of + i] / n;
      }
    }
    expected.push_back({exact, rounded(exact, (2 * relative * (1 + relative) + 2 * sums + 10 * kUnit) * size + stepped)});
  }
  return expected;
}

// Some rows before and after the sequence's belong to others.
void test_shape(Test& t, const Shape& s) {
  t.begin("attention group=%d kv_heads=%d head_dim=%d block_size=%d position=%d count=%d window=%d softcap=%g int8=%d", s.group,
          s.kv_heads, s.head_dim, s.block_size, s.position, s.count, s.window, static_cast<double>(s.softcap),
          s.type == KvType::kInt8);
  constexpr int kBefore = 2, kAfter = 1;
  Random random(s.position + s.head_dim);
  Sequence sequence(random, s);
  const int width = s.group * s.kv_heads * s.head_dim;
  Matrix<bf16> q = input(random, kBefore + s.count + kAfter, width, 2), out(q.rows, width);
  const Matrix<bf16> before = out;
  Attention a = sequence.arguments(q, out);
  a.first = kBefore;
  t.kernels.attention(a, 0, s.count, 0, s.kv_heads);
  std::vector<float> query(s.head_dim);  // turned, where keys are
  std::vector<bf16> rule;
  std::vector<Expected> expected;
  visit(t, before, out, {kBefore, kBefore + s.count}, {0, width}, [&](int row, int column, bf16 got) {
    const int d = column % s.head_dim, kv_head = column / s.head_dim / s.group, last = s.position + row - kBefore;
    if (d == 0) {
      for (int i = 0; i < s.head_dim; ++i) query[i] = widen(q.at(row, column + i));
      if (s.type == KvType::kInt8) query = turn(query.data(), s.head_dim);
      rule = attention_rule(sequence, s.type == KvType::kInt8 ? codes_of(query, kTwoBytes) : Head{query}, kv_head, last);
      expected = expect(sequence, query.data(), kv_head, last);
    }
    t.same(got, rule[d], "the rule", row, column);
    const Expected& want = expected[d];
    t.near(widen(got), want.exact, want.bound, row, column);
  });
}

void expect_same(Test& t, const Matrix<bf16>& whole, const Matrix<bf16>& part, Range rows, Range columns) {
  const Matrix<bf16> untouched(part.rows, part.width);
  visit(t, untouched, part, rows, columns, [&](int row, int column, bf16 got) {
    t.same(got, whole.at(row, column), "the whole's", row, column);
  });
}

// A prefill in one piece, in chunks, row by row, a head at a time, and through other blocks: always the same bits.
void test_independence(Test& t, KvType type) {
  const Shape s{3, 2, 32, 16, 0, 300, 270, 0, type};
  Random random(7);
  Sequence sequence(random, s);
  const int width = s.group * s.kv_heads * s.head_dim, columns = s.group * s.head_dim;
  Matrix<bf16> q = input(random, s.count, width, 3);
  Matrix<bf16> whole(s.count, width), chunks = whole, ranges = whole, head = whole, blocks = whole;

  t.begin("attention of one prefill, in chunks");
  t.kernels.attention(sequence.arguments(q, whole), 0, s.count, 0, s.kv_heads);
  for (const Range& chunk : {Range{0, 1}, Range{1, 100}, Range{100, 257}, Range{257, 299}, Range{299, 300}}) {
    Attention a = sequence.arguments(q, chunks);
    a.first = a.position = chunk.begin;
    a.count = chunk.end - chunk.begin;
    t.kernels.attention(a, 0, a.count, 0, s.kv_heads);
  }
  expect_same(t, whole, chunks, {0, s.count}, {0, width});

  t.begin("attention in ranges of rows and heads");
  for (const Range& rows : {Range{20, 33}, Range{33, 290}})
    for (int kv_head = 0; kv_head < s.kv_heads; ++kv_head)
      t.kernels.attention(sequence.arguments(q, ranges), rows.begin, rows.end, kv_head, kv_head + 1);
  expect_same(t, whole, ranges, {20, 290}, {0, width});
  t.kernels.attention(sequence.arguments(q, head), 100, 110, 1, 2);
  expect_same(t, whole, head, {100, 110}, {columns, 2 * columns});

  t.begin("attention through other blocks");
  sequence.lay_out(random, 48, 0);
  t.kernels.attention(sequence.arguments(q, blocks), 0, s.count, 0, s.kv_heads);
  expect_same(t, whole, blocks, {0, s.count}, {0, width});
}

// Pieces apart, the last ones first, and then joined: the bits of the whole.
void test_pieces(Test& t, const Shape& s) {
  t.begin("attention of pieces that are joined, group=%d count=%d window=%d", s.group, s.count, s.window);
  Random random(s.count);
  Sequence sequence(random, s);
  const int width = s.group * s.kv_heads * s.head_dim;
  Matrix<bf16> q = input(random, s.count, width, 2), whole(s.count, width), joined = whole;
  t.kernels.attention(sequence.arguments(q, whole), 0, s.count, 0, s.kv_heads);
  const Attention a = sequence.arguments(q, joined);
  const int first = first_seen(sequence, s.position) / kPiece, pieces = (sequence.tokens + kPiece - 1) / kPiece;
  const std::int64_t head_stride = pieces * s.group * partial_floats(s.head_dim), row_stride = s.kv_heads * head_stride;
  Buffer<float> partials(s.count * row_stride, poison<float>());
  std::vector<AttentionRow> rows;
  for (int i = 0; i < s.count; ++i) rows.push_back({i, s.position + i, partials.data() + i * row_stride, head_stride});
  for (int head = 0; head < s.kv_heads; ++head) {
    const std::vector<Range> runs = cut(random, {first, pieces});
    for (auto run = runs.rbegin(); run != runs.rend(); ++run)
      t.kernels.attention_pieces(a, rows.data(), s.count, head, run->begin, run->end);
    t.kernels.attention_merge(a, rows.data(), s.count, head);
  }
  for (std::int64_t i = 0; i < s.count * s.kv_heads; ++i)
    for (std::int64_t j = 0; j < first * s.group * partial_floats(s.head_dim); ++j)
      t.check(bits_of(partials[i * head_stride + j]) == bits_of(poison<float>()), "a piece before the window was written", i);
  expect_same(t, whole, joined, {0, s.count}, {0, width});
}

void test_quantize_head(Test& t) {
  t.begin("keys and values in int8");
  Random random(3);
  for (const int dim : {16, 64, 80, 256}) {
    for (const float size : {1.0f, 100.0f, 0x1p-90f, 0x1p-110f, 0.0f, INFINITY}) {
      Buffer<bf16> x(dim);
      std::vector<float> wide(dim);
      for (int d = 0; d < dim; ++d) {
        x[d] = nearest_bf16(std::isinf(size) ? (d == 5 ? size : 1.0f) : random.real(size));
        wide[d] = widen(x[d]);
      }
      Buffer<std::int8_t> codes(dim, 99);
      const float scale = t.kernels.quantize_head(x.data(), dim, codes.data());
      if (std::isinf(size)) {
        t.check(std::isnan(scale), "infinity is told");
        continue;
      }
      const Head head = stored_head(wide.data(), dim, KvType::kInt8);
      wide = turn(wide.data(), dim);
      t.same(scale, head.scale, "the scale", dim, 0);
      for (int d = 0; d < dim; ++d) {
        t.same(static_cast<float>(codes[d]), head.numbers[d], "the rule", dim, d);
        t.near(static_cast<double>(codes[d]) * scale, wide[d], (0.5001 * scale) + (scale == 0 ? size * dim : 0), dim, d);
        t.result(static_cast<std::int32_t>(codes[d]));
      }
    }
  }
}

}  // namespace

void test_attention(Test& t) {
  // Groups and rows make tiles of 12 vectors and what is left; positions cross pieces of 256.
  constexpr Shape kShapes[] = {
      {1, 2, 16, 16, 0, 5, 0, 0},       {3, 1, 64, 16, 250, 10, 0, 0},  {7, 1, 48, 32, 505, 12, 0, 30},
      {3, 2, 80, 48, 530, 4, 100, 0},   {7, 2, 32, 16, 255, 3, 257, 5}, {1, 1, 256, 16, 600, 2, 512, 0},
      {3, 1, 64, 16, 10, 6, 1, 0},      {1, 1, 32, 16, 770, 1, 0, 0},   {7, 1, 64, 32, 40, 9, 33, 0},
      {1, 3, 128, 16, 254, 20, 250, 50}};
  constexpr KvType kTypes[] = {KvType::kBfloat16, KvType::kInt8};
  for (Shape s : kShapes)
    for (const KvType type : kTypes) s.type = type, test_shape(t, s);
  for (const KvType type : kTypes) test_independence(t, type);
  constexpr Shape kLong[] = {
      {1, 1, 48, 16, 1099, 1, 0, 0}, {3, 2, 32, 16, 1060, 40, 300, 0}, {7, 1, 64, 32, 765, 5, 0, 20}};
  for (Shape s : kLong)
    for (const KvType type : kTypes) s.type = type, test_pieces(t, s);
  test_quantize_head(t);
}

}  // namespace octavo::testing
