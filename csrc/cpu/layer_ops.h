// What a layer does besides its products and attention: norm, gated activation, embedding; and the last steps of a
// model, log-probability (log_prob.h) and the likeliest token. Activations float32.
//
// Every row of a result depends on its own row of the input alone, bitwise: it is computed whole by one task, in one
// order, which belongs to the form (two instruction sets may differ in last bits).
#pragma once

#include <cstddef>
#include <cstdint>

namespace antiphon::cpu {

// What some of a row's logits add to its softmax: the largest of them, NaN aside (-inf if there is none), and the sum
// of e^(logit - largest), or of e^logit where the largest is infinite. A NaN among the logits makes the sum NaN.
struct PartialSoftmax {
  float largest;
  float sum;
};

// The largest of a row's values, NaN aside; the lowest index that has it, -1 where the largest is -inf; and whether any
// value is NaN.
struct Peak {
  float value;
  std::ptrdiff_t index;
  bool has_nan;
};

// The row functions of one instruction set. Sums run in 32 lanes, lane l over elements l, l + 32, ...; the lanes are
// then added pairwise: 16 to 16, 8 to 8, and so on.
struct LayerForm {
  // out[k] = x[k] * (1 / sqrt(mean(x^2) + eps)) * weight[k]
  void (*rms_norm)(const float* x, const float* weight, std::ptrdiff_t size, float eps, float* out);
  // out[k] = gate[k] / (1 + e^-gate[k]) * up[k]
  void (*silu_and_mul)(const float* gate, const float* up, std::ptrdiff_t size, float* out);
  // Blocks of x[size] through their Walsh-Hadamard matrix, in place: hadamard.h
  void (*hadamard)(float* x, std::ptrdiff_t size, std::ptrdiff_t block);
  // bfloat16 to float32
  void (*widen)(const std::uint16_t* row, std::ptrdiff_t size, float* out);
  PartialSoftmax (*partial_softmax)(const float* logits, std::ptrdiff_t size);
  // allowed: null, or a byte for each value, 0 where it counts as -inf (as NaN it counts all the same)
  Peak (*peak)(const float* values, const std::uint8_t* allowed, std::ptrdiff_t size);
};

extern const LayerForm kPortableLayerForm;
#if defined(__x86_64__)
extern const LayerForm kAvx2LayerForm;
#endif

// Rows of `size` consecutive floats at data + outer * outer_stride + inner * inner_stride.
struct StridedRows {
  const float* data;
  std::ptrdiff_t num_outer;
  std::ptrdiff_t outer_stride;
  std::ptrdiff_t num_inner;
  std::ptrdiff_t inner_stride;
  std::ptrdiff_t size;
};

// out[outer, inner, size], contiguous; weight[size].
void rms_norm(const LayerForm& form, const StridedRows& x, const float* weight, float eps, float* out);

// gate_up[num_rows, 2 * size] to out[num_rows, size], both contiguous; with a block over 1, blocks of a row then go
// through their Walsh-Hadamard matrix.
void silu_and_mul(const LayerForm& form, const float* gate_up, std::ptrdiff_t num_rows, std::ptrdiff_t size,
                  std::ptrdiff_t block, float* out);

enum class TableType { kFloat32, kBfloat16 };

// out[i] = table[ids[i]] in float32; table[num_rows, size]. False, and nothing written, if an id is not a row.
bool gather_rows(const LayerForm& form, const void* table, TableType type, std::ptrdiff_t num_rows,
                 std::ptrdiff_t size, const std::int64_t* ids, std::ptrdiff_t num_ids, float* out);

}  // namespace antiphon::cpu
