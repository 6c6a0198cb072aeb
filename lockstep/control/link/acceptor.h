// Where other hosts come in: holds those who have connected until they have proven the job's key.
//
// Anybody who reaches the port may connect and say anything, or nothing. So at most 64 are held, each for at
// most a second, and the oldest goes when there is one too many; but nobody before it had time for the two
// round trips that a true peer needs. Until then others wait in the kernel's queue, which is long enough for
// thousands. Of nobody more than 64 bytes are read at a time before the proof.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <list>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/control/link/secure_link.h>
#include <lockstep/os/socket.h>

namespace lockstep::control {

class Acceptor {
 public:
  static constexpr std::size_t kMostStrangers = 64;
  static constexpr std::chrono::milliseconds kPatience{1000};
  static constexpr std::chrono::milliseconds kStay{20};  // not pushed out sooner: 3,200 a second come through
  static constexpr std::chrono::milliseconds kBetweenReports{1000};

  // say: a line about those who were refused, at most one a second.
  Acceptor(TcpListener listener, std::string key, std::string context,
           std::function<void(const std::string&)> say);
  ~Acceptor();
  Acceptor(Acceptor&&) = delete;

  const TcpListener& listener() const { return listener_; }
  // Readable (poll, epoll) when serve has something to do, also when that is to give up on somebody.
  int fd() const { return epoll_.get(); }
  // When that will be, if nothing comes before; at most a minute.
  std::chrono::milliseconds next_deadline() const;

  struct Guest {
    Fd fd;  // all that the proof had to say has been written
    SecureLink link;
    std::string from;  // its address
  };
  // Accepts, listens, refuses; never waits. Those who have proven the key by now.
  std::vector<Guest> serve();

  // From now on the proof is for another attempt. Those who are held are refused.
  void change_context(std::string context);
  std::size_t held() const { return strangers_.size(); }

 private:
  using Clock = std::chrono::steady_clock;
  struct Stranger {
    Guest guest;
    Clock::time_point came;
  };
  using Place = std::list<Stranger>::iterator;

  void accept_some();
  bool full_of_newcomers() const;
  void await_knocks(bool wanted);
  void turn_one_away();
  void watch(int fd, int operation, bool wanted = true);
  std::optional<std::string> hear(Guest& guest);
  void refuse(Place stranger, const std::string& why);
  void count_refusal(std::string from, std::string why);
  void report();
  void set_timer();

  TcpListener listener_;
  std::string key_, context_;
  std::function<void(const std::string&)> say_;
  Fd epoll_, timer_;
  Fd spare_;  // given up for a moment when there are no descriptors left
  bool awaits_knocks_ = true;
  std::list<Stranger> strangers_;  // the oldest first
  std::size_t refused_ = 0;        // since the last report
  std::string last_from_, last_why_;
  Clock::time_point next_report_{};
};

}  // namespace lockstep::control
