// octavo._native.quant: weights in few bits, packed and multiplied by any table, on numpy arrays. For tests and benchmarks.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "bindings.h"
#include "bindings_arrays.h"
#include "float_mode.h"
#include "memory.h"
#include "quant.h"
#include "stored.h"

namespace octavo {
namespace {

using FlatBytes = Array<std::uint8_t, 1>;

// By the name of a stored format, or "int8".
QuantFormat quant_format(const std::string& name) {
  if (name == "int8") return kInt8;
  const StoredFormat& stored = stored_format(name);
  expect(stored.quantised(), "this format holds plain numbers");
  return stored.quant;
}

QuantWeight weight_of(const std::string& format, const Array<const std::uint8_t, 1>& packed, int n, int k) {
  const QuantWeight w{packed.data(), n, k, quant_format(format)};
  expect(n > 0 && k > 0 && static_cast<std::int64_t>(packed.shape(0)) == w.bytes(), "packed has another size than n and k say");
  return w;
}

std::int64_t packed_bytes(const std::string& format, int n, int k) {
  return QuantWeight{nullptr, n, k, quant_format(format)}.bytes();
}

// Rows of a stored format [n, bytes of a row] to panels first, first + step, ... of `out`.
void pack_stored(const std::string& name, Array<const std::uint8_t, 2> rows, FlatBytes out, std::int64_t first, int step) {
  const StoredFormat& stored = stored_format(name);
  const int n = static_cast<int>(rows.shape(0)), row_bytes = static_cast<int>(rows.shape(1));
  expect(n > 0 && row_bytes % stored.bytes == 0 && rows.stride(1) == 1 && rows.stride(0) == row_bytes, "rows must be whole blocks");
  const QuantWeight w{nullptr, n, row_bytes / stored.bytes * stored.values, quant_format(name)};
  const std::int64_t last = first + std::int64_t{w.panels() - 1} * step;
  expect((last + 1) * w.panel_bytes() <= static_cast<std::int64_t>(out.shape(0)), "out is too small for the packed weight");
  pack_stored_panels(w, stored, rows.data(), n, out.data() + first * w.panel_bytes(), step);
}

void pack_int8(Array<const float, 2> rows, FlatBytes out) {
  const QuantWeight w{nullptr, static_cast<int>(rows.shape(0)), static_cast<int>(rows.shape(1)), kInt8};
  expect(rows.stride(1) == 1 && rows.stride(0) == w.k, "rows must be contiguous");
  expect(w.bytes() == static_cast<std::int64_t>(out.shape(0)), "out has another size than the packed weight");
  pack_int8_panels(w, rows.data(), w.n, out.data(), 1);
}

void unpack(const std::string& format, Array<const std::uint8_t, 1> packed, Array<float, 2> out) {
  const QuantWeight w = weight_of(format, packed, static_cast<int>(out.shape(0)), static_cast<int>(out.shape(1)));
  expect(out.stride(1) == 1, "the columns of an array must be contiguous");
  for (int column = 0; column < w.n; ++column) unpack_column(w, column, out.data() + column * out.stride(0));
}

// Rows of x for a product with this format, in aligned memory of their own.
struct Quantized {
  Quantized(const Kernels& kernels, const ConstBf16s& x, int k, const QuantFormat& format, Activations activations) {
    const std::int64_t count = static_cast<std::int64_t>(x.shape(0)), chunks = (k + kChunk - 1) / kChunk;
    const std::int64_t stride = chunks * chunks_each(activations);
    memory = Memory(static_cast<std::size_t>(count * stride) * sizeof(QuantChunk));
    rows = {memory.as<QuantChunk>(), stride};
    kernels.quantize({rows_of(x, chunks * kChunk), rows, k, format, activations}, 0, count);
  }
  Memory memory;
  QuantRows rows;
};

// Of each chunk, of which int16 has two for 32 k's: codes int8 [rows, chunks * 32], scale [rows, chunks], initial int32 and sums [rows, chunks, 2] of a format's operand.
void quantize(const std::string& name, const std::string& format, ConstBf16s x, int k, const std::string& activations, Array<std::int8_t, 2> codes,
              Array<float, 2> scale, Array<std::int32_t, 3> initial, Array<float, 3> sums) {
  const FlushSubnormals mode;
  const Quantized made(table(name), x, k, quant_format(format), activations_of(activations));
  const std::size_t rows = x.shape(0), chunks = static_cast<std::size_t>(made.rows.stride);
  expect(codes.shape(0) == rows && codes.shape(1) == chunks * kChunk && scale.shape(0) == rows && scale.shape(1) == chunks &&
             initial.shape(0) == rows && initial.shape(1) == chunks && initial.shape(2) == 2 && sums.shape(0) == rows &&
             sums.shape(1) == chunks && sums.shape(2) == 2,
         "an array has the wrong shape");
  for (std::size_t i = 0; i < rows; ++i) {
    for (std::size_t c = 0; c < chunks; ++c) {
      const QuantChunk& chunk = made.rows.row(static_cast<std::int64_t>(i))[c];
      for (std::size_t k = 0; k < kChunk; ++k) codes(i, c * kChunk + k) = chunk.codes[k];
      scale(i, c) = chunk.scale;
      for (std::size_t g = 0; g < 2; ++g) {
        initial(i, c, g) = chunk.initial[g];
        sums(i, c, g) = chunk.sums[g];
      }
    }
  }
}

void matmul(const std::string& name, const std::string& format, ConstBf16s x, Array<const std::uint8_t, 1> packed, int n, int k,
            const std::string& activations, std::optional<Bf16s> out, std::optional<Floats> out_float, const std::string& epilogue,
            std::optional<FlatFloat> bias, std::optional<Floats> residual, int out_width, Range rows, Range panels) {
  const Kernels& kernels = table(name);
  QuantMatmul m;
  m.w = weight_of(format, packed, n, k);
  m.m.x = rows_of(x, std::int64_t{m.w.chunks()} * kChunk);
  m.activations = activations_of(activations);
  Result{out, out_float, bias, residual}.fill(m.m, epilogue, out_width, m.w.panels());
  const auto r = bounds(rows, static_cast<std::int64_t>(x.shape(0)));
  const auto p = bounds(panels, m.w.panels());
  const FlushSubnormals mode;
  const Quantized made(kernels, x, k, m.w.format, m.activations);
  m.x = made.rows;
  kernels.quant_matmul(m, r.first, r.second, static_cast<int>(p.first), static_cast<int>(p.second));
}

}  // namespace
}  // namespace octavo

