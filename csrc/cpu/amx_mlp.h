// A gated MLP on AMX tiles in one go: y[M, N] = (silu(x gate^T) * (x up^T)) down^T (+ residual[M, N]), x [M, K], float32.
// What is between the two products never leaves as float32: it is rounded to bfloat16 as it leaves the tiles.
//
// Weights are packed as amx_linear.h and int8_linear.h say. `gate_up` has panels of 16 rows of gate and the same 16 of
// up, the last ones filled up with zeros: [ceil(size / 16)][gate 16, up 16] rows.
// Numbers: gate and up are summed as a linear layer of that storage does; h = bfloat16(gate up / (1 + e^-gate)), right to
// 2e-4 before it is rounded (by 4e-3 at most); h is multiplied by `down` as a linear layer does, bfloat16 as it is, int8
// quantised per row from the rounded h. A row of y depends on its own row of
// x and residual alone, bitwise.
#pragma once

#include "cpu/amx_linear.h"
#include "cpu/int8_linear.h"

namespace antiphon::cpu {

constexpr std::ptrdiff_t kGatedColumns = 16;  // of gate, and of up, in a panel

// gate_up.num_columns is 32 ceil(size / 16), down.num_k is size. y and x must not overlap; residual may be null, or y.
void amx_bf16_mlp(const AmxBf16Weight& gate_up, const AmxBf16Weight& down, const float* x, std::ptrdiff_t num_rows,
                  const float* residual, float* y);

void amx_int8_mlp(const Int8Weight& gate_up, const Int8Weight& down, const float* x, std::ptrdiff_t num_rows,
                  const float* residual, float* y);

}  // namespace antiphon::cpu
