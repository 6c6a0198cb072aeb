// A rank's side of the control plane: a connection to the agent of its host, and a listening thread.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include <lockstep/control/board/board.h>
#include <lockstep/control/coordinator/store.h>
#include <lockstep/control/wire/messages.h>
#include <lockstep/os/socket.h>

namespace lockstep::control {

// The agent cannot be reached, or the job cannot be joined because ranks are missing.
class JoinError : public Error {
 public:
  using Error::Error;
};

// The agent closed the connection before sending anything: it was about to end. Another agent may be running.
class AgentGone : public Error {
 public:
  using Error::Error;
};

// In a child of fork() it does nothing: only the parent is the rank.
class Client final : public Channel {
 public:
  // Takes a connection to the agent. The listening thread runs until the process ends, because it holds the
  // lock by which the agent knows that this rank is alive.
  static std::shared_ptr<Client> make(Fd agent);

  // Joins the job and waits for all ranks. on_failure is called from the listening thread, at most once, when
  // the job has failed. Throws ConfigError if ranks contradict each other, JoinError if some do not join, or
  // AgentGone.
  Welcome join(const Hello& hello, std::chrono::milliseconds timeout,
               std::function<void(const Failure&)> on_failure);
  void leave() noexcept;

  StoreReply ask(const StoreRequest& request, Clock::time_point deadline,
                 const std::function<bool()>& failed) override;
  void wake() override;
  std::shared_ptr<StatusWriter> status() const;

  void tell(const GroupMade& group) noexcept;
  // For a process about to end: returns once the message has been written.
  void tell(const Fault& fault) noexcept;

  // True if the job must stop; turns true at the same call, counted from 0, on every rank.
  bool stop_requested();
  void request_stop(int signal) noexcept;  // Async-signal-safe.
  // The failure reported by the agent, now or within the limit.
  std::optional<Failure> failure(std::chrono::milliseconds limit = {});
  bool usable() const;  // True if another World of this process may use it.
  // True if `lockstep run` started this rank, so that it shows the job's failure. False until the agent has
  // answered.
  bool is_launched() const;
  int rank() const;
  ~Client() override;

 private:
  explicit Client(Fd agent);
  void listen();
  void receive(Frame frame, Fd descriptor);
  void attach(const Attach& attach, Fd descriptor);
  void fail(Failure failure);
  void agent_is_gone();
  bool agent_has_ended();
  bool write(const Frame& frame);
  // In a child of fork() the connection belongs to the parent, and so do threads that may hold any lock here.
  bool in_child() const;
  Failure failure_of_agent(std::string cause) const;
  [[noreturn]] void throw_failure() const;

  const int process_;
  Fd socket_;
  std::mutex write_mutex_;
  std::atomic<int> stop_signal_ = 0;  // Set by a signal handler.
  Fd stop_event_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  int rank_ = 0, size_ = 0;
  std::optional<Attach> attach_;
  std::shared_ptr<Board> board_;
  std::shared_ptr<StatusWriter> status_;
  std::optional<Welcome> welcome_;
  std::optional<std::string> refused_;
  std::optional<Failure> failure_;
  std::function<void(const Failure&)> on_failure_;
  bool here_ = false, holding_ = false, gone_ = false;
  std::uint32_t next_id_ = 1;
  std::map<std::uint32_t, std::optional<StoreReply>> replies_;
  std::int64_t stop_count_ = 0, stop_at_ = -1;
  bool stop_prepared_ = false;
  int agent_process_ = 0;          // Its pid as seen by this process; 0: not visible in /proc.
  std::uint64_t agent_start_ = 0;  // Guards against reuse of the pid.
  std::optional<Clock::time_point> agent_stopped_;
};

}  // namespace lockstep::control
