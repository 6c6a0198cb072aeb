// A rank's end of the control plane: one connection to the agent of its host, and a thread that listens.
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

// The agent could not be reached, or the job cannot be joined for lack of others.
class JoinError : public Error {
 public:
  using Error::Error;
};

// The agent went away before it said a word: it was about to end. Another one may be there.
class AgentGone : public Error {
 public:
  using Error::Error;
};

// In a child of fork() it does nothing: the rank is the parent.
class Client final : public Channel {
 public:
  // Takes a connection to the agent. The thread that listens runs until the process ends: it holds the lock
  // by which the agent knows that this rank lives.
  static std::shared_ptr<Client> make(Fd agent);

  // Comes, and waits for all. on_failure is called from the listening thread, at most once, when the job has
  // failed. ConfigError when ranks contradict one another, JoinError when some do not come, AgentGone.
  Welcome join(const Hello& hello, std::chrono::milliseconds timeout,
               std::function<void(const Failure&)> on_failure);
  void leave() noexcept;

  StoreReply ask(const StoreRequest& request, Clock::time_point deadline,
                 const std::function<bool()>& failed) override;
  void wake() override;
  std::shared_ptr<StatusWriter> status() const;

  void tell(const GroupMade& group) noexcept;
  // Before the process ends: returns when it has been written.
  void tell(const Fault& fault) noexcept;

  // Whether the job is to stop: true on every rank at the same call, counted from 0.
  bool stop_requested();
  void request_stop(int signal) noexcept;  // safe in a signal handler
  // The failure that the agent has told, or tells within the limit.
  std::optional<Failure> failure(std::chrono::milliseconds limit = {});
  bool usable() const;  // for another World of this process
  // Whether `lockstep run` started this rank: it shows the job's failure. False until the agent has answered.
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
  // A child of fork(): the connection is its parent's, and so are threads that may hold any lock here.
  bool in_child() const;
  Failure failure_of_agent(std::string cause) const;
  [[noreturn]] void throw_failure() const;

  const int process_;
  Fd socket_;
  std::mutex write_mutex_;
  std::atomic<int> stop_signal_ = 0;  // from a signal handler
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
  int agent_process_ = 0;          // as this process sees it; 0: it does not, and /proc says nothing of it
  std::uint64_t agent_start_ = 0;  // another process may have its number later
  std::optional<Clock::time_point> agent_stopped_;
};

}  // namespace lockstep::control
