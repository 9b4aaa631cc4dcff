#include "ops.h"

#include <algorithm>
#include <cstring>

#include "rotation.h"

namespace octavo {

namespace {

constexpr std::int64_t kFewRows = 16;            // a product of so few waits for memory
constexpr std::int64_t kCacheBytes = 256 << 10;  // of weights, and of rows, that a unit of a product keeps in a core's cache

// Small enough for the cache and to keep all threads busy to the end; panels in pairs, as gate and up stand.
Tile tile_of(const Weight& w, std::int64_t rows, int num_threads) {
  const std::int64_t row_bytes = w.plain().padded_k() * static_cast<std::int64_t>(sizeof(bf16));  // or as much in QuantChunks
  static_assert(sizeof(QuantChunk) == kChunk * sizeof(bf16));
  const std::int64_t fit_rows = std::max<std::int64_t>(kCacheBytes / row_bytes / 32 * 32, 32);
  const std::int64_t fit_panels = kCacheBytes / w.panel_bytes();
  const std::int64_t fair_panels = num_threads == 1 ? w.panels() : w.panels() / (4 * num_threads);
  const int panels = static_cast<int>(std::min(fit_panels, fair_panels)) / 2 * 2;
  return {std::max<std::int64_t>(1, std::min(fit_rows, rows)), std::max(2, panels)};
}

// Calls run(row_begin, row_end, panel_begin, panel_end) for this thread's part of a product. Few rows wait for memory, so that
// all that matters is to stream; many are cut into tiles, and neighbouring units share a panel tile, which then comes from a
// cache.
template <class Run>
void for_tiles(Units& units, int num_threads, std::int64_t rows, int panels, Tile tile, Run run) {
  if (rows <= kFewRows) {
    const std::int64_t pairs = (panels + 1) / 2;
    for (auto part = units.take_run(pairs, num_threads); part.begin < part.end; part = units.take_run(pairs, num_threads)) {
      run(0, rows, static_cast<int>(2 * part.begin), std::min(panels, static_cast<int>(2 * part.end)));
    }
    return;
  }
  const std::int64_t row_tiles = (rows + tile.rows - 1) / tile.rows;
  const std::int64_t count = row_tiles * ((panels + tile.panels - 1) / tile.panels);
  for (std::int64_t unit = units.take(); unit < count; unit = units.take()) {
    const std::int64_t row = unit % row_tiles * tile.rows;
    const int panel = static_cast<int>(unit / row_tiles) * tile.panels;
    run(row, std::min(rows, row + tile.rows), panel, std::min(panels, panel + tile.panels));
  }
}

// A thread's part of `rows` rows of a product of view x, whose row `first` is the first of op.x.
void multiply(const Runtime& runtime, const Weight& weight, View view, Matmul& op, std::int64_t first, std::int64_t rows,
              Units& units, Share share, Tile tile) {
  QuantMatmul in_few_bits;
  if (weight.quantised()) {
    const QuantRows x = runtime.quant_rows(weight, runtime.rows(view), share.thread);
    in_few_bits = {op, weight.quant(), {x.row(first), x.stride}, runtime.activations};
  } else {
    op.w = weight.plain();
  }
  for_tiles(units, share.num_threads, rows, weight.panels(), tile,
            [&](std::int64_t row_begin, std::int64_t row_end, int panel_begin, int panel_end) {
              if (weight.quantised()) {
                runtime.kernels.quant_matmul(in_few_bits, row_begin, row_end, panel_begin, panel_end);
              } else {
                runtime.kernels.matmul(op, row_begin, row_end, panel_begin, panel_end);
              }
            });
}

}  // namespace

void EmbedOp::run_rows(const Runtime& runtime, std::int64_t begin, std::int64_t end) {
  const Weight& w = runtime.weights[weight_];
  const FloatRows out = runtime.stream_at(out_);
  for (std::int64_t i = begin; i < end; ++i) {
    float* row = out.row(i);
    const std::int64_t id = runtime.step.token_ids[i] - std::int64_t{first_};
    if (id < 0 || id >= w.n()) {
      std::fill_n(row, w.k(), 0.0f);
      continue;
    }
    w.read(static_cast<int>(id), row);
    for (int k = 0; k < w.k(); ++k) row[k] = row[k] * scale_;
  }
}

void RotationTableOp::run_rows(const Runtime& runtime, std::int64_t begin, std::int64_t end) {
  for (const RotationTable& table : runtime.rotations) {
    const int half = static_cast<int>(table.frequencies.size());
    for (std::int64_t i = begin; i < end; ++i) {
      rotate_row(runtime.step.positions[i], table.frequencies.data(), half, table.factor,
                 table.cos.as<float>() + i * half, table.sin.as<float>() + i * half);
    }
  }
}

void SelectRowsOp::run_rows(const Runtime& runtime, std::int64_t begin, std::int64_t end) {
  const Buffer& x = runtime.buffers[x_.buffer];
  const Buffer& out = runtime.buffers[out_.buffer];
  for (std::int64_t i = begin; i < end; ++i) {
    std::memcpy(out.memory.as<char>() + i * out.row_bytes(),
                x.memory.as<char>() + runtime.step.logit_rows[i] * x.row_bytes(), out.row_bytes());
  }
}

void RmsNormOp::run_rows(const Runtime& runtime, std::int64_t begin, std::int64_t end) {
  RmsNorm op;
  if (runtime.is_stream(x_)) {
    op.x_float = runtime.stream_at(x_);
  } else {
    op.x = runtime.at(x_);
  }
  op.out = runtime.at(out_);
  op.weight = runtime.vectors[weight_].data();
  op.groups = groups_;
  op.width = static_cast<int>(runtime.vectors[weight_].size());
  op.eps = eps_;
  runtime.kernels.rms_norm(op, begin, end);
}

void RopeOp::run_rows(const Runtime& runtime, std::int64_t begin, std::int64_t end) {
  const RotationTable& table = runtime.rotations[rotation_];
  Rope op;
  op.x = runtime.at(x_);
  op.out = runtime.at(out_);
  op.cos = table.cos.as<float>();
  op.sin = table.sin.as<float>();
  op.heads = heads_;
  op.head_dim = head_dim_;
  op.half = static_cast<int>(table.frequencies.size());
  runtime.kernels.rope(op, begin, end);
}

void GateMulOp::run_rows(const Runtime& runtime, std::int64_t begin, std::int64_t end) {
  runtime.kernels.gate_mul({runtime.at(gate_), runtime.at(up_), runtime.at(out_), width_, f_}, begin, end);
}

void AddOp::run_rows(const Runtime& runtime, std::int64_t begin, std::int64_t end) {
  runtime.kernels.add({runtime.stream_at(a_), runtime.at(b_), runtime.stream_at(out_), width_}, begin, end);
}

void StoreOp::run_rows(const Runtime& runtime, std::int64_t begin, std::int64_t end) {
  if (runtime.kv_type == KvType::kInt8) return store_codes(runtime, begin, end);
  const Cache& cache = runtime.caches[cache_];
  const Rows k = runtime.at(out_), v = runtime.at(v_);
  const KvCache layout = runtime.layout(cache);
  const std::int64_t* slots = runtime.step.slots(cache.group);
  for (std::int64_t i = begin; i < end; ++i) {
    const std::int64_t block = slots[i] / runtime.block_size;
    const int slot = static_cast<int>(slots[i] % runtime.block_size);
    const int lane = slot % kPanel;
    for (int head = 0; head < cache.kv_heads; ++head) {
      const std::int64_t offset = layout.offset(block, head, slot / kPanel);
      bf16* keys = reinterpret_cast<bf16*>(layout.keys + offset) + lane * 2;
      bf16* values = reinterpret_cast<bf16*>(layout.values + offset) + lane / 2 * (2 * cache.head_dim) + lane % 2;
      const bf16* from_k = k.row(i) + head * cache.head_dim;
      const bf16* from_v = v.row(i) + head * cache.head_dim;
      for (int d = 0; d < cache.head_dim; d += 2) {
        std::memcpy(keys + d * kPanel, from_k + d, 2 * sizeof(bf16));
        values[2 * d] = from_v[d];
        values[2 * d + 2] = from_v[d + 1];
      }
    }
  }
}

void StoreOp::store_codes(const Runtime& runtime, std::int64_t begin, std::int64_t end) const {
  const Cache& cache = runtime.caches[cache_];
  const Rows k = runtime.at(out_), v = runtime.at(v_);
  const KvCache layout = runtime.layout(cache);
  const std::int64_t* slots = runtime.step.slots(cache.group);
  const int dim = cache.head_dim;
  std::int8_t codes[kMaxHeadDim];
  for (std::int64_t i = begin; i < end; ++i) {
    const std::int64_t block = slots[i] / runtime.block_size;
    const int slot = static_cast<int>(slots[i] % runtime.block_size), lane = slot % kPanel;
    for (int head = 0; head < cache.kv_heads; ++head) {
      const std::int64_t offset = layout.offset(block, head, slot / kPanel);
      std::uint8_t *keys = layout.keys + offset, *values = layout.values + offset;
      reinterpret_cast<float*>(keys + kPanel * dim)[lane] = runtime.kernels.quantize_head(k.row(i) + head * dim, dim, codes);
      for (int d = 0; d < dim; d += 4) {
        std::uint32_t four;
        std::memcpy(&four, codes + d, sizeof four);
        four ^= 0x80808080u;  // plus 128 each
        std::memcpy(keys + d * kPanel + lane * 4, &four, sizeof four);
      }
      reinterpret_cast<float*>(values + kPanel * dim)[lane] = runtime.kernels.quantize_head(v.row(i) + head * dim, dim, codes);
      values += lane / 4 * (4 * dim) + lane % 4;
      for (int d = 0; d < dim; ++d) values[4 * d] = static_cast<std::uint8_t>(codes[d] ^ 0x80);
    }
  }
}

void QuantizeOp::quantize(const Runtime& runtime, std::int64_t begin, std::int64_t end, int thread) const {
  const Weight& w = runtime.weights[weight_];
  const QuantRows out = runtime.quant_rows(w, runtime.rows(out_), thread);
  runtime.kernels.quantize({runtime.at(out_), out, w.k(), w.quant().format, runtime.activations}, begin, end);
}

void MatmulOp::prepare(const Runtime& runtime, int num_threads) {
  units_.reset();
  tile_ = tile_of(runtime.weights[weight_], runtime.rows(x_), num_threads);
}

void MatmulOp::run(const Runtime& runtime, Share share) {
  Matmul op;
  op.x = runtime.at(x_);
  op.bias = bias_ < 0 ? nullptr : runtime.vectors[bias_].data();
  op.epilogue = epilogue_;
  if (epilogue_ == Epilogue::kAdd) {
    op.residual = runtime.stream_at(residual_);
    op.out_float = runtime.stream_at(out_);
  } else if (epilogue_ == Epilogue::kFloat) {
    op.out_float = runtime.stream_at(out_);
  } else {
    op.out = runtime.at(out_);
  }
  op.out_width = width_;
  multiply(runtime, runtime.weights[weight_], x_, op, 0, runtime.rows(x_), units_, share, tile_);
}

void LogitsOp::prepare(const Runtime& runtime, int num_threads) {
  units_.reset();
  const std::int64_t rows = runtime.logits_end - runtime.logits_begin;
  tile_ = tile_of(runtime.weights[weight_], rows, num_threads);
}

void LogitsOp::run(const Runtime& runtime, Share share) {
  const Weight& w = runtime.weights[weight_];
  Matmul op;
  op.x = runtime.at(x_);
  op.x.data = op.x.row(runtime.logits_begin);
  op.epilogue = Epilogue::kFloat;
  op.out_float = {runtime.logits, w.n()};
  op.out_width = w.n();
  multiply(runtime, w, x_, op, runtime.logits_begin, runtime.logits_end - runtime.logits_begin, units_, share, tile_);
}

void SoftcapOp::run(const Runtime& runtime, Share share) {
  const std::int64_t count = (runtime.logits_end - runtime.logits_begin) * vocab_size_;
  const std::int64_t begin = count * share.thread / share.num_threads;
  const std::int64_t end = count * (share.thread + 1) / share.num_threads;
  if (begin < end) runtime.kernels.softcap(runtime.logits + begin, end - begin, cap_);
}

void AttentionOp::run(const Runtime& runtime, Share) {
  const Step& step = runtime.step;
  const AttentionPlan& plan = runtime.attention_plans[plan_];
  const Cache& cache = runtime.caches[cache_];
  const std::vector<AttentionUnit>& all = plan.units();
  Attention op;
  op.q = runtime.at(q_);
  op.out = runtime.at(out_);
  op.cache = runtime.layout(cache);
  op.heads = heads_;
  op.window = plan.window();
  op.scale = scale_;
  op.softcap = softcap_;
  const auto count = static_cast<std::int64_t>(all.size());
  for (std::int64_t i = units_.take(); i < count; i = units_.take()) {
    const AttentionUnit& unit = all[i];
    op.block_table = step.table(cache.group, unit.sequence);
    if (unit.whole()) {
      op.first = step.query_starts[unit.sequence];
      op.count = step.query_starts[unit.sequence + 1] - op.first;
      op.position = step.positions[op.first];
      runtime.kernels.attention(op, unit.row_begin, unit.row_end, unit.head, unit.head + 1);
      continue;
    }
    runtime.kernels.attention_pieces(op, plan.rows() + unit.row_begin, unit.row_end - unit.row_begin, unit.head,
                                     unit.piece_begin, unit.piece_end);
    for (int join = unit.join_begin; join < unit.join_end; ++join) {
      if (!plan.last_of(join, unit.head)) continue;
      const AttentionJoin& rows = plan.join(join);
      runtime.kernels.attention_merge(op, plan.rows() + rows.row_begin, rows.row_end - rows.row_begin, unit.head);
    }
  }
}

}  // namespace octavo
