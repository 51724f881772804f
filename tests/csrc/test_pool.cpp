// The pool runs every task once, in every situation that a process can bring.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "check.h"
#include "cpu/pool.h"

namespace {

using namespace antiphon::cpu;

// Whether each of num_tasks tasks ran exactly once, with thread numbers below the pool's and none twice at a time.
// The counts are plain ints on purpose: ThreadSanitizer then shows that calls hand memory over properly.
bool runs_each_once(std::ptrdiff_t num_tasks, int threads) {
  std::vector<int> counts(static_cast<std::size_t>(num_tasks), 0);
  std::unique_ptr<std::atomic<int>[]> busy(new std::atomic<int>[static_cast<std::size_t>(kMaxThreads)]());
  std::atomic<bool> good{true};
  parallel_for(num_tasks, [&](std::ptrdiff_t index, int thread) {
    if (thread < 0 || thread >= threads) {
      good = false;
      return;
    }
    if (busy[static_cast<std::size_t>(thread)].fetch_add(1) != 0) good = false;
    ++counts[static_cast<std::size_t>(index)];
    busy[static_cast<std::size_t>(thread)].fetch_sub(1);
  });
  for (int count : counts) good = good && count == 1;
  return good;
}

TEST(pool_has_a_thread_for_each_core_by_default) { CHECK(num_threads() >= 1 && num_threads() <= kMaxThreads); }

TEST(pool_runs_each_task_once_for_any_number_of_tasks_and_threads) {
  for (int threads : {1, 2, 3, 8, 2, 1, 5}) {
    set_num_threads(threads);
    CHECK(num_threads() == threads);
    for (std::ptrdiff_t num_tasks : {0, 1, 2, 3, 7, 64, 1000}) CHECK(runs_each_once(num_tasks, threads));
  }
}

TEST(pool_takes_a_count_below_one_as_one_and_bounds_it_above) {
  set_num_threads(-3);
  CHECK(num_threads() == 1);
  set_num_threads(1 << 20);
  CHECK(num_threads() == kMaxThreads);
  set_num_threads(2);
}

TEST(pool_survives_many_short_calls) {
  set_num_threads(3);
  std::ptrdiff_t sum = 0;  // written by tasks of one call after the other, never at once
  for (int call = 0; call < 70'000; ++call) {  // more than the gate's epoch counts
    std::ptrdiff_t parts[2] = {0, 0};
    parallel_for(2, [&](std::ptrdiff_t index, int) { parts[index] = index + 1; });
    sum += parts[0] + parts[1];
  }
  CHECK(sum == 3 * 70'000);
}

TEST(pool_wakes_workers_that_fell_asleep) {
  set_num_threads(4);
  for (int call = 0; call < 50; ++call) {
    std::this_thread::sleep_for(std::chrono::microseconds(20 * (call % 8)));
    CHECK(runs_each_once(9, 4));
  }
}

TEST(pool_uses_its_workers_and_the_caller_sleeps_until_they_are_done) {
  set_num_threads(2);
  std::atomic<int> num_inside{0};
  std::atomic<bool> met{false};
  parallel_for(2, [&](std::ptrdiff_t, int thread) {
    ++num_inside;
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (num_inside < 2 && std::chrono::steady_clock::now() < end) std::this_thread::yield();
    if (num_inside == 2) met = true;
    if (thread != 0) std::this_thread::sleep_for(std::chrono::milliseconds(20));
  });
  CHECK(met);
}

TEST(pool_runs_a_nested_call_in_place_on_the_same_thread) {
  set_num_threads(3);
  std::atomic<int> wrong{0};
  std::atomic<int> num_inner{0};
  parallel_for(20, [&](std::ptrdiff_t, int thread) {
    parallel_for(5, [&](std::ptrdiff_t, int inner_thread) {
      parallel_for(2, [&](std::ptrdiff_t, int innermost_thread) { wrong += innermost_thread != thread; });
      wrong += inner_thread != thread;
      ++num_inner;
    });
  });
  CHECK(wrong == 0);
  CHECK(num_inner == 100);
  CHECK(runs_each_once(50, 3));
}

TEST(pool_serves_several_callers_while_its_size_changes) {
  set_num_threads(3);
  std::atomic<int> wrong{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; ++caller) {
    callers.emplace_back([&] {
      for (int call = 0; call < 300; ++call) wrong += !runs_each_once(11, 4);
    });
  }
  for (int change = 0; change < 100; ++change) set_num_threads(1 + change % 4);
  for (std::thread& caller : callers) caller.join();
  CHECK(wrong == 0);
}

// ThreadSanitizer does not follow threads in the child of a process that had threads.
#if !defined(__SANITIZE_THREAD__)

// True if the child found that its own pool works; it leaves without the parent's exit handlers.
bool child_of_fork_works() {
  const pid_t child = fork();
  if (child == 0) {
    const bool good = runs_each_once(40, 3) && runs_each_once(40, 3);
    _exit(good ? 0 : 1);
  }
  int status = -1;
  return waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

TEST(pool_works_on_both_sides_of_a_fork) {
  set_num_threads(3);
  CHECK(runs_each_once(40, 3));
  CHECK(child_of_fork_works());
  CHECK(runs_each_once(40, 3));
}

TEST(pool_works_in_a_child_that_was_forked_during_a_call) {
  set_num_threads(3);
  std::atomic<bool> stop{false};
  std::thread caller([&] {
    while (!stop) parallel_for(64, [](std::ptrdiff_t, int) {});
  });
  for (int i = 0; i < 10; ++i) CHECK(child_of_fork_works());
  stop = true;
  caller.join();
}

#endif

}  // namespace
