// Reads affinity, topology and control groups of Linux; elsewhere the standard library's count stands.
#include "cpu/cores.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <set>
#include <sstream>
#include <thread>

#if defined(__linux__)
#include <sched.h>
#endif

namespace antiphon::cpu {
namespace {

constexpr double kNoLimit = std::numeric_limits<double>::infinity();

std::string first_line(const std::string& path) {
  std::string line;
  std::ifstream file(path);
  std::getline(file, line);
  return line;
}

double share(double quota, double period) { return quota > 0 && period > 0 ? quota / period : kNoLimit; }

// The quota that one group's folder states. Version 2: "max 100000" or "150000 100000"; version 1: two files, -1: none.
double folder_quota(const std::string& folder) {
  double quota = -1, period = 0;
  if (std::istringstream(first_line(folder + "/cpu.max")) >> quota >> period) return share(quota, period);
  std::istringstream(first_line(folder + "/cpu.cfs_quota_us")) >> quota;
  std::istringstream(first_line(folder + "/cpu.cfs_period_us")) >> period;
  return share(quota, period);
}

// The least quota of `group` ("/a/b") and of all groups above it, where the hierarchy is mounted at `mount`.
double path_quota(const std::string& mount, std::string group) {
  double least = folder_quota(mount);
  while (group.size() > 1) {
    least = std::min(least, folder_quota(mount + group));
    group.resize(group.rfind('/'));
  }
  return least;
}

#if defined(__linux__)
// Distinct cores among the CPUs of the affinity mask; 0 if the mask cannot be read.
int affinity_cores() {
  std::set<std::string> cores;
  for (int num_cpus = 1024; num_cpus <= 1 << 16; num_cpus *= 2) {  // the kernel refuses a mask smaller than its own
    cpu_set_t* mask = CPU_ALLOC(num_cpus);
    if (mask == nullptr) return 0;
    const std::size_t bytes = CPU_ALLOC_SIZE(num_cpus);
    CPU_ZERO_S(bytes, mask);
    const bool known = sched_getaffinity(0, bytes, mask) == 0;
    for (int cpu = 0; known && cpu < num_cpus; ++cpu) {
      if (!CPU_ISSET_S(cpu, bytes, mask)) continue;
      const std::string folder = "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/";
      const std::string siblings = first_line(folder + "thread_siblings_list");
      cores.insert(siblings.empty() ? "cpu " + std::to_string(cpu) : siblings);
    }
    CPU_FREE(mask);
    if (known) break;
  }
  return static_cast<int>(cores.size());
}
#else
int affinity_cores() { return 0; }
#endif

}  // namespace

double cgroup_cpu_quota(const std::string& root) {
  const std::string mounts = root + "/sys/fs/cgroup";
  double least = folder_quota(mounts);
  std::ifstream groups(root + "/proc/self/cgroup");
  // Lines "0::/path" (version 2) and "4:cpu,cpuacct:/path" (version 1).
  for (std::string line; std::getline(groups, line);) {
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string group = line.substr(second + 1);
    if (group.empty() || group[0] != '/') continue;
    if (controllers.empty()) {
      least = std::min({least, path_quota(mounts, group), path_quota(mounts + "/unified", group)});
    } else if (("," + controllers + ",").find(",cpu,") != std::string::npos) {
      least = std::min({least, path_quota(mounts + "/cpu", group), path_quota(mounts + "/" + controllers, group)});
    }
  }
  return least;
}

int available_cores() {
  int cores = affinity_cores();
  if (cores < 1) cores = static_cast<int>(std::thread::hardware_concurrency());
  const double quota = std::ceil(cgroup_cpu_quota(""));
  return std::max(1, quota < cores ? static_cast<int>(quota) : cores);
}

}  // namespace antiphon::cpu