void bind_quant(nb::module_& parent) {
  nb::module_ m = parent.def_submodule("quant", "Weights in few bits: formats are names of stored formats, and int8.");
  m.def("packed_bytes", octavo::packed_bytes, "format"_a, "n"_a, "k"_a);
  m.def("pack_stored", octavo::pack_stored, "format"_a, "rows"_a.noconvert(), "out"_a.noconvert(), "first"_a = 0, "step"_a = 1,
        "Panel p of the stored rows [n, bytes of a row] goes to place first + p * step of `out`.");
  m.def("pack_int8", octavo::pack_int8, "rows"_a.noconvert(), "out"_a.noconvert());
  m.def("unpack", octavo::unpack, "format"_a, "packed"_a.noconvert(), "out"_a.noconvert(), "The numbers, float32 [n, k].");
  m.def("quantize", octavo::quantize, "table"_a, "format"_a, "x"_a.noconvert(), "k"_a, "activations"_a, "codes"_a.noconvert(),
        "scale"_a.noconvert(), "initial"_a.noconvert(), "sums"_a.noconvert());
  m.def("matmul", octavo::matmul, "table"_a, "format"_a, "x"_a.noconvert(), "packed"_a.noconvert(), "n"_a, "k"_a, "activations"_a,
        "out"_a.noconvert().none() = nb::none(), "out_float"_a.noconvert().none() = nb::none(), "epilogue"_a = "float",
        "bias"_a.noconvert().none() = nb::none(), "residual"_a.noconvert().none() = nb::none(), "out_width"_a,
        "rows"_a = nb::none(), "panels"_a = nb::none());
}
