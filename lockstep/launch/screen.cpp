#include <lockstep/launch/screen.h>

#include <poll.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include <fmt/format.h>
#include <lockstep/base/environment.h>
#include <lockstep/launch/status_line.h>

namespace lockstep::detail {
namespace {

constexpr int kLauncher = -1;  // Used in place of a rank for the launcher's own lines.

int fd_of(Channel channel) { return channel == Channel::out ? STDOUT_FILENO : STDERR_FILENO; }
std::size_t index(Channel channel) { return static_cast<std::size_t>(channel); }

// The launcher is this process's parent and reads the terminal while it is in the foreground. After that, the
// shell must not find a status line on the terminal.
bool is_in_foreground(int fd) {
  const pid_t group = ::tcgetpgrp(fd);
  return group < 0 || group == ::getpgid(::getppid()) || group == ::getpgrp();
}

int columns_of(int fd) {
  winsize size{};
  return ::ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

// ANSI colours that are readable on light and dark backgrounds.
constexpr std::array kColours = {36, 33, 32, 35, 34, 31, 96, 93, 92, 95, 94, 91};

}  // namespace

bool write_all(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const auto written = ::write(fd, bytes.data(), bytes.size());
    if (written >= 0) {
      bytes.remove_prefix(static_cast<std::size_t>(written));
    } else if (errno == EAGAIN) {  // Another process that shares the descriptor made it nonblocking.
      pollfd wait{fd, POLLOUT, 0};
      ::poll(&wait, 1, -1);
    } else if (errno != EINTR) {
      return false;
    }
  }
  return true;
}

Screen::Screen() {
  for (Channel channel : {Channel::out, Channel::err}) {
    const auto at = index(channel);
    terminals_[at] = ::isatty(fd_of(channel)) == 1;
    const bool moves = terminals_[at] && env::text("TERM").value_or("") != "dumb";
    colours_[at] = moves && !env::text("NO_COLOR");
    if (moves) status_channel_ = channel;
  }
  struct stat out {
  }, err{};
  same_place_ = ::fstat(STDOUT_FILENO, &out) == 0 && ::fstat(STDERR_FILENO, &err) == 0 &&
                out.st_dev == err.st_dev && out.st_ino == err.st_ino;
}

void Screen::line(Channel channel, int rank, std::string_view text) {
  open(channel, rank);
  put(channel, text);
  put(channel, "\n");
  open_.reset();
}

void Screen::beginning(Channel channel, int rank, std::string_view text) {
  open(channel, rank);
  put(channel, text);
}

void Screen::bytes(Channel channel, int rank, std::string_view bytes) {
  if (bytes.empty()) return;
  put(channel, bytes);
  if (bytes.back() == '\n')
    open_.reset();
  else
    open_ = Line{channel, rank};
}

void Screen::say(std::string_view text) { line(Channel::err, kLauncher, text); }

void Screen::open(Channel channel, int rank) {
  const Line line{channel, rank};
  if (open_ == line) return;
  if (open_ && share_a_place(open_->channel, channel)) put(open_->channel, "\n");
  open_ = line;
  if (rank == kLauncher || !style_.prefix) return;
  if (colours_[index(channel)])
    put(channel, fmt::format("\033[{}m[{}]\033[0m ",
                             kColours[static_cast<std::size_t>(rank) % kColours.size()], rank));
  else
    put(channel, fmt::format("[{}] ", rank));
}

void Screen::put(Channel channel, std::string_view text) {
  if (terminals_[index(channel)]) erase_status();
  append(channel, text);
}

void Screen::draw_status(const std::string& text) {
  if (!status_channel_ || open_) return erase_status();
  const int fd = fd_of(*status_channel_);
  if (!is_in_foreground(fd)) return;
  const auto line = cut_to_columns(text, columns_of(fd) - 1);
  if (line == status_) return;
  append(*status_channel_, "\r" + line + "\033[K");
  flush();
  status_ = line;
}

void Screen::erase_status() {
  if (status_.empty()) return;
  status_.clear();
  append(*status_channel_, "\r\033[K");
}

void Screen::append(Channel channel, std::string_view text) {
  if (channel != buffered_) flush();
  buffered_ = channel;
  buffer_ += text;
  if (buffer_.size() >= (1 << 16)) flush();
}

void Screen::flush() {
  const auto at = index(buffered_);
  if (!gone_[at] && !buffer_.empty() && !write_all(fd_of(buffered_), buffer_)) {
    const bool first = !lost_[at] && !gone_[at];
    // A pipe without a reader or a closed terminal is gone for good. A disk may have room again.
    gone_[at] = errno == EPIPE || errno == EIO;
    lost_[at] = lost_[at] || !gone_[at];
    if (first && buffered_ == Channel::out) {
      const auto line = gone_[at]
                            ? "lockstep: standard output has no reader any more; the ranks continue\n"
                            : fmt::format("lockstep: cannot write to standard output, output is lost: {}\n",
                                          std::strerror(errno));
      write_all(STDERR_FILENO, line);
    }
  }
  buffer_.clear();
}

}  // namespace lockstep::detail
