// A regular file in memory, read as its pages are touched. Whoever shortens the file while it is mapped ends
// the program with SIGBUS: files of data are written under another name and renamed.
#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace lockstep::detail {

class MappedFile {
 public:
  // Writable: changes are this mapping's own and never reach the file.
  enum class Access { read, writable };

  // ConfigError, with the file's name and the system's reason, where there is none to map.
  explicit MappedFile(std::string path, Access access = Access::read);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::string& path() const { return path_; }
  std::span<const std::byte> bytes() const { return {static_cast<const std::byte*>(begin_), size_}; }
  std::byte* begin() { return static_cast<std::byte*>(begin_); }

 private:
  std::string path_;
  void* begin_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace lockstep::detail
