// Rotary embedding and store against float64, for every storage; nothing but the given slots is written; and the loops
// have the same bits as the compiler vectorises them and as they stand.
#include <algorithm>

#include "check.h"
#include "cpu/bfloat16.h"
#include "cpu/cpu_features.h"
#include "cpu/float_bits.h"
#include "cpu/pool.h"
#include "cpu/rotary_store.h"
#include "operands.h"

namespace {

using namespace antiphon::cpu;
using namespace antiphon::testing;

struct Shape {
  std::ptrdiff_t num_tokens, num_heads, num_kv_heads, head_dim;
  std::ptrdiff_t q_size() const { return num_heads * head_dim; }
  std::ptrdiff_t kv_size() const { return num_kv_heads * head_dim; }
};

constexpr Shape kShapes[] = {{1, 1, 1, 2}, {37, 3, 1, 6}, {17, 4, 2, 40}, {33, 7, 1, 64}};

// The kernel's own loops, once more in each form: this file is built without vectorisation, but for the second.
namespace plain {
#include "cpu/rotary_loops.h"
}  // namespace plain

#if defined(__x86_64__)
namespace vectors {
#pragma GCC push_options
#pragma GCC optimize("O3")
#pragma GCC target("avx2")
#include "cpu/rotary_loops.h"
#pragma GCC pop_options
}  // namespace vectors
#endif

// A form of the kernel: all tokens of the input.
using Form = void (*)(const RotaryInput& input, const KvLayer& layer, float* q_out);

// `run` gets a value of the storage's type.
template <typename Run>
void with_element(KvStorage storage, const Run& run) {
  switch (storage) {
    case KvStorage::kFloat32: return run(float{});
    case KvStorage::kBfloat16: return run(std::uint16_t{});
    case KvStorage::kInt8: return run(std::int8_t{});
  }
}

void chosen_form(const RotaryInput& input, const KvLayer& layer, float* q_out) {
  CHECK(rotary_and_store(input, layer, q_out));
}

void plain_form(const RotaryInput& input, const KvLayer& layer, float* q_out) {
  Floats rotated(static_cast<std::size_t>(layer.head_dim));
  with_element(layer.storage, [&](auto element) {
    plain::rotate_tokens<decltype(element)>(input, layer, 0, input.num_tokens, rotated.data(), q_out);
  });
}

void vector_form(const RotaryInput& input, const KvLayer& layer, float* q_out) {
#if defined(__x86_64__)
  Floats rotated(static_cast<std::size_t>(layer.head_dim));
  with_element(layer.storage, [&](auto element) {
    vectors::rotate_tokens<decltype(element)>(input, layer, 0, input.num_tokens, rotated.data(), q_out);
  });
#else
  plain_form(input, layer, q_out);
#endif
}

// Each token's q, k and v side by side with a gap before the next token's; its slot is 2 * (its mirror image) + 1.
struct Input {
  explicit Input(const Shape& of)
      : shape(of),
        stride(of.q_size() + 2 * of.kv_size() + 3),
        qkv(values(of.num_tokens * stride - 3, 1)),
        cos(values(of.num_tokens * of.head_dim / 2, 2)),
        sin(cos) {
    for (float& value : qkv) value *= 1.1f;  // so that products are not exact
    for (float& value : cos) value = std::cos(value);
    for (float& value : sin) value = std::sin(value);
    for (std::ptrdiff_t token = 0; token < of.num_tokens; ++token) slots.push_back(2 * (of.num_tokens - 1 - token) + 1);
  }

  RotaryInput tokens(std::ptrdiff_t first, std::ptrdiff_t count) const {
    const float* q = qkv.data() + first * stride;
    const std::ptrdiff_t angles = first * shape.head_dim / 2;
    return {q, q + shape.q_size(), q + shape.q_size() + shape.kv_size(), stride, stride, stride, cos.data() + angles,
            sin.data() + angles, slots.data() + first, count, shape.num_heads};
  }

  // Element i of one head of a token, rotated or as it is.
  double expected(const float* head, std::ptrdiff_t token, std::ptrdiff_t i, bool rotated) const {
    const std::ptrdiff_t half = shape.head_dim / 2;
    if (!rotated) return head[i];
    const double c = cos.data()[token * half + i % half], s = sin.data()[token * half + i % half];
    return i < half ? head[i] * c - head[i + half] * s : head[i] * c + head[i - half] * s;
  }

  Shape shape;
  std::ptrdiff_t stride;
  Floats qkv, cos, sin;
  std::vector<std::int64_t> slots;
};

// q and a pool of 2 slots a token, all bits set to begin with, so that what is not written is NaN.
struct Output {
  Output(const Input& input, KvStorage of, std::ptrdiff_t first, std::ptrdiff_t count, Form form = chosen_form)
      : shape(input.shape),
        storage(of),
        num_slots(2 * shape.num_tokens),
        q(poison(count * shape.q_size())),
        k(static_cast<std::size_t>(num_slots * shape.kv_size() * element_bytes(of)), '\xff'),
        v(k),
        k_scale(poison(of == KvStorage::kInt8 ? num_slots * shape.num_kv_heads : 0)),
        v_scale(k_scale) {
    const bool scaled = of == KvStorage::kInt8;
    const KvLayer layer{k.data(), v.data(), scaled ? k_scale.data() : nullptr, scaled ? v_scale.data() : nullptr,
                        of, shape.num_kv_heads, num_slots, shape.head_dim};
    form(input.tokens(first, count), layer, q.data());
  }

