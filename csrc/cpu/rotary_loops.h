// The loops of rotary_store.cpp, which includes them once for each instruction set that the compiler may vectorise them
// with. Every form has the same bits: contraction to fused multiply-adds is off. Nothing of the standard library's
// templates may be called here, which would be shared between the forms.

void rotate(const float* x, const float* cos, const float* sin, std::ptrdiff_t half, float* __restrict y) {
  for (std::ptrdiff_t i = 0; i < half; ++i) {
    y[i] = x[i] * cos[i] - x[i + half] * sin[i];
    y[i + half] = x[i + half] * cos[i] + x[i] * sin[i];
  }
}

void store(const float* __restrict x, std::ptrdiff_t size, float* __restrict to, float*) {
  for (std::ptrdiff_t i = 0; i < size; ++i) to[i] = x[i];
}

void store(const float* __restrict x, std::ptrdiff_t size, std::uint16_t* __restrict to, float*) {
  for (std::ptrdiff_t i = 0; i < size; ++i) to[i] = round_to_bfloat16(x[i]);
}

void store(const float* __restrict x, std::ptrdiff_t size, std::int8_t* __restrict to, float* scale) {
  std::int32_t most = 0;  // as integers, absolute values are in order, and NaN is above all
  for (std::ptrdiff_t i = 0; i < size; ++i) {
    const std::int32_t magnitude = static_cast<std::int32_t>(bits_of(x[i]) & 0x7fffffffu);
    most = magnitude > most ? magnitude : most;
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
                   float* rotated, float* q_out) {
  const std::ptrdiff_t head_dim = layer.head_dim;
  const std::ptrdiff_t half = head_dim / 2;
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
