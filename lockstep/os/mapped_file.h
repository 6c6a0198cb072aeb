// A regular file mapped into memory; its pages are read when touched. If the file is shortened while mapped,
// the program ends with SIGBUS, so data files are written under another name and renamed.
#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace lockstep::detail {

class MappedFile {
 public:
  // writable: changes are private to this mapping and never reach the file.
  enum class Access { read, writable };

  // Throws ConfigError with the file's name and the system's reason if it cannot be mapped.
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
