// Products with weights in few bits: every stored format and int8, with activations in int8, int16 and bfloat16, in pieces.
#include <cmath>
#include <string>

#include "float_mode.h"
#include "quant.h"
#include "tests/testing.h"

namespace octavo::testing {
namespace {

// A weight [n, k], packed, and its columns as the rules want them.
struct Weight {
  QuantWeight packed;
  Buffer<std::uint8_t> data;
  std::vector<Grouped> columns;
};

Weight blank(int n, int k, const QuantFormat& format) {
  Weight w{{nullptr, n, k, format}, {}, std::vector<Grouped>(n)};
  w.data.assign(w.packed.bytes(), 0xa5);
  w.packed.data = w.data.data();
  return w;
}

// Random blocks; half floats in them are ordinary numbers. No format has more than four, and all begin or end with them.
Weight stored(Random& random, const StoredFormat& format, int n, int k) {
  Weight w = blank(n, k, format.quant);
  const int blocks = k / format.values;
  std::vector<std::uint8_t> rows(std::size_t(n) * blocks * format.bytes);
  for (std::uint8_t& byte : rows) byte = static_cast<std::uint8_t>(random.bits());
  const std::string name = format.name;
  const int halves = format.quant.has_minimum ? 2 : 1;
  const int first = name == "Q6_K" ? 208 : name == "Q3_K" ? 108 : name == "Q2_K" ? 80 : 0;
  for (std::size_t at = first; at < rows.size(); at += format.bytes) {
    for (int i = 0; i < halves; ++i) rows[at + 2 * i + 1] = static_cast<std::uint8_t>(0x20 | (rows[at + 2 * i + 1] & 0x87));
  }
  for (int column = 0; column < n; ++column) {
    Grouped& own = w.columns[column];
    own.group = format.quant.group;
    own.has_minimum = format.quant.has_minimum;
    for (int block = 0; block < blocks; ++block) {
      StoredGroup groups[kMostGroups];
      format.read(rows.data() + (std::size_t(column) * blocks + block) * format.bytes, groups);
      for (int g = 0; g < format.values / kChunk; ++g) {
        for (const std::uint8_t code : groups[g].codes)
          own.whole.push_back((format.quant.codes == Codes::kTable ? kNonLinear[code] : code) - format.quant.offset);
        for (int half = 0; half < format.quant.groups(); ++half) {
          own.scale.push_back(groups[g].scale_at(half));
          own.minimum.push_back(own.has_minimum ? groups[g].minimum_at(half) : 0.0f);
        }
      }
    }
  }
  pack_stored_panels(w.packed, format, rows.data(), n, w.data.data(), 1);
  return w;
}

Weight int8(Random& random, int n, int k) {
  Weight w = blank(n, k, kInt8);
  std::vector<float> rows;
  for (int i = 0; i < n * k; ++i) rows.push_back(random.real());
  for (int column = 0; column < n; ++column) {
    Grouped& own = w.columns[column];
    for (int first = 0; first < k; first += kChunk) {
      const int count = k - first < kChunk ? k - first : kChunk;
      const float* values = rows.data() + column * k + first;
      float most = 0;
      for (int i = 0; i < count; ++i) most = std::fmax(most, std::fabs(values[i]));
      own.scale.push_back(most / 127.0f);
      own.minimum.push_back(0);
      for (int i = 0; i < kChunk; ++i)
        own.whole.push_back(i < count ? static_cast<int>(std::nearbyint(values[i] / own.scale.back())) : 0);
    }
  }
  pack_int8_panels(w.packed, rows.data(), n, w.data.data(), 1);
  return w;
}

void test_columns(Test& t, const Weight& w) {
  std::vector<float> column(w.packed.k);
  for (int c = 0; c < w.packed.n; ++c) {
    unpack_column(w.packed, c, column.data());
    const Grouped& own = w.columns[c];
    for (int k = 0; k < w.packed.k; ++k) {
      const float scaled = static_cast<float>(own.whole[k]) * own.scale[k / own.group];
      t.same(column[k], own.has_minimum ? scaled + own.minimum[k / own.group] : scaled, "unpacked", c, k);
    }
  }
}

// By the rule, and near float64: with whole numbers of the rounded rows, whose own error is the rule's and not the kernel's.
void test_product(Test& t, Random& random, const Weight& w, int rows, Activations a) {
  const bool keep = a == Activations::kBfloat16;
  const float largest = a == Activations::kInt8 ? 127.0f : 127.0f * 128.0f;
  const int n = w.packed.n, k = w.packed.k, chunks = w.packed.chunks();
  Matrix<bf16> x = input(random, rows, k, 2, 32 * random.below(2));
  const int stride = chunks * chunks_each(a);
  Buffer<QuantChunk> made(std::size_t(rows) * stride);
  Matrix<float> out(rows, n);
  const Matrix<float> before = out;
  QuantMatmul m;
  m.m.x = view(x);
  m.m.epilogue = Epilogue::kFloat;
  m.m.out_float = view(out);
  m.m.out_width = n;
  m.w = w.packed;
  m.x = {made.data(), stride};
  m.activations = a;
  for (const Range& part : cut(random, {0, rows})) t.kernels.quantize({m.m.x, m.x, k, w.packed.format, a}, part.begin, part.end);
  for (const Range& part : cut(random, {0, rows}))
    for (const Range& panels : cut(random, {0, w.packed.panels()}))
      t.kernels.quant_matmul(m, part.begin, part.end, panels.begin, panels.end);
  std::vector<float> row(chunks * kChunk, 0.0f);
  visit(t, before, out, {0, rows}, {0, n}, [&](int i, int j, float got) {
    for (int c = 0; c < k; ++c) row[c] = widen(x.at(i, c));
    const Grouped& column = w.columns[j];
    t.same(got, keep ? kept_product_rule(row.data(), column) : whole_product_rule(row.data(), column, largest), "the rule", i, j);
    double exact = 0, size = 0;
    for (int c = 0; c < k; ++c) {
      const WholeChunk chunk = whole_rule(row.data() + c / kChunk * kChunk, largest);
      const double value = keep ? row[c] : static_cast<double>(chunk.q[c % kChunk]) * chunk.scale;
      const double scaled = static_cast<double>(column.whole[c]) * column.scale[c / column.group];
      const double minimum = column.minimum[c / column.group];
      exact += value * (scaled + minimum);
      size += std::fabs(value) * (std::fabs(scaled) + std::fabs(minimum));
    }
    // Each group's terms round three times on their way (four in int16) and once as they are added; even and odd sums 17 times.
    t.near(got, exact, (2.0 * static_cast<double>(column.scale.size()) + 4 + 17) * kUnit * kSlack * size, i, j);
  });
}

}  // namespace

void test_quant(Test& t) {
  std::uint64_t seed = 900;
  for (const Activations a : {Activations::kInt8, Activations::kInt16, Activations::kBfloat16}) {
    for (const int rows : {1, 3, 20, 37}) {
      for (const StoredFormat& format : stored_formats()) {
        if (!format.quantised()) continue;
        Random random(seed++);
        t.begin("quant_matmul %s rows=%d activations=%d", format.name, rows, static_cast<int>(a));
        const Weight w = stored(random, format, 16 + random.below(30), format.values * (format.values == 32 ? 3 : 1));
        test_columns(t, w);
        test_product(t, random, w, rows, a);
      }
      Random random(seed++);
      t.begin("quant_matmul int8 rows=%d activations=%d", rows, static_cast<int>(a));
      const Weight w = int8(random, 35, 75);
      test_columns(t, w);
      test_product(t, random, w, rows, a);
    }
  }
}

}  // namespace octavo::testing
