// The gated MLP on emulated AMX tiles: bit for bit the sums and roundings that amx_mlp.h promises, for any shape. Its
// elementary functions are the emulated ones of elementary.h, here as there.
#include <algorithm>

#include "checks.h"
#include "cpu/amx_mlp.h"
#include "cpu/pool.h"
#include "cpu/rounding.h"
#include "elementary.h"
#include "naive.h"

using namespace antiphon::cpu;
using checks::Floats;

namespace {

checks::Report report;

struct Sizes {
  std::ptrdiff_t rows, num_k, size, columns;

  std::ptrdiff_t padded() const { return ceil_div(size, kGatedColumns) * kGatedColumns; }
  checks::Shape shape() const { return {rows, num_k, columns}; }
};

struct Weights {
  Sizes sizes;
  Floats gate, up, down;

  explicit Weights(Sizes of, unsigned seed = 0)
      : sizes(of),
        gate(random(of.size, of.num_k, seed + 1)),
        up(random(of.size, of.num_k, seed + 2)),
        down(random(of.columns, of.size, seed + 3)) {}

  // Sums of about 1.
  static Floats random(std::ptrdiff_t rows, std::ptrdiff_t num_k, unsigned seed) {
    Floats values = checks::random_floats(rows * num_k, seed);
    for (float& value : values) value /= std::sqrt(static_cast<float>(num_k));
    return values;
  }

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

struct Operands : Weights {
  Floats x, residual;

