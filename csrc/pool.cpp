#include "pool.h"

#include <unistd.h>

#include <algorithm>
#include <stdexcept>

#include "float_mode.h"

namespace octavo {

namespace {

constexpr int kSpins = 1000;      // some 25 microseconds: about as much as the shares of an op of a decode step are uneven by
constexpr int kFewestSpins = 50;  // enough to notice that spinning would pay again

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

}  // namespace

void Waiter::wait(const std::atomic<std::uint32_t>& word, std::uint32_t old) {
  const int spins = std::max(spins_.load(std::memory_order_relaxed), kFewestSpins);
  for (int i = 0; i < spins; ++i) {
    if (word.load(std::memory_order_acquire) != old) {
      if (i > spins / 4 && spins < most_spins_) spins_.store(2 * spins, std::memory_order_relaxed);
      return;
    }
    pause();
  }
  spins_.store(spins / 2, std::memory_order_relaxed);
  word.wait(old, std::memory_order_acquire);
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

Pool::Pool(int num_threads) : process_(getpid()), sleep_(kSpins), barrier_(num_threads, kSpins) {
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
