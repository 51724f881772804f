// The int8 forms of emulated AMX and AVX-512: bit for bit what int8_linear.h promises, for any shape.
#include <algorithm>

#include "checks.h"
#include "cpu/int8_linear.h"
#include "cpu/pool.h"
#include "naive.h"

using namespace antiphon::cpu;
using checks::Floats;
using checks::Operands;
using checks::Shape;

namespace {

checks::Report report;

class Layer {
 public:
  Layer(const Int8Form& form, const Operands& o, std::int32_t levels = 127)
      : form_(form),
        operands_(o),
        levels_(levels),
        weight_(o.weight, o.shape.columns, o.shape.num_k),
        panels_(static_cast<std::size_t>(form.num_panels(o.shape.columns) * form.panel_bytes(o.shape.num_k))),
        scales_(checks::poison(o.shape.columns)) {
    // In two goes, as a weight is streamed in.
    const std::ptrdiff_t first = std::min(o.shape.columns, form.panel_columns);
    const std::ptrdiff_t num_k = o.shape.num_k;
    const float* rows = o.weight.data();
    pack_int8_rows(form, rows, 0, first, num_k, panels_.data(), scales_.data());
    pack_int8_rows(form, rows + first * num_k, first, o.shape.columns - first, num_k, panels_.data(), scales_.data());
  }

  // Rows [first, first + count) of x.
  Floats run(std::ptrdiff_t first, std::ptrdiff_t count, bool with_bias = true, bool with_residual = true) const {
    const Shape& s = operands_.shape;
    const Floats x = operands_.x_rows(first, count), residual = operands_.residual_rows(first, count);
    Floats y = checks::poison(count * s.columns);
    const Int8Weight weight{panels_.data(), scales_.data(), s.columns, s.num_k, levels_};
    int8_linear(form_, weight, with_bias ? operands_.bias.data() : nullptr, x.data(), count,
                with_residual ? residual.data() : nullptr, y.data());
    return y;
  }

  Floats promised(bool with_bias = true, bool with_residual = true) const {
    const Shape& s = operands_.shape;
    Floats y(static_cast<std::size_t>(s.rows * s.columns));
    std::vector<std::int32_t> q(static_cast<std::size_t>(s.num_k));
    for (std::ptrdiff_t m = 0; m < s.rows; ++m) {
      const float scale = naive::quantize_row(&operands_.x[m * s.num_k], levels_, q);
      for (std::ptrdiff_t n = 0; n < s.columns; ++n) {
        float value = naive::int8_product(q, scale, weight_, n);
        if (with_bias) value += operands_.bias[n];
        if (with_residual) value += operands_.residual[m * s.columns + n];
        y[m * s.columns + n] = value;
      }
    }
    return y;
  }

 private:
  const Int8Form& form_;
  const Operands& operands_;
  std::int32_t levels_;
  naive::Int8Rows weight_;
  std::vector<char> panels_;
  Floats scales_;
};

void check_shapes(const char* name, const Int8Form& form) {
  const Shape shapes[] = {{1, 1, 1},     {2, 63, 15},   {12, 64, 16},  {13, 65, 17},    {17, 128, 31},
                          {31, 3, 32},   {32, 511, 33}, {33, 512, 64}, {47, 513, 65},   {5, 896, 3},
                          {49, 897, 70}, {130, 100, 97}, {3, 3000, 40}, {36, 1800, 70}, {1030, 20, 3}};
  for (const Shape& shape : shapes) {
    const Operands o(shape, static_cast<unsigned>(shape.rows));
    const Layer layer(form, o);
    for (int options = 0; options < 4; ++options) {
      report.expect_equal(layer.run(0, shape.rows, options & 1, options & 2), layer.promised(options & 1, options & 2),
                          checks::describe(name, shape));
    }
  }
  const Operands o({9, 70, 40});
  report.expect_equal(Layer(form, o, 50).run(0, 9), Layer(form, o, 50).promised(), "fewer levels");
}

void check_rows_alone(const char* name, const Int8Form& form, const Shape& shape) {
  const Operands o(shape);
  const Layer layer(form, o);
  checks::expect_rows_alone(report, name, shape,
                            [&](std::ptrdiff_t first, std::ptrdiff_t count) { return layer.run(first, count); });
}

void check_threads(const char* name, const Int8Form& form) {
  for (const Shape& shape : {Shape{1, 100, 300}, Shape{40, 100, 300}, Shape{70, 2000, 200}}) {
    const Operands o(shape);
    const Layer layer(form, o);
    const Floats expected = layer.run(0, shape.rows);
    for (int threads : {2, 3, 5}) {
      set_num_threads(threads);
      report.expect_equal(layer.run(0, shape.rows), expected, checks::describe(name, shape, "threads"));
    }
    set_num_threads(1);
  }
}

void check_special_rows(const char* name, const Int8Form& form) {
  Operands o({21, 150, 40});
  for (std::ptrdiff_t k = 0; k < 150; ++k) {
    o.x[3 * 150 + k] = 0.0f;
    o.x[5 * 150 + k] *= 1e-35f;
    o.x[6 * 150 + k] *= 1e30f;
    o.x[7 * 150 + k] = k % 2 == 0 ? 4.0f : -4.0f;  // every activation at its limit
    o.weight[9 * 150 + k] = k % 2 == 0 ? 1.0f : -1.0f;
  }
  o.x[11 * 150 + 149] = std::numeric_limits<float>::quiet_NaN();
  o.x[12 * 150 + 17] = -std::numeric_limits<float>::infinity();
  const Floats expected = Layer(form, o).promised();
  report.expect(std::isnan(expected[11 * 40]) && std::isnan(expected[12 * 40]), "what is not finite gives NaN");
  report.expect_equal(Layer(form, o).run(0, 21), expected, std::string(name) + " special rows");
  // Without bias and residual, to see a row of the smallest numbers become zeros.
  report.expect_equal(Layer(form, o).run(0, 21, false, false), Layer(form, o).promised(false, false),
                      std::string(name) + " special rows, sums alone");
}

// Negative control: one weight changed by one step is seen in its column, and only there.
void check_control(const char* name, const Int8Form& form) {
  Operands o({2, 90, 40});
  const Floats before = Layer(form, o).run(0, 2);
  o.weight[17 * 90 + 89] += 0.05f;
  const Floats after = Layer(form, o).run(0, 2);
  for (std::ptrdiff_t n = 0; n < 40; ++n) {
    report.expect((before[n] != after[n]) == (n == 17), std::string(name) + " shows the weight that changed");
  }
}

void check_form(const char* name, const Int8Form& form) {
  check_shapes(name, form);
  check_rows_alone(name, form, {130, 33, 17});
  check_rows_alone(name, form, {33, 1850, 3});
  check_threads(name, form);
  check_special_rows(name, form);
  check_control(name, form);
}

}  // namespace

int main() {
  check_form("amx_int8", kAmxInt8Form);
  check_form("avx512_vnni", kAvx512Int8Form);
  return report.finish("int8");
}
