#include <lockstep/metrics/metric_log.h>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include <fmt/format.h>
#include <lockstep/base/error.h>
#include <lockstep/base/log.h>
#include <lockstep/metrics/event_file.h>
#include <lockstep/os/host.h>

namespace lockstep::detail {
namespace {

constexpr std::size_t kLongestName = 256;

double now() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

// Length of the UTF-8 character at the start of the text; 0 if it is invalid.
std::size_t utf8_length(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned first = byte(0);
  const std::size_t length = first < 0x80       ? 1
                             : first >> 5 == 6  ? 2
                             : first >> 4 == 14 ? 3
                             : first >> 3 == 30 ? 4
                                                : 0;
  if (length == 0 || length > text.size()) return 0;
  unsigned value = length == 1 ? first : first & (0x7fu >> length);
  for (std::size_t i = 1; i < length; ++i) {
    if (byte(i) >> 6 != 2) return 0;
    value = value << 6 | (byte(i) & 0x3f);
  }
  constexpr unsigned kLowest[] = {0, 0, 0x80, 0x800, 0x10000};
  const bool surrogate = value >= 0xd800 && value < 0xe000;
  return value < kLowest[length] || value > 0x10ffff || surrogate ? 0 : length;
}

// Describes what is wrong with a name; empty if it is valid.
std::string trouble_with(std::string_view name) {
  if (name.empty()) return "it is empty";
  if (name.size() > kLongestName)
    return fmt::format("expected at most {} bytes, got {}", kLongestName, name.size());
  for (std::size_t at = 0; at < name.size();) {
    const auto length = utf8_length(name.substr(at));
    if (length == 0) return "it is not UTF-8";
    if (const auto c = static_cast<unsigned char>(name[at]); c < ' ' || c == 0x7f)
      return "it contains a control character, such as a newline";
    at += length;
  }
  return {};
}

std::string quoted(std::string_view text, char quote, std::string_view escaped_quote, bool backslashes) {
  std::string out(1, quote);
  for (const char c : text)
    if (c == quote)
      out += escaped_quote;
    else if (c == '\\' && backslashes)
      out += "\\\\";
    else
      out += c;
  return out + quote;
}

std::string number(double value, MetricFormat format) {
  if (std::isfinite(value)) return fmt::format("{}", value);
  if (format == MetricFormat::jsonl) return "null";
  return std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
}

}  // namespace

MetricFormat parse_metric_format(std::string_view what, std::string_view text) {
  if (text == "jsonl") return MetricFormat::jsonl;
  if (text == "csv") return MetricFormat::csv;
  throw bad_value(what, "jsonl or csv", text);
}

void check_metric_name(std::string_view name) {
  if (const auto trouble = trouble_with(name); !trouble.empty())
    throw ConfigError(fmt::format("log_metric: invalid name: {}", trouble));
}

std::string metric_line(MetricFormat format, double time, int rank, std::optional<std::int64_t> step,
                        std::string_view name, double value) {
  if (format == MetricFormat::csv)
    return fmt::format(
        "{:.6f},{},{},{},{}", time, rank, step ? std::to_string(*step) : "",
        name.find_first_of(",\"") != name.npos ? quoted(name, '"', "\"\"", false) : std::string(name),
        number(value, format));
  return fmt::format(R"({{"time":{:.6f},"rank":{},"step":{},"name":{},"value":{}}})", time, rank,
                     step ? std::to_string(*step) : "null", quoted(name, '"', "\\\"", true),
                     number(value, format));
}

void check_metric_folder(std::string_view what, const std::string& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error || !std::filesystem::is_directory(folder))
    throw ConfigError(fmt::format("{}: cannot create directory '{}': {}", what, folder,
                                  error ? error.message() : "a file of that name exists"));
  if (::access(folder.c_str(), W_OK) != 0)
    throw ConfigError(fmt::format("{}: cannot write to '{}': {}", what, folder, std::strerror(errno)));
}

