// What follows a norm, on emulated AMX tiles: bit for bit the sums and roundings that amx_normed.h promises, for any
// shape. Its elementary functions are the emulated ones of elementary.h, here as there.
#include <algorithm>

#include "checks.h"
#include "cpu/amx_normed.h"
#include "cpu/pool.h"
#include "cpu/rounding.h"
#include "elementary.h"
#include "naive.h"

using namespace antiphon::cpu;
using checks::Floats;

namespace {

checks::Report report;

// Of an MLP, `size` is that of h, and columns = num_k; of a linear layer, `size` is 0.
struct Sizes {
  std::ptrdiff_t rows, num_k, size, columns;

  std::ptrdiff_t padded() const { return ceil_div(size, kGatedColumns) * kGatedColumns; }
  checks::Shape shape() const { return {rows, num_k, columns}; }
};

Sizes mlp_sizes(std::ptrdiff_t rows, std::ptrdiff_t num_k, std::ptrdiff_t size) { return {rows, num_k, size, num_k}; }
Sizes linear_sizes(std::ptrdiff_t rows, std::ptrdiff_t num_k, std::ptrdiff_t columns) {
  return {rows, num_k, 0, columns};
}

// Weights whose sums are about 1.
Floats random_weight(std::ptrdiff_t rows, std::ptrdiff_t num_k, unsigned seed) {
  Floats values = checks::random_floats(rows * num_k, seed);
  for (float& value : values) value /= std::sqrt(static_cast<float>(num_k));
  return values;
}

struct Operands {
  Sizes sizes;
  Floats gate, up, down;  // of an MLP
  Floats weight, bias;    // of a linear layer
  Floats norm, x;
  float eps = 1e-6f;

  explicit Operands(Sizes of, unsigned seed = 0)
      : sizes(of),
        gate(random_weight(of.size, of.num_k, seed + 1)),
        up(random_weight(of.size, of.num_k, seed + 2)),
        down(random_weight(of.size > 0 ? of.columns : 0, of.size, seed + 3)),
        weight(random_weight(of.size > 0 ? 0 : of.columns, of.num_k, seed + 4)),
        bias(checks::random_floats(of.columns, seed + 5)),
        norm(checks::random_floats(of.num_k, seed + 6)),
        x(checks::random_floats(of.rows * of.num_k, seed + 7)) {
    for (float& value : norm) value = 2.0f + 0.5f * value;
    for (std::ptrdiff_t i = 0; i < of.rows * of.num_k; ++i) x[i] *= 0.25f * static_cast<float>(1 + i / of.num_k % 9);
  }

  RowNorm row_norm() const { return {norm.data(), eps}; }

  // Panels of 16 rows of gate and the same 16 of up, filled up with zeros.
  Floats gate_up() const {
    Floats rows(static_cast<std::size_t>(2 * sizes.padded() * sizes.num_k));
    for (std::ptrdiff_t s = 0; s < sizes.size; ++s) {
      const std::ptrdiff_t first = s / kGatedColumns * 2 * kGatedColumns + s % kGatedColumns;
      std::copy_n(&gate[s * sizes.num_k], sizes.num_k, &rows[first * sizes.num_k]);
      std::copy_n(&up[s * sizes.num_k], sizes.num_k, &rows[(first + kGatedColumns) * sizes.num_k]);
    }
    return rows;
  }
};

// gate * up / (1 + e^-gate) before it is rounded.
float gated(float gate, float up) {
  const float x = gate * -1.44269504f;
  const float f = emulated::past_floor(x);
  float p = 0x1.3f9670p-4f;
  for (const float c : {0x1.cefc70p-3f, 0x1.644448p-1f, 0x1.fff632p-1f}) p = std::fmaf(p, f, c);
  return gate * emulated::reciprocal(1.0f + emulated::scale(p, x)) * up;
}

// A weight as bfloat16: packed, and its values.
class Bf16Weight {
 public:
  Bf16Weight(const Floats& rows, std::ptrdiff_t columns, std::ptrdiff_t num_k)
      : rows_(naive::rounded(rows)),
        columns_(columns),
        num_k_(num_k),
        packed_(static_cast<std::size_t>(amx_bf16_packed_bytes(columns, num_k))) {
    amx_bf16_pack_rows(rows.data(), 0, columns, num_k, packed_.data());
  }
  AmxBf16Weight weight() const { return {packed_.data(), columns_, num_k_}; }

  // A row of x, rounded, times every row of the weight.
  Floats product(const Floats& row) const {
    const Floats x = naive::rounded(row);
    Floats sums;
    for (std::ptrdiff_t n = 0; n < columns_; ++n) sums.push_back(naive::bf16_sum(x.data(), &rows_[n * num_k_], num_k_));
    return sums;
  }

 private:
  Floats rows_;
  std::ptrdiff_t columns_, num_k_;
  std::vector<char> packed_;
};

// As int8.
class QuantizedWeight {
 public:
  QuantizedWeight(const Floats& rows, std::ptrdiff_t columns, std::ptrdiff_t num_k)
      : rows_(rows, columns, num_k),
        columns_(columns),
        num_k_(num_k),
        panels_(static_cast<std::size_t>(kAmxInt8Form.num_panels(columns) * kAmxInt8Form.panel_bytes(num_k))),
        scales_(checks::poison(columns)) {
    const std::int32_t sum =
        pack_int8_rows(kAmxInt8Form, rows.data(), 0, columns, num_k, panels_.data(), scales_.data());
    levels_ = int8_levels(kAmxInt8Form, sum);
  }
  Int8Weight weight() const { return {panels_.data(), scales_.data(), columns_, num_k_, levels_}; }

