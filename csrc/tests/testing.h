// What the files of kernels_test share: checks that say where they failed, random numbers and matrices that are the
// same on every machine.
//
//   rules.h             the rules of kernels.h, said again
//   kernels_test.cpp    main; the kernels that go row by row
//   matmul_test.cpp     matrix products and their epilogues
//   quant_test.cpp      the same with weights in few bits
//   attention_test.cpp  paged attention
//   numerics_test.cpp   what has no table: packing, rotation, sampling, subnormals
//
// Results are held against float64 within a bound that follows from the arithmetic, and against the rule itself, bit
// for bit. Memory that a kernel must not read is NaN, and what it must not write is compared.
#pragma once

#include <bit>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <new>
#include <utility>
#include <vector>

#include "kernels.h"
#include "tests/rules.h"

namespace octavo::testing {

constexpr int round_up(int n, int to) { return (n + to - 1) / to * to; }

// ------------------------------------------------------------------------------------------------------------- checks

// One kernel table on its way through the tests: counts what fails, and folds every result into a digest (FNV-1a), so
// that two tables, or two machines, can be compared by one number.
class Test {
 public:
  explicit Test(const Kernels& table) : kernels(table) {}

  const Kernels& kernels;

  // Names the case, for what fails in it.
  [[gnu::format(printf, 2, 3)]] void begin(const char* format, ...) {
    std::va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(case_, sizeof case_, format, arguments);
    va_end(arguments);
  }

  void check(bool holds, const char* what, std::int64_t row = 0, std::int64_t column = 0) {
    if (!holds) fail("%s at [%lld, %lld]", what, static_cast<long long>(row), static_cast<long long>(column));
  }
  template <class T>
  void same(T got, T want, const char* what, std::int64_t row, std::int64_t column) {
    if (got == want) return;
    fail("%s at [%lld, %lld]: %.9g, not %.9g", what, static_cast<long long>(row), static_cast<long long>(column),
         static_cast<double>(got), static_cast<double>(want));
  }
  void near(double got, double exact, double bound, std::int64_t row, std::int64_t column) {
    if (std::fabs(got - exact) <= bound) return;  // false of NaN
    fail("float64 at [%lld, %lld]: %.9g is %.3g from %.9g; at most %.3g is allowed", static_cast<long long>(row),
         static_cast<long long>(column), got, std::fabs(got - exact), exact, bound);
  }

  void result(bf16 x) { fold(x, 2); }
  // Which NaN an operation gives is the processor's affair.
  void result(float x) { fold(std::isnan(x) ? 0x7fc00000u : std::bit_cast<std::uint32_t>(x), 4); }
  void result(double x) { fold(std::bit_cast<std::uint64_t>(x), 8); }
  void result(std::int32_t x) { fold(static_cast<std::uint32_t>(x), 4); }

  std::uint64_t digest() const { return digest_; }
  long results() const { return results_; }
  long failures() const { return failures_; }

 private:
  static constexpr long kShown = 20;  // failures; the others are only counted

  [[gnu::format(printf, 2, 3)]] void fail(const char* format, ...) {
    if (++failures_ > kShown) return;
    std::fprintf(stderr, "kernels_test: %s: %s: ", kernels.name, case_);
    std::va_list arguments;
    va_start(arguments, format);
    std::vfprintf(stderr, format, arguments);
    va_end(arguments);
    std::fputc('\n', stderr);
  }
  void fold(std::uint64_t bits, int bytes) {
    ++results_;
    for (int i = 0; i < bytes; ++i) digest_ = (digest_ ^ (bits >> 8 * i & 0xff)) * 0x100000001b3;
  }

  char case_[200] = "";
  std::uint64_t digest_ = 0xcbf29ce484222325;
  long results_ = 0, failures_ = 0;
};

// ------------------------------------------------------------------------------------------------------------- inputs

// SplitMix64, and only exact arithmetic on top: the same numbers on every machine.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t bits() {
    std::uint64_t x = state_ += 0x9e3779b97f4a7c15;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
  }
  int below(int n) { return static_cast<int>(bits() % static_cast<std::uint64_t>(n)); }
  // In [-scale, scale), on a grid of 2^-23 of it: zero, or far from the subnormals.
  float real(float scale = 1) {
    return static_cast<float>(static_cast<int>(bits() >> 40) - (1 << 23)) * 0x1p-23f * scale;
  }
  float real_bf16(float scale = 1) { return widen(nearest_bf16(real(scale))); }

 private:
  std::uint64_t state_;
};

