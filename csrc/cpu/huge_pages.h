// Huge pages for large blocks of memory: fewer misses of the address translation, which the tile kernels feel.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace antiphon::cpu {

constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;

// Asks for huge pages on the whole 2 MiB pages inside [address, address + num_bytes). A hint: failure changes nothing.
inline void advise_huge_pages(std::uintptr_t address, std::size_t num_bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const std::uintptr_t first = (address + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
  const std::uintptr_t end = (address + num_bytes) / kHugePageBytes * kHugePageBytes;
  if (first < end) madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
#else
  (void)address;
  (void)num_bytes;
#endif
}

}  // namespace antiphon::cpu
