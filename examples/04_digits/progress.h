// Shows the progress of training: a bar on a terminal, a line per epoch elsewhere.
#pragma once

#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>

class Progress {
 public:
  // total: number of samples in the whole training. done: number already processed before a restart.
  Progress(std::int64_t total, std::int64_t done, bool quiet)
      : total_(total), before_(done), done_(done), quiet_(quiet), terminal_(isatty(STDOUT_FILENO) == 1) {}

  void add(std::int64_t samples, double loss) {
    done_ += samples;
    const auto now = Clock::now();
    if (quiet_ || !terminal_ || now - shown_ < std::chrono::milliseconds(100)) return;
    shown_ = now;
    const auto filled = static_cast<std::size_t>(30 * done_ / std::max<std::int64_t>(total_, 1));
    std::printf("\r\x1b[K[%s%s] %3d %%  loss %.4f  %.0f samples/s  %s left", std::string(filled, '#').c_str(),
                std::string(30 - filled, ' ').c_str(), static_cast<int>(100 * done_ / total_), loss, rate(),
                left().c_str());
    std::fflush(stdout);
  }

  void line(const std::string& text) {
    if (quiet_) return;
    std::printf("%s%s  %.0f samples/s\n", terminal_ ? "\r\x1b[K" : "", text.c_str(), rate());
    std::fflush(stdout);
  }

 private:
  using Clock = std::chrono::steady_clock;
  double rate() const {
    const std::chrono::duration<double> elapsed = Clock::now() - begin_;
    return static_cast<double>(done_ - before_) / std::max(elapsed.count(), 1e-6);
  }
  std::string left() const {
    const auto seconds = static_cast<long>(static_cast<double>(total_ - done_) / std::max(rate(), 1e-6));
    char text[32];
    std::snprintf(text, sizeof text, "%ld:%02ld", seconds / 60, seconds % 60);
    return text;
  }

  std::int64_t total_, before_, done_;
  bool quiet_, terminal_;
  Clock::time_point begin_ = Clock::now(), shown_{};
};
