// Work that does nothing but keep the machine busy, to be timed by the caller: what floors are made of.
#pragma once

#include <cstddef>

namespace antiphon::cpu {

// Reads `num_bytes` (a multiple of 64) by all threads of the pool. The value is of no use, but the reading is not left
// out.
unsigned long long read_memory(const void* data, std::ptrdiff_t num_bytes);

// Multiplies tiles in registers, four sums in turns, on each thread of the pool, `num_rounds` times. Returns how many
// operations (two for each multiply-add) that is in all. Only where cpu_features().amx.
double multiply_tiles(bool int8, std::ptrdiff_t num_rounds);

}  // namespace antiphon::cpu
