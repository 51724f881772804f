// One layer's keys and values in the paged pool.
#pragma once

#include <cstddef>
#include <cstdint>

namespace antiphon::cpu {

constexpr std::ptrdiff_t kPageKeys = 64;

enum class KvStorage { kFloat32, kBfloat16, kInt8 };

constexpr std::ptrdiff_t element_bytes(KvStorage storage) {
  return storage == KvStorage::kFloat32 ? 4 : storage == KvStorage::kBfloat16 ? 2 : 1;
}

// k and v are [num_kv_heads, num_slots, head_dim]; the scales are [num_kv_heads, num_slots] with int8, else null: a
// stored vector stands for int8 * scale.
struct KvLayer {
  void* k;
  void* v;
  float* k_scale;
  float* v_scale;
  KvStorage storage;
  std::ptrdiff_t num_kv_heads;
  std::ptrdiff_t num_slots;
  std::ptrdiff_t head_dim;
};

}  // namespace antiphon::cpu
