#include "program.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "checksum.h"
#include "exchange.h"
#include "pack.h"

namespace octavo {

namespace {

constexpr std::int64_t kFewBytes = 4 << 20;  // are moved sooner than sleeping threads are awake

std::uint64_t checksum_of(Pool& pool, const std::vector<Weight>& weights) {
  std::vector<ByteSpan> parts;
  for (const Weight& weight : weights) parts.push_back(weight.packed());
  return checksum(pool, parts);
}

}  // namespace

Program::Program(const Kernels& kernels, int num_threads)
    : runtime_(kernels), pool_(num_threads), scratch_(num_threads) {}

void Program::require(bool condition, const char* what) const {
  if (!condition) throw std::invalid_argument(std::string("program: ") + what);
}

void Program::check_view(View view, int width, bool stream) const {
  require(view.buffer >= 0 && view.buffer < static_cast<int>(runtime_.buffers.size()), "no such buffer");
  require(runtime_.is_stream(view) == stream, "a buffer of the residual stream where another belongs, or the reverse");
  require(view.column >= 0 && width > 0 && view.column + width <= runtime_.buffers[view.buffer].width,
          "columns past the end of a buffer");
}

// Products read whole chunks of k: the zeros behind a last, short one must be the buffer's own.
void Program::check_operand(View view, int k) const {
  check_view(view, k);
  require(view.column % kChunk == 0, "a product reads from a column that is a multiple of 32");
}

int Program::add_buffer(int width, bool selected, bool stream) {
  require(width > 0, "a buffer needs columns");
  runtime_.buffers.push_back({width, selected, stream, {}});
  return static_cast<int>(runtime_.buffers.size()) - 1;
}

int Program::add_weight(int n, int k, std::string_view width) {
  Weight weight(n, k, width);
  weight.place(runtime_.weight_memory.take(static_cast<std::size_t>(weight.bytes())));
  runtime_.weights.push_back(weight);
  if (weight.quantised()) runtime_.quant_chunks = std::max<std::int64_t>(runtime_.quant_chunks, weight.chunks());
  return static_cast<int>(runtime_.weights.size()) - 1;
}

// The panel that begins with row `first`, of those that belong to rows first .. first + count - 1.
std::int64_t Program::panel_of(int weight, int first_panel, int panel_step, int first, int count) const {
  require(weight >= 0 && weight < static_cast<int>(runtime_.weights.size()), "no such weight");
  require(runtime_.weight_file.bytes() == 0, "the weights are mapped from a file, and cannot be packed");
  require(first_panel >= 0 && panel_step >= 1 && first >= 0 && first % kPanel == 0 && count >= 1,
          "rows to pack begin with a whole panel");
  const std::int64_t place = first_panel + static_cast<std::int64_t>(first) / kPanel * panel_step;
  require(place + static_cast<std::int64_t>((count - 1) / kPanel) * panel_step < runtime_.weights[weight].panels(),
          "rows past the last panel of a weight");
  return place;
}

void Program::pack(int weight, int first_panel, int panel_step, const float* rows, int first, int count) {
  const std::int64_t place = panel_of(weight, first_panel, panel_step, first, count);
  runtime_.weights[weight].pack(rows, count, place, panel_step);
}

void Program::pack_stored(int weight, int first_panel, int panel_step, const StoredFormat& format,
                          const std::uint8_t* rows, int first, int count) {
  const std::int64_t place = panel_of(weight, first_panel, panel_step, first, count);
  runtime_.weights[weight].pack(format, rows, count, place, panel_step);
}

std::int64_t Program::packed_bytes() const {
  std::int64_t total = 0;
  for (const Weight& weight : runtime_.weights) total += weight.bytes();
  return total;
}

std::uint64_t Program::packed_checksum() {
  const std::lock_guard lock(mutex_);
  return checksum_of(pool_, runtime_.weights);
}

bool Program::map_weights(int descriptor, std::int64_t offset, std::uint64_t checksum) {
  const std::lock_guard lock(mutex_);
  require(offset >= 0 && offset % 64 == 0, "weights in a file begin at a multiple of 64 bytes");
  Memory file = Memory::view_of_file(descriptor, static_cast<std::size_t>(offset + packed_bytes()));
  std::vector<Weight> mapped = runtime_.weights;
  std::uint8_t* place = file.as<std::uint8_t>() + offset;
  for (Weight& weight : mapped) {
    weight.place(place);
    place += weight.bytes();
  }
  if (checksum_of(pool_, mapped) != checksum) return false;
  runtime_.weights = std::move(mapped);
  runtime_.weight_file = std::move(file);
  runtime_.weight_memory = Arena();
  return true;
}

int Program::add_vector(std::vector<float> values) {
  runtime_.vectors.push_back(std::move(values));
  return static_cast<int>(runtime_.vectors.size()) - 1;
}

int Program::add_rotation(std::vector<float> frequencies, float factor) {
  require(!frequencies.empty(), "a rotation needs frequencies");
  runtime_.rotations.push_back({std::move(frequencies), factor, {}, {}});
  return static_cast<int>(runtime_.rotations.size()) - 1;
}

int Program::add_cache(int kv_heads, int head_dim, int group) {
  require(kv_heads > 0 && head_dim > 0 && head_dim % kPanel == 0 && head_dim <= kMaxHeadDim,
          "the head dimension must be a multiple of 16 up to 256");
  require(group >= 0 && group < (1 << 16), "groups count from 0, and are few");
  runtime_.num_groups = std::max(runtime_.num_groups, group + 1);
  runtime_.caches.push_back({kv_heads, head_dim, group});
  return static_cast<int>(runtime_.caches.size()) - 1;
}

void Program::set_exchange(int num_ranks, std::function<void(Exchange, const ExchangeRows&)> exchange) {
  require(num_ranks >= 1, "there is at least one rank");
  runtime_.num_ranks = num_ranks;
  runtime_.exchange = std::move(exchange);
}

void Program::set_vocab_size(int vocab_size) {
  require(vocab_size > 0 && body_.empty(), "a vocabulary has ids, and its size is told before the first op");
  vocab_size_ = vocab_size;
}

void Program::set_num_groups(int num_groups) {
  require(num_groups >= runtime_.num_groups, "fewer groups than caches belong to");
  runtime_.num_groups = num_groups;
}

void Program::embed(int weight, float scale, int first, View out) {
  require(weight >= 0 && weight < static_cast<int>(runtime_.weights.size()), "no such weight");
  require(body_.empty(), "embed is the first op");
  check_view(out, runtime_.weights[weight].k(), true);
  require(first >= 0 && first + runtime_.weights[weight].n() <= vocab_size_, "an embedding outside of the vocabulary");
  body_.push_back(std::make_unique<RotationTableOp>(out));
  body_.push_back(std::make_unique<EmbedOp>(weight, scale, first, out));
}

void Program::recv(View out, int width) {
  require(body_.empty() && runtime_.exchange, "recv is the first op, and needs an exchange");
  check_view(out, width, true);
  body_.push_back(std::make_unique<RotationTableOp>(out));
  body_.push_back(std::make_unique<ExchangeOp>(Exchange::kRecv, out, width));
}

void Program::send(View x, int width) {
  require(static_cast<bool>(runtime_.exchange), "send needs an exchange");
  check_view(x, width, true);
  body_.push_back(std::make_unique<ExchangeOp>(Exchange::kSend, x, width));
}

void Program::all_reduce(View x, int width, View out) {
  require(static_cast<bool>(runtime_.exchange), "all_reduce needs an exchange");
  check_view(x, width, true);
  check_view(out, width, runtime_.buffers.at(out.buffer).stream);
  require(!runtime_.buffers[x.buffer].selected && !runtime_.buffers[out.buffer].selected, "all_reduce is of T rows");
  widest_sum_ = std::max(widest_sum_, width);
  body_.push_back(std::make_unique<ExchangeOp>(Exchange::kAllReduce, x, width));
  body_.push_back(std::make_unique<SumRanksOp>(width, out));
}

void Program::select_rows(View x, View out) {
  const Buffer& target = runtime_.buffers.at(out.buffer);
  check_view(out, target.width, target.stream);
  check_view(x, target.width, target.stream);
  require(runtime_.buffers[x.buffer].width == target.width, "select_rows takes whole rows");
  require(runtime_.buffers[out.buffer].selected && !runtime_.buffers[x.buffer].selected, "select_rows goes from T to S");
  body_.push_back(std::make_unique<SelectRowsOp>(x, out));
}

void Program::rms_norm(View x, int weight, int groups, float eps, View out) {
  const int width = groups * static_cast<int>(runtime_.vectors.at(weight).size());
  check_view(x, width, runtime_.buffers.at(x.buffer).stream);
  check_view(out, width);
  body_.push_back(std::make_unique<RmsNormOp>(x, weight, groups, eps, out));
}

void Program::rope(View x, int rotation, int heads, int head_dim, View out) {
  require(2 * static_cast<int>(runtime_.rotations.at(rotation).frequencies.size()) <= head_dim, "too many frequencies");
  check_view(x, heads * head_dim);
  check_view(out, heads * head_dim);
  body_.push_back(std::make_unique<RopeOp>(x, rotation, heads, head_dim, out));
}

void Program::gate_mul(View gate, View up, Gate f, int width, View out) {
  for (View view : {gate, up, out}) check_view(view, width);
  body_.push_back(std::make_unique<GateMulOp>(gate, up, f, width, out));
}

void Program::add(View a, View b, int width, View out) {
  for (View view : {a, out}) check_view(view, width, true);
  check_view(b, width);
  body_.push_back(std::make_unique<AddOp>(a, b, width, out));
}

void Program::store(View k, View v, int cache) {
  const Cache& target = runtime_.caches.at(cache);
  for (View view : {k, v}) check_view(view, target.kv_heads * target.head_dim);
  body_.push_back(std::make_unique<StoreOp>(k, v, cache));
}

void Program::attention(View q, int cache, int heads, int window, float scale, float softcap, View out) {
  const Cache& target = runtime_.caches.at(cache);
  require(heads > 0 && heads % target.kv_heads == 0, "query heads do not share the KV heads evenly");
  for (View view : {q, out}) check_view(view, heads * target.head_dim);
  auto& plans = runtime_.attention_plans;
  auto plan = std::find_if(plans.begin(), plans.end(), [&](const AttentionPlan& known) {
    return known.serves(heads, target.kv_heads, target.head_dim, window, target.group);
  });
  if (plan == plans.end()) plan = plans.emplace(plan, heads, target.kv_heads, target.head_dim, window, target.group);
  ++plan->layers;
  const int index = static_cast<int>(plan - plans.begin());
  body_.push_back(std::make_unique<AttentionOp>(q, cache, index, heads, scale, softcap, out));
}

// Where a weight is in few bits, its operand is made by an op of its own. Products run one after the other: they share the memory.
void Program::quantize(View x, int weight) {
  if (runtime_.weights[weight].quantised()) body_.push_back(std::make_unique<QuantizeOp>(x, weight));
}

void Program::matmul(View x, int weight, int bias, Epilogue epilogue, View residual, int width, View out) {
  const Weight& w = runtime_.weights.at(weight);
  const bool gated = epilogue == Epilogue::kSiluMul || epilogue == Epilogue::kGeluMul;
  check_operand(x, w.k());
  check_view(out, width, epilogue == Epilogue::kAdd || epilogue == Epilogue::kFloat);
  if (epilogue == Epilogue::kAdd) check_view(residual, width, true);
  require(gated ? w.panels() % 2 == 0 && width <= w.panels() / 2 * kPanel : width <= w.panels() * kPanel,
          "a product writes more columns than its weight has");
  require(bias < 0 || runtime_.vectors.at(bias).size() == static_cast<std::size_t>(w.panels()) * kPanel,
          "a bias must be as long as the panels");
  quantize(x, weight);
  body_.push_back(std::make_unique<MatmulOp>(x, weight, bias, epilogue, residual, width, out));
}

void Program::logits(View x, int weight) {
  const Weight& w = runtime_.weights.at(weight);
  check_operand(x, w.k());
  require(runtime_.buffers[x.buffer].selected && head_.empty(), "logits come once, from selected rows");
  require(w.n() <= vocab_size_, "the output projection is larger than the vocabulary");
  logits_width_ = w.n();
  quantize(x, weight);  // all slices at once
  head_.push_back(std::make_unique<LogitsOp>(x, weight));
}

void Program::softcap(float cap) {
  require(!head_.empty() && cap > 0, "softcap follows logits, and is positive");
  head_.push_back(std::make_unique<SoftcapOp>(cap, logits_width_));
}

void Program::gather() {
  require(!head_.empty() && runtime_.exchange, "gather follows logits, and needs an exchange");
  gathers_ = true;
  head_.push_back(std::make_unique<ExchangeOp>(Exchange::kGather, View{}, logits_width_));
}

void Program::allocate_kv_cache(std::int64_t num_blocks, int block_size) {
  require(block_size > 0 && block_size % kPanel == 0, "the block size must be a multiple of 16");
  require(num_blocks > 0, "a KV cache needs blocks");
  pool_.require_own_process();
  const std::lock_guard lock(mutex_);
  num_blocks_ = num_swap_blocks_ = 0;
  runtime_.kv_memory = nullptr;
  runtime_.swap_memory = Memory();
  std::vector<std::int64_t> sizes(runtime_.num_groups);
  for (Cache& cache : runtime_.caches) {
    const std::int64_t panels = std::int64_t{cache.kv_heads} * (block_size / kPanel);
    const std::int64_t size = panels * KvCache::panel_bytes(runtime_.kv_type, cache.head_dim);
    cache.keys = sizes[cache.group];
    cache.values = cache.keys + size;
    sizes[cache.group] += 2 * size;
  }
  const std::int64_t block_bytes = sizes.empty() ? 0 : *std::max_element(sizes.begin(), sizes.end());
  std::int64_t bytes = 0;
  if (__builtin_mul_overflow(num_blocks, block_bytes, &bytes)) throw std::bad_alloc();
  runtime_.kv_memory = std::make_shared<Memory>(bytes, true);
  runtime_.block_bytes = block_bytes;
  runtime_.block_size = block_size;
  num_blocks_ = num_blocks;
}

std::int64_t Program::shared_positions() const {
  std::int64_t total = 0;
  for (const AttentionPlan& plan : runtime_.attention_plans) total += plan.shared_positions() * plan.layers;
  return total;
}

void Program::allocate_swap_space(std::int64_t num_blocks, std::optional<int> descriptor) {
  pool_.require_own_process();
  const std::lock_guard lock(mutex_);
  require(num_blocks_ > 0, "allocate_kv_cache comes before allocate_swap_space");
  require(num_blocks > 0, "a host tier needs blocks");
  num_swap_blocks_ = 0;
  runtime_.swap_memory = Memory();
  std::int64_t bytes = 0;
  if (__builtin_mul_overflow(num_blocks, block_bytes(), &bytes)) throw std::bad_alloc();
  runtime_.swap_memory = descriptor ? Memory::of_file(*descriptor, bytes) : Memory(bytes, true);
  num_swap_blocks_ = num_blocks;
}

void Program::move_blocks(std::span<const BlockMove> moves) {
  pool_.require_own_process();
  const std::lock_guard lock(mutex_);
  require(num_blocks_ > 0, "allocate_kv_cache comes before move_blocks");
  const auto within = [](std::int64_t block, std::int64_t count) { return block >= 0 && block < count; };
  for (const BlockMove& move : moves) {
    const bool in = move.kind == BlockMove::Kind::kSwapIn, out = move.kind == BlockMove::Kind::kSwapOut;
    require((in || within(move.source, num_blocks_)) && (out || within(move.destination, num_blocks_)),
            "block outside the KV cache");
    require((!in || within(move.source, num_swap_blocks_)) && (!out || within(move.destination, num_swap_blocks_)),
            "block outside the host tier");
  }
  char* cache = runtime_.kv_memory->as<char>();
  char* host = runtime_.swap_memory.as<char>();
  const std::int64_t size = block_bytes();
  const auto move_part = [&](int part, int parts) {  // the same part of each block, so that moves are done in order
    const std::int64_t begin = size * part / parts, end = size * (part + 1) / parts;
    for (const BlockMove& move : moves) {
      const char* from = (move.kind == BlockMove::Kind::kSwapIn ? host : cache) + move.source * size;
      char* to = (move.kind == BlockMove::Kind::kSwapOut ? host : cache) + move.destination * size;
      if (from != to) std::memcpy(to + begin, from + begin, end - begin);
    }
  };
  if (size * static_cast<std::int64_t>(moves.size()) < kFewBytes) {
    move_part(0, 1);
  } else {
    pool_.run([&](int thread) { move_part(thread, num_threads()); });
  }
}

std::int64_t Program::weight_bytes() const {
  std::int64_t total = packed_bytes();
  for (const auto& values : runtime_.vectors) total += static_cast<std::int64_t>(values.size() * sizeof(float));
  return total;
}

void Program::check(const Step& step) const {
  require(num_blocks_ > 0, "allocate_kv_cache comes before the first step");
  require(!head_.empty() || runtime_.exchange, "the program has no logits");
  require(head_.empty() || gathers_ || logits_width_ == vocab_size_, "logits of a part of the vocabulary are gathered");
  require(step.num_sequences >= 1 && step.query_starts[0] == 0 &&
              step.query_starts[step.num_sequences] == step.num_tokens,
          "query_starts do not span the tokens");
  require(step.num_groups == runtime_.num_groups, "slot_mapping and block_tables come for each group of layers");
  for (std::int64_t i = 0; vocab_size_ > 0 && i < step.num_tokens; ++i) {
    require(step.token_ids[i] >= 0 && step.token_ids[i] < vocab_size_, "token id outside the vocabulary");
  }
  for (int r = 0; r < step.num_sequences; ++r) {
    const int first = step.query_starts[r], last = step.query_starts[r + 1] - 1;
    require(first <= last && last < step.num_tokens, "query_starts do not rise from 0 to the number of tokens");
    require(step.positions[first] >= 0, "negative position");
    for (int i = first; i <= last; ++i) {
      require(step.positions[i] == step.positions[first] + i - first, "positions of a sequence have gaps");
    }
    require(step.positions[last] / runtime_.block_size < step.table_width, "a block table is shorter than its sequence");
  }
  for (int group = 0; group < step.num_groups; ++group) check_group(step, group);
  for (std::int64_t i = 0; i < step.num_logit_rows; ++i) {
    require(step.logit_rows[i] >= 0 && step.logit_rows[i] < step.num_tokens, "logit row outside the step");
  }
}

void Program::check_group(const Step& step, int group) const {
  const auto outside = [&](const char* what) {
    return std::invalid_argument(std::string("program: ") + what + " outside the KV cache, in group " + std::to_string(group));
  };
  const std::int64_t* slots = step.slots(group);
  for (std::int64_t i = 0; i < step.num_tokens; ++i) {
    if (slots[i] < 0 || slots[i] >= num_blocks_ * runtime_.block_size) throw outside("slot");
  }
  for (int r = 0; r < step.num_sequences; ++r) {
    const std::int32_t* table = step.table(group, r);
    const int blocks = step.positions[step.query_starts[r + 1] - 1] / runtime_.block_size + 1;
    for (int i = 0; i < blocks; ++i) {
      if (table[i] < 0 || table[i] >= num_blocks_) throw outside("block");
    }
  }
}

// Buffers keep what the largest step so far needed: a steady state allocates nothing. A new one is zero, padding too.
void Program::grow(const Step& step) {
  const std::int64_t rows[2] = {step.num_tokens, step.num_logit_rows};
  for (int selected = 0; selected < 2; ++selected) {
    if (rows[selected] <= capacity_[selected]) continue;
    const std::int64_t capacity = std::max(rows[selected], std::min<std::int64_t>(2 * capacity_[selected], 4096));
    capacity_[selected] = 0;  // should memory run out half-way, the next step starts over
    for (Buffer& buffer : runtime_.buffers) {
      if (buffer.selected == (selected == 1)) {
        buffer.memory = Memory();
        buffer.memory = Memory(static_cast<std::size_t>(capacity * buffer.row_bytes()));
      }
    }
    if (selected == 0) {
      for (RotationTable& table : runtime_.rotations) {
        table.cos = Memory(capacity * table.frequencies.size() * sizeof(float));
        table.sin = Memory(capacity * table.frequencies.size() * sizeof(float));
      }
    } else {
      const std::int64_t row_bytes = static_cast<std::int64_t>(vocab_size_) * sizeof(float);
      const std::int64_t slice = std::min(capacity, std::max<std::int64_t>(1, kLogitsBytes / row_bytes));
      if (!head_.empty()) logits_ = Memory(slice * logits_width_ * static_cast<std::int64_t>(sizeof(float)));
      if (gathers_) all_logits_ = Memory(slice * row_bytes);
    }
    capacity_[selected] = capacity;
  }
  const std::int64_t most_rows = std::max({capacity_[0], capacity_[1], kOwnRows * num_threads()});
  if (widest_sum_ > 0) {
    const auto sums = static_cast<std::size_t>(runtime_.num_ranks * capacity_[0] * widest_sum_) * sizeof(float);
    if (sums > runtime_.gathered.bytes()) runtime_.gathered = Memory(sums);
  }
  const auto bytes = static_cast<std::size_t>(most_rows * runtime_.quant_chunks * chunks_each(runtime_.activations)) * sizeof(QuantChunk);
  if (bytes > runtime_.quant_memory.bytes()) {
    runtime_.quant_memory = Memory();
    runtime_.quant_memory = Memory(bytes);
  }
}

void Program::begin_slice(std::int64_t begin) {
  const std::int64_t row_bytes = static_cast<std::int64_t>(logits_width_) * sizeof(float);
  const std::int64_t fit = static_cast<std::int64_t>(logits_.bytes()) / row_bytes;
  runtime_.logits = logits_.as<float>();
  runtime_.all_logits = all_logits_.as<float>();
  runtime_.logits_begin = begin;
  runtime_.logits_end = std::min(runtime_.step.num_logit_rows, begin + fit);
  logits_units_.reset();
  prepare(head_);
  if (profile_) {
    for (std::size_t i = 0; i < head_.size(); ++i) profile_->add(body_.size() + i, head_[i]->work(runtime_));
    Work reads;
    reads.other_bytes = static_cast<double>((runtime_.logits_end - begin) * row_bytes);
    profile_->add(body_.size() + head_.size(), reads);
  }
}

void Program::prepare(std::vector<std::unique_ptr<Op>>& ops) {
  for (const auto& op : ops) op->prepare(runtime_, num_threads());
}

void Program::step(const Step& step, const LogitsUse& use) {
  pool_.require_own_process();  // before the lock: a fork may have copied it while it was held
  const std::lock_guard lock(mutex_);
  check(step);
  runtime_.step = step;
  runtime_.step.block_size = runtime_.block_size;
  grow(step);
  for (AttentionPlan& plan : runtime_.attention_plans) plan.make(runtime_.step, num_threads(), cascade_);
  for (Scratch& scratch : scratch_) {
    if (!use.rows.empty()) scratch.reserve(use.vocab_size);
  }
  prepare(body_);
  const bool has_logits = step.num_logit_rows > 0 && !head_.empty();
  if (has_logits) begin_slice(0);
  if (profile_) {
    for (std::size_t i = 0; i < body_.size(); ++i) profile_->add(i, body_[i]->work(runtime_));
  }
  pool_.run([&](int thread) {
    const Share share{thread, num_threads()};
    if (profile_) pool_.barrier([&] { profile_->start(); });  // once all are awake
    run(body_, 0, share);
    if (has_logits) run_slices(use, share);
  });
  if (const std::exception_ptr error = std::exchange(runtime_.exchange_error, nullptr)) std::rethrow_exception(error);
}

// All of these ops, and a barrier. `first`: the place of ops[0] in the profile.
void Program::run(std::vector<std::unique_ptr<Op>>& ops, std::size_t first, Share share) {
  for (std::size_t i = 0; i < ops.size(); ++i) {
    ops[i]->run(runtime_, share);
    const bool last = i + 1 == ops.size();
    const Op::Cut next = last ? Op::Cut::kUnits : ops[i + 1]->cut(runtime_);
    const bool waits = next == Op::Cut::kUnits || next != ops[i]->cut(runtime_);
    if (profile_ || (waits && !ops[i]->is_own(runtime_))) end_op(first + i);
  }
}

void Program::end_op(std::size_t op) {
  if (profile_) {
    pool_.barrier([&] { profile_->finished(op); });
  } else {
    pool_.barrier();
  }
}

void Program::start_profile() {
  const std::lock_guard lock(mutex_);
  std::vector<OpProfile> ops;
  for (const auto* part : {&body_, &head_}) {
    for (const auto& op : *part) ops.push_back({op->kind(), op->shape(runtime_), 0, 0, {}});
  }
  ops.push_back({"sample", std::to_string(vocab_size_), 0, 0, {}});
  profile_.emplace(std::move(ops));
}

std::vector<OpProfile> Program::stop_profile() {
  const std::lock_guard lock(mutex_);
  require(profile_.has_value(), "start_profile comes before stop_profile");
  std::vector<OpProfile> ops = profile_->ops();
  profile_.reset();
  return ops;
}

Roofline Program::measure_roofline() {
  const std::lock_guard lock(mutex_);
  return octavo::measure_roofline(pool_, runtime_.kernels, runtime_.weights);
}

void Program::run_slices(const LogitsUse& use, Share share) {
  for (;;) {
    run(head_, body_.size(), share);
    use_logits(use, scratch_[share.thread]);
    end_op(body_.size() + head_.size());  // the slice is done with
    if (runtime_.logits_end == runtime_.step.num_logit_rows) return;
    pool_.barrier();  // all have seen that there is another
    if (share.thread == 0) begin_slice(runtime_.logits_end);
    pool_.barrier();
  }
}

// Samples and copies the slice, a row at a time, whoever is free.
void Program::use_logits(const LogitsUse& use, Scratch& scratch) {
  const std::int64_t begin = runtime_.logits_begin, count = runtime_.logits_end - begin;
  for (std::int64_t i = logits_units_.take(); i < count; i = logits_units_.take()) {
    const float* logits = (gathers_ ? runtime_.all_logits : runtime_.logits) + i * vocab_size_;
    const std::int64_t row = begin + i;
    if (!use.rows.empty()) sample_row(logits, use.vocab_size, use.rows[row], scratch, use.sampled[row]);
    const auto wanted = std::lower_bound(use.copy_rows.begin(), use.copy_rows.end(), row);
    if (wanted != use.copy_rows.end() && *wanted == row) {
      const std::int64_t place = wanted - use.copy_rows.begin();
      std::memcpy(use.copies + place * vocab_size_, logits, vocab_size_ * sizeof(float));
    }
  }
}

}  // namespace octavo
