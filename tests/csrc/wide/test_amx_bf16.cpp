// bfloat16 on emulated AMX tiles: bit for bit the sums that amx_linear.h promises.
#include "bf16_product.h"

int main() {
  checks::Report report;
  const bf16::Form form{"amx_bf16", antiphon::cpu::amx_bf16_linear, naive::bf16_sum};
  bf16::Checks checks(form, report);
  checks.run();
  checks.check_shape({1027, 40, 3});  // more rows than a chunk holds, short and long K
  checks.check_shape({519, 930, 3});
  bf16::check_large_y(form, report);
  return report.finish("amx_bf16");
}
