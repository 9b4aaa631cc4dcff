// octavo._native.Program: what octavo/backends/cpu builds and runs. Arguments are checked by Program itself.
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "bindings.h"
#include "bindings_names.h"
#include "program.h"
#include "rotation.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using namespace octavo;

template <class T, int N = 1>
using Array = nb::ndarray<const T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
using Place = std::pair<int, int>;  // buffer, column

View view(Place place) { return {place.first, place.second}; }

template <class T>
auto numpy(std::vector<T> values, std::vector<std::size_t> shape) {
  auto* kept = new std::vector<T>(std::move(values));
  nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::ndarray<nb::numpy, T>(kept->data(), shape.size(), shape.data(), owner);
}

// The arrays of a Batch (octavo/backends/base.py), kept alive for the step.
struct BatchArrays {
  Array<std::int32_t> token_ids, positions, query_starts, logit_rows;
  Array<std::int64_t, 2> slot_mapping;
  Array<std::int32_t, 3> block_tables;

  explicit BatchArrays(nb::handle batch)
      : token_ids(nb::cast<Array<std::int32_t>>(batch.attr("token_ids"))),
        positions(nb::cast<Array<std::int32_t>>(batch.attr("positions"))),
        query_starts(nb::cast<Array<std::int32_t>>(batch.attr("query_starts"))),
        logit_rows(nb::cast<Array<std::int32_t>>(batch.attr("logit_rows"))),
        slot_mapping(nb::cast<Array<std::int64_t, 2>>(batch.attr("slot_mapping"))),
        block_tables(nb::cast<Array<std::int32_t, 3>>(batch.attr("block_tables"))) {}

  Step step() const {
    const std::size_t tokens = token_ids.shape(0);
    if (positions.shape(0) != tokens || slot_mapping.shape(1) != tokens || query_starts.shape(0) < 2 ||
        block_tables.shape(1) != query_starts.shape(0) - 1 || block_tables.shape(0) != slot_mapping.shape(0)) {
      throw std::invalid_argument("program: the arrays of a batch differ in length");
    }
    Step step;
    step.num_tokens = static_cast<std::int64_t>(tokens);
    step.num_logit_rows = static_cast<std::int64_t>(logit_rows.shape(0));
    step.num_groups = static_cast<int>(block_tables.shape(0));
    step.num_sequences = static_cast<int>(block_tables.shape(1));
    step.token_ids = token_ids.data();
    step.positions = positions.data();
    step.slot_mapping = slot_mapping.data();
    step.query_starts = query_starts.data();
    step.block_tables = block_tables.data();
    step.table_width = static_cast<std::int64_t>(block_tables.shape(2));
    step.logit_rows = logit_rows.data();
    return step;
  }
};

template <class T>
Array<T> column(nb::handle rows, const char* name, std::size_t count) {
  auto array = nb::cast<Array<T>>(rows.attr(name));
  if (array.shape(0) != count) throw std::invalid_argument(std::string("sampling rows: wrong length of ") + name);
  return array;
}

// SamplingRows (octavo/sampling/rows.py) as one struct a row.
std::vector<SamplingRow> sampling_rows(nb::handle rows, std::size_t count, int vocab_size) {
  const auto temperature = column<double>(rows, "temperature", count), top_p = column<double>(rows, "top_p", count),
             min_p = column<double>(rows, "min_p", count);
  const auto top_k = column<std::int32_t>(rows, "top_k", count), target = column<std::int32_t>(rows, "target", count),
             num_logprobs = column<std::int32_t>(rows, "num_logprobs", count);
  const auto seed = column<std::uint64_t>(rows, "seed", count), choice = column<std::uint64_t>(rows, "choice", count),
             position = column<std::uint64_t>(rows, "position", count);
  std::vector<SamplingRow> result(count);
  for (std::size_t i = 0; i < count; ++i) {
    SamplingRow& row = result[i];
    row = {temperature(i), top_p(i), min_p(i), top_k(i), seed(i), choice(i), position(i), num_logprobs(i), target(i)};
    if (row.target >= vocab_size) throw std::invalid_argument("sampling rows: target outside the vocabulary");
  }
  return result;
}

