// octavo._native.kernels: every kernel of every table on numpy arrays, with explicit ranges. For tests and benchmarks; a step
// of the engine never comes through here. bfloat16 arrays are uint16; 2-d arrays may be views with a row stride.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "bindings_arrays.h"
#include "float_mode.h"
#include "kernels.h"
#include "pack.h"
#include "stored.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

std::vector<std::string> tables() {
  const Kernels* found[8];
  const int count = available(found, 8);
  std::vector<std::string> names;
  for (int i = 0; i < count; ++i) names.emplace_back(found[i]->name);
  return names;
}

void matmul(const std::string& name, ConstBf16s x, FlatBf16 packed, int n, int k, std::optional<Bf16s> out,
            std::optional<Floats> out_float, const std::string& epilogue, std::optional<FlatFloat> bias,
            std::optional<Floats> residual, int out_width, Range rows, Range panels) {
  Matmul m;
  m.w = {packed.data(), n, k};
  m.x = rows_of(x, m.w.padded_k());
  expect(static_cast<std::int64_t>(packed.shape(0)) == std::int64_t{m.w.panels()} * m.w.padded_k() * kPanel,
         "packed has another size than n and k say");
  Result{out, out_float, bias, residual}.fill(m, epilogue, out_width, m.w.panels());
  const auto r = bounds(rows, static_cast<std::int64_t>(x.shape(0)));
  const auto p = bounds(panels, m.w.panels());
  const FlushSubnormals mode;
  table(name).matmul(m, r.first, r.second, static_cast<int>(p.first), static_cast<int>(p.second));
}

void take(RmsNorm& n, const ConstBf16s& x, int width) { n.x = rows_of(x, width); }
void take(RmsNorm& n, const Floats& x, int width) { n.x_float = rows_of(x, width); }

template <class X>
void rms_norm(const std::string& name, X x, Bf16s out, FlatFloat weight, int groups, float eps, Range rows) {
  RmsNorm n;
  n.weight = weight.data();
  n.groups = groups;
  n.width = static_cast<int>(weight.shape(0));
  n.eps = eps;
  n.out = rows_of(out, groups * n.width);
  take(n, x, groups * n.width);
  const auto r = bounds(rows, static_cast<std::int64_t>(x.shape(0)));
  const FlushSubnormals mode;
  table(name).rms_norm(n, r.first, r.second);
}

void rope(const std::string& name, ConstBf16s x, Bf16s out, Array<const float, 2> cos, Array<const float, 2> sin, int heads,
          int head_dim, Range rows) {
  const int half = static_cast<int>(cos.shape(1));
  expect(2 * half <= head_dim && cos.stride(0) == half && sin.stride(0) == half, "cos and sin must be whole [rows, half]");
  const Rope rope{rows_of(x, heads * head_dim), rows_of(out, heads * head_dim), cos.data(), sin.data(), heads, head_dim, half};
  const auto r = bounds(rows, static_cast<std::int64_t>(x.shape(0)));
  const FlushSubnormals mode;
  table(name).rope(rope, r.first, r.second);
}

void gate_mul(const std::string& name, ConstBf16s gate, ConstBf16s up, Bf16s out, int width, const std::string& f, Range rows) {
  const GateMul g{rows_of(gate, width), rows_of(up, width), rows_of(out, width), width, gate_of(f)};
  const auto r = bounds(rows, static_cast<std::int64_t>(gate.shape(0)));
  const FlushSubnormals mode;
  table(name).gate_mul(g, r.first, r.second);
}

void add(const std::string& name, Floats a, ConstBf16s b, Floats out, int width, Range rows) {
  const Add sum{rows_of(a, width), rows_of(b, width), rows_of(out, width), width};
  const auto r = bounds(rows, static_cast<std::int64_t>(a.shape(0)));
  const FlushSubnormals mode;
  table(name).add(sum, r.first, r.second);
}

