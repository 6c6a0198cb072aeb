#include <lockstep/comm/transports/shm/segment.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include <fmt/format.h>
#include <lockstep/base/error.h>
#include <lockstep/comm/transports/shm/align.h>

namespace lockstep::shm {
namespace {

// What others need meanwhile is not taken.
constexpr std::size_t kReserve = std::size_t{16} << 20;

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

}  // namespace

void check_memory(std::size_t bytes, const host::Root& root) {
  // Small ones are not worth two files a time; the reserve covers them.
  if (bytes < kReserve / 4) return;
  const auto cgroup = host::cgroup_memory(root);
  if (cgroup.limit && cgroup.usage) {
    const auto left = *cgroup.limit > *cgroup.usage ? *cgroup.limit - *cgroup.usage : 0;
    if (bytes + kReserve > left)
      throw ConfigError(fmt::format(
          "{} of shared memory are needed, and the cgroup has {} left: its limit is {}, of which {} are used",
          host::bytes_text(bytes), host::bytes_text(left), host::bytes_text(*cgroup.limit),
          host::bytes_text(*cgroup.usage)));
  }
  const auto system = host::system_memory(root);
  if (system.total != 0 && bytes + kReserve > system.available)
    throw ConfigError(fmt::format("{} of shared memory are needed, and this host has {} available of {}",
                                  host::bytes_text(bytes), host::bytes_text(system.available),
                                  host::bytes_text(system.total)));
}

std::shared_ptr<Segment> Segment::make(std::size_t bytes) {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  bytes = round_up(bytes, page);
  check_memory(bytes);
  control::Fd fd(::memfd_create("lockstep", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) fail("memfd_create");
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) fail("the size of shared memory");
  int result = 0;
  do {
    result = ::fallocate(fd.get(), 0, 0, static_cast<off_t>(bytes));
  } while (result != 0 && errno == EINTR);
  if (result != 0)
    throw ConfigError(fmt::format("{} of shared memory are needed, and the system does not give them: {}",
                                  host::bytes_text(bytes), std::generic_category().message(errno)));
  if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
    fail("the seals of shared memory");
  return std::shared_ptr<Segment>(new Segment(std::move(fd), bytes));
}

std::shared_ptr<Segment> Segment::map(control::Fd fd, std::size_t bytes) {
  struct stat status {};
  const int seals = ::fcntl(fd.get(), F_GET_SEALS);
  if (::fstat(fd.get(), &status) != 0 || static_cast<std::size_t>(status.st_size) != bytes || seals < 0 ||
      (seals & F_SEAL_SHRINK) == 0)
    throw Error("a peer handed over what is not a segment of shared memory");
  return std::shared_ptr<Segment>(new Segment(std::move(fd), bytes));
}

Segment::Segment(control::Fd fd, std::size_t bytes) : fd_(std::move(fd)), size_(bytes) {
  // The pages are there: entering them into our table all at once is cheaper than one fault each.
  void* memory = ::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_.get(), 0);
  if (memory == MAP_FAILED) fail("mapping shared memory");
  data_ = static_cast<char*>(memory);
  ::madvise(memory, size_, MADV_HUGEPAGE);  // where the system allows it for shared memory
}

Segment::~Segment() { ::munmap(data_, size_); }

void Segment::give_back() noexcept {
  ::fallocate(fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, static_cast<off_t>(size_));
}

}  // namespace lockstep::shm