// Samples a step: (token_ids [S], ranks [S], logprobs [S], top_ids [S, most], top_logprobs [S, most]).
nb::tuple step_and_sample(Program& program, nb::handle batch, nb::handle rows, int vocab_size,
                          Array<std::int32_t> copy_rows,
                          nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu> copies) {
  const BatchArrays arrays(batch);
  const Step step = arrays.step();
  const auto count = static_cast<std::size_t>(step.num_logit_rows);
  if (!rows.is_none() && (vocab_size < 1 || vocab_size > program.vocab_size())) {
    throw std::invalid_argument("program: vocab_size");
  }
  if (copies.shape(0) != copy_rows.shape(0) || copies.shape(1) != static_cast<std::size_t>(program.vocab_size())) {
    throw std::invalid_argument("program: copies of logits need [copy_rows, vocabulary]");
  }
  const std::vector<SamplingRow> wanted =
      rows.is_none() ? std::vector<SamplingRow>() : sampling_rows(rows, count, vocab_size);
  int most = 0;
  for (const SamplingRow& row : wanted) most = std::max(most, std::min(row.num_logprobs, vocab_size));
  std::vector<std::int32_t> top_ids(wanted.size() * most);
  std::vector<double> top_logprobs(wanted.size() * most);
  std::vector<SampledRow> sampled(wanted.size());
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    sampled[i].top_ids = top_ids.data() + i * most;
    sampled[i].top_logprobs = top_logprobs.data() + i * most;
  }
  const LogitsUse use{wanted, sampled, vocab_size, {copy_rows.data(), copy_rows.shape(0)}, copies.data()};
  {
    nb::gil_scoped_release released;
    program.step(step, use);
  }
  std::vector<std::int32_t> tokens, ranks;
  std::vector<double> logprobs;
  for (const SampledRow& row : sampled) {
    tokens.push_back(row.token);
    ranks.push_back(row.rank);
    logprobs.push_back(row.logprob);
  }
  const std::size_t n = wanted.size(), width = static_cast<std::size_t>(most);
  return nb::make_tuple(numpy(std::move(tokens), {n}), numpy(std::move(ranks), {n}), numpy(std::move(logprobs), {n}),
                        numpy(std::move(top_ids), {n, width}), numpy(std::move(top_logprobs), {n, width}));
}

// Rows as an array of shared memory, valid while the exchange is called.
nb::ndarray<nb::numpy, float> shared_rows(float* data, std::vector<std::size_t> shape, std::int64_t stride) {
  std::vector<std::int64_t> strides(shape.size(), 1);
  strides[shape.size() - 2] = stride;
  if (shape.size() == 3) strides[0] = stride * static_cast<std::int64_t>(shape[1]);
  return {data, shape.size(), shape.data(), nb::none(), strides.data()};
}

// exchange(kind, mine [rows, width], all), with all None, or [ranks, rows, width] of an all_reduce, or [rows, vocabulary].
void set_exchange(Program& program, int num_ranks, nb::callable exchange) {
  const auto call = [&program, num_ranks, exchange](Exchange what, const ExchangeRows& rows) {
    const nb::gil_scoped_acquire acquired;
    const auto count = static_cast<std::size_t>(rows.count), width = static_cast<std::size_t>(rows.width);
    const nb::object mine = nb::cast(shared_rows(rows.mine.data, {count, width}, rows.mine.stride));
    switch (what) {
      case Exchange::kAllReduce:
        exchange("all_reduce", mine, shared_rows(rows.all, {static_cast<std::size_t>(num_ranks), count, width}, rows.width));
        break;
      case Exchange::kGather: {
        const auto vocabulary = static_cast<std::size_t>(program.vocab_size());
        exchange("gather", mine, shared_rows(rows.all, {count, vocabulary}, program.vocab_size()));
        break;
      }
      case Exchange::kSend: exchange("send", mine, nb::none()); break;
      case Exchange::kRecv: exchange("recv", mine, nb::none()); break;
    }
  };
  program.set_exchange(num_ranks, call);
}

// One dict an op: the fields of OpProfile in octavo/metrics/profile.py.
nb::list stop_profile(Program& program) {
  std::vector<OpProfile> ops;
  {
    nb::gil_scoped_release released;  // a step that is in the middle of an exchange needs it to go on
    ops = program.stop_profile();
  }
  nb::list result;
  for (const OpProfile& op : ops) {
    nb::dict fields;
    fields["kind"] = op.kind;
    fields["shape"] = op.shape;
    fields["runs"] = op.runs;
    fields["seconds"] = op.seconds;
    fields["flops"] = op.work.flops;
    fields["weight_bytes"] = op.work.weight_bytes;
    fields["kv_bytes"] = op.work.kv_bytes;
    fields["other_bytes"] = op.work.other_bytes;
    result.append(fields);
  }
  return result;
}

