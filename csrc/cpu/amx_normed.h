// What follows a norm in a layer, norm included, on AMX tiles: a linear layer, and a whole gated MLP. All float32 but
// the weights.
//   linear   y[M, N] = norm(x) weight^T (+ bias[N])
//   MLP      y[M, K] = x + (silu(norm(x) gate^T) * (norm(x) up^T)) down^T
// norm(x) is x * (1 / sqrt(mean of x^2 + eps)) * weight of the norm, a row at a time; it is rounded to bfloat16, or
// quantised, without being written out. Weights are packed as amx_linear.h and int8_linear.h say, and summed as there.
//
// The MLP's `gate_up` has panels of 16 rows of gate and the same 16 of up, the last ones filled up with zeros:
// [ceil(size / 16)][gate 16, up 16] rows. h = bfloat16(gate up / (1 + e^-gate)), right to 2e-4 before it is rounded (by
// 4e-3 at most), leaves the tiles as the x of the second product, bfloat16 as it is, int8 quantised per row. Where int8
// has a `block` over 1, blocks of h go through their Walsh-Hadamard matrix before (hadamard.h), rounded to bfloat16 again.
// A row of y depends on its own row of x alone, bitwise.
#pragma once

#include "cpu/amx_linear.h"
#include "cpu/int8_linear.h"

namespace antiphon::cpu {

constexpr std::ptrdiff_t kGatedColumns = 16;  // of gate, and of up, in a panel

struct RowNorm {
  const float* weight;  // [K]
  float eps;
};

// bias may be null; x and y must not overlap.
void amx_bf16_normed(const AmxBf16Weight& weight, const float* bias, const RowNorm& norm, const float* x,
                     std::ptrdiff_t num_rows, float* y);
void amx_int8_normed(const Int8Weight& weight, const float* bias, const RowNorm& norm, const float* x,
                     std::ptrdiff_t num_rows, float* y);

// gate_up.num_columns is 32 ceil(size / 16), down.num_k is size, down.num_columns gate_up.num_k. y may be x.
void amx_bf16_mlp(const AmxBf16Weight& gate_up, const AmxBf16Weight& down, const RowNorm& norm, const float* x,
                  std::ptrdiff_t num_rows, float* y);
void amx_int8_mlp(const Int8Weight& gate_up, const Int8Weight& down, const RowNorm& norm, std::ptrdiff_t block,
                  const float* x, std::ptrdiff_t num_rows, float* y);

}  // namespace antiphon::cpu
