#include "roofline.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <span>

#include "memory.h"

namespace octavo {

namespace {

constexpr std::size_t kBeyondCaches = std::size_t{512} << 20;
constexpr double kSeconds = 0.1;  // of runs, of which the best counts
constexpr int kRounds = 3;        // of all measurements
constexpr int kStreams = 4;

// The shortest time of work(thread) on all threads at once.
template <class Work>
double best_seconds(Pool& pool, Work work) {
  using Clock = std::chrono::steady_clock;
  const auto since = [](Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); };
  double best = 0;
  const Clock::time_point begin = Clock::now();
  do {
    Clock::time_point start;
    double seconds = 0;
    pool.run([&](int thread) {
      pool.barrier();  // all are awake
      if (thread == 0) start = Clock::now();
      work(thread);
      pool.barrier();
      if (thread == 0) seconds = since(start);
    });
    best = best == 0 ? seconds : std::min(best, seconds);
  } while (since(begin) < kSeconds);
  return best;
}

using Words = std::span<const std::uint64_t>;

// Each thread reads its share of each of these, in a few streams at once: the processor fetches ahead in each of them, but
// stops at the end of a page.
double read_rate(Pool& pool, const std::vector<Words>& regions) {
  const auto threads = static_cast<std::size_t>(pool.num_threads());
  std::vector<std::uint64_t> sums(threads * 8);  // a cache line a thread: the result is used, so the reads stay
  const double seconds = best_seconds(pool, [&](int thread) {
    const auto own = static_cast<std::size_t>(thread);
    std::uint64_t sum[8] = {};
    for (const Words& words : regions) {
      const std::size_t begin = words.size() * own / threads, end = words.size() * (own + 1) / threads;
      const std::size_t stream = (end - begin) / kStreams / 8 * 8;  // whole cache lines
      const std::uint64_t* at = words.data() + begin;
      for (std::size_t line = 0; line < stream; line += 8) {
        for (int s = 0; s < kStreams; ++s) {
          for (int i = 0; i < 8; ++i) sum[i] += at[s * stream + line + i];
        }
      }
    }
    for (std::uint64_t each : sum) sums[own * 8] += each;
  });
  std::size_t bytes = 0;
  for (const Words& words : regions) bytes += words.size_bytes();
  return static_cast<double>(bytes) / seconds;
}

// Rows of a thread's own, and what they are multiplied with. Zeros: the time of a product does not depend on values.
struct Operands {
  Memory x, out, w;
  Matmul op;

  Operands(int rows, int n, int k) {
    const PackedWeight shape{nullptr, n, k};
    const std::int64_t stride = shape.padded_k(), columns = std::int64_t{shape.panels()} * kPanel;
    const std::int64_t out_stride = (columns + kChunk - 1) / kChunk * kChunk;
    x = filled(rows * stride);
    out = filled(rows * out_stride);
    op.x = {x.as<bf16>(), stride};
    op.out = {out.as<bf16>(), out_stride};
    op.out_width = n;
  }

