#include <lockstep/os/file.h>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <utility>

#include <fmt/format.h>
#include <lockstep/base/error.h>

#define XXH_INLINE_ALL  // Uses xxHash's code, without its library.
#include <xxhash.h>

namespace lockstep::detail {
namespace {

constexpr std::size_t kBuffer = 1 << 20;
constexpr std::size_t kAtATime = 1 << 30;  // Linux writes and reads less than 2 GiB in one call.

std::string reason(int error) { return std::strerror(error); }

template <typename Call>
auto unless_interrupted(Call call) {
  for (;;) {
    const auto result = call();
    if (result >= 0 || errno != EINTR) return result;
  }
}

const char* kind_of(mode_t mode) {
  if (S_ISDIR(mode)) return "a directory";
  if (S_ISFIFO(mode)) return "a pipe (FIFO)";
  if (S_ISCHR(mode)) return "a character device";
  if (S_ISBLK(mode)) return "a block device";
  if (S_ISSOCK(mode)) return "a socket";
  return "not a regular file";
}

// A rename would replace anything that has the name, including a pipe or a device.
void require_file_or_nothing(const std::string& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) == 0 && !S_ISREG(status.st_mode))
    throw ConfigError(fmt::format("cannot write '{}': it is {}; use a regular file or a new name", path,
                                  kind_of(status.st_mode)));
}

// Resolves symbolic links in the path; the last one may dangle.
std::string through_links(const std::string& path) {
  constexpr int kMostLinks = 40;  // As in Linux.
  std::filesystem::path target(path);
  std::error_code error;
  for (int links = 0; std::filesystem::is_symlink(std::filesystem::symlink_status(target, error)); ++links) {
    if (links == kMostLinks) throw ConfigError(fmt::format("cannot write '{}': {}", path, reason(ELOOP)));
    const auto next = std::filesystem::read_symlink(target, error);
    if (error) throw ConfigError(fmt::format("cannot write '{}': {}", path, error.message()));
    target = target.parent_path() / next;  // An absolute target replaces the folder.
  }
  return target.string();
}

}  // namespace

