// An int8 linear layer whose weight or x has a second plane: what the rounding to 8 bits leaves, quantised in its turn,
// so that both together have some 15 bits. Products are made one after the other, each as int8_linear.h says, and added
// as residuals are:
//   y = fine x + residual, then y = weight left(x) + y, then y = weight x + y (+ bias)
// each only where its plane is there. Forms whose activations have more than 8 bits make nothing of left(x).
#pragma once

#include "cpu/int8_linear.h"

namespace antiphon::cpu {

struct Int8Planes {
  Int8Weight weight;
  Int8Weight fine;  // panels null: none
  bool fine_x;
};

inline Int8Planes columns_of(const Int8Form& form, const Int8Planes& planes, std::ptrdiff_t first_column,
                             std::ptrdiff_t num_columns) {
  const bool fine = planes.fine.panels != nullptr;
  return {columns_of(form, planes.weight, first_column, num_columns),
          fine ? columns_of(form, planes.fine, first_column, num_columns) : planes.fine, planes.fine_x};
}

// As int8_linear of one plane; residual may be y.
void int8_linear(const Int8Form& form, const Int8Planes& planes, const float* bias, const float* x,
                 std::ptrdiff_t num_rows, const float* residual, float* y);

// What quantising rows of a weight leaves of them, in place: rows[n, k] - w_scale[n] * q_w[n, k], rounded twice.
void int8_remainder(float* rows, std::ptrdiff_t num_rows, std::ptrdiff_t num_k);

}  // namespace antiphon::cpu