// T: bf16, or std::uint8_t for a cache in int8.
template <class T>
void attention(const std::string& name, ConstBf16s q, Bf16s out, Array<const T, 1> keys, Array<const T, 1> values,
               Array<const std::int32_t, 1> block_table, int heads, int kv_heads, int head_dim, int block_size, int first,
               int count, int position, int window, float scale, float softcap, Range rows, Range kv_range,
               const std::optional<std::vector<std::pair<int, int>>>& pieces) {
  expect(head_dim % 16 == 0 && head_dim <= 256 && block_size % kPanel == 0, "head_dim or block_size is not supported");
  expect(kv_heads > 0 && heads % kv_heads == 0, "heads must be a multiple of kv_heads");
  expect(static_cast<std::int64_t>(block_table.shape(0)) * block_size >= position + count, "the block table is too short");
  Attention a;
  a.q = rows_of(q, heads * head_dim);
  a.out = rows_of(out, heads * head_dim);
  const auto bytes_of = [](const Array<const T, 1>& x) { return reinterpret_cast<std::uint8_t*>(const_cast<T*>(x.data())); };
  const KvType type = sizeof(T) == 1 ? KvType::kInt8 : KvType::kBfloat16;
  a.cache = {bytes_of(keys), bytes_of(values), kv_heads, head_dim, block_size,
             block_size / kPanel * kv_heads * KvCache::panel_bytes(type, head_dim), type};
  a.block_table = block_table.data();
  a.heads = heads;
  a.first = first;
  a.count = count;
  a.position = position;
  a.window = window;
  a.scale = scale;
  a.softcap = softcap;
  const auto r = bounds(rows, count);
  const auto h = bounds(kv_range, kv_heads);
  const Kernels& kernels = table(name);
  const int row_begin = static_cast<int>(r.first), row_end = static_cast<int>(r.second);
  const int head_begin = static_cast<int>(h.first), head_end = static_cast<int>(h.second);
  const FlushSubnormals mode;
  if (!pieces) {
    kernels.attention(a, row_begin, row_end, head_begin, head_end);
    return;
  }
  const std::int64_t all = (position + count + kPiece - 1) / kPiece;
  for (const auto& [begin, end] : *pieces) expect(0 <= begin && begin <= end && end <= all, "pieces are out of bounds");
  const std::int64_t head_stride = all * (heads / kv_heads) * partial_floats(head_dim), row_stride = head_stride * kv_heads;
  std::vector<float> partials(row_stride * (row_end - row_begin), std::numeric_limits<float>::quiet_NaN());
  std::vector<AttentionRow> parts;
  for (int i = 0; i < row_end - row_begin; ++i) {
    parts.push_back({first + row_begin + i, position + row_begin + i, partials.data() + i * row_stride, head_stride});
  }
  const int rows_in_parts = static_cast<int>(parts.size());
  for (int head = head_begin; head < head_end; ++head) {
    for (const auto& [begin, end] : *pieces) kernels.attention_pieces(a, parts.data(), rows_in_parts, head, begin, end);
    kernels.attention_merge(a, parts.data(), rows_in_parts, head);
  }
}

float quantize_head(const std::string& name, FlatBf16 x, Array<std::int8_t, 1> codes) {
  expect(x.shape(0) == codes.shape(0) && x.shape(0) % kPanel == 0 && x.shape(0) <= kMaxHeadDim, "x and codes differ in size, or are no multiple of 16");
  const FlushSubnormals mode;
  return table(name).quantize_head(x.data(), static_cast<int>(x.shape(0)), codes.data());
}

void softcap(const std::string& name, Array<float, 1> x, float cap) {
  const FlushSubnormals mode;
  table(name).softcap(x.data(), static_cast<std::int64_t>(x.shape(0)), cap);
}

void to_bf16(const std::string& name, FlatFloat x, Array<bf16, 1> out) {
  expect(x.shape(0) == out.shape(0), "x and out differ in size");
  const FlushSubnormals mode;
  table(name).to_bf16(x.data(), out.data(), static_cast<std::int64_t>(x.shape(0)));
}

// Blocks of a stored format as float32.
void decode(const std::string& name, Array<const std::uint8_t, 2> blocks, Array<float, 2> out) {
  const StoredFormat& format = stored_format(name);
  expect(static_cast<int>(blocks.shape(1)) == format.bytes && static_cast<int>(out.shape(1)) == format.values &&
             blocks.shape(0) == out.shape(0) && blocks.stride(1) == 1 && out.stride(1) == 1,
         "blocks and out differ in size from the format's, or are not contiguous");
  for (std::size_t i = 0; i < blocks.shape(0); ++i) {
    format.decode(blocks.data() + static_cast<std::int64_t>(i) * blocks.stride(0),
                  out.data() + static_cast<std::int64_t>(i) * out.stride(0));
  }
}

