// Files that are there whole or not at all, without LibTorch. Errors are ConfigErrors that name the file and
// say why.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include <lockstep/base/error.h>

namespace lockstep::detail {

// Another process, or another PartialFile of this one, is writing the file now.
class FileInUse : public ConfigError {
 public:
  using ConfigError::ConfigError;
};

// Writes beside its final name, ".NAME.partial" in the same folder, and takes the name when all of it is on
// disk. Until then the file that had the name is as it was. What a process that was killed left behind is
// written over by the next one; another process that writes it now is an error.
class PartialFile {
 public:
  explicit PartialFile(const std::string& path);
  ~PartialFile();  // without commit() nothing is left
  PartialFile(const PartialFile&) = delete;
  PartialFile& operator=(const PartialFile&) = delete;

  void write(std::span<const std::byte> bytes);
  void write_at(std::uint64_t offset, std::string_view bytes);  // of what was written before
  // To disk, and then by its name: fsync, rename, fsync of the folder.
  void commit();

 private:
  [[noreturn]] void fail(const char* doing);
  void put(const std::byte* bytes, std::size_t count);
  void flush();

  std::string path_;              // as given
  std::string target_;            // what it stands for, through links
  std::string folder_, partial_;  // of the target, and beside it
  int file_ = -1;
  std::unique_ptr<std::byte[]> buffer_;
  std::size_t buffered_ = 0;
};

// A regular file, to be read.
class WholeFile {
 public:
  explicit WholeFile(const std::string& path);
  ~WholeFile();
  WholeFile(const WholeFile&) = delete;
  WholeFile& operator=(const WholeFile&) = delete;

  std::uint64_t size() const { return size_; }
  void read(std::uint64_t offset, std::span<std::byte> bytes);  // all of them, or an error

 private:
  std::string path_;
  int file_ = -1;
  std::uint64_t size_ = 0;
};

// XXH3 of 128 bits, as 32 hexadecimal digits: against damage, not against an attacker.
class Checksum {
 public:
  Checksum();
  ~Checksum();
  Checksum(const Checksum&) = delete;
  Checksum& operator=(const Checksum&) = delete;
  void add(std::span<const std::byte> bytes);
  std::string digits() const;
  static constexpr std::size_t kDigits = 32;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace lockstep::detail
