// Rotary embedding of queries and keys, and the store of keys and values to their slots.
//
// Halves, not pairs: y[i] = x[i] cos[i] - x[i + h] sin[i], y[i + h] = x[i + h] cos[i] + x[i] sin[i], h = head_dim / 2,
// each product and sum rounded on its own, so that every form has the same bits. bfloat16 is rounded to nearest even;
// int8 is rint(x * (127 / absmax)) with the scale absmax / 127 of its own token and head, both 0 where absmax is below
// 1e-35. A NaN stays NaN (with int8: its scale does).
#pragma once

#include "cpu/kv_layer.h"

namespace antiphon::cpu {

// q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim]: heads are contiguous, tokens a stride apart.
struct RotaryInput {
  const float* q;
  const float* k;
  const float* v;
  std::ptrdiff_t q_token_stride;
  std::ptrdiff_t k_token_stride;
  std::ptrdiff_t v_token_stride;
  const float* cos;           // [tokens, head_dim / 2]
  const float* sin;
  const std::int64_t* slots;  // [tokens], distinct
  std::ptrdiff_t num_tokens;
  std::ptrdiff_t num_heads;
};

// q_out [tokens, heads, head_dim], contiguous. False, with nothing done, where a slot is not in the layer.
bool rotary_and_store(const RotaryInput& input, const KvLayer& layer, float* q_out);

}  // namespace antiphon::cpu
