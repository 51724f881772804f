// What the emulated tests share: operands of exactly the right size, comparison by bits, and a report.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace checks {

using Floats = std::vector<float>;

struct Shape {
  std::ptrdiff_t rows, num_k, columns;
};

inline Floats random_floats(std::ptrdiff_t count, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  Floats values(static_cast<std::size_t>(count));
  for (float& value : values) value = normal(generator);
  return values;
}

inline Floats poison(std::ptrdiff_t count) {
  return Floats(static_cast<std::size_t>(count), std::numeric_limits<float>::quiet_NaN());
}

struct Operands {
  Shape shape;
  Floats x, weight, bias, residual;

  explicit Operands(Shape of, unsigned seed = 0)
      : shape(of),
        x(random_floats(of.rows * of.num_k, seed)),
        weight(random_floats(of.columns * of.num_k, seed + 1)),
        bias(random_floats(of.columns, seed + 2)),
        residual(random_floats(of.rows * of.columns, seed + 3)) {}

  // Rows [first, first + count), in memory of their own.
  Floats x_rows(std::ptrdiff_t first, std::ptrdiff_t count) const {
    return Floats(x.begin() + first * shape.num_k, x.begin() + (first + count) * shape.num_k);
  }

  Floats residual_rows(std::ptrdiff_t first, std::ptrdiff_t count) const {
    return Floats(residual.begin() + first * shape.columns, residual.begin() + (first + count) * shape.columns);
  }
};

class Report {
 public:
  void expect(bool holds, const std::string& what) {
    ++num_checks_;
    if (holds) return;
    ++num_failures_;
    if (num_failures_ <= 20) std::printf("FAILED: %s\n", what.c_str());
  }

  // The same bits, or both NaN.
  void expect_equal(const Floats& got, const Floats& expected, const std::string& what) {
    for (std::size_t i = 0; i < expected.size(); ++i) {
      if (std::isnan(got[i]) && std::isnan(expected[i])) continue;
      if (std::memcmp(&got[i], &expected[i], sizeof(float)) == 0) continue;
      expect(false, what + ": element " + std::to_string(i) + " is " + std::to_string(got[i]) + ", not " +
                        std::to_string(expected[i]));
      return;
    }
    expect(got.size() == expected.size(), what);
  }

  int finish(const char* name) const {
    std::printf("%s: %d checks, %d failures\n", name, num_checks_, num_failures_);
    return num_failures_ == 0 ? 0 : 1;
  }

 private:
  int num_checks_ = 0;
  int num_failures_ = 0;
};

inline std::string describe(const char* form, const Shape& shape, const char* what = "") {
  return std::string(form) + " " + std::to_string(shape.rows) + "x" + std::to_string(shape.num_k) + "x" +
         std::to_string(shape.columns) + " " + what;
}

// `run(first, count)` gives rows [first, first + count) of a product. Each row alone must have the bits that it has among
// any number of first rows, and of last ones.
template <typename Run>
void expect_rows_alone(Report& report, const char* form, const Shape& shape, const Run& run) {
  Floats alone;
  for (std::ptrdiff_t row = 0; row < shape.rows; ++row) {
    const Floats y = run(row, 1);
    alone.insert(alone.end(), y.begin(), y.end());
  }
  for (std::ptrdiff_t rows = 1; rows <= shape.rows; ++rows) {
    const std::ptrdiff_t count = rows * shape.columns;
    report.expect_equal(run(0, rows), Floats(alone.begin(), alone.begin() + count), describe(form, shape, "first rows"));
    report.expect_equal(run(shape.rows - rows, rows), Floats(alone.end() - count, alone.end()),
                        describe(form, shape, "last rows"));
  }
}

}  // namespace checks
