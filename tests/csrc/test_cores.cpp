// The CPU quota is found in either version of control groups, wherever in the tree it is set.
#include <cmath>
#include <filesystem>
#include <fstream>
#include <string>

#include "check.h"
#include "cpu/cores.h"

namespace {

using antiphon::cpu::cgroup_cpu_quota;

// A made-up /proc and /sys, removed at the end.
class Tree {
 public:
  Tree() {
    std::string pattern = (std::filesystem::temp_directory_path() / "antiphon-cores-XXXXXX").string();
    root_ = mkdtemp(pattern.data());
  }
  ~Tree() { std::filesystem::remove_all(root_); }
  Tree(const Tree&) = delete;

  void write(const std::string& path, const std::string& text) const {
    const std::filesystem::path file = root_ + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  double quota() const { return cgroup_cpu_quota(root_); }

 private:
  std::string root_;
};

TEST(cores_are_at_least_one) { CHECK(antiphon::cpu::available_cores() >= 1); }

TEST(cores_without_a_quota_are_not_limited) {
  Tree tree;
  CHECK(std::isinf(tree.quota()));
  tree.write("/proc/self/cgroup", "0::/a\nnonsense\n7:cpu\n");
  tree.write("/sys/fs/cgroup/a/cpu.max", "max 100000\n");
  CHECK(std::isinf(tree.quota()));
}

TEST(cores_take_the_least_quota_of_a_group_and_those_above_it) {
  Tree tree;
  tree.write("/proc/self/cgroup", "0::/a/b\n");
  tree.write("/sys/fs/cgroup/a/b/cpu.max", "400000 100000\n");
  CHECK(tree.quota() == 4);
  tree.write("/sys/fs/cgroup/a/cpu.max", "150000 100000\n");
  CHECK(tree.quota() == 1.5);
}

TEST(cores_see_a_quota_at_the_root_of_a_container) {
  Tree tree;
  tree.write("/proc/self/cgroup", "0::/not/visible/here\n");
  tree.write("/sys/fs/cgroup/cpu.max", "300000 100000\n");
  CHECK(tree.quota() == 3);
}

TEST(cores_read_control_groups_of_version_1) {
  Tree tree;
  tree.write("/proc/self/cgroup", "5:cpuset:/x\n4:cpu,cpuacct:/a\n");
  tree.write("/sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us", "-1\n");
  tree.write("/sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us", "100000\n");
  CHECK(std::isinf(tree.quota()));
  tree.write("/sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us", "250000\n");
  CHECK(tree.quota() == 2.5);
}

}  // namespace
