// The whole test framework of the C++ driver: TEST registers, CHECK counts.
#pragma once

#include <cstdio>
#include <vector>

namespace antiphon::testing {

struct Test {
  const char* name;
  void (*run)();
};

inline std::vector<Test>& all_tests() {
  static std::vector<Test> tests;
  return tests;
}

inline int& num_failures() {
  static int failures = 0;
  return failures;
}

struct Registration {
  Registration(const char* name, void (*run)()) { all_tests().push_back({name, run}); }
};

}  // namespace antiphon::testing

// A test that main.cpp runs: TEST(name) { ... CHECK(...); }
#define TEST(name)                                                            \
  static void name();                                                         \
  static const antiphon::testing::Registration name##_registered(#name, name); \
  static void name()

// Counts and prints a condition that does not hold, and goes on. For the main thread only.
#define CHECK(condition)                                                             \
  do {                                                                               \
    if (!(condition)) {                                                              \
      ++antiphon::testing::num_failures();                                           \
      std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);   \
    }                                                                                \
  } while (false)
