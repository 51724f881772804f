// The form of each product that an instruction set has, behind one interface. A layout of packed weights belongs to its
// form: what was packed for one is for that one alone.
#pragma once

#include <cstddef>
#include <string>

#include "cpu/int8_linear.h"
#include "cpu/linear.h"

namespace antiphon::cpu {

enum class Isa { kAmx, kAvx512Bf16, kAvx512, kAvx2, kPortable };

// std::invalid_argument for a name that is not one of supported_isas().
Isa parse_isa(const std::string& name);

// Weights and sums, by instruction set:
//   bfloat16   amx, avx512_bf16: x is rounded to bfloat16 too, sums as in amx_linear.h or avx512_bf16_linear.h;
//              else: widened, sums as in linear.h
//   float32    sums as in linear.h; amx and avx512_bf16 are avx512
//   int8       amx, avx512_bf16, avx512: activations of 127 levels; else: as many as the sums hold (int8_linear.h)
std::size_t linear_packed_bytes(Isa isa, Storage storage, std::ptrdiff_t num_columns, std::ptrdiff_t num_k);

// Packs rows [first_row, first_row + num_rows) of weight[N, K], given as float32 with that many rows, into `packed`.
// first_row is a multiple of 32; num_rows is one too unless these rows are the last.
void linear_pack_rows(Isa isa, Storage storage, const float* rows, std::ptrdiff_t first_row, std::ptrdiff_t num_rows,
                      std::ptrdiff_t num_k, void* packed);

// y[num_rows, N] from x[num_rows, K] and residual[num_rows, N], all contiguous; bias and residual may be null.
// y overlaps neither x nor residual.
void run_linear(Isa isa, const PackedWeight& weight, const float* bias, const float* residual, const float* x,
                std::ptrdiff_t num_rows, float* y);

// Columns [first_column, first_column + num_columns) of a packed weight, as one; first_column is a multiple of 32.
PackedWeight linear_columns(Isa isa, const PackedWeight& weight, std::ptrdiff_t first_column,
                            std::ptrdiff_t num_columns);

const Int8Form& int8_form(Isa isa);

}  // namespace antiphon::cpu