  // Whether element i of a slot is as near to an exact value as its storage allows.
  bool holds(const std::vector<char>& pool, const Floats& scales, std::ptrdiff_t slot, std::ptrdiff_t i,
             double exact) const {
    const double value = stored(storage, pool, slot * shape.head_dim + i);
    if (storage == KvStorage::kInt8) {
      const double scale = scales.data()[slot];
      return near(value * scale, exact, 0.5001 * scale + 1e-6);
    }
    return near(value, exact, storage == KvStorage::kBfloat16 ? std::abs(exact) / 256 + 1e-6 : 1e-6);
  }

  Shape shape;
  KvStorage storage;
  std::ptrdiff_t num_slots;
  Floats q;
  std::vector<char> k, v;
  Floats k_scale, v_scale;
};

bool is_right(const Input& input, const Output& output) {
  const Shape& shape = input.shape;
  bool good = true;
  for (std::ptrdiff_t token = 0; token < shape.num_tokens; ++token) {
    const RotaryInput from = input.tokens(token, 1);
    for (std::ptrdiff_t i = 0; i < shape.q_size(); ++i) {
      const float* head = from.q + i / shape.head_dim * shape.head_dim;
      const double exact = input.expected(head, token, i % shape.head_dim, true);
      good = good && near(output.q.data()[token * shape.q_size() + i], exact, 1e-6);
    }
    for (std::ptrdiff_t i = 0; i < shape.kv_size(); ++i) {
      const std::ptrdiff_t head = i / shape.head_dim, element = i % shape.head_dim;
      const std::ptrdiff_t slot = head * output.num_slots + from.slots[0];
      const double k = input.expected(from.k + head * shape.head_dim, token, element, true);
      const double v = input.expected(from.v + head * shape.head_dim, token, element, false);
      good = good && output.holds(output.k, output.k_scale, slot, element, k);
      good = good && output.holds(output.v, output.v_scale, slot, element, v);
      for (const std::vector<char>* pool : {&output.k, &output.v}) {  // the slot before is nobody's
        const std::ptrdiff_t bytes = element_bytes(output.storage);
        const char* at = pool->data() + ((slot - 1) * shape.head_dim + element) * bytes;
        good = good && std::all_of(at, at + bytes, [](char byte) { return byte == '\xff'; });
      }
    }
  }
  return good;
}

TEST(rotary_and_store_is_right_and_has_the_same_bits_alone_and_in_a_crowd) {
  for (const Shape& shape : kShapes) {
    const Input input(shape);
    for (KvStorage storage : kKvStorages) {
      set_num_threads(3);
      const Output crowd(input, storage, 0, shape.num_tokens);
      CHECK(is_right(input, crowd));
      set_num_threads(1);
      const std::ptrdiff_t token = shape.num_tokens / 2;
      const Output alone(input, storage, token, 1);
      CHECK(same_bits(alone.q, part(crowd.q, token * shape.q_size(), shape.q_size())));
      const std::ptrdiff_t bytes = shape.head_dim * element_bytes(storage);
      const char* slot = alone.k.data() + input.slots[static_cast<std::size_t>(token)] * bytes;
      CHECK(std::memcmp(slot, crowd.k.data() + (slot - alone.k.data()), static_cast<std::size_t>(bytes)) == 0);
    }
  }
}

bool same(const Output& a, const Output& b) {
  return same_bits(a.q, b.q) && same_bits(a.k, b.k) && same_bits(a.v, b.v) && same_bits(a.k_scale, b.k_scale) &&
         same_bits(a.v_scale, b.v_scale);
}

// One special value in k and v of most tokens: of two NaN in a product, which one stays is the compiler's choice.
void make_special(Input& input) {
  const float kinds[] = {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), -0.0f, 1e-40f,
                         1.00390625f, 3e38f};  // halfway between two bfloat16; beyond the largest bfloat16
  const Shape& shape = input.shape;
  for (std::ptrdiff_t token = 0; token < shape.num_tokens; ++token) {
    float* k = input.qkv.data() + token * input.stride + shape.q_size();
    float* v = k + shape.kv_size();
    if (token % 8 < 6) k[token % shape.head_dim] = v[token % shape.head_dim] = kinds[token % 8];
    const float scale = token % 8 == 6 ? 1e-36f : 1.0f;  // vanishes in int8
    for (std::ptrdiff_t i = 0; i < shape.kv_size(); ++i) {
      k[i] *= scale;
      v[i] *= scale;
    }
  }
}

TEST(rotary_and_store_has_the_same_bits_in_vectors_and_one_by_one) {
  for (const Shape& shape : kShapes) {
    Input input(shape);
    for (const bool special : {false, true}) {
      if (special) make_special(input);
      for (KvStorage storage : kKvStorages) {
        const Output plain(input, storage, 0, shape.num_tokens, plain_form);
        CHECK(same(Output(input, storage, 0, shape.num_tokens), plain));
        if (cpu_features().avx2) CHECK(same(Output(input, storage, 0, shape.num_tokens, vector_form), plain));
        if (!special) CHECK(is_right(input, plain));
      }
    }
    // Negative control: one bit of one sine shows.
    const Output before(input, KvStorage::kFloat32, 0, shape.num_tokens, plain_form);
    input.sin.data()[0] = float_of(bits_of(input.sin.data()[0]) ^ (1u << 20));
    CHECK(!same(Output(input, KvStorage::kFloat32, 0, shape.num_tokens, plain_form), before));
  }
}

}  // namespace
