// Accepts connections from other hosts and holds them until they have proven the job's key.
//
// Anything that reaches the port may connect and send any data, or none. So at most 64 connections are held,
// each for at most a second, and a new one displaces the oldest, but not before the oldest had time for the
// two round trips that a true peer needs. Until then new ones wait in the kernel's queue, which holds
// thousands.
// Before the proof, at most 64 bytes at a time are read from a connection.
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
  // Not displaced sooner: 3,200 connections a second get through.
  static constexpr std::chrono::milliseconds kStay{20};
  static constexpr std::chrono::milliseconds kBetweenReports{1000};

  // say: logs a line about refused connections, at most once a second.
  Acceptor(TcpListener listener, std::string key, std::string context,
           std::function<void(const std::string&)> say);
  ~Acceptor();
  Acceptor(Acceptor&&) = delete;

  const TcpListener& listener() const { return listener_; }
  // Readable (poll, epoll) when serve has something to do, including a timeout.
  int fd() const { return epoll_.get(); }
  // Time until the next timeout; at most a minute.
  std::chrono::milliseconds next_deadline() const;

  struct Guest {
    Fd fd;  // All output of the proof has been written.
    SecureLink link;
    std::string from;  // Its address.
  };
  // Accepts, reads and refuses connections without blocking. Returns those that have proven the key.
  std::vector<Guest> serve();

  // Requires the proof for another attempt from now on. Refuses the connections held.
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
  Fd spare_;  // Closed briefly when no descriptors are left, to accept and refuse one connection.
  bool awaits_knocks_ = true;
  std::list<Stranger> strangers_;  // Oldest first.
  std::size_t refused_ = 0;        // Since the last report.
  std::string last_from_, last_why_;
  Clock::time_point next_report_{};
};

}  // namespace lockstep::control
