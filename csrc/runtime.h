// What the ops of a program share: buffers, weights, KV caches, and the step that is running.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <vector>

#include "attention_plan.h"
#include "kernels.h"
#include "memory.h"
#include "weight.h"

namespace octavo {

// One step's arrays, in the caller's memory; see Batch in octavo/backends/base.py. G: groups of layers that share blocks.
struct Step {
  std::int64_t num_tokens = 0;                // T
  std::int64_t num_logit_rows = 0;            // S
  int num_sequences = 0;                      // R
  const std::int32_t* token_ids = nullptr;    // [T]
  const std::int32_t* positions = nullptr;    // [T]
  int num_groups = 0;                         // G
  const std::int64_t* slot_mapping = nullptr; // [G, T]
  const std::int32_t* query_starts = nullptr; // [R + 1]
  const std::int32_t* block_tables = nullptr; // [G, R, table_width]
  std::int64_t table_width = 0;
  int block_size = 0;                         // tokens of a block; the program's own
  const std::int32_t* logit_rows = nullptr;   // [S]

  const std::int64_t* slots(int group) const { return slot_mapping + group * num_tokens; }
  const std::int32_t* table(int group, int sequence) const {
    return block_tables + (std::int64_t{group} * num_sequences + sequence) * table_width;
  }
};

// Activations of T rows, or of the S rows whose logits are needed. Several values may follow each other in one buffer,
// or stand side by side in it; all that share one have their columns past `width` at zero.
struct Buffer {
  int width = 0;
  bool selected = false;  // S rows, not T
  bool stream = false;    // of the residual stream: float32, not bfloat16
  Memory memory;
  std::int64_t stride() const { return (width + kChunk - 1) / kChunk * kChunk; }
  std::int64_t row_bytes() const { return stride() * static_cast<std::int64_t>(stream ? sizeof(float) : sizeof(bf16)); }
};

// A value: the columns of a buffer from `column` on.
struct View {
  int buffer = -1;
  int column = 0;
};

// cos and sin of a step's positions, made once a step for all layers that turn alike.
struct RotationTable {
  std::vector<float> frequencies;  // [half]
  float factor = 1;
  Memory cos, sin;                 // [T, half]
};

// Keys and values of one layer. A block holds those of all layers of one group, one after the other, so that it can be
// copied as one piece of memory, and so that a few large pages hold all of a short sequence. All blocks are as large as
// the largest group's:
//
//   block of group 0: layer 5 keys | layer 5 values | layer 11 keys | ...      of group 1: layer 0 keys | layer 0 values | ...
struct Cache {
  int kv_heads = 0, head_dim = 0, group = 0;
  std::int64_t keys = 0, values = 0;  // where they begin in a block, bytes
};

// What workers tell each other in the middle of a step; see octavo/collectives.
enum class Exchange { kAllReduce, kGather, kSend, kRecv };

struct ExchangeRows {
  std::int64_t count = 0;
  int width = 0;
  FloatRows mine;        // [count, width]; kRecv: to be filled
  float* all = nullptr;  // kAllReduce: [ranks, count, width]; kGather: [count, vocabulary], to be filled by rank 0
};

constexpr std::int64_t kOwnRows = 4;

struct Runtime {
  explicit Runtime(const Kernels& table) : kernels(table) {}

  const Kernels& kernels;
  std::vector<Buffer> buffers;
  Arena weight_memory;
  Memory weight_file;  // in its place, where the weights are mapped
  std::vector<Weight> weights;
  Activations activations = Activations::kInt8;  // where a weight is in few bits
  std::int64_t quant_chunks = 0;            // of the deepest such weight
  Memory quant_memory;                      // the rows that the next such product reads
  std::vector<std::vector<float>> vectors;  // norm weights and biases
  std::vector<RotationTable> rotations;
  std::vector<Cache> caches;
  int num_groups = 0;                 // of the caches
  std::shared_ptr<Memory> kv_memory;  // of all blocks; shared with whoever looks into it from outside
  Memory swap_memory;                 // the host tier: whole blocks that gave their place up
  std::int64_t block_bytes = 0;
  KvType kv_type = KvType::kBfloat16;
  std::vector<AttentionPlan> attention_plans;
  int block_size = 0;

  Step step;
  std::int64_t logits_begin = 0, logits_end = 0;  // of S: the slice whose logits are being computed
  float* logits = nullptr;                        // [slice, vocabulary]

  int num_ranks = 1;  // that divide each layer
  std::function<void(Exchange, const ExchangeRows&)> exchange;  // called by one thread; may throw
  mutable std::exception_ptr exchange_error;                    // what it threw in this step
  Memory gathered;                                              // [ranks, T, width] of the partial sums at hand
  float* all_logits = nullptr;                                  // [slice, vocabulary], where logits are gathered

  std::int64_t rows(View view) const { return buffers[view.buffer].selected ? step.num_logit_rows : step.num_tokens; }
  KvCache layout(const Cache& cache) const {
    auto* base = kv_memory->as<std::uint8_t>();
    return {base + cache.keys, base + cache.values, cache.kv_heads, cache.head_dim, block_size, block_bytes, kv_type};
  }
  // Of a token's keys and values in one layer.
  std::int64_t token_bytes(const Cache& cache) const {
    return 2 * cache.kv_heads * KvCache::panel_bytes(kv_type, cache.head_dim) / kPanel;
  }
  Rows at(View view) const {
    const Buffer& buffer = buffers[view.buffer];
    return {buffer.memory.as<bf16>() + view.column, buffer.stride()};
  }
  // What a product of so many rows with this weight reads. Few rows are quicker made than waited for: each thread has its own.
  bool has_own_rows(std::int64_t rows) const { return rows <= kOwnRows; }
  QuantRows quant_rows(const Weight& weight, std::int64_t rows, int thread) const {
    const std::int64_t first = has_own_rows(rows) ? thread * kOwnRows * quant_chunks : 0;
    const int each = chunks_each(activations);
    return {quant_memory.as<QuantChunk>() + first * each, std::int64_t{weight.chunks()} * each};
  }
  bool is_stream(View view) const { return buffers[view.buffer].stream; }
  FloatRows stream_at(View view) const {
    const Buffer& buffer = buffers[view.buffer];
    return {buffer.memory.as<float>() + view.column, buffer.stride()};
  }
};

}  // namespace octavo
