// How many threads are worth starting: what the process may use of the machine's cores.
#pragma once

#include <string>

namespace antiphon::cpu {

// Physical cores that the process may run on (its affinity mask, two hardware threads of a core counted once), but no
// more than its control groups' CPU quota, rounded up. At least 1. What cannot be read counts as no limit.
int available_cores();

// CPUs' worth of time that the control groups of the process allow, infinity without a quota. Looks at all groups from
// its own up to the root, of both versions. `root` stands before /proc and /sys: empty, or a made-up tree of a test.
double cgroup_cpu_quota(const std::string& root);

}  // namespace antiphon::cpu
