// bfloat16 on emulated AVX-512 BF16: bit for bit the sums that avx512_bf16_linear.h promises. Built without
// ANTIPHON_EMULATED it holds a processor to the same.
#include "bf16_product.h"
#include "cpu/avx512_bf16_linear.h"

namespace {

float promised_sum(const float* x, const float* w, std::ptrdiff_t num_k) {
  float sum = 0.0f;
  for (std::ptrdiff_t pair = 0; pair < num_k; pair += 2) {
    if (pair + 1 < num_k) sum = emulated::flush(std::fmaf(x[pair + 1], w[pair + 1], sum));
    sum = emulated::flush(std::fmaf(x[pair], w[pair], sum));
  }
  return sum;
}

}  // namespace

int main() {
  checks::Report report;
  const bf16::Form form{"avx512_bf16", antiphon::cpu::avx512_bf16_linear, promised_sum};
  bf16::Checks checks(form, report);
  checks.run();
  checks.check_shape({13, 2048, 70});  // one whole block of k, and two
  checks.check_shape({13, 2049, 70});
  checks.check_shape({25, 5000, 300});
  checks.check_shape({300, 930, 33});     // several spans of rows
  checks.check_shape({13, 360000, 3});    // several chunks of rows
#if defined(ANTIPHON_EMULATED)
  bf16::check_large_y(form, report);
#endif
  return report.finish("avx512_bf16");
}
