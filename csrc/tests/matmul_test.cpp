// Matrix products: shapes with ragged ends, every epilogue, with and without bias, in one range and in pieces of it.
#include "float_mode.h"
#include "pack.h"
#include "tests/testing.h"

namespace octavo::testing {
namespace {

struct Shape {
  int m, n, k;
};

bool is_gated(Epilogue e) { return e == Epilogue::kSiluMul || e == Epilogue::kGeluMul; }

// A product and what it needs. For a gated epilogue the rows of w are n of gate, then n of up.
struct Product {
  Product(Random& random, Shape s, Epilogue epilogue, bool with_bias);

  int panels() const { return is_gated(epilogue) ? 2 * round_up(shape.n, kPanel) / kPanel : (shape.n + 15) / kPanel; }
  Matmul arguments();

  // Of row i of x with row j of w: acc + bias by the rule, in float64, and what the roundings are relative to.
  struct Sum {
    float rule;
    double exact, bound;
  };
  Sum sum(int i, int j) const;

  Shape shape;
  Epilogue epilogue;
  Matrix<bf16> x;
  std::vector<float> x_values, w;  // [m, k], [rows of w, k]
  Buffer<bf16> packed;
  std::vector<float> bias;         // by row of w; empty for none
  Buffer<float> packed_bias;       // in the panels' order
};

Product::Product(Random& random, Shape s, Epilogue epilogue, bool with_bias)
    : shape(s), epilogue(epilogue), x(input(random, s.m, s.k, 2, 32 * random.below(2))) {
  const int halves = is_gated(epilogue) ? 2 : 1, step = halves;
  for (int i = 0; i < s.m; ++i)
    for (int k = 0; k < s.k; ++k) x_values.push_back(widen(x.at(i, k)));
  for (int i = 0; i < halves * s.n * s.k; ++i) w.push_back(random.real_bf16());

  const std::int64_t panel = round_up(s.k, kChunk) * kPanel;
  packed.assign(panels() * panel, kPoison);
  for (int half = 0; half < halves; ++half)
    pack_panels(w.data() + half * s.n * s.k, s.k, s.n, s.k, packed.data() + half * panel, 0, (s.n + 15) / kPanel, step);

  if (!with_bias) return;
  packed_bias.assign(panels() * kPanel, poison<float>());  // past n it is read, but must not come out
  for (int i = 0; i < halves * s.n; ++i) {
    bias.push_back(random.real(3));
    const int half = i / s.n, column = i % s.n;
    packed_bias[(column / kPanel * step + half) * kPanel + column % kPanel] = bias.back();
  }
}

Matmul Product::arguments() {
  Matmul m;
  m.x = view(x);
  m.w = {packed.data(), is_gated(epilogue) ? panels() * kPanel : shape.n, shape.k};
  m.bias = bias.empty() ? nullptr : packed_bias.data();
  m.epilogue = epilogue;
  m.out_width = shape.n;
  return m;
}

// Products are exact. A chunk's even or odd sum takes 15 roundings, even + odd one, the accumulator one a chunk, the
// bias one: each relative to a partial sum, which is below the sum of the sizes.
Product::Sum Product::sum(int i, int j) const {
  const float* row = x_values.data() + i * shape.k;
  const float* column = w.data() + j * shape.k;
  Sum s{matrix_rule(row, column, shape.k), 0, 0};
  double size = 0;
  for (int k = 0; k < shape.k; ++k) {
    const double product = static_cast<double>(row[k]) * column[k];
    s.exact += product;
    size += std::fabs(product);
  }
  if (!bias.empty()) {
    s.rule = s.rule + bias[j];
    s.exact += bias[j];
    size += std::fabs(bias[j]);
  }
  s.bound = (17 + round_up(shape.k, kChunk) / kChunk) * kUnit * kSlack * size;
  return s;
}

// Rows and panels to ask for: all of them, or all but the first and the last.
Range range_of(int count, bool whole, int step = 1) {
  return whole || count < 3 * step ? Range{0, count} : Range{step, count - step};
}

struct Asked {
  Range rows, panels, columns;
};

// Calls the kernel piece by piece; says what it had to write.
Asked run(Test& t, Random& random, const Product& p, const Matmul& m) {
  const int step = is_gated(p.epilogue) ? 2 : 1;
  const bool whole = random.below(2) == 0;
  Asked asked{range_of(p.shape.m, whole), range_of(p.panels(), whole, step), {}};
  for (const Range& rows : cut(random, asked.rows))
    for (const Range& panels : cut(random, asked.panels, step))
      t.kernels.matmul(m, rows.begin, rows.end, panels.begin, panels.end);
  const int end = asked.panels.end / step * kPanel;
  asked.columns = {asked.panels.begin / step * kPanel, end < m.out_width ? end : m.out_width};
  return asked;
}

void test_float(Test& t, Random& random, Product& p) {
  Matrix<float> out(p.shape.m, p.shape.n);
  const Matrix<float> before = out;
  Matmul m = p.arguments();
  m.out_float = view(out);
  const Asked asked = run(t, random, p, m);
  visit(t, before, out, asked.rows, asked.columns, [&](int row, int column, float got) {
    const Product::Sum want = p.sum(row, column);
    t.same(got, want.rule, "the rule", row, column);
    t.near(got, want.exact, want.bound, row, column);
  });
}

void test_store(Test& t, Random& random, Product& p) {
  Matrix<bf16> out(p.shape.m, p.shape.n);
  const Matrix<bf16> before = out;
  Matmul m = p.arguments();
  m.out = view(out);
  if (p.shape.n > 1) --m.out_width;  // a column that nobody wants
  const Asked asked = run(t, random, p, m);
  visit(t, before, out, asked.rows, asked.columns, [&](int row, int column, bf16 got) {
    const Product::Sum want = p.sum(row, column);
    t.same(got, nearest_bf16(want.rule), "the rule", row, column);
    t.near(widen(got), want.exact, rounded(want.exact, want.bound), row, column);
  });
}

// In place, as the runtime does it, or not. The sum with the residual rounds once more, to float32.
void test_add(Test& t, Random& random, Product& p) {
  Matrix<float> residual = input<float>(random, p.shape.m, p.shape.n, 100), out(p.shape.m, p.shape.n);
  const bool in_place = random.below(2) == 0;
  const Matrix<float> before = in_place ? residual : out, addend = residual;
  Matmul m = p.arguments();
  m.residual = view(residual);
  m.out_float = in_place ? view(residual) : view(out);
  const Asked asked = run(t, random, p, m);
  visit(t, before, in_place ? residual : out, asked.rows, asked.columns, [&](int row, int column, float got) {
    const Product::Sum want = p.sum(row, column);
    t.same(got, addend.at(row, column) + widen(nearest_bf16(want.rule)), "the rule", row, column);
    const double exact = addend.at(row, column) + want.exact, bound = rounded(want.exact, want.bound);
    t.near(got, exact, bound + kUnit * kSlack * (std::fabs(exact) + bound), row, column);
  });
}

// Float64 starts from the rule's gate and up, which are rounded to bfloat16.
void test_gated(Test& t, Random& random, Product& p) {
  Matrix<bf16> out(p.shape.m, p.shape.n);
  const Matrix<bf16> before = out;
  Matmul m = p.arguments();
  m.out = view(out);
  const Gate f = p.epilogue == Epilogue::kSiluMul ? Gate::kSilu : Gate::kGelu;
  const Asked asked = run(t, random, p, m);
  visit(t, before, out, asked.rows, asked.columns, [&](int row, int column, bf16 got) {
    const bf16 gate = nearest_bf16(p.sum(row, column).rule), up = nearest_bf16(p.sum(row, p.shape.n + column).rule);
    t.same(got, nearest_bf16(gated_rule(f, widen(gate), widen(up))), "the rule", row, column);
    const Gated want = gated(f, widen(gate), widen(up));
    t.near(widen(got), want.exact, rounded(want.exact, want.bound), row, column);
  });
}

void test_subnormals(Test& t) {
  t.begin("matmul of subnormals");
  Matrix<bf16> x(1, kChunk, 0x0040, 0);  // 2^-127
  const Buffer<bf16> ones(kChunk * kPanel, 0x3f80);
  Matrix<float> out(1, kPanel);
  Matmul m;
  m.x = view(x);
  m.w = {ones.data(), kPanel, kChunk};
  m.epilogue = Epilogue::kFloat;
  m.out_float = view(out);
  m.out_width = kPanel;
  t.kernels.matmul(m, 0, 1, 0, 1);
  for (int column = 0; column < kPanel; ++column) t.same(out.at(0, column), 0.0f, "zero", 0, column);
}

}  // namespace

void test_matmul(Test& t) {
  // Rows around the blocks of every table (2, 4, 16, 32), columns and k's around panels and chunks.
  constexpr Shape kShapes[] = {{1, 1, 1},   {1, 16, 32},  {2, 17, 33},  {3, 35, 100}, {5, 70, 64},
                               {9, 49, 96}, {33, 33, 65}, {40, 20, 31}, {70, 50, 40}, {2, 40, 1000}};
  std::uint64_t seed = 1;
  for (const Shape& s : kShapes) {
    for (const Epilogue e :
         {Epilogue::kStore, Epilogue::kFloat, Epilogue::kAdd, Epilogue::kSiluMul, Epilogue::kGeluMul}) {
      for (const bool with_bias : {false, true}) {
        Random random(seed++);
        Product p(random, s, e, with_bias);
        t.begin("matmul m=%d n=%d k=%d epilogue=%d bias=%d", s.m, s.n, s.k, static_cast<int>(e), with_bias);
        if (e == Epilogue::kFloat) test_float(t, random, p);
        if (e == Epilogue::kStore) test_store(t, random, p);
        if (e == Epilogue::kAdd) test_add(t, random, p);
        if (is_gated(e)) test_gated(t, random, p);
      }
    }
  }
  test_subnormals(t);
}

}  // namespace octavo::testing
