// What each op is called, and what one run of it costs.
#include "profile.h"

#include <algorithm>

#include "ops.h"

namespace octavo {

namespace {

constexpr double kBf16 = sizeof(bf16), kFloat = sizeof(float);

std::string by(std::int64_t a, std::int64_t b) { return std::to_string(a) + " x " + std::to_string(b); }

double size(const std::vector<float>& values) { return static_cast<double>(values.size()) * kFloat; }

// Bytes of a value of `width` columns, over the rows of its buffer.
double bytes(const Runtime& runtime, View view, int width) {
  return static_cast<double>(runtime.rows(view)) * width * (runtime.is_stream(view) ? kFloat : kBf16);
}

// rows x [k] times a packed weight, `columns` of whose products are kept.
Work product(const Weight& weight, std::int64_t rows, double columns) {
  Work work;
  work.flops = 2.0 * static_cast<double>(rows) * columns * weight.k();
  if (rows > 0) work.weight_bytes = static_cast<double>(weight.bytes());
  work.other_bytes = static_cast<double>(rows) * weight.k() * kBf16;
  return work;
}

}  // namespace

std::string EmbedOp::shape(const Runtime& runtime) const { return std::to_string(runtime.weights[weight_].k()); }

Work EmbedOp::work(const Runtime& runtime) const {
  const Weight& weight = runtime.weights[weight_];
  const int width = weight.k();
  Work work;
  const double row = weight.quantised() ? static_cast<double>(weight.panel_bytes()) / kPanel : width * kBf16;
  work.weight_bytes = static_cast<double>(runtime.rows(out_)) * row;
  work.other_bytes = bytes(runtime, out_, width);
  return work;
}

std::string RotationTableOp::shape(const Runtime& runtime) const {
  return std::to_string(runtime.rotations.size()) + " tables";
}

Work RotationTableOp::work(const Runtime& runtime) const {
  Work work;
  for (const RotationTable& table : runtime.rotations) {
    work.other_bytes += static_cast<double>(runtime.rows(out_)) * 2 * size(table.frequencies);
  }
  return work;
}

std::string SelectRowsOp::shape(const Runtime& runtime) const {
  return std::to_string(runtime.buffers[out_.buffer].width);
}

Work SelectRowsOp::work(const Runtime& runtime) const {
  Work work;
  work.other_bytes = 2 * bytes(runtime, out_, runtime.buffers[out_.buffer].width);
  return work;
}

std::string RmsNormOp::shape(const Runtime& runtime) const {
  return by(groups_, static_cast<std::int64_t>(runtime.vectors[weight_].size()));
}

Work RmsNormOp::work(const Runtime& runtime) const {
  const int width = groups_ * static_cast<int>(runtime.vectors[weight_].size());
  Work work;
  work.flops = 4.0 * static_cast<double>(runtime.rows(out_)) * width;  // square, sum, scale, weight
  if (runtime.rows(out_) > 0) work.weight_bytes = size(runtime.vectors[weight_]);
  work.other_bytes = bytes(runtime, x_, width) + bytes(runtime, out_, width);
  return work;
}

std::string RopeOp::shape(const Runtime&) const { return by(heads_, head_dim_); }

Work RopeOp::work(const Runtime& runtime) const {
  const std::vector<float>& frequencies = runtime.rotations[rotation_].frequencies;
  const auto rows = static_cast<double>(runtime.rows(out_));
  Work work;
  work.flops = 6.0 * rows * heads_ * static_cast<double>(frequencies.size());
  work.other_bytes = 2 * bytes(runtime, out_, heads_ * head_dim_) + 2 * rows * size(frequencies);
  return work;
}

std::string GateMulOp::kind() const { return f_ == Gate::kSilu ? "silu_mul" : "gelu_mul"; }
std::string GateMulOp::shape(const Runtime&) const { return std::to_string(width_); }

Work GateMulOp::work(const Runtime& runtime) const {
  Work work;
  work.flops = static_cast<double>(runtime.rows(out_)) * width_;
  work.other_bytes = 3 * bytes(runtime, out_, width_);
  return work;
}

std::string AddOp::shape(const Runtime&) const { return std::to_string(width_); }

Work AddOp::work(const Runtime& runtime) const {
  Work work;
  work.flops = static_cast<double>(runtime.rows(out_)) * width_;
  work.other_bytes = bytes(runtime, a_, width_) + bytes(runtime, b_, width_) + bytes(runtime, out_, width_);
  return work;
}

std::string StoreOp::shape(const Runtime& runtime) const {
  return by(runtime.caches[cache_].kv_heads, runtime.caches[cache_].head_dim);
}

Work StoreOp::work(const Runtime& runtime) const {
  const Cache& cache = runtime.caches[cache_];
  Work work;
  work.other_bytes = 2 * bytes(runtime, v_, cache.kv_heads * cache.head_dim);
  work.kv_bytes = static_cast<double>(runtime.rows(v_)) * runtime.token_bytes(cache);
  return work;
}

std::string QuantizeOp::shape(const Runtime& runtime) const { return std::to_string(runtime.weights[weight_].k()); }

Work QuantizeOp::work(const Runtime& runtime) const {
  Work work;
  work.other_bytes = 2 * bytes(runtime, out_, runtime.weights[weight_].k());  // a chunk of codes is as long as one of bfloat16
  return work;
}

std::string MatmulOp::kind() const {
  switch (epilogue_) {
    case Epilogue::kAdd: return "matmul+add";
    case Epilogue::kSiluMul: return "matmul+silu_mul";
    case Epilogue::kGeluMul: return "matmul+gelu_mul";
    default: return "matmul";
  }
}

std::string MatmulOp::shape(const Runtime& runtime) const {
  return by(runtime.weights[weight_].k(), std::int64_t{gated() ? 2 : 1} * width_);
}

Work MatmulOp::work(const Runtime& runtime) const {
  Work work = product(runtime.weights[weight_], runtime.rows(x_), (gated() ? 2.0 : 1.0) * width_);
  if (bias_ >= 0) work.weight_bytes += size(runtime.vectors[bias_]);
  if (epilogue_ == Epilogue::kAdd) work.other_bytes += bytes(runtime, residual_, width_);
  work.other_bytes += bytes(runtime, out_, width_);
  return work;
}

std::string LogitsOp::shape(const Runtime& runtime) const {
  return by(runtime.weights[weight_].k(), runtime.weights[weight_].n());
}

Work LogitsOp::work(const Runtime& runtime) const {
  const std::int64_t rows = runtime.logits_end - runtime.logits_begin;
  Work work = product(runtime.weights[weight_], rows, runtime.weights[weight_].n());
  work.other_bytes += static_cast<double>(rows) * runtime.weights[weight_].n() * kFloat;
  return work;
}

std::string SoftcapOp::shape(const Runtime&) const { return std::to_string(vocab_size_); }

Work SoftcapOp::work(const Runtime& runtime) const {
  Work work;
  work.other_bytes = 2.0 * static_cast<double>(runtime.logits_end - runtime.logits_begin) * vocab_size_ * kFloat;
  return work;
}

std::string AttentionOp::shape(const Runtime& runtime) const {
  const Cache& cache = runtime.caches[cache_];
  return std::to_string(heads_) + "/" + std::to_string(cache.kv_heads) + " x " + std::to_string(cache.head_dim);
}

// Per query row and head two products over each position that it sees. A sequence reads what its rows see together once.
Work AttentionOp::work(const Runtime& runtime) const {
  const Step& step = runtime.step;
  const Cache& cache = runtime.caches[cache_];
  const std::int64_t window = runtime.attention_plans[plan_].window();
  double pairs = 0, positions = 0;
  for (int r = 0; r < step.num_sequences; ++r) {
    const std::int64_t first = step.positions[step.query_starts[r]];
    const std::int64_t last = first + step.query_starts[r + 1] - step.query_starts[r] - 1;
    for (std::int64_t p = first; p <= last; ++p) pairs += static_cast<double>(window > 0 ? std::min(p + 1, window) : p + 1);
    positions += static_cast<double>(last + 1 - (window > 0 ? std::max<std::int64_t>(0, first - window + 1) : 0));
  }
  Work work;
  work.flops = 4.0 * pairs * heads_ * cache.head_dim;
  work.kv_bytes = positions * static_cast<double>(runtime.token_bytes(cache));
  work.other_bytes = 2 * bytes(runtime, q_, heads_ * cache.head_dim);
  return work;
}

}  // namespace octavo
