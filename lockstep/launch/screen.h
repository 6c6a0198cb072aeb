// Writes the ranks' output for the user: whole lines, each from one rank and prefixed with its number.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <string_view>

namespace lockstep::detail {

enum class Channel { out, err };

class Screen {
 public:
  // `raw`: a single rank, whose bytes pass through unchanged. Otherwise whole lines, with or without the
  // rank.
  struct Style {
    bool raw = false;
    bool prefix = true;
  };
  Screen();
  void set_style(Style style) { style_ = style; }
  bool raw() const { return style_.raw; }

  void line(Channel channel, int rank, std::string_view text);  // Text without its newline.
  // The beginning of a line, such as a prompt. Later text continues it unless another line comes between.
  void beginning(Channel channel, int rank, std::string_view text);
  void bytes(Channel channel, int rank, std::string_view bytes);
  void say(std::string_view line);  // A line of the launcher, to standard error.
  void flush();

  // A line below the output, if there is a terminal. Any output erases it, and the next call draws it again.
  // Not drawn while a line is open, or while another job has the terminal.
  bool has_terminal() const { return status_channel_.has_value(); }
  void draw_status(const std::string& text);
  void erase_status();

  // True if output that has a reader could not be written.
  bool has_lost() const { return lost_[0] || lost_[1]; }

 private:
  struct Line {
    Channel channel;
    int rank;
    bool operator==(const Line&) const = default;
  };
  void open(Channel channel, int rank);
  void put(Channel channel, std::string_view text);
  void append(Channel channel, std::string_view text);
  bool share_a_place(Channel one, Channel other) const { return one == other || same_place_; }

  Style style_;
  std::array<bool, 2> terminals_{};
  std::array<bool, 2> colours_{};
  std::optional<Channel> status_channel_;
  std::string status_;          // The status on the terminal; empty if there is none.
  std::array<bool, 2> gone_{};  // True if there is no reader any more.
  std::array<bool, 2> lost_{};  // True if a write has failed.
  bool same_place_ = false;     // True if standard output and error are the same terminal, pipe or file.
  std::optional<Line> open_;    // The line that has begun and not ended.
  std::string buffer_;
  Channel buffered_ = Channel::out;
};

// Writes all of it, however long the reader takes. Returns false on failure, with errno set.
bool write_all(int fd, std::string_view bytes);

}  // namespace lockstep::detail
