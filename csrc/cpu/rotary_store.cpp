// Plain loops that vectorise on any machine: the kernel is bound by memory.
#include "cpu/rotary_store.h"

#include <algorithm>
#include <cstring>

#include "cpu/bfloat16.h"
#include "cpu/pool.h"
#include "cpu/workspace.h"

namespace antiphon::cpu {
namespace {

constexpr std::ptrdiff_t kTokensPerTask = 16;

std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

float float_of(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

void rotate(const float* x, const float* cos, const float* sin, std::ptrdiff_t half, float* __restrict y) {
  for (std::ptrdiff_t i = 0; i < half; ++i) {
    y[i] = x[i] * cos[i] - x[i + half] * sin[i];
    y[i + half] = x[i + half] * cos[i] + x[i] * sin[i];
  }
}

void store(const float* __restrict x, std::ptrdiff_t size, float* __restrict to, float*) { std::copy_n(x, size, to); }

void store(const float* __restrict x, std::ptrdiff_t size, std::uint16_t* __restrict to, float*) {
  for (std::ptrdiff_t i = 0; i < size; ++i) to[i] = round_to_bfloat16(x[i]);
}

void store(const float* __restrict x, std::ptrdiff_t size, std::int8_t* __restrict to, float* scale) {
  std::int32_t most = 0;  // as integers, absolute values are in order, and NaN is above all
  for (std::ptrdiff_t i = 0; i < size; ++i) {
    most = std::max(most, static_cast<std::int32_t>(bits_of(x[i]) & 0x7fffffffu));
  }
  const float absmax = float_of(static_cast<std::uint32_t>(most));
  const bool vanishes = absmax < 1e-35f;
  const float inverse = vanishes ? 0.0f : 127.0f / absmax;
  *scale = vanishes ? 0.0f : absmax / 127.0f;
  for (std::ptrdiff_t i = 0; i < size; ++i) {
    // Adding 1.5 * 2^23 rounds to an integer, to nearest even, which the low byte then holds.
    to[i] = static_cast<std::int8_t>(bits_of(x[i] * inverse + 0x1.8p23f) & 0xffu);
  }
}

float* scale_at(float* scales, std::ptrdiff_t slot) { return scales != nullptr ? scales + slot : nullptr; }

template <typename T>
void rotate_tokens(const RotaryInput& input, const KvLayer& layer, std::ptrdiff_t first, std::ptrdiff_t end,
                   float* q_out) {
  const std::ptrdiff_t head_dim = layer.head_dim;
  const std::ptrdiff_t half = head_dim / 2;
  thread_local Workspace workspace;
  float* rotated = workspace.at_least<float>(head_dim);
  for (std::ptrdiff_t token = first; token < end; ++token) {
    const float* cos = input.cos + token * half;
    const float* sin = input.sin + token * half;
    for (std::ptrdiff_t head = 0; head < input.num_heads; ++head) {
      rotate(input.q + token * input.q_token_stride + head * head_dim, cos, sin, half,
             q_out + (token * input.num_heads + head) * head_dim);
    }
    for (std::ptrdiff_t head = 0; head < layer.num_kv_heads; ++head) {
      const std::ptrdiff_t slot = head * layer.num_slots + input.slots[token];
      rotate(input.k + token * input.k_token_stride + head * head_dim, cos, sin, half, rotated);
      store(rotated, head_dim, static_cast<T*>(layer.k) + slot * head_dim, scale_at(layer.k_scale, slot));
      store(input.v + token * input.v_token_stride + head * head_dim, head_dim,
            static_cast<T*>(layer.v) + slot * head_dim, scale_at(layer.v_scale, slot));
    }
  }
}

}  // namespace

void rotary_and_store(const RotaryInput& input, const KvLayer& layer, float* q_out) {
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
}

}  // namespace antiphon::cpu
