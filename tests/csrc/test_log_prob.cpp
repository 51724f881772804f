// Log-probabilities against log-softmax in float64, with the linear kernel inside, in every form here.
#include <algorithm>

#include "check.h"
#include "cpu/linear.h"
#include "cpu/log_prob.h"
#include "cpu/pool.h"
#include "operands.h"

namespace {

using namespace antiphon::cpu;
using namespace antiphon::testing;

struct Shape {
  std::ptrdiff_t num_rows, num_columns, num_k;
};

// Strips are 1,024 columns, a task is 144 rows of one, a pass 1,152 rows.
constexpr Shape kShapes[] = {{1, 1, 1}, {2, 1023, 5}, {3, 3001, 33}, {150, 1025, 7}, {1160, 1040, 3}};

struct Head {
  explicit Head(const Shape& of)
      : shape(of), weight(values(of.num_columns * of.num_k, 1)), packed((of.num_columns + 15) / 16 * 16 * of.num_k) {
    pack_rows(weight.data(), 0, of.num_columns, of.num_k, Storage::kFloat32, packed.data());
  }

  // Panels follow each other, so columns from a multiple of 16 on are a weight of their own.
  StripLogits strips(const TileTable& tiles) const {
    return [this, &tiles](const float* x, std::ptrdiff_t num_rows, std::ptrdiff_t first, std::ptrdiff_t count,
                          float* logits) {
      const PackedWeight strip{packed.data() + first * shape.num_k, count, shape.num_k, Storage::kFloat32};
      std::fill_n(logits, num_rows * count, std::numeric_limits<float>::quiet_NaN());
      linear(tiles, strip, nullptr, nullptr, x, num_rows, logits);
    };
  }

  double expected(const float* x, std::int64_t target) const {
    std::vector<double> logits(static_cast<std::size_t>(shape.num_columns), 0.0);
    for (std::ptrdiff_t i = 0; i < shape.num_columns * shape.num_k; ++i) {
      logits.data()[i / shape.num_k] += static_cast<double>(weight.data()[i]) * x[i % shape.num_k];
    }
    const double largest = *std::max_element(logits.begin(), logits.end());
    double sum = 0.0;
    for (double logit : logits) sum += std::exp(logit - largest);
    return logits[static_cast<std::size_t>(target)] - largest - std::log(sum);
  }

  Shape shape;
  Floats weight;
  std::vector<float> packed;
};

TEST(log_prob_is_right_and_has_the_same_bits_alone_and_in_a_crowd) {
  const auto tables = FORMS(kPortableTiles, kAvx2Tiles);
  const auto forms = FORMS(kPortableLayerForm, kAvx2LayerForm);
  for (const Shape& shape : kShapes) {
    const Head head(shape);
    const Floats x = values(shape.num_rows * shape.num_k, 2);
    std::vector<std::int64_t> targets;
    for (std::ptrdiff_t row = 0; row < shape.num_rows; ++row) targets.push_back((row + 1) * 1021 % shape.num_columns);
    targets.back() = shape.num_columns - 1;
    for (std::size_t form = 0; form < forms.size(); ++form) {
      const StripLogits strips = head.strips(*tables[form]);
      Floats out = poison(shape.num_rows);
      set_num_threads(3);
      CHECK(log_prob(*forms[form], strips, x.data(), shape.num_rows, shape.num_k, targets.data(), shape.num_columns,
                     out.data()));
      set_num_threads(1);
      for (std::ptrdiff_t row = 0; row < shape.num_rows; row += row < 3 ? 1 : 31) {
        const Floats one = part(x, row * shape.num_k, shape.num_k);
        const std::int64_t target = targets[static_cast<std::size_t>(row)];
        CHECK(near(out.data()[row], head.expected(one.data(), target), 5e-5));
        Floats alone = poison(1);
        CHECK(log_prob(*forms[form], strips, one.data(), 1, shape.num_k, &target, shape.num_columns, alone.data()));
        CHECK(same_bits(alone, part(out, row, 1)));
      }
    }
  }
}

TEST(log_prob_refuses_a_target_that_is_no_column_and_keeps_a_nan_in_its_row) {
  const Shape shape{3, 1500, 5};
  const Head head(shape);
  const StripLogits strips = head.strips(kPortableTiles);
  Floats x = values(3 * 5, 2);
  x[7] = std::numeric_limits<float>::quiet_NaN();
  set_num_threads(2);
  for (const LayerForm* form : FORMS(kPortableLayerForm, kAvx2LayerForm)) {
    Floats out(3, 1.0f);
    for (const std::int64_t wrong : {-1, 1500}) {
      const std::int64_t targets[] = {0, 1, wrong};
      CHECK(!log_prob(*form, strips, x.data(), 3, 5, targets, 1500, out.data()));
      CHECK(out == Floats(3, 1.0f));
    }
    const std::int64_t targets[] = {0, 1, 1499};
    CHECK(log_prob(*form, strips, x.data(), 3, 5, targets, 1500, out.data()));
    CHECK(std::isfinite(out[0]) && std::isnan(out[1]) && std::isfinite(out[2]));
  }
}

}  // namespace
