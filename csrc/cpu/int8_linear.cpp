// Blocking and threads of the int8 linear kernel, the same for every form. Nothing here can change a bit of the result.
#include "cpu/int8_linear.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "cpu/pool.h"
#include "cpu/rounding.h"
#include "cpu/workspace.h"

namespace antiphon::cpu {
namespace {

constexpr std::ptrdiff_t kChunkBytes = 6 << 20;          // packed x of one chunk: stays in a third-level cache
constexpr std::ptrdiff_t kGroupBytes = 192 << 10;        // a row group's block of x: stays in a second-level cache
constexpr std::ptrdiff_t kMaxPanelsPerTask = 8;          // their sums and blocks of weight stay there beside it
constexpr std::ptrdiff_t kTasksPerThread = 8;            // wanted at least, so that threads end together
constexpr std::ptrdiff_t kBlockStep = 64;                // blocks of k are multiples of it; so is Int8Form::block_k
constexpr std::ptrdiff_t kInPlaceElements = 1 << 15;     // packing less x than this costs less than waking a thread
constexpr std::ptrdiff_t kPrefetchDistance = 4 << 10;    // ahead in a stream of panels from memory


// One call: what is multiplied, and the packed rows of x of one chunk, [row blocks][K][rows of the block].
struct Call {
  const Int8Form& form;
  const Int8Weight& weight;
  const float* bias;
  const float* residual;  // of the chunk's first row, as y and x
  float* y;
  std::ptrdiff_t num_rows;
  char* packed;
  float* x_scales;

  std::ptrdiff_t padded_k() const { return form.padded_k(weight.num_k); }
  std::ptrdiff_t num_panels() const { return form.num_panels(weight.num_columns); }
  std::ptrdiff_t rows_at(std::ptrdiff_t row) const { return std::min(form.tile_rows, num_rows - row); }

  const char* panel(std::ptrdiff_t index) const {
    return static_cast<const char*>(weight.panels) + index * form.panel_bytes(weight.num_k);
  }

  // The row block that starts at `row`, from first_k on.
  char* row_block(std::ptrdiff_t row, std::ptrdiff_t first_k) const {
    return packed + (row * padded_k() + rows_at(row) * first_k) * form.activation_bytes;
  }

  void pack(const float* x, std::ptrdiff_t row) const {
    form.pack_rows(x + row * weight.num_k, rows_at(row), weight.num_k, weight.levels, row_block(row, 0),
                   x_scales + row);
  }

