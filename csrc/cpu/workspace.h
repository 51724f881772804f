// A buffer that a thread keeps and grows: allocating it anew for each call costs more in page faults than most kernels.
#pragma once

#include <cstddef>
#include <memory>
#include <new>

namespace antiphon::cpu {

// Aligned to 64 bytes; what was in it is lost when it grows. Use as `thread_local Workspace workspace;`.
class Workspace {
 public:
  template <typename T>
  T* at_least(std::ptrdiff_t count) {
    const std::size_t num_bytes = sizeof(T) * static_cast<std::size_t>(count);
    if (num_bytes > num_bytes_) {
      data_.reset();
      num_bytes_ = 0;
      data_.reset(static_cast<char*>(::operator new(num_bytes, kAlignment)));
      num_bytes_ = num_bytes;
    }
    return reinterpret_cast<T*>(data_.get());
  }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(char* data) const { ::operator delete(data, kAlignment); }
  };
  std::unique_ptr<char, Free> data_;
  std::size_t num_bytes_ = 0;
};

}  // namespace antiphon::cpu
