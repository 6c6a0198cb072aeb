#include <lockstep/launch/output.h>

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include <fmt/format.h>
#include <lockstep/base/error.h>
#include <lockstep/base/start_thread.h>

namespace lockstep::detail {
namespace {

using Clock = std::chrono::steady_clock;
using control::Fd;

constexpr std::size_t kLongestLine = 64 << 10;  // Longer lines are split.
constexpr std::size_t kLastLines = 20, kLongestLastLine = 4 << 10;
constexpr std::chrono::milliseconds kPromptAfter{200};
// A line rewritten in place ("\r": a progress bar) is shown this often, each time as a new line: the ranks
// share the screen, so the cursor cannot go back.
constexpr std::chrono::seconds kProgressEvery{1};
// Interval of the status line: short on a terminal, long where each one stays. A status that is not refreshed
// is removed after kStatusStale.
constexpr std::chrono::milliseconds kStatusEvery{200}, kStatusStale{1500};
constexpr std::chrono::seconds kStatusLineEvery{10};
// How long to keep reading a pipe after all known writers have ended: an unrelated process may still hold it.
constexpr std::chrono::seconds kPatienceWithStrangers{1};

Fd checked(int fd, const char* what) {
  if (fd < 0) throw std::system_error(errno, std::generic_category(), what);
  return Fd(fd);
}

void signal_event(int fd) {
  const std::uint64_t one = 1;
  [[maybe_unused]] auto written = ::write(fd, &one, sizeof one);
}

Fd open_log(const std::string& name) {
  Fd log(::open(name.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666));
  if (!log) throw ConfigError(fmt::format("--log-dir: cannot write '{}': {}", name, std::strerror(errno)));
  return log;
}

}  // namespace

struct Output::Stream {
  Fd fd;
  int number = 0;  // World rank.
  std::shared_ptr<Rank> rank;
  Channel channel = Channel::out;
  bool shown = true;
  bool prompts = false;                       // True if an unfinished line is worth showing.
  std::string line;                           // The current line so far.
  std::size_t displayed = 0;                  // Number of its bytes that are on the screen already.
  Clock::time_point begun{}, since{};         // Times of its first and its last byte.
  bool overwritten = false;                   // True if it was overwritten; `line` is the latest text.
  bool open = false;                          // True if its beginning is on the screen and may be continued.
  Clock::time_point progress{};               // Last time a state of it was shown.
  std::optional<Clock::time_point> deadline;  // Set once every known writer has ended.