  // The tile of k in [first_k, end_k), all but its weights and what is done about sums and prefetch.
  Int8Tile tile(std::ptrdiff_t row, std::ptrdiff_t panel_index, std::ptrdiff_t first_k, std::ptrdiff_t end_k) const {
    const std::ptrdiff_t column = panel_index * form.panel_columns;
    const std::ptrdiff_t place = row * weight.num_columns + column;
    Int8Tile tile{};
    tile.a = row_block(row, first_k);
    tile.b = panel(panel_index) + first_k * form.panel_columns;
    tile.num_rows = rows_at(row);
    tile.num_k = end_k - first_k;
    tile.first = first_k == 0;
    tile.last = end_k == padded_k();
    tile.panel_extra = panel(panel_index) + padded_k() * form.panel_columns;
    tile.x_scales = x_scales + row;
    tile.w_scales = weight.scales + column;
    tile.bias = bias == nullptr ? nullptr : bias + column;
    tile.residual = residual == nullptr ? nullptr : residual + place;
    tile.y = y + place;
    tile.y_row_stride = weight.num_columns;
    tile.num_columns = std::min(form.panel_columns, weight.num_columns - column);
    return tile;
  }
};

std::ptrdiff_t panels_per_task(std::ptrdiff_t num_panels, std::ptrdiff_t num_groups) {
  const std::ptrdiff_t even = num_panels * num_groups / (kTasksPerThread * num_threads());
  return std::clamp<std::ptrdiff_t>(even, 1, kMaxPanelsPerTask);
}

// One row block: each thread streams whole panels from memory, once.
void run_few_rows(const Call& call) {
  const std::ptrdiff_t num_panels = call.num_panels();
  const std::ptrdiff_t step = panels_per_task(num_panels, 1);
  parallel_for(ceil_div(num_panels, step), [&](std::ptrdiff_t task, int) {
    for (std::ptrdiff_t panel = task * step; panel < std::min(num_panels, (task + 1) * step); ++panel) {
      Int8Tile tile = call.tile(0, panel, 0, call.padded_k());
      tile.prefetch = static_cast<const char*>(tile.b) + kPrefetchDistance;
      tile.prefetch_bytes = call.form.panel_bytes(call.weight.num_k);
      call.form.tile(tile);
    }
  });
}

// Rows [first_row, end_row) x panels [first_panel, end_panel). Loops, outermost first: blocks of k, panels (their block
// in the first-level cache), row blocks.
void run_group(const Call& call, std::ptrdiff_t first_row, std::ptrdiff_t end_row, std::ptrdiff_t first_panel,
               std::ptrdiff_t end_panel) {
  const Int8Form& form = call.form;
  const std::ptrdiff_t padded_k = call.padded_k();
  const std::ptrdiff_t num_blocks = ceil_div(padded_k, form.block_k);
  const std::ptrdiff_t block_k = round_up(ceil_div(padded_k, num_blocks), kBlockStep);
  const std::ptrdiff_t num_tiles = ceil_div(end_row - first_row, form.tile_rows);
  const std::ptrdiff_t tile_sums = form.tile_rows * form.panel_columns;
  thread_local Workspace workspace;
  std::int32_t* all_sums = workspace.at_least<std::int32_t>((end_panel - first_panel) * num_tiles * tile_sums);
  for (std::ptrdiff_t first_k = 0; first_k < padded_k; first_k += block_k) {
    const std::ptrdiff_t end_k = std::min(padded_k, first_k + block_k);
    const std::ptrdiff_t share = round_up(ceil_div((end_k - first_k) * form.panel_columns, num_tiles), 128);
    std::int32_t* sums = all_sums;
    for (std::ptrdiff_t panel = first_panel; panel < end_panel; ++panel) {
      const bool more = panel + 1 < end_panel;
      const char* next = more ? call.panel(panel + 1) + first_k * form.panel_columns : nullptr;
      for (std::ptrdiff_t row = first_row; row < end_row; row += form.tile_rows) {
        Int8Tile tile = call.tile(row, panel, first_k, end_k);
        tile.sums = sums;
        sums += tile_sums;
        if (more) {
          tile.prefetch = next;
          tile.prefetch_bytes = share;
          next += share;
        }
        form.tile(tile);
      }
    }
  }
}

void run_many_rows(const Call& call) {
  const Int8Form& form = call.form;
  const std::ptrdiff_t fitting = kGroupBytes / (form.block_k * form.activation_bytes);
  const std::ptrdiff_t num_groups = ceil_div(call.num_rows, round_up(fitting, form.tile_rows));
  const std::ptrdiff_t group_rows = round_up(ceil_div(call.num_rows, num_groups), form.tile_rows);
  const std::ptrdiff_t num_panels = call.num_panels();
  const std::ptrdiff_t step = panels_per_task(num_panels, num_groups);
  const std::ptrdiff_t group_tasks = ceil_div(num_panels, step);
  parallel_for(ceil_div(call.num_rows, group_rows) * group_tasks, [&](std::ptrdiff_t task, int) {
    const std::ptrdiff_t row = task / group_tasks * group_rows;
    const std::ptrdiff_t panel = task % group_tasks * step;
    run_group(call, row, std::min(call.num_rows, row + group_rows), panel, std::min(num_panels, panel + step));
  });
}

}  // namespace

std::int32_t quantize_weights(const float* row, std::ptrdiff_t num_k, std::int8_t* out, float* scale) {
  std::uint32_t absmax_bits = 0;  // as integers, bits are ordered as absolute values are, NaN above all
  for (std::ptrdiff_t k = 0; k < num_k; ++k) {
    std::uint32_t bits;
    std::memcpy(&bits, row + k, sizeof(bits));
    absmax_bits = std::max(absmax_bits, bits & 0x7fffffffu);
  }
  float absmax;
  std::memcpy(&absmax, &absmax_bits, sizeof(absmax));
  if (absmax_bits >= 0x7f800000u || absmax < kSmallestAbsmax) {
    std::memset(out, 0, static_cast<std::size_t>(num_k));
    *scale = 0.0f;
    return absmax_bits >= 0x7f800000u ? -1 : 0;
  }
  const float divisor = absmax / static_cast<float>(kMaxInt8Weight);
  constexpr float kRound = 0x1.8p23f;  // adding it leaves the nearest integer, ties to even, in the low bits
  std::int32_t sum = 0;
  for (std::ptrdiff_t k = 0; k < num_k; ++k) {
    const float shifted = row[k] / divisor + kRound;
    std::int32_t bits;
    std::memcpy(&bits, &shifted, sizeof(bits));
    const std::int32_t value = bits - 0x4b400000;
    out[k] = static_cast<std::int8_t>(value);
    sum += value < 0 ? -value : value;
  }
  *scale = divisor;
  return sum;
}

std::int32_t pack_int8_rows(const Int8Form& form, const float* rows, std::ptrdiff_t first_row, std::ptrdiff_t num_rows,
                            std::ptrdiff_t num_k, void* panels, float* scales) {
  char* out = static_cast<char*>(panels) + first_row / form.panel_columns * form.panel_bytes(num_k);
  const std::ptrdiff_t num_panels = form.num_panels(num_rows);
  std::vector<std::int32_t> largest(static_cast<std::size_t>(num_panels), 0);
  std::atomic<bool> finite{true};
  parallel_for(num_panels, [&](std::ptrdiff_t panel, int) {
    thread_local Workspace workspace;
    std::int8_t* quantized = workspace.at_least<std::int8_t>(form.panel_columns * num_k);
    const std::ptrdiff_t row = panel * form.panel_columns;
    const std::ptrdiff_t num_columns = std::min(form.panel_columns, num_rows - row);
    for (std::ptrdiff_t column = 0; column < num_columns; ++column) {
      const std::int32_t sum = quantize_weights(rows + (row + column) * num_k, num_k, quantized + column * num_k,
                                                scales + first_row + row + column);
      if (sum < 0) finite = false;
      largest[static_cast<std::size_t>(panel)] = std::max(largest[static_cast<std::size_t>(panel)], sum);
    }
    form.pack_panel(quantized, num_columns, num_k, out + panel * form.panel_bytes(num_k));
  });
  if (!finite) return -1;
  return largest.empty() ? 0 : *std::max_element(largest.begin(), largest.end());
}

std::int32_t int8_levels(const Int8Form& form, std::int32_t max_absolute_sum) {
  return std::min(form.max_levels, INT32_MAX / std::max(1, max_absolute_sum));
}

void int8_linear(const Int8Form& form, const Int8Weight& weight, const float* bias, const float* x,
                 std::ptrdiff_t num_rows, const float* residual, float* y) {
  if (form.product != nullptr) return form.product(weight, bias, x, num_rows, residual, y);
  const std::ptrdiff_t row_bytes = form.padded_k(weight.num_k) * form.activation_bytes;
  const std::ptrdiff_t chunk_rows =
      std::min(num_rows, round_up(std::max<std::ptrdiff_t>(192, kChunkBytes / row_bytes), form.tile_rows));
  thread_local Workspace workspace;
  const std::ptrdiff_t scale_bytes = round_up(4 * chunk_rows, 64);
  char* scratch = workspace.at_least<char>(scale_bytes + chunk_rows * row_bytes);
  for (std::ptrdiff_t first_row = 0; first_row < num_rows; first_row += chunk_rows) {
    const std::ptrdiff_t place = first_row * weight.num_columns;
    const Call call{form, weight, bias, residual == nullptr ? nullptr : residual + place, y + place,
                    std::min(chunk_rows, num_rows - first_row), scratch + scale_bytes,
                    reinterpret_cast<float*>(scratch)};
    const float* rows = x + first_row * weight.num_k;
    const std::ptrdiff_t num_row_blocks = ceil_div(call.num_rows, form.tile_rows);
    if (call.num_rows * weight.num_k <= kInPlaceElements) {
      for (std::ptrdiff_t block = 0; block < num_row_blocks; ++block) call.pack(rows, block * form.tile_rows);
    } else {
      parallel_for(num_row_blocks, [&](std::ptrdiff_t block, int) { call.pack(rows, block * form.tile_rows); });
    }
    num_row_blocks == 1 ? run_few_rows(call) : run_many_rows(call);
  }
}

}  // namespace antiphon::cpu
