// Plain loops that vectorise on any machine: the kernel is bound by memory.
#include "cpu/rotary_store.h"

#include <algorithm>

#include "cpu/bfloat16.h"
#include "cpu/cpu_features.h"
#include "cpu/float_bits.h"
#include "cpu/pool.h"
#include "cpu/workspace.h"

namespace antiphon::cpu {
namespace {

constexpr std::ptrdiff_t kTokensPerTask = 16;

namespace portable {
#include "cpu/rotary_loops.h"
}  // namespace portable

#if defined(__x86_64__)
namespace avx2 {
#pragma GCC push_options
#pragma GCC target("avx2")
#include "cpu/rotary_loops.h"
#pragma GCC pop_options
}  // namespace avx2
#endif

template <typename T>
void rotate_tokens(const RotaryInput& input, const KvLayer& layer, std::ptrdiff_t first, std::ptrdiff_t end,
                   float* q_out) {
  thread_local Workspace workspace;
  float* rotated = workspace.at_least<float>(layer.head_dim);  // one head
#if defined(__x86_64__)
  if (cpu_features().avx2) return avx2::rotate_tokens<T>(input, layer, first, end, rotated, q_out);
#endif
  portable::rotate_tokens<T>(input, layer, first, end, rotated, q_out);
}

}  // namespace

bool rotary_and_store(const RotaryInput& input, const KvLayer& layer, float* q_out) {
  for (std::ptrdiff_t token = 0; token < input.num_tokens; ++token) {
    if (input.slots[token] < 0 || input.slots[token] >= layer.num_slots) return false;
  }
  const std::ptrdiff_t num_tasks = (input.num_tokens + kTokensPerTask - 1) / kTokensPerTask;
  parallel_for(num_tasks, [&](std::ptrdiff_t task, int) {
    const std::ptrdiff_t first = task * kTokensPerTask;
    const std::ptrdiff_t end = std::min(input.num_tokens, first + kTokensPerTask);
    switch (layer.storage) {
      case KvStorage::kFloat32: return rotate_tokens<float>(input, layer, first, end, q_out);
      case KvStorage::kBfloat16: return rotate_tokens<std::uint16_t>(input, layer, first, end, q_out);
      case KvStorage::kInt8: return rotate_tokens<std::int8_t>(input, layer, first, end, q_out);
    }
  });
  return true;
}

}  // namespace antiphon::cpu
