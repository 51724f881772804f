// Log-probabilities of given tokens: the head's product and the log-sum-exp in one, so that logits exist only a strip
// of columns at a time.
//
//   columns  | strip 0: 1,024 | strip 1: 1,024 | ... | the rest     |   a strip is a task: the logits of all rows, then
//   row      | largest, sum   | largest, sum   | ... | largest, sum |   each row's PartialSoftmax of them
// The strips are then merged per row in ascending order, in double. A row's result depends on no other row, bitwise, if
// the product's does not.
#pragma once

#include <functional>

#include "cpu/layer_ops.h"

namespace antiphon::cpu {

constexpr std::ptrdiff_t kStripColumns = 1024;  // a multiple of every packed layout's panel

// logits[num_rows, num_columns] = x[num_rows, K] @ weight[first_column ... + num_columns, K]^T (+ bias), contiguous.
// first_column is a multiple of kStripColumns. Called from inside tasks of the pool, so it must run in place there.
using StripLogits = std::function<void(const float* x, std::ptrdiff_t num_rows, std::ptrdiff_t first_column,
                                       std::ptrdiff_t num_columns, float* logits)>;

// out[i] = log(softmax(logits of x[i] over the first num_columns columns))[targets[i]]; x[num_rows, num_k] contiguous.
// False, and nothing written, if a target is not a column.
bool log_prob(const LayerForm& form, const StripLogits& strip_logits, const float* x, std::ptrdiff_t num_rows,
              std::ptrdiff_t num_k, const std::int64_t* targets, std::ptrdiff_t num_columns, float* out);

}  // namespace antiphon::cpu
