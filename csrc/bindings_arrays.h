// What the bindings of kernels share: numpy arrays as the rows of kernels.h, and names.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "bindings_names.h"
#include "kernels.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

template <class T, int Dims>
using Array = nb::ndarray<T, nb::ndim<Dims>, nb::device::cpu>;
using Bf16s = Array<bf16, 2>;
using ConstBf16s = Array<const bf16, 2>;
using Floats = Array<float, 2>;
using FlatBf16 = Array<const bf16, 1>;
using FlatFloat = Array<const float, 1>;
using Range = std::optional<std::pair<std::int64_t, std::int64_t>>;

inline void expect(bool condition, const char* what) {
  if (!condition) throw std::invalid_argument(what);
}

inline const Kernels& table(const std::string& name) {
  const Kernels* found = find(name.c_str());
  if (!found) throw std::invalid_argument("no kernel table " + name + " on this machine; see tables()");
  return *found;
}

template <class T>
Rows rows_of(const Array<T, 2>& a, std::int64_t width) {
  expect(a.stride(1) == 1 || a.shape(1) == 1, "the columns of an array must be contiguous");
  expect(static_cast<std::int64_t>(a.shape(1)) >= width, "an array has too few columns");
  return {const_cast<bf16*>(a.data()), a.stride(0)};
}

inline FloatRows rows_of(const Array<float, 2>& a, std::int64_t width) {
  expect(a.stride(1) == 1 || a.shape(1) == 1, "the columns of an array must be contiguous");
  expect(static_cast<std::int64_t>(a.shape(1)) >= width, "an array has too few columns");
  return {a.data(), a.stride(0)};
}

inline std::pair<std::int64_t, std::int64_t> bounds(const Range& range, std::int64_t limit) {
  const auto r = range.value_or(std::pair<std::int64_t, std::int64_t>{0, limit});
  expect(0 <= r.first && r.first <= r.second && r.second <= limit, "a range is out of bounds");
  return r;
}

// What a product does with its sums, for a weight of so many panels.
struct Result {
  std::optional<Bf16s> out;
  std::optional<Floats> out_float;
  std::optional<FlatFloat> bias;
  std::optional<Floats> residual;

  void fill(Matmul& m, const std::string& epilogue, int out_width, int panels) const {
    m.epilogue = epilogue_of(epilogue);
    m.out_width = out_width;
    if (bias) {
      expect(static_cast<int>(bias->shape(0)) == panels * kPanel, "bias must have n rounded up to 16 elements");
      m.bias = bias->data();
    }
    if (m.epilogue == Epilogue::kFloat || m.epilogue == Epilogue::kAdd) {
      expect(out_float.has_value(), "out_float is missing");
      m.out_float = rows_of(*out_float, out_width);
    } else {
      expect(out.has_value(), "out is missing");
      m.out = rows_of(*out, out_width);
    }
    expect((m.epilogue == Epilogue::kAdd) == residual.has_value(), "a residual goes with the epilogue add");
    if (residual) m.residual = rows_of(*residual, out_width);
  }
};

}  // namespace
}  // namespace octavo