  Floats product(const Floats& row) const {
    std::vector<std::int32_t> q(row.size());
    const float scale = naive::quantize_row(row.data(), levels_, q);
    Floats sums;
    for (std::ptrdiff_t n = 0; n < columns_; ++n) sums.push_back(naive::int8_product(q, scale, rows_, n));
    return sums;
  }

 private:
  naive::Int8Rows rows_;
  std::ptrdiff_t columns_, num_k_;
  std::vector<char> panels_;
  Floats scales_;
  std::int32_t levels_ = 0;
};

void run_mlp(const Bf16Weight& gate_up, const Bf16Weight& down, const RowNorm& norm, const float* x,
             std::ptrdiff_t rows, float* y) {
  amx_bf16_mlp(gate_up.weight(), down.weight(), norm, x, rows, y);
}
void run_mlp(const QuantizedWeight& gate_up, const QuantizedWeight& down, const RowNorm& norm, const float* x,
             std::ptrdiff_t rows, float* y) {
  amx_int8_mlp(gate_up.weight(), down.weight(), norm, x, rows, y);
}
void run_linear(const Bf16Weight& weight, const float* bias, const RowNorm& norm, const float* x, std::ptrdiff_t rows,
                float* y) {
  amx_bf16_normed(weight.weight(), bias, norm, x, rows, y);
}
void run_linear(const QuantizedWeight& weight, const float* bias, const RowNorm& norm, const float* x,
                std::ptrdiff_t rows, float* y) {
  amx_int8_normed(weight.weight(), bias, norm, x, rows, y);
}

template <typename Weight>
class Mlp {
 public:
  static constexpr bool kIsMlp = true;

  explicit Mlp(const Operands& o)
      : o_(o),
        gate_up_(o.gate_up(), 2 * o.sizes.padded(), o.sizes.num_k),
        down_(o.down, o.sizes.columns, o.sizes.size) {}

  void run(const float* x, std::ptrdiff_t rows, float* y) const {
    run_mlp(gate_up_, down_, o_.row_norm(), x, rows, y);
  }

  Floats promised_row(const float* x) const {
    const Floats sums = gate_up_.product(naive::normed(x, o_.norm, o_.eps));
    Floats h;
    for (std::ptrdiff_t s = 0; s < o_.sizes.size; ++s) {
      const std::ptrdiff_t gate = s / kGatedColumns * 2 * kGatedColumns + s % kGatedColumns;
      h.push_back(naive::to_bfloat16_and_back(gated(sums[gate], sums[gate + kGatedColumns])));
    }
    Floats y = down_.product(h);
    for (std::ptrdiff_t n = 0; n < o_.sizes.columns; ++n) y[n] += x[n];
    return y;
  }

 private:
  const Operands& o_;
  Weight gate_up_, down_;
};

template <typename Weight, bool kWithBias>
class Linear {
 public:
  static constexpr bool kIsMlp = false;

  explicit Linear(const Operands& o) : o_(o), weight_(o.weight, o.sizes.columns, o.sizes.num_k) {}

  void run(const float* x, std::ptrdiff_t rows, float* y) const {
    run_linear(weight_, kWithBias ? o_.bias.data() : nullptr, o_.row_norm(), x, rows, y);
  }

  Floats promised_row(const float* x) const {
    Floats y = weight_.product(naive::normed(x, o_.norm, o_.eps));
    for (std::ptrdiff_t n = 0; n < o_.sizes.columns && kWithBias; ++n) y[n] += o_.bias[n];
    return y;
  }

 private:
  const Operands& o_;
  Weight weight_;
};

template <typename Block>
Floats promised(const Block& block, const Operands& o) {
  Floats y;
  for (std::ptrdiff_t m = 0; m < o.sizes.rows; ++m) {
    const Floats row = block.promised_row(&o.x[m * o.sizes.num_k]);
    y.insert(y.end(), row.begin(), row.end());
  }
  return y;
}

// Rows [first, first + count).
template <typename Block>
Floats run(const Block& block, const Operands& o, std::ptrdiff_t first, std::ptrdiff_t count) {
  const std::ptrdiff_t num_k = o.sizes.num_k;
  const Floats x(o.x.begin() + first * num_k, o.x.begin() + (first + count) * num_k);
  Floats y = checks::poison(count * o.sizes.columns);
  block.run(x.data(), count, y.data());
  return y;
}

// Leaves NaN wherever the workspaces keep what is between the products.
template <typename Block>
void poison_workspaces(const Block& block, const Sizes& s) {
  const std::ptrdiff_t rows = s.rows + 40;
  const Floats x = checks::poison(rows * s.num_k);
  Floats y = checks::poison(rows * s.columns);
  block.run(x.data(), rows, y.data());
}

template <typename Block>
Sizes sizes_of(std::ptrdiff_t rows, std::ptrdiff_t num_k, std::ptrdiff_t columns) {
  return Block::kIsMlp ? mlp_sizes(rows, num_k, columns) : linear_sizes(rows, num_k, columns);
}

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
  check_linear<Bf16Weight>("bf16 normed");
  check_linear<QuantizedWeight>("int8 normed");
  return report.finish("amx_normed");
}
