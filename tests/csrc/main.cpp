// Runs every TEST of the driver, or those whose name contains the first argument. Exit status 1 if a CHECK failed.
#include <chrono>
#include <cstring>

#include "check.h"

int main(int argc, char** argv) {
  int num_run = 0;
  for (const antiphon::testing::Test& test : antiphon::testing::all_tests()) {
    if (argc > 1 && std::strstr(test.name, argv[1]) == nullptr) continue;
    const int failures_before = antiphon::testing::num_failures();
    const auto start = std::chrono::steady_clock::now();
    test.run();
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    const bool good = antiphon::testing::num_failures() == failures_before;
    std::printf("%-60s %s %6.2f s\n", test.name, good ? "ok    " : "FAILED", taken.count());
    std::fflush(stdout);
    ++num_run;
  }
  std::printf("%d tests, %d failures\n", num_run, antiphon::testing::num_failures());
  return num_run == 0 || antiphon::testing::num_failures() > 0 ? 1 : 0;
}
