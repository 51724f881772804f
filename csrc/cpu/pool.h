// The process's own threads: every native kernel cuts its work into tasks and hands them to this one pool.
//
// Tasks are taken dynamically, in ascending order, by whoever is free; a kernel must not let the taking change a bit of
// its result. Calls from several threads are served one after the other; a call from inside a task runs in place.
#pragma once

#include <cstddef>
#include <type_traits>

namespace antiphon::cpu {

// Threads that work on a call, the caller included: 1 or more.
int num_threads();

// Physical cores by default. Takes effect with the next call; num_threads < 1 is 1.
void set_num_threads(int num_threads);

using TaskFunction = void (*)(void* context, std::ptrdiff_t index, int thread);

void run_tasks(std::ptrdiff_t num_tasks, TaskFunction function, void* context);

// task(index, thread) for every index in [0, num_tasks); thread is in [0, num_threads()) and is no two tasks' at once.
// Returns when all have ended. Tasks must not throw.
template <typename Task>
void parallel_for(std::ptrdiff_t num_tasks, Task&& task) {
  using Plain = std::remove_reference_t<Task>;
  run_tasks(
      num_tasks,
      [](void* context, std::ptrdiff_t index, int thread) { (*static_cast<Plain*>(context))(index, thread); },
      const_cast<void*>(static_cast<const void*>(&task)));
}

}  // namespace antiphon::cpu
