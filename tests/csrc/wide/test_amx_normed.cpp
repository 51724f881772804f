// What follows a norm, on emulated AMX tiles: bit for bit the sums and roundings that amx_normed.h promises, for any
// shape. Its elementary functions are the emulated ones of elementary.h, here as there.
#include <algorithm>

#include "checks.h"
#include "cpu/amx_normed.h"
#include "cpu/pool.h"
#include "elementary.h"
#include "normed_blocks.h"

using namespace antiphon::cpu;
using checks::Floats;
using namespace normed;

namespace {

checks::Report report;

std::string named(const char* name, const Sizes& sizes, const char* what = "") {
  return checks::describe(name, sizes.shape(), what) + " size " + std::to_string(sizes.size);
}

template <typename Block>
void check_shape(const char* name, const Sizes& sizes, const char* what = "") {
  const Operands o(sizes, static_cast<unsigned>(sizes.rows));
  const Block block(o);
  poison_workspaces(block, sizes);
  report.expect_equal(run(block, o, 0, sizes.rows), promised(block, o), named(name, sizes, what));
}

// rows, K, and the size of an MLP or the columns of a linear layer.
template <typename Block>
void check_shapes(const char* name) {
  // Odd and even numbers of panels of 16; K and size around steps of 32 and 64, and over several blocks of them.
  const std::ptrdiff_t shapes[][3] = {{1, 1, 1},     {2, 31, 15},  {3, 32, 16},   {15, 33, 17},  {16, 63, 31},
                                      {17, 64, 32},  {31, 65, 33}, {32, 96, 47},  {33, 100, 48}, {47, 127, 49},
                                      {48, 129, 63}, {49, 40, 64}, {64, 50, 65},  {65, 20, 130}, {130, 72, 48},
                                      {5, 950, 20},  {34, 20, 950}, {3, 1900, 40}, {36, 30, 1850}};
  for (const auto& [rows, num_k, size] : shapes) check_shape<Block>(name, sizes_of<Block>(rows, num_k, size));
}

// More rows than an MLP has between its products, or a linear layer packs at a time.
template <typename Block>
void check_chunks(const char* name) {
  const std::ptrdiff_t mlp[][3] = {{257, 5, 17}, {300, 33, 48}, {529, 3, 40}};
  const std::ptrdiff_t linear[][3] = {{513, 5, 17}, {1027, 40, 3}, {259, 930, 3}};
  for (const auto& [rows, num_k, size] : Block::kIsMlp ? mlp : linear) {
    check_shape<Block>(name, sizes_of<Block>(rows, num_k, size), "chunks");
  }
}

template <typename Block>
void check_rows_alone(const char* name, const Sizes& sizes) {
  const Operands o(sizes);
  const Block block(o);
  checks::expect_rows_alone(report, name, sizes.shape(),
                            [&](std::ptrdiff_t first, std::ptrdiff_t count) { return run(block, o, first, count); });
}

template <typename Block>
void check_threads(const char* name) {
  const std::ptrdiff_t shapes[][3] = {{1, 70, 200}, {40, 100, 300}, {70, 950, 176}};
  for (const auto& [rows, num_k, size] : shapes) {
    const Sizes sizes = sizes_of<Block>(rows, num_k, size);
    const Operands o(sizes);
    const Block block(o);
    const Floats expected = run(block, o, 0, rows);
    for (int threads : {2, 3, 5}) {
      set_num_threads(threads);
      poison_workspaces(block, sizes);
      report.expect_equal(run(block, o, 0, rows), expected, named(name, sizes, "threads"));
    }
    set_num_threads(1);
  }
}

// Large norms: gates where the exponential is infinite, or next to nothing; then products beyond float32.
template <typename Block>
void check_special_rows(const char* name) {
  for (const float large : {1.0f, 100.0f, 1e30f}) {
    Operands o(sizes_of<Block>(21, 40, 50));
    for (float& value : o.norm) value *= large;
    std::fill_n(&o.x[2 * 40], 40, 0.0f);
    o.x[7 * 40 + 39] = std::numeric_limits<float>::quiet_NaN();
    o.x[9 * 40] = -std::numeric_limits<float>::infinity();
    for (std::ptrdiff_t k = 0; k < 40; ++k) {
      o.x[11 * 40 + k] *= 1e18f;
      o.x[12 * 40 + k] *= 1e30f;  // squares beyond float32: the norm gives zeros
      o.x[13 * 40 + k] *= 1e-30f;  // squares that vanish beside eps
    }
    const Block block(o);
    const Floats y = run(block, o, 0, 21);
    report.expect_equal(y, promised(block, o), std::string(name) + " special rows");
    const std::ptrdiff_t columns = o.sizes.columns;
    const Floats zeros = block.promised_row(&o.x[2 * 40]);
    for (std::ptrdiff_t n = 0; n < columns; ++n) {
      report.expect(zeros[n] == (Block::kIsMlp ? 0.0f : y[2 * columns + n]), "a row of zeros stays one in an MLP");
      report.expect(std::isnan(y[7 * columns + n]) && !std::isfinite(y[9 * columns + n]),
                    "what is not finite shows in its row");
    }
  }
}

template <typename Block>
void check_no_rows(const char* name) {
  const Operands o(sizes_of<Block>(1, 40, 30));
  Floats y = checks::poison(o.sizes.columns);
  Block(o).run(o.x.data(), 0, y.data());
  report.expect_equal(y, checks::poison(o.sizes.columns), std::string(name) + " no rows, nothing done");
}

// Negative control: one value of the norm, and its eps where squares are small, moves some bit of every row.
template <typename Block>
void check_norm_control(const char* name) {
  Operands o(sizes_of<Block>(3, 90, 50));
  for (float& value : o.x) value *= 1e-3f;  // mean squares about eps
  const Floats before = run(Block(o), o, 0, 3);
  Operands other_weight = o, other_eps = o;
  other_weight.norm[89] *= 3.0f;
  other_eps.eps *= 1.5f;
  for (const Operands& other : {other_weight, other_eps}) {
    const Floats after = run(Block(other), other, 0, 3);
    for (std::ptrdiff_t row = 0, columns = o.sizes.columns; row < 3; ++row) {
      const float* bits = &before[row * columns];
      report.expect(!std::equal(bits, bits + columns, &after[row * columns]), std::string(name) + " shows the norm");
    }
  }
}

// Negative control: a weight moves its column alone.
template <typename Block>
void check_linear_control(const char* name) {
  Operands o(linear_sizes(2, 90, 40));
  const Floats before = run(Block(o), o, 0, 2);
  o.weight[17 * 90 + 89] += 0.1f;
  const Floats after = run(Block(o), o, 0, 2);
  for (std::ptrdiff_t n = 0; n < 40; ++n) {
    report.expect((before[n] != after[n]) == (n == 17), std::string(name) + " shows the weight that changed");
  }
}

// One weight of down moves its column alone; one of gate, or of up, moves some bit.
template <typename Block>
void check_mlp_control(const char* name) {
  const Operands o(mlp_sizes(2, 90, 50));
  const Floats before = run(Block(o), o, 0, 2);
  Operands other = o;
  other.down[17 * 50 + 49] += 0.1f;
  const Floats after = run(Block(other), other, 0, 2);
  for (std::ptrdiff_t n = 0; n < 90; ++n) {
    report.expect((before[n] != after[n]) == (n == 17), std::string(name) + " shows the weight that changed");
  }
  for (Floats Operands::*weight : {&Operands::gate, &Operands::up}) {
    Operands changed = o;
    (changed.*weight)[49 * 90 + 89] += 0.1f;
    report.expect(run(Block(changed), changed, 0, 2) != before, std::string(name) + " shows gate and up");
  }
  Operands swapped = o;
  std::swap(swapped.gate, swapped.up);
  report.expect(run(Block(swapped), swapped, 0, 2) != before, std::string(name) + " tells gate from up");
}

// A shut gate shuts, however large the other side.
template <typename Block>
void check_shut_gates(const char* name) {
  Operands o(mlp_sizes(3, 4, 20));
  std::fill(o.x.begin(), o.x.end(), 1.0f);
  std::fill(o.norm.begin(), o.norm.end(), 1.0f);
  std::fill(o.gate.begin(), o.gate.end(), -1e30f);
  std::fill(o.up.begin(), o.up.end(), 1e30f);
  report.expect(run(Block(o), o, 0, 3) == o.x, std::string(name) + " shut gates give x");
}

template <typename Block>
void check_in_place(const char* name) {
  for (const Sizes& sizes : {mlp_sizes(70, 40, 30), mlp_sizes(300, 33, 20)}) {
    const Operands o(sizes);
    const Block block(o);
    Floats y = o.x;
    block.run(y.data(), sizes.rows, y.data());
    report.expect_equal(y, run(block, o, 0, sizes.rows), std::string(name) + " y may be x");
  }
}

// Before rounding h is right to 2e-4, wherever its sigmoid is a normal number.
void check_gated() {
  for (float gate = -87.0f; gate <= 90.0f; gate += 0.01f) {
    const double exact = gate * 3.0 / (1.0 + std::exp(-double{gate}));
    if (std::fabs(gated(gate, 3.0f) - exact) <= 2e-4 * std::fabs(exact)) continue;
    report.expect(false, "gated(" + std::to_string(gate) + ") is " + std::to_string(gated(gate, 3.0f)));
  }
}

// Blocks of every size; and, as a negative control, a rotation that is there moves some bit.
void check_rotation() {
  for (std::ptrdiff_t size : {2, 4, 24, 48, 96, 192, 256, 320, 384, 768}) {
    check_shape<Mlp<QuantizedWeight, true>>("rotated int8 mlp", mlp_sizes(19, 20, size));
    const Operands o(mlp_sizes(3, 20, size));
    report.expect(run(Mlp<QuantizedWeight, true>(o), o, 0, 3) != run(Mlp<QuantizedWeight>(o), o, 0, 3),
                  "the rotation is seen");
  }
}

template <typename Block>
void check_block(const char* name) {
  check_shapes<Block>(name);
  check_rows_alone<Block>(name, sizes_of<Block>(130, 33, 17));
  check_rows_alone<Block>(name, sizes_of<Block>(35, 910, 40));
  check_threads<Block>(name);
  check_chunks<Block>(name);
  check_special_rows<Block>(name);
  check_no_rows<Block>(name);
  check_norm_control<Block>(name);
}

template <typename Block>
void check_mlp(const char* name) {
  check_block<Block>(name);
  check_mlp_control<Block>(name);
  check_shut_gates<Block>(name);
  check_in_place<Block>(name);
}

template <typename Weight>
void check_linear(const char* name) {
  check_block<Linear<Weight, true>>(name);
  check_linear_control<Linear<Weight, true>>(name);
  check_shapes<Linear<Weight, false>>(name);
}

}  // namespace

int main() {
  check_gated();
  check_mlp<Mlp<Bf16Weight>>("bf16 mlp");
  check_mlp<Mlp<QuantizedWeight>>("int8 mlp");
  check_mlp<Mlp<QuantizedWeight, true>>("rotated int8 mlp");
  check_rotation();
  check_linear<Bf16Weight>("bf16 normed");
  check_linear<QuantizedWeight>("int8 normed");
  return report.finish("amx_normed");
}
