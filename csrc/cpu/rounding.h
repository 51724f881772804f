// Whole numbers rounded up: how many pieces, and the multiple above.
#pragma once

#include <cstddef>

namespace antiphon::cpu {

constexpr std::ptrdiff_t ceil_div(std::ptrdiff_t a, std::ptrdiff_t b) { return (a + b - 1) / b; }

constexpr std::ptrdiff_t round_up(std::ptrdiff_t value, std::ptrdiff_t step) { return ceil_div(value, step) * step; }

}  // namespace antiphon::cpu