// Packs source panels into `out` (see pack_panels).
template <class T>
void pack(Array<const T, 2> rows, Array<bf16, 1> out, std::int64_t first, int step) {
  const int n = static_cast<int>(rows.shape(0)), k = static_cast<int>(rows.shape(1));
  const PackedWeight w{out.data(), n, k};
  const std::int64_t panel = std::int64_t{w.padded_k()} * kPanel;
  expect(rows.stride(1) == 1 || k == 1, "the columns of an array must be contiguous");
  expect(n > 0 && (first + std::int64_t{w.panels() - 1} * step + 1) * panel <= static_cast<std::int64_t>(out.shape(0)),
         "out is too small for the packed weight");
  pack_panels(rows.data(), rows.stride(0), n, k, out.data() + first * panel, 0, w.panels(), step);
}

}  // namespace
}  // namespace octavo

void bind_kernels(nb::module_& parent) {
  nb::module_ m = parent.def_submodule("kernels", "Every kernel of every table, on numpy arrays (bfloat16 as uint16).");
  m.def("tables", octavo::tables, "Names of the kernel tables this machine runs, slowest first.");
  m.def("matmul", octavo::matmul, "table"_a, "x"_a.noconvert(), "packed"_a.noconvert(), "n"_a, "k"_a,
        "out"_a.noconvert().none() = nb::none(), "out_float"_a.noconvert().none() = nb::none(), "epilogue"_a = "store",
        "bias"_a.noconvert().none() = nb::none(), "residual"_a.noconvert().none() = nb::none(), "out_width"_a,
        "rows"_a = nb::none(), "panels"_a = nb::none());
  m.def("rms_norm", octavo::rms_norm<octavo::ConstBf16s>, "table"_a, "x"_a.noconvert(), "out"_a.noconvert(),
        "weight"_a.noconvert(), "groups"_a = 1, "eps"_a, "rows"_a = nb::none());
  m.def("rms_norm", octavo::rms_norm<octavo::Floats>, "table"_a, "x"_a.noconvert(), "out"_a.noconvert(),
        "weight"_a.noconvert(), "groups"_a = 1, "eps"_a, "rows"_a = nb::none());
  m.def("rope", octavo::rope, "table"_a, "x"_a.noconvert(), "out"_a.noconvert(), "cos"_a.noconvert(), "sin"_a.noconvert(),
        "heads"_a, "head_dim"_a, "rows"_a = nb::none());
  m.def("gate_mul", octavo::gate_mul, "table"_a, "gate"_a.noconvert(), "up"_a.noconvert(), "out"_a.noconvert(), "width"_a,
        "f"_a = "silu", "rows"_a = nb::none());
  m.def("add", octavo::add, "table"_a, "a"_a.noconvert(), "b"_a.noconvert(), "out"_a.noconvert(), "width"_a,
        "rows"_a = nb::none());
  const auto def_attention = [&m](auto function) {
    m.def("attention", function, "table"_a, "q"_a.noconvert(), "out"_a.noconvert(), "keys"_a.noconvert(),
          "values"_a.noconvert(), "block_table"_a.noconvert(), "heads"_a, "kv_heads"_a, "head_dim"_a, "block_size"_a,
          "first"_a = 0, "count"_a, "position"_a, "window"_a = 0, "scale"_a, "softcap"_a = 0.0f, "rows"_a = nb::none(),
          "kv_range"_a = nb::none(), "pieces"_a = nb::none(),
          "With pieces, runs of them [begin, end) are computed apart, in the order given, and then joined.");
  };
  def_attention(octavo::attention<octavo::bf16>);
  def_attention(octavo::attention<std::uint8_t>);
  m.def("quantize_head", octavo::quantize_head, "table"_a, "x"_a.noconvert(), "codes"_a.noconvert());
  m.def("softcap", octavo::softcap, "table"_a, "x"_a.noconvert(), "cap"_a);
  m.def("to_bf16", octavo::to_bf16, "table"_a, "x"_a.noconvert(), "out"_a.noconvert());
  m.def("decode", octavo::decode, "format"_a, "blocks"_a.noconvert(), "out"_a.noconvert());
  m.def("pack", octavo::pack<float>, "rows"_a.noconvert(), "out"_a.noconvert(), "first"_a = 0, "step"_a = 1,
        "Panel p of the weight's rows [n, k] goes to place first + p * step of `out`.");
  m.def("pack", octavo::pack<octavo::bf16>, "rows"_a.noconvert(), "out"_a.noconvert(), "first"_a = 0, "step"_a = 1);
}
