#include <lockstep/os/mapped_file.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include <lockstep/base/error.h>

namespace lockstep::detail {
namespace {

[[noreturn]] void refuse(const std::string& path, int error) {
  throw ConfigError(path + ": " + std::generic_category().message(error));
}

}  // namespace

MappedFile::MappedFile(std::string path, Access access) : path_(std::move(path)) {
  // Nonblocking, because opening a pipe would wait for a writer.
  const int file = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file < 0) refuse(path_, errno);
  struct stat status {};
  int error = ::fstat(file, &status) == 0 ? 0 : errno;
  if (error == 0 && !S_ISREG(status.st_mode)) {
    ::close(file);
    throw ConfigError(path_ + ": not a regular file");
  }
  size_ = static_cast<std::size_t>(status.st_size);
  if (error == 0 && size_ > 0) {
    const int protection = access == Access::read ? PROT_READ : PROT_READ | PROT_WRITE;
    // Pages that are only read need no private memory, however large the file.
    begin_ = ::mmap(nullptr, size_, protection, MAP_PRIVATE | MAP_NORESERVE, file, 0);
    if (begin_ == MAP_FAILED) error = errno;
  }
  ::close(file);
  if (error != 0) refuse(path_, error);
}

MappedFile::~MappedFile() {
  if (size_ > 0) ::munmap(begin_, size_);
}

}  // namespace lockstep::detail