  bool is_progress() const { return overwritten || line.ends_with('\r'); }
  std::string_view rest() const { return std::string_view(line).substr(displayed); }
  // When the unfinished line is shown; never if it is not worth showing.
  std::optional<Clock::time_point> due() const {
    if (line.size() <= displayed || !(prompts || is_progress())) return std::nullopt;
    return is_progress() ? std::max(since + kPromptAfter, progress + kProgressEvery) : since + kPromptAfter;
  }
};

Output::Output(const LaunchOptions& options)
    : options_(options),
      wake_(checked(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd")),
      done_(checked(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd")),
      poll_(checked(::epoll_create1(EPOLL_CLOEXEC), "epoll")) {
  if (!options.log_directory.empty()) {
    std::error_code error;
    std::filesystem::create_directories(options.log_directory, error);
    if (error)
      throw ConfigError(
          fmt::format("--log-dir: cannot create directory '{}': {}", options.log_directory, error.message()));
  }
  epoll_event event{EPOLLIN, {nullptr}};
  ::epoll_ctl(poll_.get(), EPOLL_CTL_ADD, wake_.get(), &event);
  thread_ = start_thread("the ranks' output", [this] { run(); });
}

Output::~Output() {
  finish();
  thread_.join();
}

void Output::post(std::function<void()> task) {
  {
    std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
  }
  signal_event(wake_.get());
}

void Output::begin_attempt(int attempt, int world_size) {
  attempt_ = attempt;
  post([this, world_size] {
    const bool alone = world_size == 1 && options_.prefix != Prefix::always;
    screen_.set_style({.raw = alone, .prefix = !alone && options_.prefix != Prefix::never});
    ranks_.clear();
    status_.clear();
  });
}

// Called many times a second, even while the terminal or pipe is blocked: only the latest text is queued.
void Output::show_status(std::string text) {
  {
    std::lock_guard lock(mutex_);
    if (std::exchange(told_status_, std::move(text))) return;
  }
  post([this] {
    std::unique_lock lock(mutex_);
    auto told = std::exchange(told_status_, std::nullopt);
    lock.unlock();
    if (!told) return;
    if (status_.empty()) status_due_ = std::max(status_due_, Clock::now());
    status_ = std::move(*told);
    status_at_ = Clock::now();
  });
}

void Output::hold_status(bool hold) {
  post([this, hold] { status_held_ = hold; });
}

void Output::add_rank(int number, Fd out, Fd err) {
  auto rank = std::make_shared<Rank>();
  if (!options_.log_directory.empty()) {
    rank->log_name = attempt_ == 0
                         ? fmt::format("{}/rank-{}.log", options_.log_directory, number)
                         : fmt::format("{}/rank-{}.restart-{}.log", options_.log_directory, number, attempt_);
    rank->log = open_log(rank->log_name);
  }
  auto make = [&](Fd fd, Channel channel) {
    ::fcntl(fd.get(), F_SETFL, O_NONBLOCK);
    auto stream = std::make_shared<std::unique_ptr<Stream>>(std::make_unique<Stream>());
    (*stream)->fd = std::move(fd);
    (*stream)->number = number;
    (*stream)->rank = rank;
    (*stream)->channel = channel;
    (*stream)->shown = options_.show.contains(number);
    (*stream)->prompts = options_.stdin_rank == number;
    post([this, stream] {
      epoll_event event{EPOLLIN, {stream->get()}};
      ::epoll_ctl(poll_.get(), EPOLL_CTL_ADD, (*stream)->fd.get(), &event);
      ranks_[(*stream)->number] = (*stream)->rank;
      streams_.push_back(std::move(*stream));
    });
  };
  make(std::move(out), Channel::out);
  make(std::move(err), Channel::err);
}

void Output::say(std::string line) {
  post([this, line = std::move(line)] { screen_.say(line); });
}

void Output::tell_failure(std::string line, int rank) {
  post([this, line = std::move(line), rank] {
    for (auto& stream : streams_)
      if (stream->number == rank) read(*stream);
    screen_.say(line);
    // The lines of a single rank were shown raw and are directly above.
    if (!screen_.raw() || !options_.show.contains(rank)) show_last_lines(rank);
  });
}

void Output::ranks_are_gone() {
  post([this] {
    for (auto& stream : streams_)
      if (!stream->deadline) stream->deadline = Clock::now() + kPatienceWithStrangers;
    status_.clear();
  });
}

void Output::finish() {
  post([this] { finishing_ = true; });
}

void Output::run() {
  std::array<epoll_event, 64> events;
  while (!finishing_ || !streams_.empty()) {
    const int count =
        ::epoll_wait(poll_.get(), events.data(), static_cast<int>(events.size()), milliseconds_to_wait());
    // Streams first, so that output written before a launcher message is shown before it.
    for (int i = 0; i < count; ++i)
      if (auto* stream = static_cast<Stream*>(events[static_cast<std::size_t>(i)].data.ptr))
        read_some(*stream);
    run_tasks();
    show_prompts();
    end_those_left_over();
    std::erase_if(streams_, [](const auto& stream) { return !stream->fd; });
    draw_status();
    screen_.flush();
  }
  screen_.erase_status();
  screen_.flush();
  lost_ = screen_.has_lost();
  signal_event(done_.get());
}

void Output::run_tasks() {
  std::uint64_t count = 0;
  if (::read(wake_.get(), &count, sizeof count) < 0) return;
  std::vector<std::function<void()>> tasks;
  {
    std::lock_guard lock(mutex_);
    tasks.swap(tasks_);
  }
  for (auto& task : tasks) task();
}

int Output::milliseconds_to_wait() const {
  const auto now = Clock::now();
  auto next = now + std::chrono::hours(1);
  for (const auto& stream : streams_) {
    if (stream->deadline) next = std::min(next, *stream->deadline);
    if (const auto due = stream->due()) next = std::min(next, *due);
  }
  if (!status_.empty() && !status_held_ && !finishing_ && !screen_.raw())
    next = std::min(next, std::max(status_due_, now + std::chrono::milliseconds(1)));
  const auto wait = std::chrono::ceil<std::chrono::milliseconds>(next - now).count();
  return static_cast<int>(std::max<std::int64_t>(0, wait));
}

void Output::read(Stream& stream) {
  constexpr int kMost = 64;  // More than a pipe holds; a writer may be faster than this reader.
  for (int i = 0; i < kMost && read_some(stream); ++i) {
  }
}

bool Output::read_some(Stream& stream) {
  std::array<char, 64 << 10> bytes;
  if (!stream.fd) return false;
  const auto got = ::read(stream.fd.get(), bytes.data(), bytes.size());
  if (got > 0) {
    take(stream, {bytes.data(), static_cast<std::size_t>(got)});
    return true;
  }
  if (got < 0 && errno == EINTR) return true;
  if (got == 0 || errno != EAGAIN) end_stream(stream);
  return false;
}

void Output::take(Stream& stream, std::string_view bytes) {
  Rank& rank = *stream.rank;
  if (rank.log && !write_all(rank.log.get(), bytes)) {
    screen_.say(
        fmt::format("lockstep: cannot continue the log '{}': {}", rank.log_name, std::strerror(errno)));
    rank.log.reset();
  }
  if (stream.shown && screen_.raw()) screen_.bytes(stream.channel, stream.number, bytes);
  stream.since = Clock::now();
  while (!bytes.empty()) {
    if (stream.line.ends_with('\r') && bytes.front() != '\r' && bytes.front() != '\n') overwrite_line(stream);
    if (stream.line.empty() && !stream.overwritten) stream.begun = stream.since;
    const auto end = bytes.find('\n');
    const auto room = kLongestLine - stream.line.size();
    auto piece = bytes.substr(0, std::min(end, room));
    if (const auto back = piece.find('\r'); back != piece.npos) piece = piece.substr(0, back + 1);
    stream.line.append(piece);
    bytes.remove_prefix(piece.size());
    if (!bytes.empty() && bytes.front() == '\n') {
      bytes.remove_prefix(1);
      end_line(stream);
    } else if (stream.line.size() == kLongestLine && !bytes.empty()) {
      end_line(stream);
    }
  }
}

void Output::end_line(Stream& stream) {
  const bool all_shown = stream.displayed > 0 && !stream.open && stream.rest().empty();
  if (stream.shown && !screen_.raw() && !all_shown)
    screen_.line(stream.channel, stream.number, stream.rest());
  auto& last = stream.rank->last_lines;
  if (last.size() == kLastLines) last.pop_front();
  stream.line.resize(std::min(stream.line.size(), kLongestLastLine));
  last.push_back(std::exchange(stream.line, {}));
  stream.displayed = 0;
  stream.open = stream.overwritten = false;
}

// Text after "\r" replaces the line, except for what is shown of it now.
void Output::overwrite_line(Stream& stream) {
  while (stream.line.ends_with('\r')) stream.line.pop_back();
  stream.displayed = std::min(stream.displayed, stream.line.size());
  const auto now = Clock::now();
  const bool due =
      !stream.rest().empty() && now >= stream.begun + kPromptAfter && now >= stream.progress + kProgressEvery;
  if (stream.shown && !screen_.raw() && (stream.open || due)) {
    screen_.line(stream.channel, stream.number, stream.rest());
    stream.progress = now;
  }
  stream.line.clear();
  stream.displayed = 0;
  stream.open = false;
  stream.overwritten = true;
}

void Output::end_stream(Stream& stream) {
  if (!stream.line.empty()) end_line(stream);
  // Closing is not enough: a rank that is being started briefly holds a copy.
  ::epoll_ctl(poll_.get(), EPOLL_CTL_DEL, stream.fd.get(), nullptr);
  stream.fd.reset();
}

void Output::show_prompts() {
  const auto now = Clock::now();
  for (auto& stream : streams_) {
    const auto due = stream->due();
    if (!due || now < *due) continue;
    if (stream->shown && !screen_.raw()) {
      auto text = stream->rest();
      if (stream->is_progress()) {
        while (text.ends_with('\r')) text.remove_suffix(1);
        if (stream->open || !text.empty()) screen_.line(stream->channel, stream->number, text);
        stream->progress = now;
        stream->open = false;
      } else {
        screen_.beginning(stream->channel, stream->number, text);
        stream->open = true;
      }
    }
    stream->displayed = stream->line.size();
  }
}

void Output::show_last_lines(int number) {
  const auto found = ranks_.find(number);
  if (found == ranks_.end()) return;
  auto lines = found->second->last_lines;
  for (const auto& stream : streams_)
    if (stream->number == number && !stream->line.empty()) lines.push_back(stream->line);
  if (lines.empty()) return;
  screen_.say(lines.size() == 1
                  ? fmt::format("lockstep: the last line of rank {}:", number)
                  : fmt::format("lockstep: the last {} lines of rank {}:", lines.size(), number));
  for (const auto& line : lines) screen_.say("    " + line);
}

void Output::draw_status() {
  const auto now = Clock::now();
  if (now - status_at_ > kStatusStale) status_.clear();
  if (status_.empty() || status_held_ || finishing_ || screen_.raw()) return screen_.erase_status();
  if (now < status_due_) return;
  if (screen_.has_terminal()) {
    screen_.draw_status(status_);
    status_due_ = now + kStatusEvery;
  } else if (options_.status == StatusLine::always) {
    screen_.say("lockstep: " + status_);
    status_due_ = now + kStatusLineEvery;
  } else {
    status_due_ = now + kStatusEvery;
  }
}

void Output::end_those_left_over() {
  for (auto& stream : streams_) {
    if (!stream->deadline || Clock::now() < *stream->deadline) continue;
    read(*stream);
    if (stream->fd) end_stream(*stream);
  }
}

}  // namespace lockstep::detail
