// Everything that a World owns: identity, store, groups, observers.
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <lockstep/comm/group/group_state.h>
#include <lockstep/comm/world.h>
#include <lockstep/control/client.h>
#include <lockstep/launch/identity/identity.h>
#include <lockstep/metrics/metric_log.h>

namespace lockstep::detail {

class ThreadsJob;

class WorldState : public std::enable_shared_from_this<WorldState> {
 public:
  // threads: non-null when ranks are threads of this process; no launcher and no network is used then.
  WorldState(Identity identity, WorldOptions options, std::shared_ptr<ThreadsJob> threads = nullptr);

  // Waits for the other ranks and makes the group of all ranks.
  void join();

  const Identity& identity() const { return identity_; }
  at::Device device() const { return device_; }
  std::shared_ptr<GroupState> default_group() const;
  std::shared_ptr<GroupState> make_group(std::vector<int> ranks, GroupOptions options);
  bool compares_calls() const { return compares_calls_; }

  void fail(Verdict verdict) noexcept;
  bool judge(Verdict verdict);  // as in GroupState
  void wake();
  bool failed() const { return failed_; }
  bool in_threads() const { return threads_ != nullptr; }
  // Waits at most that long for the control plane's verdict: an engine that lost a peer knows less about the
  // cause.
  void await_failure(std::chrono::milliseconds limit);
  control::Client* client() const { return client_.get(); }  // null without a control plane
  // How a rank left a group, for members that are still in an operation: see GroupState::left_after.
  void note_left(std::int64_t group, int rank, std::uint64_t collectives) noexcept;
  std::optional<std::uint64_t> left_after(std::int64_t group, int rank) noexcept;
  void step(std::int64_t step);
  void log_metric(std::string_view name, double value, std::optional<std::int64_t> step);
  bool stop_requested();
  void close(bool in_order) noexcept;
  // A call has thrown a CommError, so the program knows about the failure.
  void note_told() noexcept;
  // After close(): the error of an operation whose Work was dropped, if ranks are threads and no call has
  // thrown it.
  std::exception_ptr unheard() const { return unheard_; }

  void add_observer(std::shared_ptr<Observer> observer);
  void remove_observer(const std::shared_ptr<Observer>& observer);
  bool is_observed() const { return observed_.load(std::memory_order_acquire); }
  template <typename F>
  void observe(F&& tell) const {
    if (!is_observed()) return;
    for (const auto& observer : observers()) tell(*observer);
  }

 private:
  std::vector<std::shared_ptr<Observer>> observers() const;
  std::vector<std::shared_ptr<GroupState>> live_groups() const;
  Verdict verdict() const;
  bool in_child() const;
  void finish_operations(const std::vector<std::shared_ptr<GroupState>>& groups, bool in_order);

  Identity identity_;
  const std::chrono::milliseconds timeout_, join_timeout_;
  const std::string backend_;  // as given
  const bool compares_calls_;
  const bool cpu_allocator_;
  const std::shared_ptr<ThreadsJob> threads_;
  const std::string metrics_folder_, metrics_format_;
  std::unique_ptr<MetricLog> metrics_;  // null: nothing is written
  std::atomic<std::int64_t> step_ = -1;
  std::vector<int> nodes_;  // host number of each rank: ranks with the same number share a host
  std::map<at::DeviceType, std::string> backends_;
  at::Device device_ = at::kCPU;
  std::string address_;  // this host's address as peers reach it; empty: loopback
  std::shared_ptr<control::Client> client_;
  std::shared_ptr<control::Channel> channel_;
  std::string prefix_;  // prefix of this World's names: the process may have had other Worlds before
  c10::intrusive_ptr<c10d::Store> store_;

  mutable std::mutex mutex_;
  std::optional<Verdict> verdict_;
  std::atomic<bool> failed_ = false, closed_ = false;
  std::atomic<bool> told_ = false, fails_at_exit_ = false;
  std::exception_ptr unheard_;
  const std::uint64_t generation_;  // of the process: different in a child of fork()
  std::shared_ptr<GroupState> default_group_;
  std::vector<std::weak_ptr<GroupState>> groups_;
  std::map<std::string, int> group_counts_;  // number of groups made of each list of ranks
  std::vector<std::shared_ptr<Observer>> observers_;
  std::atomic<bool> observed_ = false;
};

// Registers a function that is called with every World of this process that has joined, on the thread that
// joined it. Call it before main(): parts of the library that build on this one hook in here.
void when_joined(void (*call)(const std::shared_ptr<WorldState>&));

}  // namespace lockstep::detail
