// Stores past the caches, counted: a test can see whether they were used.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace emulated {

inline std::atomic<long> num_streamed{0};

// VMOVNTPS of a whole line.
inline void stream(void* address, const void* line) {
  if (reinterpret_cast<std::uintptr_t>(address) % 64 != 0) {
    std::fprintf(stderr, "the processor would refuse this store: it is not aligned to 64 bytes\n");
    std::abort();
  }
  std::memcpy(address, line, 64);
  ++num_streamed;
}

}  // namespace emulated