template <class T>
struct Aligned {  // to 64 bytes
  using value_type = T;
  Aligned() = default;
  template <class U>
  Aligned(const Aligned<U>&) {}
  T* allocate(std::size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), std::align_val_t{64})); }
  void deallocate(T* p, std::size_t) { ::operator delete(p, std::align_val_t{64}); }
  bool operator==(const Aligned&) const { return true; }
};
template <class T>
using Buffer = std::vector<T, Aligned<T>>;

constexpr bf16 kPoison = 0x7fc1;  // a NaN that no kernel writes
template <class T>
T poison() {
  if constexpr (sizeof(T) == 2) return kPoison;
  return static_cast<T>(std::bit_cast<float>(0x7fc12345u));
}
inline std::uint32_t bits_of(bf16 x) { return x; }
inline std::uint32_t bits_of(float x) { return std::bit_cast<std::uint32_t>(x); }

// Rows of a kernel, as kernels.h wants them; what it writes starts as poison.
template <class T>
struct Matrix {
  Matrix(int rows, int width, T fill = poison<T>(), int spare = 32)
      : rows(rows), width(width), stride(round_up(width, 32) + spare), data(rows * stride, fill) {}
  T& at(std::int64_t row, std::int64_t column) { return data[row * stride + column]; }
  T at(std::int64_t row, std::int64_t column) const { return data[row * stride + column]; }

  int rows, width;
  std::int64_t stride;
  Buffer<T> data;
};

inline Rows view(Matrix<bf16>& m) { return {m.data.data(), m.stride}; }
inline FloatRows view(Matrix<float>& m) { return {m.data.data(), m.stride}; }

// Random rows to read: columns up to the stride are zero.
template <class T = bf16>
Matrix<T> input(Random& random, int rows, int width, float scale = 1, int spare = 0) {
  Matrix<T> m(rows, width, T{0}, spare);
  for (int row = 0; row < rows; ++row) {
    for (int column = 0; column < width; ++column) {
      if constexpr (sizeof(T) == 2) {
        m.at(row, column) = nearest_bf16(random.real(scale));
      } else {
        m.at(row, column) = random.real(scale);
      }
    }
  }
  return m;
}

struct Range {
  int begin = 0, end = 0;
  bool holds(std::int64_t i) const { return begin <= i && i < end; }
};

// A range in up to three pieces, at random multiples of step.
inline std::vector<Range> cut(Random& random, Range whole, int step = 1) {
  std::vector<Range> pieces;
  const int steps = (whole.end - whole.begin) / step;
  int begin = whole.begin;
  for (int piece = 0; piece < 2 && steps > 1; ++piece) {
    const int end = whole.begin + random.below(steps + 1) * step;
    if (end <= begin) continue;
    pieces.push_back({begin, end});
    begin = end;
  }
  if (begin < whole.end) pieces.push_back({begin, whole.end});
  return pieces;
}

// Calls f(row, column, result) for what had to be written; all else must be as it was before, whatever the stride.
template <class T, class F>
void visit(Test& t, const Matrix<T>& before, const Matrix<T>& out, Range rows, Range columns, F&& f) {
  for (int row = 0; row < out.rows; ++row) {
    for (int column = 0; column < out.stride; ++column) {
      if (rows.holds(row) && columns.holds(column)) {
        t.result(out.at(row, column));
        f(row, column, out.at(row, column));
      } else {
        t.check(bits_of(out.at(row, column)) == bits_of(before.at(row, column)), "was written", row, column);
      }
    }
  }
}

// ----------------------------------------------------------------------------------------------------------- the tests

void test_matmul(Test& t);
void test_quant(Test& t);
void test_attention(Test& t);
// Independent of the table.
void test_packing(Test& t);
void test_rotation(Test& t);
void test_sampling(Test& t);

}  // namespace octavo::testing