  // A pattern in place of untouched pages, which would all be the same one.
  static Memory filled(std::int64_t elements) {
    Memory memory(static_cast<std::size_t>(elements) * sizeof(bf16));
    std::fill(memory.as<bf16>(), memory.as<bf16>() + elements, bf16{0x3f80});
    return memory;
  }
};

double product_read_rate(Pool& pool, const Kernels& kernels, const std::vector<Weight>& weights, double bytes) {
  int widest = 0, deepest = 0;
  for (const Weight& w : weights) {
    widest = std::max(widest, w.n());
    deepest = std::max(deepest, w.k());
  }
  std::vector<Operands> operands;
  for (int thread = 0; thread < pool.num_threads(); ++thread) operands.emplace_back(1, widest, deepest);
  const double seconds = best_seconds(pool, [&](int thread) {
    const Operands& own = operands[static_cast<std::size_t>(thread)];
    Matmul op = own.op;
    for (const Weight& w : weights) {
      op.out_width = w.n();
      const std::int64_t panels = w.panels(), threads = pool.num_threads();
      const int begin = static_cast<int>(panels * thread / threads), end = static_cast<int>(panels * (thread + 1) / threads);
      if (begin == end) continue;
      if (w.quantised()) {  // x in place of a QuantChunk each 32 columns: as long, and any bytes will do
        kernels.quant_matmul({op, w.quant(), {own.x.as<QuantChunk>(), 0}, Activations::kInt8}, 0, 1, begin, end);
      } else {
        op.w = w.plain();
        kernels.matmul(op, 0, 1, begin, end);
      }
    }
  });
  return bytes / seconds;
}

// Of bfloat16 weights, or of weights like this one.
double product_flops(Pool& pool, const Kernels& kernels, int rows, int n, int k, const Weight* like) {
  constexpr int kRepeats = 64;
  std::vector<Operands> operands;
  for (int thread = 0; thread < pool.num_threads(); ++thread) {
    Operands& own = operands.emplace_back(rows, n, k);
    own.w = Operands::filled(std::int64_t{n} * k);  // and no format takes more
    own.op.w = {own.w.as<bf16>(), n, k};
  }
  const double seconds = best_seconds(pool, [&](int thread) {
    const Operands& own = operands[static_cast<std::size_t>(thread)];
    if (like == nullptr) {
      for (int i = 0; i < kRepeats; ++i) kernels.matmul(own.op, 0, rows, 0, own.op.w.panels());
      return;
    }
    const QuantWeight w{own.w.as<std::uint8_t>(), n, k, like->quant().format};
    const QuantMatmul op{own.op, w, {own.x.as<QuantChunk>(), w.chunks()}, Activations::kInt8};
    for (int i = 0; i < kRepeats; ++i) kernels.quant_matmul(op, 0, rows, 0, w.panels());
  });
  return 2.0 * rows * n * k * kRepeats * pool.num_threads() / seconds;
}

}  // namespace

Roofline measure_roofline(Pool& pool, const Kernels& kernels, const std::vector<Weight>& weights) {
  Roofline roofline;
  std::vector<Words> packed;
  for (const Weight& w : weights) {
    packed.emplace_back(reinterpret_cast<const std::uint64_t*>(w.packed().data()), w.bytes() / sizeof(std::uint64_t));
    roofline.weights_size += static_cast<double>(w.bytes());
  }
  // Pages that were never written are all one page of zeros, which is in a cache.
  const Memory memory(kBeyondCaches, true);
  const std::span words(memory.as<std::uint64_t>(), kBeyondCaches / sizeof(std::uint64_t));
  std::fill(words.begin(), words.end(), 1);
  const auto in_few_bits = std::find_if(weights.begin(), weights.end(), [](const Weight& w) { return w.quantised(); });
  // In turn, so that what disturbs the machine for a while does not fall on one of them alone.
  for (int round = 0; round < kRounds; ++round) {
    const auto best = [](double& so_far, double rate) { so_far = std::max(so_far, rate); };
    best(roofline.memory_bytes, read_rate(pool, {words}));
    best(roofline.weights_bytes, read_rate(pool, packed));
    best(roofline.product_bytes, product_read_rate(pool, kernels, weights, roofline.weights_size));
    // 16 KiB each of rows and weight; 64 KiB; 256 KiB of either and 64 of the other.
    for (const auto& [rows, n, k] : {std::array{32, 32, 256}, {64, 64, 512}, {128, 64, 512}, {128, 256, 512}}) {
      best(roofline.product_flops, product_flops(pool, kernels, rows, n, k, nullptr));
      if (in_few_bits != weights.end()) best(roofline.product_flops, product_flops(pool, kernels, rows, n, k, &*in_few_bits));
    }
  }
  return roofline;
}

}  // namespace octavo
