// A flat program of ops over named buffers, and its runner: one call a step, on the program's own threads.
//
//   build     add_buffer, add_weight + pack, add_vector, add_rotation, add_cache, then ops in the order in which they run
//   once      allocate_kv_cache, allocate_swap_space
//   a step    body ops over T rows ── select_rows ── body ops over S rows ┐
//             for each slice of S: logits ── softcap ── sample, copy out  ┘  barriers between ops, one wake
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "ops.h"
#include "pool.h"
#include "profile.h"
#include "roofline.h"
#include "runtime.h"
#include "sampling.h"
#include "stored.h"

namespace octavo {

constexpr std::int64_t kLogitsBytes = 64 << 20;  // of float32 logits held at a time

// What is to become of a step's logits, one entry per logit row; both parts may be absent.
struct LogitsUse {
  std::span<const SamplingRow> rows;         // [S] or empty: sample
  std::span<SampledRow> sampled;             // as many
  int vocab_size = 0;                        // ids that may be sampled: the first of the vocabulary
  std::span<const std::int32_t> copy_rows;   // ascending rows of S whose logits are asked for
  float* copies = nullptr;                   // [copy_rows, vocabulary]
};

// A whole block goes from one place to another; BlockMove of octavo/core/plan.py.
struct BlockMove {
  enum class Kind { kCopy, kSwapOut, kSwapIn };  // within the cache; to the host tier; back from there
  Kind kind;
  std::int64_t source, destination;
};

class Program {
 public:
  Program(const Kernels& kernels, int num_threads);

  // Building. Each add_... gives back the number by which ops name the thing. Widths and shapes that do not fit raise
  // std::invalid_argument; so do numbers of what is not there.
  int add_buffer(int width, bool selected, bool stream);
  // `width`: as of Weight.
  int add_weight(int n, int k, std::string_view width);
  // Packs rows [count, k] of float32: row i becomes row (first + i) of the panels first_panel, first_panel + panel_step, ... of
  // the weight. first: a multiple of 16. Several threads may pack different rows at once.
  void pack(int weight, int first_panel, int panel_step, const float* rows, int first, int count);
  // The same for `count` rows of a stored format, side by side.
  void pack_stored(int weight, int first_panel, int panel_step, const StoredFormat& format, const std::uint8_t* rows,
                   int first, int count);
  // All packed weights, one after the other, make a file that a later program of the same weights maps instead of packing them.
  std::int64_t packed_bytes() const;
  std::uint64_t packed_checksum();
  // Maps the file's bytes from `offset`, a multiple of 64, on, if they have this checksum; else false, and nothing is changed. The
  // file must have the bytes. Nothing can be packed afterwards. Raises std::bad_alloc where it cannot be mapped.
  bool map_weights(int descriptor, std::int64_t offset, std::uint64_t checksum);
  int add_vector(std::vector<float> values);
  int add_rotation(std::vector<float> frequencies, float factor);
  // group: of the layers whose keys and values share blocks, and so a block table.
  int add_cache(int kv_heads, int head_dim, int group);

  // Where several workers share the model: how many divide each layer, and what is called between them. The program of one
  // stage of a pipeline begins with recv, or ends with send, or both.
  void set_exchange(int num_ranks, std::function<void(Exchange, const ExchangeRows&)> exchange);
  // Of the whole model, whatever this part of it has; before the first op.
  void set_vocab_size(int vocab_size);
  void set_num_groups(int num_groups);

  // `first`: the id of the weight's first row; rows of ids that it has not are zero.
  void embed(int weight, float scale, int first, View out);
  void recv(View out, int width);
  void send(View x, int width);
  // The partial sums of all ranks for x, added in rank order.
  void all_reduce(View x, int width, View out);
  void select_rows(View x, View out);
  void rms_norm(View x, int weight, int groups, float eps, View out);
  void rope(View x, int rotation, int heads, int head_dim, View out);
  void gate_mul(View gate, View up, Gate f, int width, View out);
  void add(View a, View b, int width, View out);
  void store(View k, View v, int cache);
  void attention(View q, int cache, int heads, int window, float scale, float softcap, View out);
  void matmul(View x, int weight, int bias, Epilogue epilogue, View residual, int width, View out);
  // Of the vocabulary, or of this rank's part of it.
  void logits(View x, int weight);
  void softcap(float cap);
  // After logits: brings the columns of all ranks to rank 0, who then has the whole vocabulary's.
  void gather();

