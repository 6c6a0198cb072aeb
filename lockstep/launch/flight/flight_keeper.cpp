#include <lockstep/launch/flight/flight_keeper.h>

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string_view>
#include <utility>

#include <fmt/format.h>
#include <lockstep/launch/flight/flight_file.h>
#include <lockstep/launch/flight/flight_verdict.h>
#include <lockstep/os/socket.h>

namespace lockstep::detail {
namespace {

namespace fs = std::filesystem;

// Names the file of a restart: "flight.json" becomes "flight.restart-2.json", like the logs.
std::string of_attempt(const std::string& file, int attempt) {
  if (attempt == 0) return file;
  fs::path path(file);
  path.replace_filename(
      fmt::format("{}.restart-{}{}", path.stem().string(), attempt, path.extension().string()));
  return path.string();
}

// Returns false with errno on failure, also if a pipe's reader does not read within 2 s: the job must end.
bool write_soon(int fd, std::string_view bytes) {
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(2);
  while (!bytes.empty()) {
    const auto written = ::write(fd, bytes.data(), bytes.size());
    if (written >= 0) {
      bytes.remove_prefix(static_cast<std::size_t>(written));
    } else if (errno == EAGAIN) {
      const auto left =
          std::chrono::ceil<std::chrono::milliseconds>(limit - std::chrono::steady_clock::now()).count();
      pollfd wait{fd, POLLOUT, 0};
      if (left <= 0 || ::poll(&wait, 1, static_cast<int>(left)) == 0) {
        errno = ETIMEDOUT;
        return false;
      }
    } else if (errno != EINTR) {
      return false;
    }
  }
  return true;
}

}  // namespace

void FlightKeeper::take(control::FlightRecord record) {
  std::lock_guard lock(mutex_);
  taken_ = std::move(record);
}

std::pair<std::string, int> FlightKeeper::open(int attempt) const {
  // A pipe must not block the end of the job.
  constexpr int kFlags = O_WRONLY | O_CREAT | O_CLOEXEC | O_NONBLOCK | O_NOCTTY;
  auto file = options_.flight_record;
  if (file.empty() && !options_.log_directory.empty()) file = options_.log_directory + "/flight.json";
  if (!file.empty()) {
    file = of_attempt(file, attempt);
    return {file, ::open(file.c_str(), kFlags | O_TRUNC, 0666)};
  }
  // In a world-writable folder: refuse names that another user created.
  const char* given = std::getenv("TMPDIR");
  const std::string folder = given && *given ? given : "/tmp";
  for (int number = 0;; ++number) {
    const auto name = fmt::format("{}/lockstep-flight-{}{}.json", folder, ::getpid(),
                                  number == 0 ? "" : fmt::format(".{}", number));
    file = of_attempt(name, attempt);
    const int fd = ::open(file.c_str(), kFlags | O_EXCL | O_NOFOLLOW, 0600);
    if (fd >= 0 || errno != EEXIST || number == 100) return {file, fd};
  }
}

std::optional<std::string> FlightKeeper::save() {
  std::optional<control::FlightRecord> record;
  {
    std::lock_guard lock(mutex_);
    record = std::exchange(taken_, std::nullopt);
  }
  if (!record || options_.flight_record == "none") return std::nullopt;
  // A job that was stopped by request has not failed; its record is saved only if the user asked for a file.
  if (!record->failure && options_.flight_record.empty()) return std::nullopt;
  // If a file was asked for, it is always replaced, so that an earlier failure's record is not mistaken for
  // this one's.
  const bool any = !options_.flight_record.empty() ||
                   std::any_of(record->ranks.begin(), record->ranks.end(),
                               [](const auto& each) { return !each.second.log.entries.empty(); });
  if (!any) return std::nullopt;
  const auto text = flight_json(*record);
  auto [file, fd] = open(record->attempt);
  const control::Fd owned(fd);
  const bool written = fd >= 0 && write_soon(fd, text);
  const int error = errno;
  const auto verdict = judge(*record).text;
  if (!written)
    return fmt::format("cannot write the flight record to {}: {}; its verdict: {}", file,
                       std::strerror(error), verdict);
  return fmt::format("flight record in {}: {}", file, verdict);
}

}  // namespace lockstep::detail
