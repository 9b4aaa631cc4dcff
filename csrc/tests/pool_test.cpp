// The pool by itself, for the thread sanitizer: every thread runs, barriers hold, pools live beside each other and end.
#include "pool.h"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <thread>
#include <vector>

using octavo::Pool;

namespace {

void check(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "pool_test: %s\n", what);
  std::exit(1);
}

// Unsynchronised but for the barriers: a race is for the sanitizer to find, a lost update for the sums.
void rounds(Pool& pool, int runs, int rounds_a_run) {
  const int n = pool.num_threads();
  std::vector<long> mine(n), seen(n);
  for (int run = 0; run < runs; ++run) {
    pool.run([&](int thread) {
      for (int round = 0; round < rounds_a_run; ++round) {
        mine[thread] += thread + 1;
        pool.barrier();
        long total = 0;
        for (long value : mine) total += value;
        seen[thread] = total;
        pool.barrier();
        check(seen[thread] == seen[(thread + 1) % n], "threads saw different sums");
        pool.barrier();
      }
    });
  }
  for (int thread = 0; thread < n; ++thread) {
    check(mine[thread] == static_cast<long>(thread + 1) * runs * rounds_a_run, "a round was lost");
  }
}

void test_sizes() {
  for (int n : {1, 2, 3, 5, 8}) {
    Pool pool(n);
    check(pool.num_threads() == n, "number of threads");
    rounds(pool, 50, 20);
  }
}

// The last to arrive runs what it is given while all others still wait.
void test_last_of_a_barrier() {
  for (int n : {1, 2, 5}) {
    Pool pool(n);
    std::vector<long> arrived(n);
    long calls = 0;
    pool.run([&](int thread) {
      for (long round = 1; round <= 200; ++round) {
        arrived[thread] = round;
        pool.barrier([&] {
          ++calls;
          for (long each : arrived) check(each == round, "called before all had arrived");
        });
        check(calls == round, "not called once a barrier");
        pool.barrier();
      }
    });
  }
}

void test_two_pools_at_once() {
  std::thread other([] {
    Pool pool(3);
    rounds(pool, 200, 5);
  });
  Pool pool(3);
  rounds(pool, 200, 5);
  other.join();
}

void test_short_lives() {
  for (int i = 0; i < 200; ++i) Pool(1 + i % 4);  // ended without a run
  for (int i = 0; i < 100; ++i) {
    Pool pool(1 + i % 4);
    std::atomic<int> count = 0;
    pool.run([&](int) { ++count; });
    check(count == pool.num_threads(), "a thread did not run, or ran twice");
  }
}

void test_sleepers_wake() {
  Pool pool(4);
  for (int i = 0; i < 5; ++i) {
    usleep(20'000);  // longer than anybody spins
    rounds(pool, 1, 3);
  }
}

void test_fork() {
  Pool pool(2);
  rounds(pool, 2, 2);
  const pid_t child = fork();
  if (child == 0) {
    try {
      pool.run([](int) {});
    } catch (const std::runtime_error&) {
      _exit(0);
    }
    _exit(1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  check(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a child of fork was not told");
  rounds(pool, 2, 2);
}

}  // namespace

int main() {
  test_sizes();
  test_last_of_a_barrier();
  test_two_pools_at_once();
  test_short_lives();
  test_sleepers_wake();
  test_fork();
  std::puts("pool_test: ok");
}
