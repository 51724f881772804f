// Sleeping on a word of memory, without a mutex: a thread sleeps while the word has a value, and others wake it.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace antiphon::cpu {

// Sleeps if `word` still is `value`, until woken. May also return for no reason: look at the word again.
inline void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t value) {
  static_assert(sizeof(word) == 4);
#if defined(__linux__)
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
#else
  if (word.load() == value) std::this_thread::sleep_for(std::chrono::microseconds(50));
#endif
}

// Wakes up to `count` of those that sleep on `word`.
inline void futex_wake(std::atomic<std::uint32_t>& word, int count) {
#if defined(__linux__)
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
#else
  (void)word;
  (void)count;
#endif
}

// Tells the processor that this is a loop that waits.
inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace antiphon::cpu
