// Work that does nothing but keep the machine busy, to be timed by the caller: what floors are made of.
#pragma once

#include <cstddef>

#include "cpu/linear_forms.h"

namespace antiphon::cpu {

// Reads `num_bytes` (a multiple of 64) by all threads of the pool. The value is of no use, but the reading is not left
// out.
unsigned long long read_memory(const void* data, std::ptrdiff_t num_bytes);

// Multiplies what lies in registers, bfloat16 or int8, on each thread of the pool, `num_rounds` times: with amx tiles,
// four sums in turns; with avx512_bf16 vectors, fourteen. Returns how many operations (two for each multiply-add) that
// is in all. `isa` is one of the two and on this machine.
double multiply_registers(Isa isa, bool int8, std::ptrdiff_t num_rounds);

}  // namespace antiphon::cpu