  explicit Operands(Sizes of, unsigned seed = 0)
      : Weights(of, seed),
        x(checks::random_floats(of.rows * of.num_k, seed + 4)),
        residual(checks::random_floats(of.rows * of.columns, seed + 5)) {
    for (float& value : x) value *= 2.0f;
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

struct Bf16 {
  static constexpr const char* kName = "bf16 mlp";

  explicit Bf16(const Weights& w)
      : sizes_(w.sizes),
        gate_(naive::rounded(w.gate)),
        up_(naive::rounded(w.up)),
        down_(naive::rounded(w.down)),
        packed_gate_up_(packed(w.gate_up(), 2 * sizes_.padded(), sizes_.num_k)),
        packed_down_(packed(w.down, sizes_.columns, sizes_.size)) {}

  void run(const float* x, std::ptrdiff_t rows, const float* residual, float* y) const {
    amx_bf16_mlp({packed_gate_up_.data(), 2 * sizes_.padded(), sizes_.num_k},
                 {packed_down_.data(), sizes_.columns, sizes_.size}, x, rows, residual, y);
  }

  Floats promised_row(const float* row) const {
    const Floats x = naive::rounded(Floats(row, row + sizes_.num_k));
    Floats h, y;
    for (std::ptrdiff_t s = 0; s < sizes_.size; ++s) {
      const float gate = naive::bf16_sum(x.data(), &gate_[s * sizes_.num_k], sizes_.num_k);
      const float up = naive::bf16_sum(x.data(), &up_[s * sizes_.num_k], sizes_.num_k);
      h.push_back(naive::to_bfloat16_and_back(gated(gate, up)));
    }
    for (std::ptrdiff_t n = 0; n < sizes_.columns; ++n) {
      y.push_back(naive::bf16_sum(h.data(), &down_[n * sizes_.size], sizes_.size));
    }
    return y;
  }

 private:
  static std::vector<char> packed(const Floats& weight, std::ptrdiff_t columns, std::ptrdiff_t num_k) {
    std::vector<char> bytes(amx_bf16_packed_bytes(columns, num_k));
    amx_bf16_pack_rows(weight.data(), 0, columns, num_k, bytes.data());
    return bytes;
  }

  Sizes sizes_;
  Floats gate_, up_, down_;
  std::vector<char> packed_gate_up_, packed_down_;
};

struct Int8 {
  static constexpr const char* kName = "int8 mlp";

  explicit Int8(const Weights& w)
      : sizes_(w.sizes),
        gate_(w.gate, sizes_.size, sizes_.num_k),
        up_(w.up, sizes_.size, sizes_.num_k),
        down_(w.down, sizes_.columns, sizes_.size),
        packed_gate_up_(w.gate_up(), 2 * sizes_.padded(), sizes_.num_k),
        packed_down_(w.down, sizes_.columns, sizes_.size) {}

  void run(const float* x, std::ptrdiff_t rows, const float* residual, float* y) const {
    amx_int8_mlp(packed_gate_up_.weight(), packed_down_.weight(), x, rows, residual, y);
  }

  Floats promised_row(const float* row) const {
    std::vector<std::int32_t> q(static_cast<std::size_t>(sizes_.num_k)), q_h(static_cast<std::size_t>(sizes_.size));
    Floats h, y;
    const float scale = naive::quantize_row(row, packed_gate_up_.levels, q);
    for (std::ptrdiff_t s = 0; s < sizes_.size; ++s) {
      const float gate = naive::int8_product(q, scale, gate_, s), up = naive::int8_product(q, scale, up_, s);
      h.push_back(naive::to_bfloat16_and_back(gated(gate, up)));
    }
    const float h_scale = naive::quantize_row(h.data(), packed_down_.levels, q_h);
    for (std::ptrdiff_t n = 0; n < sizes_.columns; ++n) y.push_back(naive::int8_product(q_h, h_scale, down_, n));
    return y;
  }

 private:
  struct Packed {
    std::ptrdiff_t columns, num_k;
    std::vector<char> panels;
    Floats scales;
    std::int32_t levels;

    Packed(const Floats& rows, std::ptrdiff_t of_columns, std::ptrdiff_t of_k)
        : columns(of_columns),
          num_k(of_k),
          panels(static_cast<std::size_t>(kAmxInt8Form.num_panels(of_columns) * kAmxInt8Form.panel_bytes(of_k))),
          scales(checks::poison(of_columns)) {
      const std::int32_t sum =
          pack_int8_rows(kAmxInt8Form, rows.data(), 0, columns, num_k, panels.data(), scales.data());
      levels = int8_levels(kAmxInt8Form, sum);
    }
    Int8Weight weight() const { return {panels.data(), scales.data(), columns, num_k, levels}; }
  };

  Sizes sizes_;
  naive::Int8Rows gate_, up_, down_;
  Packed packed_gate_up_, packed_down_;
};

template <typename Mlp>
Floats promised(const Mlp& mlp, const Operands& o, bool with_residual = true) {
  Floats y;
  for (std::ptrdiff_t m = 0; m < o.sizes.rows; ++m) {
    const Floats row = mlp.promised_row(&o.x[m * o.sizes.num_k]);
    y.insert(y.end(), row.begin(), row.end());
  }
  for (std::size_t i = 0; i < y.size() && with_residual; ++i) y[i] += o.residual[i];
  return y;
}

// Rows [first, first + count).
template <typename Mlp>
Floats run(const Mlp& mlp, const Operands& o, std::ptrdiff_t first, std::ptrdiff_t count, bool with_residual = true) {
  const Sizes& s = o.sizes;
  const Floats x(o.x.begin() + first * s.num_k, o.x.begin() + (first + count) * s.num_k);
  const Floats residual(o.residual.begin() + first * s.columns, o.residual.begin() + (first + count) * s.columns);
  Floats y = checks::poison(count * s.columns);
  mlp.run(x.data(), count, with_residual ? residual.data() : nullptr, y.data());
  return y;
}

// Leaves NaN wherever the workspaces keep what is between the products.
template <typename Mlp>
void poison_workspaces(const Mlp& mlp, const Sizes& s) {
  const std::ptrdiff_t rows = s.rows + 40;
  const Floats x = checks::poison(rows * s.num_k);
  Floats y = checks::poison(rows * s.columns);
  mlp.run(x.data(), rows, nullptr, y.data());
}

template <typename Mlp>
void check_shapes() {
  // Odd and even numbers of panels of 16; K and size around steps of 32 and 64, and over several blocks of them.
  const Sizes shapes[] = {{1, 1, 1, 1},      {2, 31, 15, 33},   {3, 32, 16, 32},   {15, 33, 17, 31},  {16, 63, 31, 16},
                          {17, 64, 32, 17},  {31, 65, 33, 15},  {32, 96, 47, 64},  {33, 100, 48, 65}, {47, 127, 49, 3},
                          {48, 129, 63, 40}, {49, 40, 64, 97},  {64, 50, 65, 5},   {65, 20, 130, 33}, {130, 72, 48, 31},
                          {5, 950, 20, 7},   {34, 20, 950, 40}, {3, 1900, 40, 70}, {36, 30, 1850, 9}};
  for (const Sizes& sizes : shapes) {
    const Operands o(sizes, static_cast<unsigned>(sizes.rows));
    const Mlp mlp(o);
    for (const bool with_residual : {false, true}) {
      poison_workspaces(mlp, sizes);
      report.expect_equal(run(mlp, o, 0, sizes.rows, with_residual), promised(mlp, o, with_residual),
                          checks::describe(Mlp::kName, sizes.shape()) + "size " + std::to_string(sizes.size));
    }
  }
}

template <typename Mlp>
void check_rows_alone(const Sizes& sizes) {
  const Operands o(sizes);
  const Mlp mlp(o);
  checks::expect_rows_alone(report, Mlp::kName, sizes.shape(),
                            [&](std::ptrdiff_t first, std::ptrdiff_t count) { return run(mlp, o, first, count); });
}

template <typename Mlp>
void check_threads() {
  for (const Sizes& sizes : {Sizes{1, 40, 200, 70}, Sizes{40, 100, 300, 90}, Sizes{70, 950, 176, 150}}) {
    const Operands o(sizes);
    const Mlp mlp(o);
    const Floats expected = run(mlp, o, 0, sizes.rows);
    for (int threads : {2, 3, 5}) {
      set_num_threads(threads);
      poison_workspaces(mlp, sizes);
      report.expect_equal(run(mlp, o, 0, sizes.rows), expected, checks::describe(Mlp::kName, sizes.shape(), "threads"));
    }
    set_num_threads(1);
  }
}

// More rows than are between the products at a time, with remainders below and above a tile.
template <typename Mlp>
void check_chunks() {
  for (const Sizes& sizes : {Sizes{257, 40, 17, 5}, Sizes{300, 10, 48, 33}, Sizes{529, 33, 40, 3}}) {
    const Operands o(sizes);
    const Mlp mlp(o);
    poison_workspaces(mlp, sizes);
    report.expect_equal(run(mlp, o, 0, sizes.rows), promised(mlp, o),
                        checks::describe(Mlp::kName, sizes.shape(), "chunks"));
  }
}

template <typename Mlp>
void check_special_rows() {
  Operands o({21, 40, 50, 20});
  std::fill_n(&o.x[2 * 40], 40, 0.0f);
  o.x[7 * 40 + 39] = std::numeric_limits<float>::quiet_NaN();
  o.x[9 * 40] = -std::numeric_limits<float>::infinity();
  for (std::ptrdiff_t k = 0; k < 40; ++k) {
    o.x[11 * 40 + k] *= 100.0f;  // gates where the exponential is infinite, or next to nothing
    o.x[12 * 40 + k] *= 1e30f;   // products of gate and up beyond float32
    o.x[13 * 40 + k] *= 1e-30f;
  }
  const Mlp mlp(o);
  const Floats y = run(mlp, o, 0, 21);
  report.expect_equal(y, promised(mlp, o), std::string(Mlp::kName) + " special rows");
  for (std::ptrdiff_t n = 0; n < 20; ++n) {
    report.expect(y[2 * 20 + n] == o.residual[2 * 20 + n], "a row of zeros gives the residual");
    report.expect(std::isnan(y[7 * 20 + n]) && !std::isfinite(y[9 * 20 + n]), "what is not finite shows in its row");
  }
}

// A shut gate shuts, however large the other side.
template <typename Mlp>
void check_shut_gates() {
  Operands o({3, 1, 20, 4});
  std::fill(o.x.begin(), o.x.end(), 1.0f);
  std::fill(o.gate.begin(), o.gate.end(), -1e30f);
  std::fill(o.up.begin(), o.up.end(), 1e30f);
  report.expect(run(Mlp(o), o, 0, 3) == o.residual, std::string(Mlp::kName) + " shut gates give the residual");
}

template <typename Mlp>
void check_in_place() {
  const Operands o({70, 40, 30, 33});
  const Mlp mlp(o);
  Floats y = o.residual;
  mlp.run(o.x.data(), o.sizes.rows, y.data(), y.data());
  report.expect_equal(y, run(mlp, o, 0, o.sizes.rows), std::string(Mlp::kName) + " residual may be y");
  mlp.run(o.x.data(), 0, y.data(), y.data());
  report.expect_equal(y, run(mlp, o, 0, o.sizes.rows), std::string(Mlp::kName) + " no rows, nothing done");
}

// Negative control: one weight of down moves its column alone; one of gate, or of up, moves some bit.
template <typename Mlp>
void check_control() {
  Operands o({2, 90, 50, 40});
  const Floats before = run(Mlp(o), o, 0, 2);
  Operands other = o;
  other.down[17 * 50 + 49] += 0.1f;
  const Floats after = run(Mlp(other), other, 0, 2);
  for (std::ptrdiff_t n = 0; n < 40; ++n) {
    report.expect((before[n] != after[n]) == (n == 17), std::string(Mlp::kName) + " shows the weight that changed");
  }
  for (Floats Weights::*weight : {&Weights::gate, &Weights::up}) {
    Operands changed = o;
    (changed.*weight)[49 * 90 + 89] += 0.1f;
    report.expect(run(Mlp(changed), changed, 0, 2) != before, std::string(Mlp::kName) + " shows gate and up");
  }
  Operands swapped = o;
  std::swap(swapped.gate, swapped.up);
  report.expect(run(Mlp(swapped), swapped, 0, 2) != before, std::string(Mlp::kName) + " tells gate from up");
}

// Before rounding h is right to 2e-4, wherever its sigmoid is a normal number.
void check_gated() {
  for (float gate = -87.0f; gate <= 90.0f; gate += 0.01f) {
    const double exact = gate * 3.0 / (1.0 + std::exp(-double{gate}));
    if (std::fabs(gated(gate, 3.0f) - exact) <= 2e-4 * std::fabs(exact)) continue;
    report.expect(false, "gated(" + std::to_string(gate) + ") is " + std::to_string(gated(gate, 3.0f)));
  }
}

template <typename Mlp>
void check_mlp() {
  check_shapes<Mlp>();
  check_rows_alone<Mlp>({130, 33, 17, 5});
  check_rows_alone<Mlp>({35, 910, 40, 17});
  check_threads<Mlp>();
  check_chunks<Mlp>();
  check_special_rows<Mlp>();
  check_shut_gates<Mlp>();
  check_in_place<Mlp>();
  check_control<Mlp>();
}

}  // namespace

int main() {
  check_gated();
  check_mlp<Bf16>();
  check_mlp<Int8>();
  return report.finish("amx_mlp");
}
