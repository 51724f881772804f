// A pool for the emulated tests: new threads at every call, which see nothing that another thread set up, and a check
// that no task leaves its tile configuration, or another rounding of subnormal numbers, behind.
#include <immintrin.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "cpu/pool.h"
#include "tiles.h"

namespace antiphon::cpu {
namespace {
int g_num_threads = 1;
}

int num_threads() { return g_num_threads; }

void set_num_threads(int num_threads) { g_num_threads = num_threads; }

void run_tasks(std::ptrdiff_t num_tasks, TaskFunction function, void* context) {
  std::atomic<std::ptrdiff_t> next{0};
  const unsigned csr = _mm_getcsr();
  auto work = [&](int thread) {
    for (std::ptrdiff_t index = next++; index < num_tasks; index = next++) {
      function(context, index, thread);
      if (emulated::tiles.configured()) {
        std::fprintf(stderr, "a task left its tile configuration\n");
        std::abort();
      }
      if (_mm_getcsr() != csr) {
        std::fprintf(stderr, "a task left its control and status register\n");
        std::abort();
      }
    }
  };
  std::vector<std::thread> threads;
  for (int thread = 1; thread < g_num_threads; ++thread) threads.emplace_back(work, thread);
  work(0);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace antiphon::cpu
