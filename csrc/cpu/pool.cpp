// The pool behind pool.h: one gate through which workers enter a call, one counter from which tasks are taken.
//
// The gate is one word: [epoch: 16 bits][open: 1][workers inside: 15]. A call raises the epoch and opens the gate; a
// worker that sees a new epoch enters by raising the count, only while the gate is open, and then takes tasks until
// none is left. The caller takes tasks too, then closes the gate and waits until nobody is inside. A worker that comes
// late finds the gate closed: a call never waits for a thread that the system did not run.
#include "cpu/pool.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <mutex>
#include <new>
#include <thread>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "cpu/cores.h"
#include "cpu/futex.h"

namespace antiphon::cpu {
namespace {

// Longer than Python takes from one kernel to the next, and far shorter than a time slice of the system.
constexpr std::chrono::microseconds kSpin{30};

constexpr std::uint32_t kOpen = 1u << 15;
constexpr std::uint32_t kInside = kOpen - 1;
static_assert(kMaxThreads < static_cast<int>(kOpen));

std::uint32_t epoch_of(std::uint32_t gate) { return gate >> 16; }
std::uint32_t next_epoch(std::uint32_t gate) { return ((gate >> 16) + 1) << 16; }

struct Job {
  TaskFunction function = nullptr;
  void* context = nullptr;
  std::ptrdiff_t num_tasks = 0;
};

struct Pool {
  std::mutex callers;                           // held by the call that is served
  Job job;                                      // written while nobody is inside, read by who is
  int num_workers = 0;                          // living ones, guarded by `callers`; they are threads 1 to num_workers
  std::atomic<int> last_worker{0};              // workers above it end
  std::atomic<std::uint32_t> num_ended{0};      // of those that were told to end
  std::atomic<std::uint32_t> caller_sleeps{0};  // 1: the caller sleeps on this word until nobody is inside
  std::atomic<int> num_sleeping{0};             // workers that sleep on the gate, or are about to
  alignas(64) std::atomic<std::uint32_t> gate{0};
  alignas(64) std::atomic<std::ptrdiff_t> next_task{0};
};

// Workers run until the process is gone, so what they use must have no destructor.
static_assert(std::is_trivially_destructible_v<Pool>);
Pool g_pool;
std::atomic<int> g_asked_threads{0};   // 0: the default
thread_local int t_thread = -1;        // the thread's number while it is inside a task, else -1

// Spins until condition(), for kSpin at most; whether it came true.
template <typename Condition>
bool spin_until(Condition condition) {
  const auto end = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 16; ++i) {
      if (condition()) return true;
      cpu_relax();
    }
  } while (std::chrono::steady_clock::now() < end);
  return condition();
}

// Rounding to nearest, subnormals kept, for as long as it lives: a caller that flushes subnormals (or a library that
// switched it on) must not make bits depend on which thread took a task.
class DefaultFloats {
 public:
#if defined(__x86_64__)
  DefaultFloats() : before_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~DefaultFloats() { _mm_setcsr(before_); }
  DefaultFloats(const DefaultFloats&) = delete;
  DefaultFloats& operator=(const DefaultFloats&) = delete;

 private:
  unsigned before_;
#endif
};

// Runs tasks as `thread` until none is left. A task that throws ends the process: others still use the caller's frame.
void take_tasks(const Job& job, std::atomic<std::ptrdiff_t>& next_task, int thread) noexcept {
  [[maybe_unused]] const DefaultFloats floats;
  t_thread = thread;
  for (;;) {
    const std::ptrdiff_t index = next_task.fetch_add(1, std::memory_order_relaxed);
    if (index >= job.num_tasks) break;
    job.function(job.context, index, thread);
  }
  t_thread = -1;
}

void run_in_place(const Job& job, int thread) {
  [[maybe_unused]] const DefaultFloats floats;
  const int before = t_thread;
  t_thread = thread;
  for (std::ptrdiff_t index = 0; index < job.num_tasks; ++index) job.function(job.context, index, thread);
  t_thread = before;
}

bool must_end(const Pool& pool, int thread) { return thread > pool.last_worker.load(std::memory_order_acquire); }

// Returns when the gate's epoch is no longer `seen_epoch`, or the worker must end.
void wait_for_epoch(Pool& pool, int thread, std::uint32_t seen_epoch) {
  auto has_news = [&](std::uint32_t gate) { return epoch_of(gate) != seen_epoch || must_end(pool, thread); };
  if (spin_until([&] { return has_news(pool.gate.load(std::memory_order_relaxed)); })) return;
  // The opener writes the gate, then reads num_sleeping; here it is the other way round, so one of both sees the other.
  pool.num_sleeping.fetch_add(1);
  for (std::uint32_t gate; !has_news(gate = pool.gate.load());) futex_wait(pool.gate, gate);
  pool.num_sleeping.fetch_sub(1);
}

