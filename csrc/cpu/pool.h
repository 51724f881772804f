// The process's own threads: every native kernel cuts its work into tasks and hands them to this one pool.
//
// Tasks are taken dynamically, in ascending order, by whoever is free; a kernel must not let the taking change a bit of
// its result. Calls from several threads are served one after the other; a call from inside a task runs in place.
//
// A thread that waits spins for some microseconds and then sleeps, so that a busy neighbour gets the core. The threads
// start with the first call that needs them. They never end by themselves and nobody waits for them when the process
// exits: they are detached and all that they touch outlives every destructor. After fork() the child has none and
// starts its own; fork() from inside a task is not supported.
#pragma once

#include <cstddef>
#include <type_traits>

namespace antiphon::cpu {

constexpr int kMaxThreads = 1024;

// Threads that work on a call, the caller included: 1 to kMaxThreads.
int num_threads();

// The physical cores that the process may use, by default. Takes effect with the next call; num_threads < 1 is 1.
void set_num_threads(int num_threads);

using TaskFunction = void (*)(void* context, std::ptrdiff_t index, int thread);

void run_tasks(std::ptrdiff_t num_tasks, TaskFunction function, void* context);

// task(index, thread) for every index in [0, num_tasks); thread is in [0, num_threads()), and two tasks of a call that
// run at once never have the same. Two calls that run in place (one task, or one thread) may run at once, both as
// thread 0: scratch memory is a thread_local Workspace, never an array over `thread` that outlives the call.
// Returns when all have ended; what they wrote is then visible to the caller. A task that throws, out of memory
// included, ends the process.
template <typename Task>
void parallel_for(std::ptrdiff_t num_tasks, Task&& task) {
  using Plain = std::remove_reference_t<Task>;
  run_tasks(
      num_tasks,
      [](void* context, std::ptrdiff_t index, int thread) { (*static_cast<Plain*>(context))(index, thread); },
      const_cast<void*>(static_cast<const void*>(&task)));
}

}  // namespace antiphon::cpu
