// The thread pool: N - 1 workers and the caller, woken once a step, with barriers inside.
//
//   caller    run(task) ── task(0) ── barrier ── task(0) goes on ── ... ── all done, run returns
//   worker 1  asleep  ──── task(1) ── barrier ── task(1) goes on ── ... ── asleep
//
// Threads are not pinned: two engines may live on the same cores, and a container may move or throttle them. For the
// same reason a wait spins only for as long as spinning pays, learns that from its own successes, and then sleeps.
//
// fork: a child has none of its parent's workers. `run` in a child throws rather than wait for them for ever.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace octavo {

// Waits until a word changes: spins a little, then sleeps in the kernel. After a long sleep it hardly spins any more, until many
// short ones in a row say that it would pay: where others want the cores, a thread that spins uses up the time that the
// system gives it, and then waits for milliseconds in the middle of an op.
class Waiter {
 public:
  explicit Waiter(int most_spins) : most_spins_(most_spins), spins_(most_spins) {}
  // Returns once `word` differs from `old`; what was written before the change is then visible.
  void wait(const std::atomic<std::uint32_t>& word, std::uint32_t old);

 private:
  const int most_spins_;
  std::atomic<int> spins_;
  std::atomic<int> short_sleeps_ = 0;  // in a row
};

// All of `num_threads` threads wait for each other, again and again.
class Barrier {
 public:
  Barrier(int num_threads, int most_spins) : num_threads_(num_threads), waiter_(most_spins) {}
  // The last to arrive calls `last` before any goes on.
  void wait(const std::function<void()>& last = {});

 private:
  const int num_threads_;
  Waiter waiter_;
  alignas(64) std::atomic<int> arrived_ = 0;
  alignas(64) std::atomic<std::uint32_t> round_ = 0;
};

class Pool {
 public:
  // Raises std::invalid_argument for less than one thread, std::system_error where no thread can be started.
  explicit Pool(int num_threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Runs task(thread) once on each thread, 0 being the caller, and returns when all have returned. Subnormals are
  // flushed inside. A task must not throw; one `run` at a time. Raises std::runtime_error after a fork.
  void run(const std::function<void(int thread)>& task);

  // Raises std::runtime_error in a child of the process that made the pool.
  void require_own_process() const;

  // Inside a task: returns once every thread of the pool has called it, and the last of them has called `last`.
  void barrier(const std::function<void()>& last = {}) { barrier_.wait(last); }

 private:
  void work(int thread);
  void stop();

  const pid_t process_;
  const std::function<void(int)>* task_ = nullptr;  // null: end
  alignas(64) std::atomic<std::uint32_t> runs_ = 0;
  Waiter sleep_;
  Barrier barrier_;
  std::vector<std::thread> workers_;
};

}  // namespace octavo