// The fields of Roofline in octavo/metrics/profile.py.
nb::dict roofline_of(Program& program) {
  Roofline roofline;
  {
    nb::gil_scoped_release released;
    roofline = program.measure_roofline();
  }
  nb::dict fields;
  fields["memory_bytes"] = roofline.memory_bytes;
  fields["weights_bytes"] = roofline.weights_bytes;
  fields["product_bytes"] = roofline.product_bytes;
  fields["product_flops"] = roofline.product_flops;
  fields["weights_size"] = roofline.weights_size;
  return fields;
}

// Keys and values of a layer as they lie, shared memory: uint16 [blocks, KV heads, panels, 16 * head_dim] each, or in int8 uint8
// [blocks, KV heads, panels, 16 * (head_dim + 4)]. All blocks, also those of other groups of layers; what other layers keep of a
// block lies between.
template <class T>
nb::tuple kv_arrays(const Program& program, int index) {
  const Runtime& runtime = program.runtime();
  const Cache& cache = runtime.caches.at(index);
  if (runtime.kv_memory == nullptr) throw std::invalid_argument("program: allocate_kv_cache comes first");
  const auto elements = [](std::int64_t bytes) { return bytes / static_cast<std::int64_t>(sizeof(T)); };
  const std::int64_t panel = elements(KvCache::panel_bytes(runtime.kv_type, cache.head_dim)), panels = runtime.block_size / kPanel;
  const std::int64_t blocks = static_cast<std::int64_t>(runtime.kv_memory->bytes()) / runtime.block_bytes;
  auto array = [&](std::int64_t first) {
    auto* kept = new std::shared_ptr<Memory>(runtime.kv_memory);
    nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::shared_ptr<Memory>*>(p); });
    return nb::ndarray<nb::numpy, T>(
        runtime.kv_memory->as<T>() + elements(first),
        {static_cast<std::size_t>(blocks), static_cast<std::size_t>(cache.kv_heads), static_cast<std::size_t>(panels),
         static_cast<std::size_t>(panel)},
        owner, {elements(runtime.block_bytes), panels * panel, panel, 1});
  };
  return nb::make_tuple(array(cache.keys), array(cache.values));
}
nb::tuple kv_cache(const Program& program, int index) {
  const bool codes = program.runtime().kv_type == KvType::kInt8;
  return codes ? kv_arrays<std::uint8_t>(program, index) : kv_arrays<std::uint16_t>(program, index);
}

// (cos, sin) of one token's angles: float32 [half] each.
nb::tuple rotation(std::int32_t position, Array<float> frequencies, float factor) {
  const std::size_t half = frequencies.shape(0);
  std::vector<float> cos(half), sin(half);
  rotate_row(position, frequencies.data(), static_cast<int>(half), factor, cos.data(), sin.data());
  return nb::make_tuple(numpy(std::move(cos), {half}), numpy(std::move(sin), {half}));
}

}  // namespace