MetricLog::MetricLog(std::string folder, MetricFormat format, int rank)
    : folder_(std::move(folder)), format_(format), rank_(rank) {
  check_metric_folder("metrics", folder_);
  ready_ = rank_ != 0;
  if (ready_) return;
  open();
  ready_ = trouble_ == 0;
  if (ready_) return;
  close();
  throw ConfigError(fmt::format("metrics: cannot write to '{}': {}", folder_, std::strerror(trouble_)));
}

MetricLog::~MetricLog() {
  if (lost_ > 1) log(LogLevel::warn, "{} metrics could not be written to '{}'", lost_, folder_);
  close();
}

void MetricLog::close() {
  for (File* file : {&lines_, &events_})
    if (file->fd >= 0) ::close(std::exchange(file->fd, -1));
}

void MetricLog::open() {
  opened_ = true;
  const auto place = rank_ == 0 ? std::string() : fmt::format(".rank-{}", rank_);
  const bool csv = format_ == MetricFormat::csv;
  lines_.name = fmt::format("{}/metrics{}.{}", folder_, place, csv ? "csv" : "jsonl");
  lines_.fd = ::open(lines_.name.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (lines_.fd < 0) return trouble(fmt::format("'{}': {}", lines_.name, std::strerror(errno)), errno);
  struct stat status {};
  char last = '\n';
  if (::fstat(lines_.fd, &status) == 0 && status.st_size > 0 &&
      ::pread(lines_.fd, &last, 1, status.st_size - 1) == 1 && last != '\n')
    write(lines_, "\n");  // Ends a line that a full disk cut short.
  if (csv && status.st_size == 0) write(lines_, "time,rank,step,name,value\n");

  // TensorBoard shows each folder as a run.
  const auto run = rank_ == 0 ? folder_ : fmt::format("{}/rank-{}", folder_, rank_);
  std::error_code error;
  std::filesystem::create_directories(run, error);
  for (int number = 0; number < 1000; ++number) {
    events_.name = run + "/" + event_file_name(now(), host::name(), ::getpid(), number);
    events_.fd = ::open(events_.name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0666);
    if (events_.fd >= 0 || errno != EEXIST)
      break;  // an earlier World of this process may have used this second's name
  }
  if (events_.fd < 0) return trouble(fmt::format("'{}': {}", events_.name, std::strerror(errno)), errno);
  write(events_, event_file_header(now()));
}

void MetricLog::add(std::string_view name, double value, std::optional<std::int64_t> step) {
  const auto time = now();
  std::lock_guard lock(mutex_);
  if (!opened_) open();
  const bool line = write(lines_, metric_line(format_, time, rank_, step, name, value) + "\n");
  const bool event = write(events_, scalar_event(time, step.value_or(0), name, value));
  if (!line || !event) ++lost_;
}

// Writes all of it or nothing: a write cut short by a full disk is undone.
bool MetricLog::write(File& file, std::string_view bytes) {
  if (file.fd < 0) return false;
  std::size_t done = 0;
  while (done < bytes.size()) {
    const auto written = ::write(file.fd, bytes.data() + done, bytes.size() - done);
    if (written > 0) {
      done += static_cast<std::size_t>(written);
    } else if (written == 0 || errno != EINTR) {
      const int reason = written == 0 ? ENOSPC : errno;
      struct stat status {};
      if (done > 0 && ::fstat(file.fd, &status) == 0 && status.st_size >= static_cast<off_t>(done))
          [[maybe_unused]]
        const auto cut = ::ftruncate(file.fd, status.st_size - static_cast<off_t>(done));
      trouble(fmt::format("'{}': {}", file.name, std::strerror(reason)), reason);
      return false;
    }
  }
  return true;
}

void MetricLog::trouble(const std::string& why, int reason) {
  if (trouble_ == 0 && ready_) log(LogLevel::warn, "cannot write a metric, training continues: {}", why);
  if (trouble_ == 0) trouble_ = reason;
}

}  // namespace lockstep::detail
