#include <lockstep/control/link/key.h>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include <fmt/format.h>
#include <sodium.h>

#include <lockstep/base/environment.h>
#include <lockstep/base/error.h>
#include <lockstep/os/socket.h>

namespace lockstep::control {
namespace {

constexpr std::size_t kDigits = 2 * kKeySize;

// The text itself appears in no error, because errors end up in logs.
std::string parse(const std::string& what, std::string_view text) {
  if (text.ends_with('\n')) text.remove_suffix(1);
  if (text.ends_with('\r')) text.remove_suffix(1);
  std::string key(kKeySize, '\0');
  std::size_t size = 0;
  const bool whole = text.size() == kDigits &&
                     ::sodium_hex2bin(reinterpret_cast<unsigned char*>(key.data()), key.size(), text.data(),
                                      text.size(), nullptr, &size, nullptr) == 0 &&
                     size == kKeySize;
  if (whole) return key;
  forget(key);
  throw ConfigError(
      fmt::format("{}: expected {} hexadecimal digits as printed by `lockstep key`, got {} characters", what,
                  kDigits, text.size()));
}

std::string read_key_file(const std::string& what, const std::string& path) {
  // Checks the opened file itself, wherever a link led, not the name before or after opening it. Nonblocking,
  // because opening a pipe would wait.
  const Fd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK));
  struct stat status {};
  if (!file || ::fstat(file.get(), &status) != 0)
    throw ConfigError(fmt::format("{}: cannot read {}: {}", what, path, std::strerror(errno)));
  if (!S_ISREG(status.st_mode)) throw ConfigError(fmt::format("{}: {} is not a regular file", what, path));
  if (status.st_uid != ::geteuid())
    throw ConfigError(fmt::format("{}: expected a file of the current user {}, but {} belongs to user {}",
                                  what, ::geteuid(), path, status.st_uid));
  if (const auto mode = status.st_mode & 07777; mode != 0600 && mode != 0400)
    throw ConfigError(fmt::format(
        "{}: expected mode 0600 or 0400, readable only by its owner, but {} has mode {:04o}; run: "
        "chmod 600 {}",
        what, path, mode, path));
  std::string text(kDigits + 3, '\0');  // Longer than a key, to detect extra characters.
  const auto size = ::read(file.get(), text.data(), text.size());
  try {
    if (size < 0) throw ConfigError(fmt::format("{}: cannot read {}: {}", what, path, std::strerror(errno)));
    std::string key = parse(fmt::format("{} {}", what, path),
                            std::string_view(text).substr(0, static_cast<std::size_t>(size)));
    forget(text);
    return key;
  } catch (...) {
    forget(text);
    throw;
  }
}

}  // namespace

void use_sodium() {
  if (::sodium_init() < 0) throw Error("libsodium cannot find a source of random numbers on this system");
}

void forget(std::string& secret) noexcept {
  ::sodium_memzero(secret.data(), secret.size());
  secret.clear();
}

std::string make_key_text() {
  use_sodium();
  std::array<unsigned char, kKeySize> key{};
  ::randombytes_buf(key.data(), key.size());
  std::string text(kDigits + 1, '\0');
  ::sodium_bin2hex(text.data(), text.size(), key.data(), key.size());
  ::sodium_memzero(key.data(), key.size());
  text.back() = '\n';
  return text;
}

void make_key_file(const std::string& path) {
  const Fd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!file && errno == EEXIST)
    throw ConfigError(
        fmt::format("{} already exists; a key file is never overwritten: choose another name", path));
  if (!file) throw ConfigError(fmt::format("cannot create {}: {}", path, std::strerror(errno)));
  std::string text = make_key_text();
  // The umask may have removed this user's bits too.
  const bool written = ::fchmod(file.get(), 0600) == 0 &&
                       ::write(file.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size()) &&
                       ::fsync(file.get()) == 0;
  const int problem = errno;
  forget(text);
  if (written) return;
  ::unlink(path.c_str());
  throw ConfigError(fmt::format("cannot write {}: {}", path, std::strerror(problem)));
}

std::optional<std::string> job_key(const std::string& key_file) {
  use_sodium();
  if (!key_file.empty()) return read_key_file("--key-file", key_file);
  if (const auto path = env::text("LOCKSTEP_KEY_FILE")) return read_key_file("LOCKSTEP_KEY_FILE", *path);
  // Not env::text, which copies the secret.
  const char* text = std::getenv("LOCKSTEP_KEY");
  if (!text || !*text) return std::nullopt;
  return parse("LOCKSTEP_KEY", text);
}

}  // namespace lockstep::control
