// octavo._native.sampling: rows of logits to tokens and logprobs, as numpy arrays.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "sampling.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

template <class T>
using Column = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Logits = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>;

// A numpy array that owns what was a vector.
template <class T>
nb::object to_numpy(std::vector<T> values) {
  auto* kept = new std::vector<T>(std::move(values));
  nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(kept->data(), {kept->size()}, owner));
}

template <class T>
const T* column(const char* name, const Column<T>& values, std::size_t rows) {
  if (values.shape(0) != rows) {
    throw nb::value_error((std::string(name) + " has " + std::to_string(values.shape(0)) + " entries for " +
                           std::to_string(rows) + " rows of logits: give one a row").c_str());
  }
  return values.data();
}

void check_logits(const Logits& logits, int vocab_size) {
  if (vocab_size < 1 || static_cast<std::size_t>(vocab_size) > logits.shape(1)) {
    throw nb::value_error(("vocab_size " + std::to_string(vocab_size) + " is not in 1 .. " +
                           std::to_string(logits.shape(1)) + ", the width of the logits: cut it down").c_str());
  }
  if (logits.size() > 0 && logits.shape(1) > 1 && logits.stride(1) != 1)
    throw nb::value_error("a row of logits must be contiguous: copy it");
}

nb::tuple sample(const Logits& logits, int vocab_size, const Column<double>& temperature,
                 const Column<std::int32_t>& top_k, const Column<double>& top_p, const Column<double>& min_p,
                 const Column<std::uint64_t>& seed, const Column<std::uint64_t>& choice,
                 const Column<std::uint64_t>& position, const Column<std::int32_t>& num_logprobs,
                 const Column<std::int32_t>& target) {
  check_logits(logits, vocab_size);
  const std::size_t n = logits.shape(0);
  std::vector<octavo::SamplingRow> rows(n);
  std::vector<std::int64_t> offsets(n + 1);
  for (std::size_t i = 0; i < n; ++i) {
    rows[i] = {column("temperature", temperature, n)[i], column("top_p", top_p, n)[i], column("min_p", min_p, n)[i],
               column("top_k", top_k, n)[i], column("seed", seed, n)[i], column("choice", choice, n)[i],
               column("position", position, n)[i], column("num_logprobs", num_logprobs, n)[i],
               column("target", target, n)[i]};
    if (rows[i].target >= vocab_size) {
      throw nb::value_error(("target " + std::to_string(rows[i].target) + " is not below vocab_size " +
                             std::to_string(vocab_size) + ": it has no logprob").c_str());
    }
    offsets[i + 1] = offsets[i] + std::clamp(rows[i].num_logprobs, 0, vocab_size);
  }
  std::vector<std::int32_t> tokens(n), ranks(n), top_ids(offsets[n]);
  std::vector<double> logprobs(n), top_logprobs(offsets[n]);
  {
    nb::gil_scoped_release release;
    octavo::Scratch scratch;
    for (std::size_t i = 0; i < n; ++i) {
      octavo::SampledRow out;
      out.top_ids = top_ids.data() + offsets[i];
      out.top_logprobs = top_logprobs.data() + offsets[i];
      const float* row = logits.data() + static_cast<std::int64_t>(i) * logits.stride(0);
      octavo::sample_row(row, vocab_size, rows[i], scratch, out);
      tokens[i] = out.token;
      ranks[i] = out.rank;
      logprobs[i] = out.logprob;
    }
  }
  return nb::make_tuple(to_numpy(std::move(tokens)), to_numpy(std::move(logprobs)), to_numpy(std::move(ranks)),
                        to_numpy(std::move(offsets)), to_numpy(std::move(top_ids)), to_numpy(std::move(top_logprobs)));
}

nb::object exponentials(const Column<double>& x) {
  std::vector<double> y(x.shape(0));
  octavo::exponentials(x.data(), y.data(), static_cast<int>(y.size()));
  return to_numpy(std::move(y));
}

nb::object logarithms(const Column<double>& x) {
  std::vector<double> y(x.shape(0));
  std::transform(x.data(), x.data() + y.size(), y.begin(), octavo::logarithm);
  return to_numpy(std::move(y));
}

constexpr const char* kSampleDoc =
    "Samples each row of logits [n, V] float32; ids from vocab_size on do not count.\n\n"
    "The columns are those of octavo.sampling.SamplingRows, of the same dtypes. Returns, as arrays: token_ids int32\n"
    "[n] (-1 where the largest logit is not finite), logprobs float64 [n] and ranks int32 [n] (without meaning where\n"
    "num_logprobs or the token is negative), offsets int64 [n + 1], and the most likely tokens of all rows one after\n"
    "the other, those of row i at offsets[i] .. offsets[i + 1]: top_ids int32 and top_logprobs float64.\n\n"
    "Raises:\n    ValueError: a column's length, vocab_size or a target is out of range.";

}  // namespace

void bind_sampling(nb::module_& m) {
  nb::module_ sampling = m.def_submodule("sampling", "from logits to tokens and logprobs");
  sampling.def("sample", &sample, "logits"_a.noconvert(), "vocab_size"_a, nb::kw_only(), "temperature"_a.noconvert(),
               "top_k"_a.noconvert(), "top_p"_a.noconvert(), "min_p"_a.noconvert(), "seed"_a.noconvert(),
               "choice"_a.noconvert(), "position"_a.noconvert(), "num_logprobs"_a.noconvert(), "target"_a.noconvert(),
               kSampleDoc);
  sampling.def("uniform", &octavo::uniform, "seed"_a, "choice"_a, "position"_a, "The draw in [0, 1) of a key.");
  sampling.def("exponentials", &exponentials, "x"_a.noconvert(), "exp of float64 [n], none above 709.");
  sampling.def("logarithms", &logarithms, "x"_a.noconvert(), "log of positive normal float64 [n].");
}