PartialFile::PartialFile(const std::string& path) : path_(path) {
  const auto name_in = [&](const std::filesystem::path& full) {
    auto name = full.filename().string();
    if (name.empty() || name == "." || name == "..")
      throw ConfigError(fmt::format("cannot write '{}': the path names no file", path));
    return name;
  };
  (void)name_in(path);
  require_file_or_nothing(path);
  target_ = through_links(path);
  const std::filesystem::path full(target_);
  const auto name = name_in(full);
  folder_ = full.has_parent_path() ? full.parent_path().string() : ".";
  partial_ = (std::filesystem::path(folder_) / ("." + name + ".partial")).string();

  for (;;) {
    file_ = ::open(partial_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0666);
    if (file_ < 0) throw ConfigError(fmt::format("cannot write '{}': {}", partial_, reason(errno)));
    struct stat opened {
    }, named{};
    const bool known = ::fstat(file_, &opened) == 0;
    std::string problem;
    if (!known || !S_ISREG(opened.st_mode) || opened.st_uid != ::geteuid() || opened.st_nlink > 1)
      problem = "it already exists and is not a plain file of this user";
    if (!problem.empty()) {
      ::close(file_);
      throw ConfigError(fmt::format("cannot write '{}': {}", partial_, problem));
    }
    // Other errors: locks are not supported here.
    if (::flock(file_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
      ::close(file_);
      throw FileInUse(fmt::format("cannot write '{}': another process is writing it now", partial_));
    }
    // The previous holder of the lock may have renamed the file since it was opened.
    if (::lstat(partial_.c_str(), &named) == 0 && named.st_ino == opened.st_ino &&
        named.st_dev == opened.st_dev)
      break;
    ::close(file_);
  }
  buffer_ = std::make_unique<std::byte[]>(kBuffer);
  if (::ftruncate(file_, 0) != 0) fail("empty");
}

PartialFile::~PartialFile() {
  if (file_ < 0) return;
  ::unlink(partial_.c_str());
  ::close(file_);
}

void PartialFile::fail(const char* doing) {
  const int error = errno;
  if (file_ >= 0) {
    ::unlink(partial_.c_str());
    ::close(file_);
    file_ = -1;
  }
  throw ConfigError(fmt::format("cannot write '{}' ({} '{}'): {}", path_, doing, partial_, reason(error)));
}

void PartialFile::put(const std::byte* bytes, std::size_t count) {
  while (count > 0) {
    const auto written = unless_interrupted([&] { return ::write(file_, bytes, std::min(count, kAtATime)); });
    if (written < 0) fail("write");
    bytes += written;
    count -= static_cast<std::size_t>(written);
  }
}

void PartialFile::flush() {
  put(buffer_.get(), buffered_);
  buffered_ = 0;
}

void PartialFile::write(std::span<const std::byte> bytes) {
  LOCKSTEP_ASSERT(file_ >= 0, "the file is already finished");
  if (buffered_ + bytes.size() > kBuffer) flush();
  if (bytes.size() >= kBuffer) return put(bytes.data(), bytes.size());
  if (!bytes.empty()) std::memcpy(buffer_.get() + buffered_, bytes.data(), bytes.size());
  buffered_ += bytes.size();
}

void PartialFile::write_at(std::uint64_t offset, std::string_view bytes) {
  flush();
  while (!bytes.empty()) {
    const auto written = unless_interrupted(
        [&] { return ::pwrite(file_, bytes.data(), bytes.size(), static_cast<off_t>(offset)); });
    if (written < 0) fail("write");
    bytes.remove_prefix(static_cast<std::size_t>(written));
    offset += static_cast<std::uint64_t>(written);
  }
}

void PartialFile::commit() {
  flush();
  if (unless_interrupted([&] { return ::fsync(file_); }) != 0) fail("fsync");
  require_file_or_nothing(target_);  // Still.
  if (::rename(partial_.c_str(), target_.c_str()) != 0) fail("rename");
  // The file exists from here on; what is left is to make its name survive a power loss.
  ::close(std::exchange(file_, -1));
  const int folder = ::open(folder_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const bool synced = folder >= 0 && unless_interrupted([&] { return ::fsync(folder); }) == 0;
  const int error = errno;
  if (folder >= 0) ::close(folder);
  if (!synced && error != EINVAL)  // Some file systems have no fsync of folders.
    throw ConfigError(
        fmt::format("'{}' is written, but fsync of its folder failed: {}", path_, reason(error)));
}

WholeFile::WholeFile(const std::string& path) : path_(path) {
  // Nonblocking, because opening a pipe would wait.
  file_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file_ < 0) throw ConfigError(fmt::format("cannot read '{}': {}", path, reason(errno)));
  struct stat status {};
  const bool plain = ::fstat(file_, &status) == 0 && S_ISREG(status.st_mode);
  if (!plain) {
    ::close(file_);
    throw ConfigError(fmt::format("cannot read '{}': it is not a regular file", path));
  }
  size_ = static_cast<std::uint64_t>(status.st_size);
}

WholeFile::~WholeFile() { ::close(file_); }

void WholeFile::read(std::uint64_t offset, std::span<std::byte> bytes) {
  while (!bytes.empty()) {
    const auto got = unless_interrupted([&] {
      return ::pread(file_, bytes.data(), std::min(bytes.size(), kAtATime), static_cast<off_t>(offset));
    });
    if (got <= 0)
      throw ConfigError(fmt::format("cannot read '{}': {}", path_,
                                    got < 0 ? reason(errno) : "it became shorter while it was read"));
    bytes = bytes.subspan(static_cast<std::size_t>(got));
    offset += static_cast<std::uint64_t>(got);
  }
}

struct Checksum::State {
  XXH3_state_t state;  // Aligned to 64 bytes.
};

Checksum::Checksum() : state_(std::make_unique<State>()) { XXH3_128bits_reset(&state_->state); }
Checksum::~Checksum() = default;

void Checksum::add(std::span<const std::byte> bytes) {
  XXH3_128bits_update(&state_->state, bytes.data(), bytes.size());
}

std::string Checksum::digits() const {
  const auto hash = XXH3_128bits_digest(&state_->state);
  return fmt::format("{:016x}{:016x}", hash.high64, hash.low64);
}

}  // namespace lockstep::detail
