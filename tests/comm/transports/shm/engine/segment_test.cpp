#include <lockstep/comm/transports/shm/engine/segment.h>

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>

#include <fmt/format.h>

#include "support/errors.h"
#include "support/folder.h"

namespace lockstep::shm {
namespace {

using ::testing::AllOf;
using testing::error_of;
using ::testing::HasSubstr;

std::size_t blocks(int fd) {
  struct stat status {};
  ::fstat(fd, &status);
  return static_cast<std::size_t>(status.st_blocks) * 512;
}

TEST(Segment, is_there_as_a_whole_and_cannot_be_cut) {
  auto segment = Segment::make(100000);
  EXPECT_EQ(segment->size(), 102400);
  EXPECT_GE(blocks(segment->fd()), segment->size());
  EXPECT_EQ(::ftruncate(segment->fd(), 4096), -1);
  EXPECT_EQ(::ftruncate(segment->fd(), 1 << 20), -1);
  for (std::size_t i = 0; i < segment->size(); ++i) EXPECT_EQ(segment->data()[i], 0);
}

// KiB in huge pages of the mapping that begins there.
std::size_t huge_kib(const char* start) {
  std::ifstream maps("/proc/self/smaps");
  const auto begins = fmt::format("{:x}-", reinterpret_cast<std::uintptr_t>(start));
  bool here = false;
  for (std::string line; std::getline(maps, line);) {
    if (line.find(' ') != std::string::npos && line.find('-') < line.find(' '))
      here = line.starts_with(begins);
    if (here && line.starts_with("ShmemPmdMapped:")) return std::stoul(line.substr(15));
  }
  return 0;
}

TEST(Segment, has_huge_pages_where_the_system_gives_them) {
  std::ifstream in("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
  std::string settings;
  std::getline(in, settings);
  constexpr std::size_t kBytes = std::size_t{16} << 20;
  auto segment = Segment::make(kBytes);
  if (settings.find("[never]") != std::string::npos || settings.find("[deny]") != std::string::npos ||
      settings.empty()) {
    EXPECT_EQ(huge_kib(segment->data()), 0);
    return;
  }
  // Memory may be too fragmented for huge pages. Other programs allocate and free it meanwhile, so there are
  // several attempts.
  for (int attempt = 0; attempt < 5 && huge_kib(segment->data()) < 8 << 10; ++attempt) {
    control::Fd plain(::memfd_create("plain", MFD_CLOEXEC));
    ASSERT_EQ(::ftruncate(plain.get(), kBytes), 0);
    void* memory = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, plain.get(), 0);
    ASSERT_NE(memory, MAP_FAILED);
    ::madvise(memory, kBytes, MADV_HUGEPAGE);
    std::memset(memory, 1, kBytes);
    const auto given = huge_kib(static_cast<char*>(memory));
    ::munmap(memory, kBytes);
    if (given < 8 << 10) GTEST_SKIP() << "the system has no free huge pages now";
    segment = Segment::make(kBytes);
  }
  EXPECT_GE(huge_kib(segment->data()), 8 << 10);
  auto other = Segment::map(control::Fd(::dup(segment->fd())), segment->size());
  EXPECT_GE(huge_kib(other->data()), 8 << 10);
}

TEST(Segment, is_the_same_memory_in_every_mapping) {
  auto segment = Segment::make(4096);
  auto other = Segment::map(control::Fd(::dup(segment->fd())), segment->size());
  segment->data()[17] = 'x';
  EXPECT_EQ(other->data()[17], 'x');
}

TEST(Segment, gives_its_pages_back_though_a_peer_has_it_mapped) {
  auto segment = Segment::make(1 << 20);
  auto other = Segment::map(control::Fd(::dup(segment->fd())), segment->size());
  other->data()[0] = 1;
  segment->give_back();
  EXPECT_EQ(blocks(segment->fd()), 0);
  EXPECT_EQ(other->data()[0], 0);
}

TEST(Segment, of_another_size_or_kind_is_refused) {
  auto segment = Segment::make(8192);
  EXPECT_THROW(Segment::map(control::Fd(::dup(segment->fd())), 4096), Error);
  control::Fd unsealed(::memfd_create("test", MFD_CLOEXEC));
  ASSERT_EQ(::ftruncate(unsealed.get(), 4096), 0);
  EXPECT_THROW(Segment::map(std::move(unsealed), 4096), Error);
}

TEST(Segment, that_the_cgroup_does_not_allow_is_an_error_with_both_figures) {
  const testing::Folder root;
  root.write("proc/self/cgroup", "0::/job\n");
  root.write("proc/self/mountinfo", "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
  root.write("sys/fs/cgroup/cgroup.controllers", "memory");
  root.write("sys/fs/cgroup/job/memory.max", "1073741824\n");
  root.write("sys/fs/cgroup/job/memory.current", "536870912\n");
  root.write("proc/meminfo", "MemTotal: 4194304 kB\nMemAvailable: 2097152 kB\n");
  check_memory(std::size_t{400} << 20, root);
  EXPECT_THAT(error_of<ConfigError>([&] { check_memory(std::size_t{600} << 20, root); }),
              AllOf(HasSubstr("cannot allocate 600.0 MiB of shared memory"), HasSubstr("512.0 MiB left"),
                    HasSubstr("limit is 1.0 GiB")));
  root.write("sys/fs/cgroup/job/memory.max", "max\n");
  check_memory(std::size_t{600} << 20, root);
  EXPECT_THAT(error_of<ConfigError>([&] { check_memory(std::size_t{3} << 30, root); }),
              AllOf(HasSubstr("cannot allocate 3.0 GiB of shared memory"),
                    HasSubstr("2.0 GiB available of 4.0 GiB")));
}

// Runs the body in a child and returns its status, or minus the signal that killed it.
template <typename Body>
int status_of_child(Body body) {
  std::fflush(nullptr);
  const pid_t child = ::fork();
  if (child == 0) {
    try {
      ::_exit(body());
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
    }
    ::_exit(99);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

TEST(Segment, is_made_in_time_where_signals_come_all_the_while) {
  EXPECT_EQ(status_of_child([] {
              static volatile int ticks = 0;
              ::signal(SIGALRM, [](int) { ticks = ticks + 1; });
              const itimerval often{{0, 500}, {0, 500}};
              ::setitimer(ITIMER_REAL, &often, nullptr);
              const auto began = std::chrono::steady_clock::now();
              Segment::make(std::size_t{64} << 20);
              const auto took = std::chrono::steady_clock::now() - began;
              return took < std::chrono::seconds(60) && ticks > 0 ? 0 : 1;
            }),
            0);
}

TEST(Segment, that_the_processs_limits_do_not_allow_is_refused) {
  struct Case {
    int resource;
    rlim_t limit;
    const char* text;
  };
  for (const auto& each : {Case{RLIMIT_FSIZE, 1 << 20, "ulimit -f"}, Case{RLIMIT_NOFILE, 0, "Too many open"},
                           Case{RLIMIT_AS, 1 << 20, "could not be mapped"}})
    EXPECT_EQ(status_of_child([&] {
                const auto resource = static_cast<__rlimit_resource>(each.resource);
                rlimit limit{};
                ::getrlimit(resource, &limit);
                limit.rlim_cur = each.limit;
                ::setrlimit(resource, &limit);
                try {
                  Segment::make(std::size_t{4} << 20);
                } catch (const ConfigError& error) {
                  return std::strstr(error.what(), each.text) != nullptr ? 0 : 1;
                }
                return 2;
              }),
              0)
        << each.text;
}

// In a cgroup with a limit, if this process may create one: two processes allocate at the same time, and
// there is memory for only one. Neither may be killed for lack of it.
TEST(Segment, of_several_that_are_too_much_together_one_is_refused) {
  const std::string limit_file = "memory.limit_in_bytes";
  const std::filesystem::path cgroup =
      std::filesystem::path("/sys/fs/cgroup/memory") / ("lockstep_" + std::to_string(::getpid()));
  std::error_code problem;
  std::filesystem::create_directory(cgroup, problem);
  std::ofstream limit(cgroup / limit_file);
  if (problem || !(limit << (std::size_t{500} << 20) << std::flush)) {
    std::filesystem::remove(cgroup, problem);
    GTEST_SKIP() << "cgroups of version 1 cannot be made here";
  }
  std::vector<pid_t> children;
  for (int i = 0; i < 3; ++i) {
    const pid_t child = ::fork();
    if (child == 0) {
      std::ofstream(cgroup / "cgroup.procs") << ::getpid() << std::flush;
      try {
        const auto segment = Segment::make(std::size_t{300} << 20);
        ::pause();
      } catch (const std::exception& error) {
        ::_exit(std::strstr(error.what(), "the cgroup has") != nullptr ? 1 : 2);
      }
      ::_exit(0);
    }
    children.push_back(child);
  }
  for (int refused = 0; refused < 2; ++refused) {
    int status = 0;
    const pid_t child = ::wait(&status);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 1) << status;
    std::erase(children, child);
  }
  for (auto child : children) {
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
  }
  for (int i = 0; i < 100 && !std::filesystem::remove(cgroup, problem); ++i) ::usleep(10'000);
}

// Page cache counts as available; a limit higher up in the hierarchy may be tighter.
TEST(Segment, is_measured_by_what_can_be_taken) {
  const testing::Folder folder;
  const auto& root = folder.path();
  auto write = [&](const std::string& path, const std::string& text) {
    std::filesystem::create_directories((root / path).parent_path());
    std::ofstream(root / path) << text;
  };
  auto mib = [](std::uint64_t n) { return std::to_string(n << 20) + "\n"; };
  write("proc/meminfo", "MemTotal: 41943040 kB\nMemAvailable: 20971520 kB\n");
  for (bool unified : {true, false}) {
    const std::string at = unified ? "sys/fs/cgroup/" : "sys/fs/cgroup/memory/";
    const std::string limit = unified ? "/memory.max" : "/memory.limit_in_bytes",
                      usage = unified ? "/memory.current" : "/memory.usage_in_bytes",
                      total = unified ? "" : "total_";
    write("proc/self/cgroup", unified ? "0::/all/job\n" : "4:memory:/all/job\n");
    write("proc/self/mountinfo", unified
                                     ? "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
                                     : "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n");
    write(at + "all/job" + limit, mib(1000));
    write(at + "all/job" + usage, mib(990));
    write(at + "all/job/memory.stat",
          total + "inactive_file " + mib(500) + total + "active_file " + mib(100));
    check_memory(std::size_t{400} << 20, root);
    EXPECT_THAT(error_of<ConfigError>([&] { check_memory(std::size_t{600} << 20, root); }),
                HasSubstr("560.0 MiB left"));
    write(at + "all" + limit, mib(4000));
    write(at + "all" + usage, mib(3900));
    EXPECT_THAT(error_of<ConfigError>([&] { check_memory(std::size_t{400} << 20, root); }),
                AllOf(HasSubstr("100.0 MiB left"), HasSubstr("limit is 3.9 GiB")));
    std::filesystem::remove_all(root / "sys");
  }
  std::filesystem::remove_all(root);
}

TEST(Segment, that_the_host_has_no_memory_for_is_refused_before_anything_is_taken) {
  const auto more_than_there_is = static_cast<std::size_t>(host::system_memory().total) * 2;
  EXPECT_THAT(error_of<ConfigError>([&] { Segment::make(more_than_there_is); }),
              HasSubstr("of shared memory: "));
}

}  // namespace
}  // namespace lockstep::shm
