#include "pool.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>

#include "float_mode.h"

namespace octavo {

namespace {

// A spin takes some 25 nanoseconds.
constexpr int kBarrierSpins = 1000;  // about as much as the shares of an op of a decode step are uneven by
constexpr int kRunSpins = 16000;     // as long as the caller takes between two steps
constexpr int kFewestSpins = 50;
constexpr int kConvincing = 64;  // short sleeps after which to spin again
constexpr std::chrono::nanoseconds kSpin{25}, kWakeUp{75'000};  // what a sleep costs beyond the wait itself, at most

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

}  // namespace

void Waiter::wait(const std::atomic<std::uint32_t>& word, std::uint32_t old) {
  const int spins = spins_.load(std::memory_order_relaxed);
  for (int i = 0; i < spins; ++i) {
    if (word.load(std::memory_order_acquire) != old) return;
    pause();
  }
  const auto start = std::chrono::steady_clock::now();
  word.wait(old, std::memory_order_acquire);
  const auto slept = std::chrono::steady_clock::now() - start;
  if (slept > most_spins_ * kSpin + kWakeUp) {
    short_sleeps_.store(0, std::memory_order_relaxed);
    spins_.store(kFewestSpins, std::memory_order_relaxed);
  } else if (short_sleeps_.fetch_add(1, std::memory_order_relaxed) + 1 == kConvincing) {
    spins_.store(most_spins_, std::memory_order_relaxed);
  }
}

void Barrier::wait(const std::function<void()>& last) {
  const std::uint32_t round = round_.load(std::memory_order_relaxed);  // nobody can move it on before we arrive
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 < num_threads_) {
    waiter_.wait(round_, round);
    return;
  }
  if (last) last();
  arrived_.store(0, std::memory_order_relaxed);
  round_.store(round + 1, std::memory_order_release);
  round_.notify_all();
}

Pool::Pool(int num_threads) : process_(getpid()), sleep_(kRunSpins), barrier_(num_threads, kBarrierSpins) {
  if (num_threads < 1) throw std::invalid_argument("a pool needs at least one thread");
  try {
    for (int thread = 1; thread < num_threads; ++thread) workers_.emplace_back([this, thread] { work(thread); });
  } catch (...) {
    stop();  // those that were started
    throw;
  }
}

Pool::~Pool() { stop(); }

void Pool::stop() {
  if (getpid() != process_) {
    // A fork: the threads live in the parent only, and their handles here may by now be those of another pool's. So
    // nothing is done with them: they are left in memory that nobody frees.
    new std::vector<std::thread>(std::move(workers_));
    return;
  }
  task_ = nullptr;
  runs_.fetch_add(1, std::memory_order_release);
  runs_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void Pool::require_own_process() const {
  if (getpid() != process_) throw std::runtime_error("this engine was made before a fork; make one in the child");
}

void Pool::run(const std::function<void(int)>& task) {
  require_own_process();
  const FlushSubnormals guard;
  task_ = &task;
  runs_.fetch_add(1, std::memory_order_release);
  runs_.notify_all();
  task(0);
  barrier_.wait();
}

void Pool::work(int thread) {
  const FlushSubnormals guard;
  for (std::uint32_t seen = 0;; ++seen) {
    sleep_.wait(runs_, seen);  // no run is missed: the next one starts only after all have passed this one's barrier
    if (task_ == nullptr) return;
    (*task_)(thread);
    barrier_.wait();
  }
}

}  // namespace octavo
