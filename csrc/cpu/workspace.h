// A buffer that a thread keeps and grows: allocating it anew for each call costs more in page faults than most kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

#include "cpu/huge_pages.h"

namespace antiphon::cpu {

// Aligned to 64 bytes, large ones to huge pages; what was in it is lost when it grows. Use as
// `thread_local Workspace workspace;`.
class Workspace {
 public:
  template <typename T>
  T* at_least(std::ptrdiff_t count) {
    const std::size_t num_bytes = sizeof(T) * static_cast<std::size_t>(count);
    if (num_bytes > num_bytes_) {
      data_.reset();
      num_bytes_ = 0;
      const std::align_val_t alignment{num_bytes >= kHugePageBytes ? kHugePageBytes : std::size_t{64}};
      data_ = {static_cast<char*>(::operator new(num_bytes, alignment)), Free{alignment}};
      num_bytes_ = num_bytes;
      advise_huge_pages(reinterpret_cast<std::uintptr_t>(data_.get()), num_bytes);
    }
    return reinterpret_cast<T*>(data_.get());
  }

 private:
  struct Free {
    std::align_val_t alignment;
    void operator()(char* data) const { ::operator delete(data, alignment); }
  };
  std::unique_ptr<char, Free> data_{nullptr, Free{std::align_val_t{64}}};
  std::size_t num_bytes_ = 0;
};

}  // namespace antiphon::cpu
