#include <lockstep/os/host.h>

#include <unistd.h>

#include "support/environment.h"
#include "support/errors.h"
#include "support/folder.h"

namespace lockstep::testing {
namespace {

// A tree that replaces "/".
class Host : public ::testing::Test {
 protected:
  void put(const std::string& file, const std::string& text) { root_.write(file, text); }
  void unified(const std::string& path) {
    put("proc/self/cgroup", "0::" + path + "\n");
    put("proc/self/mountinfo", "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n");
  }
  // Version 1 with an additional mount of version 2, which has no controllers.
  void hybrid(const std::string& path, const std::string& shown = "/") {
    put("proc/self/cgroup", "9:name=systemd:/\n4:memory:" + path + "\n1:cpu,cpuacct:" + path + "\n0::/\n");
    put("proc/self/mountinfo",
        "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n"
        "32 31 0:29 " +
            shown +
            " /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
            "35 31 0:32 " +
            shown +
            " /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
            "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n");
    put("sys/fs/cgroup/unified/cpu.max", "10000 100000\n");  // Not where the controller is.
  }

  const Folder root_;
};

TEST_F(Host, without_cgroups_the_affinity_counts) {
  EXPECT_EQ(host::cpu_quota(root_), std::nullopt);
  EXPECT_EQ(host::available_cores(root_), host::affinity_cores());
  EXPECT_EQ(host::memory_limit(root_), std::nullopt);
  EXPECT_EQ(host::cgroup_memory(root_).oom_kills, std::nullopt);
}

TEST_F(Host, the_lowest_quota_of_version_2_counts) {
  unified("/jobs/17");
  put("sys/fs/cgroup/jobs/17/cpu.max", "max 100000\n");
  EXPECT_EQ(host::cpu_quota(root_), std::nullopt);
  put("sys/fs/cgroup/jobs/cpu.max", "150000 100000\n");
  EXPECT_EQ(host::cpu_quota(root_), 1.5);
  put("sys/fs/cgroup/jobs/17/cpu.max", "200000 100000\n");
  EXPECT_EQ(host::cpu_quota(root_), 1.5);
  EXPECT_EQ(host::available_cores(root_), std::min(2, host::affinity_cores()));
}

TEST_F(Host, the_lowest_quota_of_version_1_counts) {
  hybrid("/jobs/17");
  put("sys/fs/cgroup/cpu/jobs/17/cpu.cfs_quota_us", "-1\n");
  put("sys/fs/cgroup/cpu/jobs/17/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(host::cpu_quota(root_), std::nullopt);
  put("sys/fs/cgroup/cpu/jobs/cpu.cfs_quota_us", "25000\n");
  put("sys/fs/cgroup/cpu/jobs/cpu.cfs_period_us", "50000\n");
  EXPECT_EQ(host::cpu_quota(root_), 0.5);
  EXPECT_EQ(host::available_cores(root_), 1);
}

TEST_F(Host, a_container_whose_mount_shows_its_own_part_is_read) {
  hybrid("/docker/abc", "/docker/abc");
  put("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "30000\n");
  put("sys/fs/cgroup/cpu/cpu.cfs_period_us", "10000\n");
  EXPECT_EQ(host::cpu_quota(root_), 3.0);
  hybrid("/elsewhere", "/docker/abc");
  EXPECT_EQ(host::cpu_quota(root_), 3.0);
  hybrid("/../../elsewhere");
  EXPECT_EQ(host::cpu_quota(root_), 3.0);
}

TEST_F(Host, memory_of_version_2_is_that_of_the_lowest_limit) {
  unified("/jobs/17");
  put("sys/fs/cgroup/jobs/17/memory.max", "max\n");
  put("sys/fs/cgroup/jobs/17/memory.current", "1000\n");
  put("sys/fs/cgroup/jobs/17/memory.events", "low 0\nhigh 0\nmax 12\noom 2\noom_kill 3\n");
  EXPECT_EQ(host::memory_limit(root_), std::nullopt);
  EXPECT_EQ(host::memory_usage(root_), 1000);
  put("sys/fs/cgroup/jobs/memory.max", "4096\n");
  put("sys/fs/cgroup/jobs/memory.current", "2000\n");
  put("sys/fs/cgroup/jobs/memory.peak", "4000\n");
  const auto memory = host::cgroup_memory(root_);
  EXPECT_EQ(memory.limit, 4096);
  EXPECT_EQ(memory.usage, 2000);
  EXPECT_EQ(memory.peak, 4000);
  EXPECT_EQ(memory.oom_kills, 3);
}

TEST_F(Host, memory_of_version_1_is_that_of_the_lowest_limit) {
  hybrid("/jobs/17");
  put("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  put("sys/fs/cgroup/memory/jobs/17/memory.limit_in_bytes", "8192\n");
  put("sys/fs/cgroup/memory/jobs/17/memory.usage_in_bytes", "100\n");
  put("sys/fs/cgroup/memory/jobs/17/memory.max_usage_in_bytes", "8000\n");
  put("sys/fs/cgroup/memory/jobs/17/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n");
  const auto memory = host::cgroup_memory(root_);
  EXPECT_EQ(memory.limit, 8192);
  EXPECT_EQ(memory.usage, 100);
  EXPECT_EQ(memory.peak, 8000);
  EXPECT_EQ(memory.oom_kills, 1);
}

TEST_F(Host, another_process_may_be_asked_about) {
  unified("/");
  put("proc/4711/cgroup", "0::/other\n");
  put("sys/fs/cgroup/other/memory.max", "77\n");
  EXPECT_EQ(host::cgroup_memory(root_, 4711).limit, 77);
  EXPECT_EQ(host::cgroup_memory(root_).limit, std::nullopt);
}

TEST_F(Host, the_system_tells_its_memory) {
  put("proc/meminfo", "MemTotal:       2048 kB\nMemFree:  1 kB\nMemAvailable:    1024 kB\n");
  put("proc/vmstat", "nr_free_pages 5\noom_kill 9\n");
  const auto memory = host::system_memory(root_);
  EXPECT_EQ(memory.total, 2 << 20);
  EXPECT_EQ(memory.available, 1 << 20);
  EXPECT_EQ(memory.oom_kills, 9);
}

TEST_F(Host, gpus_are_counted_as_cuda_shows_them) {
  {
    ScopedEnvironment all("CUDA_VISIBLE_DEVICES", std::nullopt);
    EXPECT_EQ(host::gpu_count(root_), 0);
    for (const char* name : {"0000:01:00.0", "0000:02:00.0", "0000:03:00.0"})
      put("proc/driver/nvidia/gpus/" + std::string(name) + "/information", "");
    EXPECT_EQ(host::gpu_count(root_), 3);
    for (const char* name : {"nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"})
      put("dev/" + std::string(name), "");
    EXPECT_EQ(host::gpu_count(root_), 2);  // A container that was given two of three.
  }
  const std::pair<const char*, int> cases[] = {{"", 0},      {"0", 1},        {"1,0", 2},       {"-1", 0},
                                               {"0,7,1", 1}, {"GPU-1a2b", 1}, {"NoDevFiles", 0}};
  for (const auto& [visible, count] : cases) {
    ScopedEnvironment some("CUDA_VISIBLE_DEVICES", visible);
    EXPECT_EQ(host::gpu_count(root_), count) << visible;
  }
}

TEST(RealHost, says_something_that_can_be) {
  EXPECT_GE(host::available_cores(), 1);
  EXPECT_LE(host::available_cores(), host::affinity_cores());
  EXPECT_GE(host::gpu_count(), 0);
  const auto system = host::system_memory();
  EXPECT_GT(system.total, std::uint64_t{64} << 20);
  EXPECT_LE(system.available, system.total);
  const auto memory = host::cgroup_memory();
  if (!memory.usage) GTEST_SKIP() << "this process is in no cgroup that counts memory";
  EXPECT_GT(*memory.usage, 0);
  EXPECT_EQ(host::cgroup_memory("/", ::getpid()).limit, memory.limit);
}

TEST(RealHost, has_a_name) {
  char name[256] = {};
  ASSERT_EQ(::gethostname(name, sizeof name - 1), 0);
  EXPECT_EQ(host::name(), name);
}

TEST(BytesText, has_a_unit_that_a_person_reads) {
  EXPECT_EQ(host::bytes_text(17), "17 B");
  EXPECT_EQ(host::bytes_text(512 << 20), "512.0 MiB");
  EXPECT_EQ(host::bytes_text(std::uint64_t{3} << 39), "1.5 TiB");
}

}  // namespace
}  // namespace lockstep::testing