// Enters the call that is open, if one is; `gate` is what was seen.
bool enter(Pool& pool, std::uint32_t& gate) {
  gate = pool.gate.load(std::memory_order_relaxed);
  while ((gate & kOpen) != 0) {
    if (pool.gate.compare_exchange_weak(gate, gate + 1, std::memory_order_acquire, std::memory_order_relaxed)) {
      return true;
    }
  }
  return false;
}

void leave(Pool& pool) {
  const std::uint32_t gate = pool.gate.fetch_sub(1) - 1;
  if ((gate & (kOpen | kInside)) == 0 && pool.caller_sleeps.exchange(0) == 1) futex_wake(pool.caller_sleeps, 1);
}

void run_worker(Pool& pool, int thread, std::uint32_t seen_epoch) {
  for (;;) {
    wait_for_epoch(pool, thread, seen_epoch);
    std::uint32_t gate;
    const bool entered = enter(pool, gate);
    seen_epoch = epoch_of(gate);
    if (entered) {
      take_tasks(pool.job, pool.next_task, thread);
      leave(pool);
    } else if (must_end(pool, thread)) {
      pool.num_ended.fetch_add(1);
      futex_wake(pool.num_ended, 1);
      return;
    }
  }
}

void wake_workers(Pool& pool, int count) {
  if (pool.num_sleeping.load() > 0) futex_wake(pool.gate, count);
}

// The child of a fork has none of the threads, and perhaps a mutex that one of them held.
void forget_threads() { new (&g_pool) Pool; }

// False if the system has no thread to give: those that are there then do the work.
bool start_worker(Pool& pool, int thread) {
  // Signals are for the threads that the program knows of.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  bool started = true;
  try {
    std::thread(run_worker, std::ref(pool), thread, epoch_of(pool.gate.load())).detach();
  } catch (const std::exception&) {  // no thread, or no memory for one
    started = false;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return started;
}

// Makes `wanted` workers of those that are there, between two calls.
void resize(Pool& pool, int wanted) {
  const int too_many = pool.num_workers - wanted;
  pool.num_ended.store(0);
  pool.last_worker.store(wanted, std::memory_order_release);
  if (too_many > 0) {
    pool.gate.store(next_epoch(pool.gate.load()));  // another value, so that nobody falls asleep on the old one
    wake_workers(pool, pool.num_workers);
    for (std::uint32_t ended; (ended = pool.num_ended.load()) < static_cast<std::uint32_t>(too_many);) {
      futex_wait(pool.num_ended, ended);
    }
    pool.num_workers = wanted;
  }
  while (pool.num_workers < wanted && start_worker(pool, pool.num_workers + 1)) ++pool.num_workers;
}

void wait_until_empty(Pool& pool) {
  auto is_empty = [&] { return (pool.gate.load(std::memory_order_acquire) & kInside) == 0; };
  if (spin_until(is_empty)) return;
  for (;;) {
    pool.caller_sleeps.store(1);
    if ((pool.gate.load() & kInside) == 0) break;
    futex_wait(pool.caller_sleeps, 1);
  }
  pool.caller_sleeps.store(0);
}

}  // namespace

int num_threads() {
  static const int cores = std::min(available_cores(), kMaxThreads);
  const int asked = g_asked_threads.load(std::memory_order_relaxed);
  return asked > 0 ? asked : cores;
}

void set_num_threads(int num_threads) {
  g_asked_threads.store(std::clamp(num_threads, 1, kMaxThreads), std::memory_order_relaxed);
}

void run_tasks(std::ptrdiff_t num_tasks, TaskFunction function, void* context) {
  const Job job{function, context, num_tasks};
  const int threads = num_threads();
  if (t_thread >= 0 || num_tasks <= 1 || threads == 1) return run_in_place(job, std::max(t_thread, 0));

  static const int fork_handler = pthread_atfork(nullptr, nullptr, forget_threads);
  (void)fork_handler;
  Pool& pool = g_pool;
  const std::lock_guard<std::mutex> served(pool.callers);
  if (pool.num_workers != threads - 1) resize(pool, threads - 1);
  pool.job = job;
  pool.next_task.store(0, std::memory_order_relaxed);
  pool.gate.store(next_epoch(pool.gate.load(std::memory_order_relaxed)) | kOpen);
  wake_workers(pool, static_cast<int>(std::min<std::ptrdiff_t>(threads, num_tasks) - 1));
  take_tasks(pool.job, pool.next_task, 0);
  pool.gate.fetch_and(~kOpen);
  wait_until_empty(pool);
}

}  // namespace antiphon::cpu
