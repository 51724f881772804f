// The linear kernel on AVX-512 BF16, for processors without AMX: operands, rounding of x and layout of the weight are
// those of amx_linear.h, so amx_bf16_pack_rows packs for both.
//
// Order of summation, the same for every element of y, whatever M, its row, the threads and the blocking: one chain
// from 0 over the pairs of k in ascending order, of each pair the odd k first (what VDPBF16PS does: two multiply-adds,
// each rounded to nearest even; subnormal numbers count as zeros, as operands and as sums)
//   s = x[2 i] w[2 i] + (x[2 i + 1] w[2 i + 1] + s);   y = s + bias + residual
#pragma once

#include "cpu/amx_linear.h"

namespace antiphon::cpu {

// y[num_rows, N] from x[num_rows, K] and residual[num_rows, N], all contiguous; bias and residual may be null. y
// overlaps neither x nor residual: it holds partial sums between blocks of k. Only where cpu_features().avx512_bf16.
void avx512_bf16_linear(const AmxBf16Weight& weight, const float* bias, const float* residual, const float* x,
                        std::ptrdiff_t num_rows, float* y);

}  // namespace antiphon::cpu
