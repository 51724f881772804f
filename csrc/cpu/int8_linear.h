// The CPU linear kernel on int8 weights: y[M, N] = x[M, K] @ weight[N, K]^T (+ bias[N]) (+ residual[M, N]), all but the
// weight float32. DESIGN section 4; kernels/native_int8.py is its Python side, kernels/reference_int8.py its oracle.
//
//   weight    q_w[n, k] = rint(weight[n, k] / w_scale[n]), w_scale[n] = absmax of row n / 127 (0 for zeros)
//   x         q_x[m, k] = rint(x[m, k] * (levels / absmax)), x_scale[m] = absmax / levels, absmax of row m
//   sum       sum[m, n] = sum over k of q_x q_w, in int32, exact: levels is chosen per weight so that no sum overflows
//   y         y[m, n] = float(sum) * (x_scale[m] * w_scale[n]) + bias[n] + residual[m, n], rounded after every step
//
// The sums are exact, so no blocking, thread or neighbouring row can change a bit of y. A row of x that is all zeros
// (or all below kSmallestAbsmax) gives the bias; a row with a NaN or an infinity gives NaN in that row, and only there.
//
// How weight and x are laid out belongs to a *form* (Int8Form), one per instruction set; the blocking and the threads
// (int8_linear.cpp) are the same for all.
#pragma once

#include <cstddef>
#include <cstdint>

namespace antiphon::cpu {

constexpr float kSmallestAbsmax = 0x1p-100f;             // below it, levels / absmax could overflow
constexpr std::ptrdiff_t kMaxInt8LinearK = 65536;        // 255 x 127 x this many still fits int32
constexpr std::int32_t kMaxInt8Weight = 127;

// One tile: num_rows rows x one panel of columns x one block of k.
struct Int8Tile {
  const void* a;            // the row block, from this block of k on
  const void* b;            // the panel, from this block of k on
  std::ptrdiff_t num_rows;  // of the row block, 1..tile_rows
  std::ptrdiff_t num_k;     // a multiple of k_multiple
  std::int32_t* sums;       // tile_rows * panel_columns sums of the blocks before, in any order the form likes
  bool first;               // sums are not there yet: start from zero
  bool last;                // write y; otherwise write sums
  const void* panel_extra;  // the panel's extra bytes (see Int8Form)

  // What follows is used with `last` alone, and points at this tile's first row and column.
  const float* x_scales;
  const float* w_scales;
  const float* bias;         // or null
  const float* residual;     // or null; rows y_row_stride apart
  float* y;
  std::ptrdiff_t y_row_stride;
  std::ptrdiff_t num_columns;  // 1..panel_columns: columns past it are padding and are not written

  const char* prefetch;  // null, or bytes that will be wanted next
  std::ptrdiff_t prefetch_bytes;
};

struct Int8Weight;

// The layouts of one instruction set and the functions that write and read them.
//
//   panel      panel_columns columns of y. Its weights from k on (a multiple of k_multiple) start at byte
//              k * panel_columns; after all padded K come panel_extra_bytes that pack_panel fills as it likes (for
//              example column sums, where activations are stored with an offset)
//   row block  up to tile_rows rows of quantised x. Its k, a multiple of k_multiple, starts at byte
//              k * num_rows * activation_bytes
// Both are padded with zeros to K rounded up to k_multiple.
struct Int8Form {
  std::ptrdiff_t panel_columns;
  std::ptrdiff_t tile_rows;
  std::ptrdiff_t k_multiple;
  std::ptrdiff_t block_k;  // the most k of a block where there are many row blocks; a multiple of 64, which k_multiple
                           // divides
  std::ptrdiff_t activation_bytes;
  std::ptrdiff_t panel_extra_bytes;
  std::int32_t max_levels;  // of an activation: 127 for int8, 32767 for int16

  // Rows [num_columns][num_k] of quantised weights to one panel.
  void (*pack_panel)(const std::int8_t* rows, std::ptrdiff_t num_columns, std::ptrdiff_t num_k, void* panel);
  // Quantises x[num_rows][num_k] to one row block and its scales[num_rows] (0 for a row of zeros, NaN where one is
  // not finite; such rows are stored as zeros).
  void (*pack_rows)(const float* x, std::ptrdiff_t num_rows, std::ptrdiff_t num_k, std::int32_t levels, void* row_block,
                    float* scales);
  void (*tile)(const Int8Tile&);

  // Null, or all of int8_linear: a form with a blocking of its own. It then has no use for pack_rows and tile.
  void (*product)(const Int8Weight& weight, const float* bias, const float* x, std::ptrdiff_t num_rows,
                  const float* residual, float* y) = nullptr;

  std::ptrdiff_t padded_k(std::ptrdiff_t num_k) const { return (num_k + k_multiple - 1) / k_multiple * k_multiple; }
  std::ptrdiff_t num_panels(std::ptrdiff_t num_columns) const {
    return (num_columns + panel_columns - 1) / panel_columns;
  }
  std::ptrdiff_t panel_bytes(std::ptrdiff_t num_k) const {
    return padded_k(num_k) * panel_columns + panel_extra_bytes;
  }
};

// int16 activations, [k / 2][row][2]; weights [k / 2][16 columns][2].
extern const Int8Form kPortableInt8Form;
#if defined(__x86_64__)
extern const Int8Form kAvx2Int8Form;
// int8 activations; these two give the same bits as each other.
extern const Int8Form kAvx512Int8Form;
extern const Int8Form kAmxInt8Form;
#endif

struct Int8Weight {
  const void* panels;           // [num_panels][panel_bytes]
  const float* scales;          // [num_columns]
  std::ptrdiff_t num_columns;   // N
  std::ptrdiff_t num_k;         // K
  std::int32_t levels;          // of an activation; see int8_levels
};

// Columns [first_column, first_column + num_columns) of a packed weight, as a weight of their own; first_column is a
// multiple of panel_columns.
inline Int8Weight columns_of(const Int8Form& form, const Int8Weight& weight, std::ptrdiff_t first_column,
                             std::ptrdiff_t num_columns) {
  const std::ptrdiff_t offset = first_column / form.panel_columns * form.panel_bytes(weight.num_k);
  return {static_cast<const char*>(weight.panels) + offset, weight.scales + first_column, num_columns, weight.num_k,
          weight.levels};
}

// Quantises rows [first_row, first_row + num_rows) of the weight, given as float32 with that many rows, and packs them
// into `panels` and `scales`, which are the whole weight's; first_row is a multiple of panel_columns, num_rows too
// unless these rows are the last. Returns the largest sum of absolute values of a row, or -1 where one is not finite.
std::int32_t pack_int8_rows(const Int8Form& form, const float* rows, std::ptrdiff_t first_row, std::ptrdiff_t num_rows,
                            std::ptrdiff_t num_k, void* panels, float* scales);

// One row of them to out[num_k]. Returns the sum of its absolute values, or -1 where one is not finite.
std::int32_t quantize_weights(const float* row, std::ptrdiff_t num_k, std::int8_t* out, float* scale);

// The most levels of an activation with which no sum can overflow, for a weight whose rows' absolute sums are at most
// max_absolute_sum. Real weights are mostly far below 127, so this is some 4 times what K alone would allow.
std::int32_t int8_levels(const Int8Form& form, std::int32_t max_absolute_sum);

// y[num_rows, N] from x[num_rows, K] and residual[num_rows, N] (or null), all contiguous; residual may be y.
void int8_linear(const Int8Form& form, const Int8Weight& weight, const float* bias, const float* x,
                 std::ptrdiff_t num_rows, const float* residual, float* y);

}  // namespace antiphon::cpu
