// Files that are written completely or not at all. Does not use LibTorch. Errors are ConfigErrors with the
// file's name and the reason.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include <lockstep/base/error.h>

namespace lockstep::detail {

// Another process, or another PartialFile of this process, is writing the file.
class FileInUse : public ConfigError {
 public:
  using ConfigError::ConfigError;
};

// Writes to ".NAME.partial" in the same folder and renames it to its final name once everything is on disk.
// Until then an existing file is unchanged. The next writer overwrites what a killed process left behind; a
// concurrent writer in another process is an error.
class PartialFile {
 public:
  explicit PartialFile(const std::string& path);
  ~PartialFile();  // Leaves nothing behind without commit().
  PartialFile(const PartialFile&) = delete;
  PartialFile& operator=(const PartialFile&) = delete;

  void write(std::span<const std::byte> bytes);
  void write_at(std::uint64_t offset, std::string_view bytes);  // Overwrites bytes written before.
  // Makes the file durable under its name: fsync, rename, fsync of the folder.
  void commit();

 private:
  [[noreturn]] void fail(const char* doing);
  void put(const std::byte* bytes, std::size_t count);
  void flush();

  std::string path_;              // As given.
  std::string target_;            // With links resolved.
  std::string folder_, partial_;  // The target's folder, and the partial file in it.
  int file_ = -1;
  std::unique_ptr<std::byte[]> buffer_;
  std::size_t buffered_ = 0;
};

// A regular file for reading.
class WholeFile {
 public:
  explicit WholeFile(const std::string& path);
  ~WholeFile();
  WholeFile(const WholeFile&) = delete;
  WholeFile& operator=(const WholeFile&) = delete;

  std::uint64_t size() const { return size_; }
  void read(std::uint64_t offset, std::span<std::byte> bytes);  // Reads all of them, or throws.

 private:
  std::string path_;
  int file_ = -1;
  std::uint64_t size_ = 0;
};

// 128-bit XXH3 as 32 hexadecimal digits: detects damage, not an attacker's changes.
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
