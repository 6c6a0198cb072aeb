// What a person sees of the ranks' output: whole lines, each from one rank, with its rank before it.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <string_view>

namespace lockstep::detail {

enum class Channel { out, err };

class Screen {
 public:
  // `raw`: one rank alone, whose bytes go through as they are; else lines, with or without the rank.
  struct Style {
    bool raw = false;
    bool prefix = true;
  };
  Screen();
  void set_style(Style style) { style_ = style; }
  bool raw() const { return style_.raw; }

  void line(Channel channel, int rank, std::string_view text);  // without its newline
  // The beginning of a line, such as a prompt; what follows goes on in it if nobody came between.
  void beginning(Channel channel, int rank, std::string_view text);
  void bytes(Channel channel, int rank, std::string_view bytes);
  void say(std::string_view line);  // the launcher's own, to standard error
  void flush();

  // A line below everything, where there is a terminal: what is written takes its place, and it is drawn
  // again by the next call. Not while a line is open, nor while another job has the terminal.
  bool has_terminal() const { return status_channel_.has_value(); }
  void draw_status(const std::string& text);
  void erase_status();

  bool has_lost() const {
    return lost_[0] || lost_[1];
  }  // somebody was to read it, and it could not be written

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
  std::string status_;          // as it is on the terminal; empty: it is not
  std::array<bool, 2> gone_{};  // nobody reads it any longer
  std::array<bool, 2> lost_{};  // it could not be written, at least once
  bool same_place_ = false;     // standard output and error are one terminal, pipe or file
  std::optional<Line> open_;    // the line that has begun and not ended
  std::string buffer_;
  Channel buffered_ = Channel::out;
};

// All of it, however long the reader takes; false where that cannot be done, with errno.
bool write_all(int fd, std::string_view bytes);

}  // namespace lockstep::detail
