// Norm, gated activation, embedding and the softmax parts against float64, in every form that this machine runs.
#include <algorithm>

#include "check.h"
#include "cpu/layer_ops.h"
#include "cpu/pool.h"
#include "operands.h"

namespace {

using namespace antiphon::cpu;
using namespace antiphon::testing;

constexpr std::ptrdiff_t kSizes[] = {1, 7, 8, 9, 31, 33, 100, 257, 1025, 2100};
constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::vector<const LayerForm*> forms() { return FORMS(kPortableLayerForm, kAvx2LayerForm); }

// 35 x 3 rows, with NaN between them; from 313 elements on they are several tasks.
struct Rows {
  explicit Rows(std::ptrdiff_t size) : data(poison(34 * (3 * size + 7) + 2 * (size + 1) + size)) {
    strided = {data.data(), 35, 3 * size + 7, 3, size + 1, size};
    const Floats all = values(35 * 3 * size, 1);
    for (std::ptrdiff_t row = 0; row < 35 * 3; ++row) {
      std::copy_n(all.data() + row * size, size, data.data() + offset(row));
    }
  }
  std::ptrdiff_t offset(std::ptrdiff_t row) const {
    return row / 3 * strided.outer_stride + row % 3 * strided.inner_stride;
  }
  Floats data;
  StridedRows strided;
};

TEST(rms_norm_is_right_and_has_the_same_bits_alone_and_in_a_crowd) {
  for (std::ptrdiff_t size : kSizes) {
    const Rows rows(size);
    const Floats weight = values(size, 2);
    for (const LayerForm* form : forms()) {
      set_num_threads(3);
      Floats out = poison(35 * 3 * size);
      rms_norm(*form, rows.strided, weight.data(), 1e-3f, out.data());
      set_num_threads(1);
      bool good = true;
      for (std::ptrdiff_t row = 0; row < 35 * 3; ++row) {
        const Floats x = part(rows.data, rows.offset(row), size);
        double sum = 0.0;
        for (float value : x) sum += static_cast<double>(value) * value;
        const double scale = 1.0 / std::sqrt(sum / static_cast<double>(size) + 1e-3f);
        for (std::ptrdiff_t i = 0; i < size; ++i) {
          const double exact = x.data()[i] * scale * weight.data()[i];
          good = good && near(out.data()[row * size + i], exact, 2e-6 * std::abs(exact));
        }
        Floats alone = poison(size);
        rms_norm(*form, {x.data(), 1, size, 1, size, size}, weight.data(), 1e-3f, alone.data());
        good = good && same_bits(alone, part(out, row * size, size));
      }
      CHECK(good);
    }
  }
}

TEST(silu_and_mul_is_right_and_has_the_same_bits_alone_and_in_a_crowd) {
  for (std::ptrdiff_t size : kSizes) {
    Floats gate_up = values(41 * 2 * size, 1);
    for (float& value : gate_up) value *= 10.0f;
    for (const LayerForm* form : forms()) {
      set_num_threads(3);
      Floats out = poison(41 * size);
      silu_and_mul(*form, gate_up.data(), 41, size, 0, out.data());
      set_num_threads(1);
      bool good = true;
      for (std::ptrdiff_t row = 0; row < 41; ++row) {
        const Floats x = part(gate_up, row * 2 * size, 2 * size);
        for (std::ptrdiff_t i = 0; i < size; ++i) {
          const double gate = x.data()[i];
          const double exact = gate / (1.0 + std::exp(-gate)) * x.data()[size + i];
          good = good && near(out.data()[row * size + i], exact, 2e-6 * std::abs(exact));
        }
        Floats alone = poison(size);
        silu_and_mul(*form, x.data(), 1, size, 0, alone.data());
        good = good && same_bits(alone, part(out, row * size, size));
      }
      CHECK(good);
    }
  }
}

TEST(gather_rows_copies_or_widens_and_refuses_an_id_that_is_no_row) {
  for (std::ptrdiff_t size : kSizes) {
    const Floats table = values(5 * size, 1);
    std::vector<std::uint16_t> narrow(table.size());
    for (std::size_t i = 0; i < table.size(); ++i) {  // its lower half is 0
      std::memcpy(&narrow[i], reinterpret_cast<const char*>(&table[i]) + 2, 2);
    }
    std::vector<std::int64_t> ids(50);
    Floats expected;
    for (std::size_t i = 0; i < ids.size(); ++i) {
      ids[i] = static_cast<std::int64_t>(4 - i % 5);
      expected.insert(expected.end(), table.begin() + ids[i] * size, table.begin() + (ids[i] + 1) * size);
    }
    for (const LayerForm* form : forms()) {
      set_num_threads(3);
      for (TableType type : {TableType::kFloat32, TableType::kBfloat16}) {
        const void* from = narrow.data();
        if (type == TableType::kFloat32) from = table.data();
        Floats out = poison(50 * size);
        CHECK(gather_rows(*form, from, type, 5, size, ids.data(), 50, out.data()) && same_bits(out, expected));
        for (const std::int64_t id : {-1, 5}) CHECK(!gather_rows(*form, from, type, 5, size, &id, 1, out.data()));
        CHECK(same_bits(out, expected));
      }
    }
  }
}

TEST(partial_softmax_and_peak_are_right_with_infinities_nan_and_a_mask) {
  for (std::ptrdiff_t size : kSizes) {
    Floats x = values(size, 1);
    for (const LayerForm* form : forms()) {
      const Floats nothing(x.size(), -kInfinity);
      CHECK(form->partial_softmax(nothing.data(), size).sum == 0.0f);
      CHECK(form->peak(nothing.data(), nullptr, size).index == -1);
      const auto first = std::max_element(x.begin(), x.end());
      double sum = 0.0;
      for (float value : x) sum += std::exp(static_cast<double>(value) - *first);
      const PartialSoftmax softmax = form->partial_softmax(x.data(), size);
      CHECK(softmax.largest == *first && near(softmax.sum, sum, 2e-6 * sum));
      Peak peak = form->peak(x.data(), nullptr, size);
      CHECK(peak.value == *first && peak.index == first - x.begin() && !peak.has_nan);

      // All but the last one refused; and a NaN, which counts all the same.
      std::vector<std::uint8_t> allowed(x.size(), 0);
      allowed.back() = 1;
      peak = form->peak(x.data(), allowed.data(), size);
      CHECK(peak.value == x.back() && peak.index == size - 1 && !peak.has_nan);
      Floats with_nan = x;
      with_nan.front() = std::numeric_limits<float>::quiet_NaN();
      peak = form->peak(with_nan.data(), allowed.data(), size);
      CHECK(peak.has_nan && peak.index == (size == 1 ? -1 : size - 1));
      CHECK(std::isnan(form->partial_softmax(with_nan.data(), size).sum));
    }
  }
}

}  // namespace
