#include <lockstep/launch/out_of_memory.h>

#include <fmt/format.h>
#include <lockstep/os/host.h>

namespace lockstep::detail {

void OutOfMemory::begin() {
  std::lock_guard lock(mutex_);
  of_cgroup_ = host::cgroup_memory().oom_kills;
  of_system_ = host::system_memory().oom_kills;
}

std::string OutOfMemory::note() const {
  std::lock_guard lock(mutex_);
  const auto cgroup = host::cgroup_memory();
  if (cgroup.oom_kills > of_cgroup_) {
    std::string text = "out of memory";
    if (cgroup.limit) text += fmt::format(": the cgroup's limit is {}", host::bytes_text(*cgroup.limit));
    if (const auto usage = cgroup.peak ? cgroup.peak : cgroup.usage; cgroup.limit && usage)
      text +=
          fmt::format(", its {} usage was {}", cgroup.peak ? "highest" : "last", host::bytes_text(*usage));
    return text;
  }
  const auto system = host::system_memory();
  if (system.oom_kills > of_system_)
    return fmt::format(
        "probably out of memory: the kernel killed a process to free memory ({} of the system's {} "
        "are free now)",
        host::bytes_text(system.available), host::bytes_text(system.total));
  return {};
}

}  // namespace lockstep::detail
