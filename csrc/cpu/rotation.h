// Orthogonal matrices that weights are multiplied with as they are loaded (kernels/rotation.py), float32:
//   R[i b + k, j b + l] = signs[i b + k] mix[i, j] H[k, l]        i, j < a; k, l < b; a b = size
// H being the Walsh-Hadamard matrix of b = block (hadamard.h). Every row or column is rotated alone, in one order.
#pragma once

#include <cstddef>

namespace antiphon::cpu {

struct Rotation {
  const float* signs;    // [size], or null: ones
  const float* mix;      // [a][a], or null: the identity
  std::ptrdiff_t size;
  std::ptrdiff_t block;  // a power of two that divides size

  std::ptrdiff_t num_blocks() const { return size / block; }
};

// x[num_rows, size] to x R, in place.
void rotate_rows(const Rotation& rotation, float* x, std::ptrdiff_t num_rows);
// x[size, num_columns] to R^T x, in place.
void rotate_columns(const Rotation& rotation, float* x, std::ptrdiff_t num_columns);

}  // namespace antiphon::cpu
