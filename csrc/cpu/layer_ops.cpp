// Rows to tasks. Nothing here can change a bit of the result: see layer_ops.h.
#include "cpu/layer_ops.h"

#include <algorithm>
#include <cstring>

#include "cpu/pool.h"

namespace antiphon::cpu {
namespace {

// Elements of a task: some microseconds of work, as much as handing it over costs.
constexpr std::ptrdiff_t kTaskElements = 32768;

// run(first, end) over [0, num_rows) in pieces of about kTaskElements. What is no more than one piece runs in place.
template <typename Run>
void for_row_ranges(std::ptrdiff_t num_rows, std::ptrdiff_t size, Run&& run) {
  const std::ptrdiff_t task_rows = std::max<std::ptrdiff_t>(1, kTaskElements / std::max<std::ptrdiff_t>(1, size));
  const std::ptrdiff_t num_tasks = (num_rows + task_rows - 1) / task_rows;
  parallel_for(num_tasks, [&](std::ptrdiff_t task, int) {
    run(task * task_rows, std::min(num_rows, (task + 1) * task_rows));
  });
}

}  // namespace

void rms_norm(const LayerForm& form, const StridedRows& x, const float* weight, float eps, float* out) {
  for_row_ranges(x.num_outer * x.num_inner, x.size, [&](std::ptrdiff_t first, std::ptrdiff_t end) {
    std::ptrdiff_t outer = first / std::max<std::ptrdiff_t>(1, x.num_inner);
    std::ptrdiff_t inner = first - outer * x.num_inner;
    for (std::ptrdiff_t row = first; row < end; ++row) {
      const float* from = x.data + outer * x.outer_stride + inner * x.inner_stride;
      form.rms_norm(from, weight, x.size, eps, out + row * x.size);
      if (++inner == x.num_inner) {
        inner = 0;
        ++outer;
      }
    }
  });
}

void silu_and_mul(const LayerForm& form, const float* gate_up, std::ptrdiff_t num_rows, std::ptrdiff_t size,
                  std::ptrdiff_t block, float* out) {
  for_row_ranges(num_rows, size, [&](std::ptrdiff_t first, std::ptrdiff_t end) {
    for (std::ptrdiff_t row = first; row < end; ++row) {
      const float* gate = gate_up + row * 2 * size;
      form.silu_and_mul(gate, gate + size, size, out + row * size);
      if (block > 1) form.hadamard(out + row * size, size, block);
    }
  });
}

bool gather_rows(const LayerForm& form, const void* table, TableType type, std::ptrdiff_t num_rows,
                 std::ptrdiff_t size, const std::int64_t* ids, std::ptrdiff_t num_ids, float* out) {
  const auto is_row = [&](std::int64_t id) { return 0 <= id && id < num_rows; };
  if (!std::all_of(ids, ids + num_ids, is_row)) return false;
  for_row_ranges(num_ids, size, [&](std::ptrdiff_t first, std::ptrdiff_t end) {
    for (std::ptrdiff_t i = first; i < end; ++i) {
      const std::ptrdiff_t offset = static_cast<std::ptrdiff_t>(ids[i]) * size;
      if (type == TableType::kFloat32) {
        std::memcpy(out + i * size, static_cast<const float*>(table) + offset, sizeof(float) * size);
      } else {
        form.widen(static_cast<const std::uint16_t*>(table) + offset, size, out + i * size);
      }
    }
  });
  return true;
}

}  // namespace antiphon::cpu
