// The layout of the int8 forms whose activations are int16: k in pairs, as vpmaddwd takes them.
//
//   panel      [K / 2][16 columns][2] int8
//   row block  [K / 2][rows][2] int16, 1 to 6 rows
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/int8_linear.h"

namespace antiphon::cpu {

constexpr std::ptrdiff_t kPairColumns = 16;
constexpr std::ptrdiff_t kPairRows = 6;       // 6 x 16 sums are 12 of the 16 AVX2 registers
constexpr std::ptrdiff_t kPairBlockK = 1024;  // a panel block of 16 KiB: half of a first-level cache
constexpr std::int32_t kPairMaxLevels = 32767;

void pack_pair_panel(const std::int8_t* rows, std::ptrdiff_t num_columns, std::ptrdiff_t num_k, void* panel);

// Bits of the largest absolute value of x[num_k]. As integers they are ordered as the values are, infinities and NaN
// above all finite ones.
using AbsmaxFunction = std::uint32_t (*)(const float* x, std::ptrdiff_t num_k);
// out[i] = rint(x[i] * inverse) for count values that are known to fit.
using QuantizeFunction = void (*)(const float* x, std::ptrdiff_t count, float inverse, std::int16_t* out);

// Int8Form::pack_rows for this layout, on one instruction set's two loops.
void pack_pair_rows(AbsmaxFunction absmax, QuantizeFunction quantize, const float* x, std::ptrdiff_t num_rows,
                    std::ptrdiff_t num_k, std::int32_t levels, void* row_block, float* scales);

}  // namespace antiphon::cpu