void bind_program(nb::module_& m) {
  m.def("isas", [] {
    const Kernels* tables[16];
    std::vector<std::string> names;
    for (int i = 0, count = available(tables, 16); i < count; ++i) names.emplace_back(tables[i]->name);
    return names;
  }, "Names of the kernel tables that this machine can run, slowest first.");
  m.def("fast_table", [](const std::string& isa) {
    const Kernels* table = find(isa.c_str());
    if (table == nullptr) throw std::invalid_argument("no kernels named " + isa + " on this machine");
    return std::string(fast_math(*table).name);
  }, "isa"_a, "The table that is faster where last bits may differ from the other tables'; `isa` itself where there is none.");
  m.def("stored_formats", [] {
    std::vector<std::string> names;
    for (const StoredFormat& format : stored_formats()) names.emplace_back(format.name);
    return names;
  }, "Names of the formats that Program.pack_stored reads.");
  m.def("quant_formats", [] {
    nb::dict bits;
    for (const StoredFormat& format : stored_formats()) {
      if (format.quantised()) bits[format.name] = format.quant.code_bytes() * 8 / (kChunk * kPanel);
    }
    return bits;
  }, "Those of them whose rows a weight can keep, losing nothing, and the bits in which it holds a code.");
  m.def("packing", [] { return OCTAVO_PACKING; },
        "Names the way in which this build packs weights: another way has another name.");
  m.def("rotation", &rotation, "position"_a, "frequencies"_a, "factor"_a,
        "cos and sin of position * frequencies, times factor: what rotary embeddings turn by. float32 [half] each.");
  nb::class_<Program>(m, "Program")
      .def("__init__",
           [](Program* self, const std::string& isa, int num_threads) {
             const Kernels* kernels = find(isa.c_str());
             if (kernels == nullptr) throw std::invalid_argument("no kernels named " + isa + " on this machine");
             new (self) Program(*kernels, num_threads);
           },
           "isa"_a, "num_threads"_a)
      .def_prop_ro("isa", [](const Program& p) { return std::string(p.kernels().name); })
      .def_prop_ro("num_threads", &Program::num_threads)
      .def_prop_ro("vocab_size", &Program::vocab_size)
      .def_prop_ro("weight_bytes", &Program::weight_bytes)
      .def("add_buffer", &Program::add_buffer, "width"_a, "selected"_a, "stream"_a)
      .def("add_weight", [](Program& p, int n, int k, const std::string& width) { return p.add_weight(n, k, width); }, "n"_a,
           "k"_a, "width"_a = "bfloat16")
      .def("pack",
           [](Program& p, int weight, int first_panel, int panel_step, Array<float, 2> rows, int first) {
             if (rows.shape(1) != static_cast<std::size_t>(p.runtime().weights.at(weight).k())) {
               throw std::invalid_argument("program: rows to pack have another width than their weight");
             }
             nb::gil_scoped_release released;
             p.pack(weight, first_panel, panel_step, rows.data(), first, static_cast<int>(rows.shape(0)));
           },
           "weight"_a, "first_panel"_a, "panel_step"_a, "rows"_a, "first"_a)
      .def("pack_stored",
           [](Program& p, int weight, int first_panel, int panel_step, const std::string& format,
              Array<std::uint8_t, 2> rows, int first) {
             const StoredFormat& stored = stored_format(format);
             const auto k = static_cast<std::size_t>(p.runtime().weights.at(weight).k());
             if (rows.shape(1) * stored.values != k * stored.bytes) {
               throw std::invalid_argument("program: rows to pack have another width than their weight");
             }
             nb::gil_scoped_release released;
             p.pack_stored(weight, first_panel, panel_step, stored, rows.data(), first, static_cast<int>(rows.shape(0)));
           },
           "weight"_a, "first_panel"_a, "panel_step"_a, "format"_a, "rows"_a, "first"_a)
      .def_prop_ro("packed_bytes", &Program::packed_bytes)
      .def("packed",
           [](const Program& p, int weight) {
             const auto bytes = p.runtime().weights.at(weight).packed();
             return nb::bytes(bytes.data(), bytes.size());
           },
           "weight"_a)
      .def("packed_checksum", &Program::packed_checksum, nb::call_guard<nb::gil_scoped_release>())
      .def("map_weights", &Program::map_weights, "descriptor"_a, "offset"_a, "checksum"_a,
           nb::call_guard<nb::gil_scoped_release>())
      .def("add_vector",
           [](Program& p, Array<float> values) {
             return p.add_vector(std::vector<float>(values.data(), values.data() + values.shape(0)));
           },
           "values"_a)
      .def("add_rotation", &Program::add_rotation, "frequencies"_a, "factor"_a)
      .def("add_cache", &Program::add_cache, "kv_heads"_a, "head_dim"_a, "group"_a)
      .def("set_exchange", &set_exchange, "num_ranks"_a, "exchange"_a)
      .def("set_vocab_size", &Program::set_vocab_size, "vocab_size"_a)
      .def("set_num_groups", &Program::set_num_groups, "num_groups"_a)
      .def("recv", [](Program& p, Place out, int width) { p.recv(view(out), width); }, "out"_a, "width"_a)
      .def("send", [](Program& p, Place x, int width) { p.send(view(x), width); }, "x"_a, "width"_a)
      .def("all_reduce", [](Program& p, Place x, int width, Place out) { p.all_reduce(view(x), width, view(out)); },
           "x"_a, "width"_a, "out"_a)
      .def("gather", &Program::gather)
      .def("embed",
           [](Program& p, int weight, float scale, int first, Place out) { p.embed(weight, scale, first, view(out)); },
           "weight"_a, "scale"_a, "first"_a, "out"_a)
      .def("select_rows", [](Program& p, Place x, Place out) { p.select_rows(view(x), view(out)); }, "x"_a, "out"_a)
      .def("rms_norm",
           [](Program& p, Place x, int weight, int groups, float eps, Place out) {
             p.rms_norm(view(x), weight, groups, eps, view(out));
           },
           "x"_a, "weight"_a, "groups"_a, "eps"_a, "out"_a)
      .def("rope",
           [](Program& p, Place x, int rotation, int heads, int head_dim, Place out) {
             p.rope(view(x), rotation, heads, head_dim, view(out));
           },
           "x"_a, "rotation"_a, "heads"_a, "head_dim"_a, "out"_a)
      .def("gate_mul",
           [](Program& p, Place gate, Place up, const std::string& f, int width, Place out) {
             p.gate_mul(view(gate), view(up), gate_of(f), width, view(out));
           },
           "gate"_a, "up"_a, "f"_a, "width"_a, "out"_a)
      .def("add", [](Program& p, Place a, Place b, int width, Place out) { p.add(view(a), view(b), width, view(out)); },
           "a"_a, "b"_a, "width"_a, "out"_a)
      .def("store", [](Program& p, Place k, Place v, int cache) { p.store(view(k), view(v), cache); }, "k"_a, "v"_a,
           "cache"_a)
      .def("attention",
           [](Program& p, Place q, int cache, int heads, int window, float scale, float softcap, Place out) {
             p.attention(view(q), cache, heads, window, scale, softcap, view(out));
           },
           "q"_a, "cache"_a, "heads"_a, "window"_a, "scale"_a, "softcap"_a, "out"_a)
      .def("matmul",
           [](Program& p, Place x, int weight, int bias, const std::string& epilogue, Place residual, int width,
              Place out) {
             p.matmul(view(x), weight, bias, epilogue_of(epilogue), view(residual), width, view(out));
           },
           "x"_a, "weight"_a, "bias"_a, "epilogue"_a, "residual"_a, "width"_a, "out"_a)
      .def("logits", [](Program& p, Place x, int weight) { p.logits(view(x), weight); }, "x"_a, "weight"_a)
      .def("softcap", &Program::softcap, "cap"_a)
      .def("allocate_kv_cache", &Program::allocate_kv_cache, "num_blocks"_a, "block_size"_a,
           nb::call_guard<nb::gil_scoped_release>())
      .def("allocate_swap_space", &Program::allocate_swap_space, "num_blocks"_a, "descriptor"_a.none(),
           nb::call_guard<nb::gil_scoped_release>())
      .def("move_blocks",
           [](Program& p, Array<std::int64_t, 2> rows) {
             if (rows.shape(1) != 3) throw std::invalid_argument("program: moves are rows of kind, source and destination");
             std::vector<BlockMove> moves;
             for (std::size_t i = 0; i < rows.shape(0); ++i) {
               if (rows(i, 0) < 0 || rows(i, 0) > 2) throw std::invalid_argument("program: a kind of move is 0, 1 or 2");
               moves.push_back({static_cast<BlockMove::Kind>(rows(i, 0)), rows(i, 1), rows(i, 2)});
             }
             nb::gil_scoped_release released;
             p.move_blocks(moves);
           },
           "moves"_a)
      .def("kv_cache", &kv_cache, "cache"_a)
      .def("set_cascade", &Program::set_cascade, "on"_a)
      .def("set_activations", [](Program& p, const std::string& dtype) { p.set_activations(activations_of(dtype)); }, "dtype"_a)
      .def("set_kv_cache_dtype", [](Program& p, const std::string& dtype) { p.set_kv_type(kv_type_of(dtype)); }, "dtype"_a)
      .def_prop_ro("shared_positions", &Program::shared_positions)
      .def("start_profile", &Program::start_profile, nb::call_guard<nb::gil_scoped_release>())
      .def("stop_profile", &stop_profile)
      .def("measure_roofline", &roofline_of)
      .def("step", &step_and_sample, "batch"_a, "rows"_a.none(), "vocab_size"_a, "copy_rows"_a, "copies"_a);
}
