// A first form of the pool, on OpenMP.
#include "cpu/pool.h"

#include <omp.h>

#include <atomic>

namespace antiphon::cpu {
namespace {
std::atomic<int> g_num_threads{0};
}

int num_threads() {
  const int asked = g_num_threads.load();
  return asked > 0 ? asked : omp_get_num_procs();
}

void set_num_threads(int num_threads) { g_num_threads.store(num_threads < 1 ? 1 : num_threads); }

void run_tasks(std::ptrdiff_t num_tasks, TaskFunction function, void* context) {
  const int threads = num_threads();
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
  for (std::ptrdiff_t index = 0; index < num_tasks; ++index) function(context, index, omp_get_thread_num());
}

}  // namespace antiphon::cpu
