#include <lockstep/comm/transports/shm/segment.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

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
  EXPECT_EQ(blocks(other->fd()), 0);
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
              AllOf(HasSubstr("600.0 MiB of shared memory are needed"), HasSubstr("512.0 MiB left"),
                    HasSubstr("limit is 1.0 GiB")));
  root.write("sys/fs/cgroup/job/memory.max", "max\n");
  check_memory(std::size_t{600} << 20, root);
  EXPECT_THAT(
      error_of<ConfigError>([&] { check_memory(std::size_t{3} << 30, root); }),
      AllOf(HasSubstr("3.0 GiB of shared memory are needed"), HasSubstr("2.0 GiB available of 4.0 GiB")));
}

TEST(Segment, that_the_host_has_no_memory_for_is_refused_before_anything_is_taken) {
  const auto more_than_there_is = static_cast<std::size_t>(host::system_memory().total) * 2;
  EXPECT_THAT(error_of<ConfigError>([&] { Segment::make(more_than_there_is); }),
              HasSubstr("of shared memory are needed"));
}

}  // namespace
}  // namespace lockstep::shm
