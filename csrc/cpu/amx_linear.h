// The linear kernel on AMX tiles: y[M, N] = x[M, K] @ weight[N, K]^T (+ bias[N]) (+ residual[M, N]), all float32 but
// the weight, which is bfloat16, packed once: [ceil(N / 32)][ceil(K / 32)][2][16 lines][16 columns][2 of k], zeros past
// N and K.
//
// x is rounded to bfloat16, to nearest even. Order of summation, the same for every element of y, whatever M, its row,
// the threads and the blocking: step s covers k in [32 s, 32 (s + 1)); within it the even k are summed from 0 in
// ascending order by multiply-adds, and so are the odd k (what TDPBF16PS does; subnormal numbers count as zeros)
//   y = (((even_0 + odd_0) + (even_1 + odd_1)) + ...) + bias + residual
#pragma once

#include <cstddef>

namespace antiphon::cpu {

constexpr std::ptrdiff_t kAmxPanelColumns = 32;
constexpr std::ptrdiff_t kAmxBf16StepK = 32;

struct AmxBf16Weight {
  const void* data;
  std::ptrdiff_t num_columns;  // N
  std::ptrdiff_t num_k;        // K
};

std::size_t amx_bf16_packed_bytes(std::ptrdiff_t num_columns, std::ptrdiff_t num_k);

// Packs rows [first_row, first_row + num_rows) of weight[N, K], given as float32 with that many rows, into `packed`,
// rounded to nearest even. first_row is a multiple of 32; num_rows is one too unless these rows are the last.
void amx_bf16_pack_rows(const float* rows, std::ptrdiff_t first_row, std::ptrdiff_t num_rows, std::ptrdiff_t num_k,
                        void* packed);

// y[num_rows, N] from x[num_rows, K] and residual[num_rows, N], all contiguous; bias and residual may be null, residual
// may be y. Only where cpu_features().amx.
void amx_bf16_linear(const AmxBf16Weight& weight, const float* bias, const float* residual, const float* x,
                     std::ptrdiff_t num_rows, float* y);

}  // namespace antiphon::cpu