  // Zeroed lazily by the system; a cache that was there is dropped, and so is its host tier. block_size: a multiple of 16.
  void allocate_kv_cache(std::int64_t num_blocks, int block_size);

  // The host tier, room for `num_blocks` blocks: in memory, lazily committed, or in a file that has the room.
  void allocate_swap_space(std::int64_t num_blocks, std::optional<int> descriptor);

  // Copies whole blocks, one after the other. Raises as `step` does.
  void move_blocks(std::span<const BlockMove> moves);

  // Runs one step; steps of two threads run one after the other. Raises std::invalid_argument, before anything is
  // written, for ids, slots, blocks or rows that are out of range: a step never leaves its memory. Raises
  // std::runtime_error after a fork, and std::bad_alloc where the buffers cannot grow; a smaller step may follow that.
  void step(const Step& step, const LogitsUse& use);

  // Times the ops of the steps to come, from zero; the profile so far, one entry an op in the order in which they run,
  // the last for sampling. Steps that are not timed do not pay for it.
  void start_profile();
  std::vector<OpProfile> stop_profile();

  // What this machine's memory and kernels can do, on this program's threads and weights. Takes about two seconds.
  Roofline measure_roofline();

  // Whether what several sequences share is read once for all of them; on unless told otherwise. Results are the same.
  void set_cascade(bool on) { cascade_ = on; }

  // What activations become in products with weights in few bits; int8 unless told otherwise, before the first step.
  void set_activations(Activations activations) { runtime_.activations = activations; }

  // What the cache holds; bfloat16 unless told otherwise, before it is allocated.
  void set_kv_type(KvType type) { runtime_.kv_type = type; }

  // Positions of the last step whose keys and values were read for several sequences at once, over all layers: each counts
  // once for every sequence but the first.
  std::int64_t shared_positions() const;

  const Kernels& kernels() const { return runtime_.kernels; }
  int num_threads() const { return pool_.num_threads(); }
  int vocab_size() const { return vocab_size_; }
  std::int64_t weight_bytes() const;
  std::int64_t block_bytes() const { return runtime_.block_bytes; }
  const Runtime& runtime() const { return runtime_; }

 private:
  void require(bool condition, const char* what) const;
  std::int64_t panel_of(int weight, int first_panel, int panel_step, int first, int count) const;
  void quantize(View x, int weight);
  void check_view(View view, int width, bool stream = false) const;
  void check_operand(View view, int k) const;
  void check(const Step& step) const;
  void check_group(const Step& step, int group) const;
  void grow(const Step& step);
  void prepare(std::vector<std::unique_ptr<Op>>& ops);
  void run(std::vector<std::unique_ptr<Op>>& ops, std::size_t first, Share share);
  void run_slices(const LogitsUse& use, Share share);
  void use_logits(const LogitsUse& use, Scratch& scratch);
  void begin_slice(std::int64_t begin);
  void end_op(std::size_t op);

  Runtime runtime_;
  Pool pool_;
  std::mutex mutex_;  // of step and of the caches
  std::vector<std::unique_ptr<Op>> body_, head_;
  int vocab_size_ = 0;
  int logits_width_ = 0;  // of them this worker computes
  int widest_sum_ = 0;    // of all_reduce
  bool gathers_ = false;
  std::int64_t num_blocks_ = 0, num_swap_blocks_ = 0;
  bool cascade_ = true;
  std::int64_t capacity_[2] = {0, 0};  // rows of T and of S that the buffers hold
  Memory logits_, all_logits_;
  Units logits_units_;
  std::vector<Scratch> scratch_;  // one a thread
  std::optional<Profile> profile_;  // while one is taken: body, head, sampling
};

}  // namespace octavo
