#include <lockstep/comm/transports/shm/engine/segment.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <string>
#include <system_error>

#include <fmt/format.h>
#include <lockstep/base/error.h>
#include <lockstep/base/quiet_threads.h>
#include <lockstep/memory/align.h>

namespace lockstep::shm {

using memory::round_up;

namespace {

// Smaller requests are not worth reading the system's files; the reserve covers them.
constexpr std::size_t kAlwaysFits = std::size_t{4} << 20;
// Allocated at a time. In between, the check sees what other ranks have allocated at the same time.
constexpr std::size_t kPiece = std::size_t{8} << 20;

// Memory to leave for other processes.
std::uint64_t reserve(std::uint64_t limit) {
  constexpr std::uint64_t kLeast = std::uint64_t{16} << 20, kMost = std::uint64_t{64} << 20;
  return std::clamp(limit / 16, kLeast, kMost);
}

[[noreturn]] void refuse(std::size_t bytes, const std::string& why) {
  throw ConfigError(fmt::format("cannot allocate {} of shared memory: {}", host::bytes_text(bytes), why));
}

[[noreturn]] void fail(std::size_t bytes, const char* what) {
  const int error = errno;
  refuse(bytes, fmt::format("{}: {}", what, std::generic_category().message(error)));
}

control::Fd make_memfd() {
#ifndef MFD_NOEXEC_SEAL
  constexpr unsigned MFD_NOEXEC_SEAL = 8;
#endif
  constexpr unsigned kFlags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  // Systems may require the flag (vm.memfd_noexec); older kernels do not know it.
  control::Fd fd(::memfd_create("lockstep", kFlags | MFD_NOEXEC_SEAL));
  if (!fd && errno == EINVAL) fd.reset(::memfd_create("lockstep", kFlags));
  return fd;
}

#ifndef MADV_POPULATE_WRITE
constexpr int MADV_POPULATE_WRITE = 23;
#endif

bool huge_pages_are_advised() {
  std::ifstream in("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
  std::string settings;
  std::getline(in, settings);
  return settings.find("[advise]") != std::string::npos;
}

}  // namespace

void check_memory(std::size_t bytes, const host::Root& root, std::size_t taken) {
  const auto wanted = bytes - taken;
  if (wanted < kAlwaysFits) return;
  if (const auto cgroup = host::cgroup_memory_left(root))
    if (wanted + reserve(cgroup->limit) > cgroup->left)
      refuse(bytes,
             fmt::format("the cgroup has {} left: its limit is {}, of which {} are used and {} reserved",
                         host::bytes_text(cgroup->left + taken), host::bytes_text(cgroup->limit),
                         host::bytes_text(cgroup->usage - std::min(taken, cgroup->usage)),
                         host::bytes_text(reserve(cgroup->limit))));
  const auto system = host::system_memory(root);
  if (system.total != 0 && wanted + reserve(system.total) > system.available)
    refuse(bytes, fmt::format("this host has {} available of {}, of which {} are reserved",
                              host::bytes_text(system.available + taken), host::bytes_text(system.total),
                              host::bytes_text(reserve(system.total))));
}

std::shared_ptr<Segment> Segment::make(std::size_t bytes) {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  bytes = round_up(bytes, page);
  rlimit files{};
  // Beyond the limit the kernel sends a signal that terminates the process.
  if (::getrlimit(RLIMIT_FSIZE, &files) == 0 && files.rlim_cur < bytes)
    refuse(bytes,
           fmt::format("this process may only make files of up to {}, which limits shared memory too: raise "
                       "`ulimit -f`",
                       host::bytes_text(files.rlim_cur)));
  auto fd = make_memfd();
  if (!fd) fail(bytes, "memfd_create failed");
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) fail(bytes, "its size could not be set");
  std::shared_ptr<Segment> segment(new Segment(std::move(fd), bytes));
  const bool advised = huge_pages_are_advised();
  const detail::QuietThreads quiet;  // after a signal fallocate releases what it has and starts again
  for (std::size_t at = 0; at < bytes; at += kPiece) {
    check_memory(bytes, "/", at);
    const auto piece = std::min(kPiece, bytes - at);
    // fallocate ignores madvise and would allocate small pages.
    if (advised) ::madvise(segment->data_ + at, piece, MADV_POPULATE_WRITE);
    int result = 0;
    do {
      result = ::fallocate(segment->fd(), 0, static_cast<off_t>(at), static_cast<off_t>(piece));
    } while (result != 0 && errno == EINTR);
    if (result != 0) fail(bytes, "the system could not provide it");
  }
  if (::fcntl(segment->fd(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
    fail(bytes, "it could not be sealed");
  segment->enter();
  return segment;
}

std::shared_ptr<Segment> Segment::map(control::Fd fd, std::size_t bytes) {
  struct stat status {};
  const int seals = ::fcntl(fd.get(), F_GET_SEALS);
  if (::fstat(fd.get(), &status) != 0 || static_cast<std::size_t>(status.st_size) != bytes || seals < 0 ||
      (seals & F_SEAL_SHRINK) == 0)
    throw Error("a peer sent a descriptor that is not a shared memory segment");
  std::shared_ptr<Segment> segment(new Segment(std::move(fd), bytes));
  segment->enter();
  segment->fd_.reset();  // the mapping stays; descriptors are scarce
  return segment;
}

Segment::Segment(control::Fd fd, std::size_t bytes) : fd_(std::move(fd)), size_(bytes) {
  void* memory = ::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0);
  if (memory == MAP_FAILED) fail(size_, "it could not be mapped");
  data_ = static_cast<char*>(memory);
  ::madvise(memory, size_, MADV_HUGEPAGE);  // if the system allows it for shared memory
}

// The pages exist; entering them into the page table all at once is cheaper than one fault each. Kernels
// before Linux 5.14 do not support this and fault them in one by one.
void Segment::enter() noexcept { ::madvise(data_, size_, MADV_POPULATE_WRITE); }

Segment::~Segment() { ::munmap(data_, size_); }

void Segment::give_back() noexcept {
  ::fallocate(fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, static_cast<off_t>(size_));
}

}  // namespace lockstep::shm
