// The int8 linear kernel against a loop over what the header says is quantised, in every form that this machine runs.
#include <algorithm>

#include "check.h"
#include "cpu/int8_linear.h"
#include "cpu/pool.h"
#include "operands.h"

namespace {

using namespace antiphon::cpu;
using namespace antiphon::testing;

struct Shape {
  std::ptrdiff_t num_rows, num_columns, num_k;
};

// The last is two chunks of x.
constexpr Shape kShapes[] = {{1, 1, 1},   {2, 15, 255},   {5, 17, 33},    {7, 33, 1301},
                             {13, 300, 9}, {150, 70, 700}, {301, 40, 513}, {195, 3, 33001}};

std::vector<const Int8Form*> forms() { return FORMS(kPortableInt8Form, kAvx2Int8Form); }

float absmax(const float* row, std::ptrdiff_t size) {
  float most = 0.0f;
  for (std::ptrdiff_t i = 0; i < size; ++i) most = std::max(most, std::abs(row[i]));
  return most;
}

// Values that do not all quantise exactly.
Floats inexact(std::ptrdiff_t count, std::uint32_t seed) {
  Floats out = values(count, seed);
  const Floats fine = values(count, seed + 100);
  for (std::size_t i = 0; i < out.size(); ++i) out[i] += fine[i] / 64.0f;
  return out;
}

struct Operands {
  explicit Operands(const Shape& of)
      : shape(of),
        weight(inexact(of.num_columns * of.num_k, 1)),
        bias(values(of.num_columns, 2)),
        x(inexact(of.num_rows * of.num_k, 3)),
        residual(values(of.num_rows * of.num_columns, 4)) {
    for (float& value : x) value = std::abs(value);  // with those of weight's first row, the largest sums there are
    for (std::ptrdiff_t k = 0; k < of.num_k; ++k) weight.data()[k] = std::abs(weight.data()[k]);
  }
  Shape shape;
  Floats weight, bias, x, residual;
};

struct Layer {
  Layer(const Int8Form& of, const Operands& o)
      : form(of),
        bias(o.bias),
        panels(static_cast<std::size_t>(of.num_panels(o.shape.num_columns) * of.panel_bytes(o.shape.num_k))),
        scales(poison(o.shape.num_columns)) {
    const std::int32_t most = pack_int8_rows(of, o.weight.data(), 0, o.shape.num_columns, o.shape.num_k,
                                             panels.data(), scales.data());
    packed = {panels.data(), scales.data(), o.shape.num_columns, o.shape.num_k, int8_levels(of, most)};
  }

  // Without a buffer of its own for the residual: y holds it to begin with.
  Floats run(const Floats& x, Floats y) const {
    int8_linear(form, packed, bias.data(), x.data(), static_cast<std::ptrdiff_t>(x.size()) / packed.num_k, y.data(),
                y.data());
    return y;
  }

  const Int8Form& form;
  const Floats& bias;
  std::vector<char> panels;
  Floats scales;
  Int8Weight packed;
};

std::vector<double> quantized(const Floats& rows, std::ptrdiff_t num_k, std::int32_t levels, bool divide) {
  std::vector<double> out;
  for (std::ptrdiff_t first = 0; first < static_cast<std::ptrdiff_t>(rows.size()); first += num_k) {
    const float* row = rows.data() + first;
    const float most = absmax(row, num_k), scale = most / static_cast<float>(levels);
    const float inverse = static_cast<float>(levels) / most;
    for (std::ptrdiff_t k = 0; k < num_k; ++k) {
      out.push_back(std::nearbyint(divide ? row[k] / scale : row[k] * inverse));
    }
  }
  return out;
}

bool is_right(const Operands& o, const Layer& layer, const Floats& y) {
  const std::ptrdiff_t num_k = o.shape.num_k;
  const std::vector<double> q_w = quantized(o.weight, num_k, kMaxInt8Weight, true);
  const std::vector<double> q_x = quantized(o.x, num_k, layer.packed.levels, false);
  for (std::ptrdiff_t place = 0; place < o.shape.num_rows * o.shape.num_columns; ++place) {
    const std::ptrdiff_t row = place / o.shape.num_columns, column = place % o.shape.num_columns;
    double sum = 0.0;  // of integers, exact
    for (std::ptrdiff_t k = 0; k < num_k; ++k) sum += q_x.data()[row * num_k + k] * q_w.data()[column * num_k + k];
    if (std::abs(sum) > INT32_MAX) return false;
    const double x_scale = absmax(o.x.data() + row * num_k, num_k) / static_cast<double>(layer.packed.levels);
    const double w_scale = absmax(o.weight.data() + column * num_k, num_k) / 127.0;
    const double product = sum * x_scale * w_scale;
    const double exact = product + o.bias.data()[column] + o.residual.data()[place];
    if (!near(y.data()[place], exact, 5e-7 * (std::abs(product) + std::abs(exact) + 4.0))) return false;
  }
  return true;
}

TEST(int8_linear_is_right_and_has_the_same_bits_alone_and_in_a_crowd) {
  for (const Shape& shape : kShapes) {
    const Operands operands(shape);
    for (const Int8Form* form : forms()) {
      set_num_threads(3);
      const Layer layer(*form, operands);
      const Floats y = layer.run(operands.x, operands.residual);
      CHECK(is_right(operands, layer, y));
      set_num_threads(1);
      CHECK(Layer(*form, operands).panels == layer.panels);
      for (const std::ptrdiff_t row : {std::ptrdiff_t{0}, shape.num_rows / 2, shape.num_rows - 1}) {
        const Floats residual = part(operands.residual, row * shape.num_columns, shape.num_columns);
        const Floats alone = layer.run(part(operands.x, row * shape.num_k, shape.num_k), residual);
        CHECK(same_bits(alone, part(y, row * shape.num_columns, shape.num_columns)));
      }
    }
  }
}

TEST(int8_linear_gives_the_bias_for_zeros_and_keeps_a_nan_in_its_row) {
  Operands operands({9, 33, 40});
  std::fill_n(operands.x.begin() + 40, 40, 0.0f);
  operands.x[3 * 40 + 17] = std::numeric_limits<float>::quiet_NaN();
  operands.x[4 * 40 + 39] = -std::numeric_limits<float>::infinity();
  set_num_threads(2);
  for (const Int8Form* form : forms()) {
    Floats y = poison(9 * 33);
    const Layer layer(*form, operands);
    int8_linear(*form, layer.packed, operands.bias.data(), operands.x.data(), 9, nullptr, y.data());
    CHECK(same_bits(part(y, 33, 33), operands.bias));
    for (std::ptrdiff_t row = 0; row < 9; ++row) {
      const auto is_nan = [](float value) { return std::isnan(value); };
      const auto nans = std::count_if(y.begin() + row * 33, y.begin() + (row + 1) * 33, is_nan);
      CHECK(nans == (row == 3 || row == 4 ? 33 : 0));
    }
  }
}

}  // namespace
