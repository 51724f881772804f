// See log_prob.h.
#include "cpu/log_prob.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/pool.h"
#include "cpu/workspace.h"

namespace antiphon::cpu {
namespace {

constexpr std::ptrdiff_t kTaskRows = 144;      // rows of logits at a time: 576 KiB of scratch
constexpr std::ptrdiff_t kPassRows = 8 * 144;  // rows between which the strips meet: the head is read once for them

// What a strip's sum is relative to, see PartialSoftmax.
double shift(float largest) { return std::isfinite(largest) ? largest : 0.0; }

// Shifts each strip's sum to the largest logit of all and adds them. As torch.logsumexp: +inf among the logits gives
// -inf (NaN if it is the target's), NaN gives NaN.
float merge(const PartialSoftmax* strips, std::ptrdiff_t num_strips, float target_logit) {
  float largest = strips[0].largest;
  for (std::ptrdiff_t strip = 1; strip < num_strips; ++strip) largest = std::max(largest, strips[strip].largest);
  double sum = 0.0;
  for (std::ptrdiff_t strip = 0; strip < num_strips; ++strip) {
    if (strips[strip].sum == 0.0f) continue;  // all -inf
    sum += static_cast<double>(strips[strip].sum) * std::exp(shift(strips[strip].largest) - shift(largest));
  }
  return static_cast<float>(static_cast<double>(target_logit) - (shift(largest) + std::log(sum)));
}

}  // namespace

bool log_prob(const LayerForm& form, const StripLogits& strip_logits, const float* x, std::ptrdiff_t num_rows,
              std::ptrdiff_t num_k, const std::int64_t* targets, std::ptrdiff_t num_columns, float* out) {
  const auto is_column = [&](std::int64_t target) { return 0 <= target && target < num_columns; };
  if (!std::all_of(targets, targets + num_rows, is_column)) return false;
  const std::ptrdiff_t num_strips = (num_columns + kStripColumns - 1) / kStripColumns;
  std::vector<PartialSoftmax> partials(static_cast<std::size_t>(std::min(num_rows, kPassRows) * num_strips));
  for (std::ptrdiff_t pass = 0; pass < num_rows; pass += kPassRows) {
    const std::ptrdiff_t end_row = std::min(num_rows, pass + kPassRows);
    parallel_for(num_strips, [&](std::ptrdiff_t strip, int) {
      thread_local Workspace workspace;
      const std::ptrdiff_t first_column = strip * kStripColumns;
      const std::ptrdiff_t width = std::min(kStripColumns, num_columns - first_column);
      float* logits = workspace.at_least<float>(std::min(kTaskRows, end_row - pass) * kStripColumns);
      for (std::ptrdiff_t first = pass; first < end_row; first += kTaskRows) {
        const std::ptrdiff_t end = std::min(end_row, first + kTaskRows);
        strip_logits(x + first * num_k, end - first, first_column, width, logits);
        for (std::ptrdiff_t row = first; row < end; ++row) {
          const float* row_logits = logits + (row - first) * width;
          partials[(row - pass) * num_strips + strip] = form.partial_softmax(row_logits, width);
          const std::ptrdiff_t target = static_cast<std::ptrdiff_t>(targets[row]) - first_column;
          if (0 <= target && target < width) out[row] = row_logits[target];  // until the strips are merged
        }
      }
    });
    for (std::ptrdiff_t row = pass; row < end_row; ++row) {
      out[row] = merge(partials.data() + (row - pass) * num_strips, num_strips, out[row]);
    }
  }
  return true;
}

}  // namespace antiphon::cpu
