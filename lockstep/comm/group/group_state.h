// GroupState: the state that the copies of a Group share on one rank.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <c10/util/FunctionRef.h>
#include <lockstep/base/error.h>
#include <lockstep/comm/c10d/transport.h>
#include <lockstep/comm/group.h>
#include <lockstep/comm/group/device_watch.h>
#include <lockstep/control/board/board.h>

namespace lockstep::detail {

class WorkState;
class WorldState;

// Shared with the operations in flight, which may outlive the group.
using Transports = std::map<at::DeviceType, std::shared_ptr<Transport>>;

// Why waiting is pointless: the first failure.
struct Verdict {
  std::string cause;
  std::optional<int> rank;  // world rank that failed, if known
  CommError::Kind kind = CommError::Kind::stopped;
};

// Why a process that was forked from that rank of the world is refused.
std::string forked_text(int rank);

// FNV-1a: the same on every rank, whatever its standard library.
std::int64_t hash_of(const std::string& text);

class GroupState : public std::enable_shared_from_this<GroupState> {
 public:
  // key: the same on every member; different for every group.
  GroupState(std::shared_ptr<WorldState> world, std::string name, const std::string& key,
             std::vector<int> ranks, int rank, std::chrono::milliseconds timeout, Transports transports);
  ~GroupState();

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(ranks_.size()); }
  const std::vector<int>& ranks() const { return ranks_; }
  const std::string& name() const { return name_; }
  std::chrono::milliseconds timeout() const { return timeout_; }
  WorldState& world() const { return *world_; }
  std::shared_ptr<Transport> transport(at::DeviceType device) const;  // null if there is none
  void check_open() const;                                            // ConfigError after the World has left
  // The device on which small values are sent.
  at::Device control_device() const;

  // Starts an operation: assigns order and sequence number, notifies observers and compares the calls.
  // `start` passes the tensors to the engine. The caller has already checked for errors that it can fix.
  using Start = c10::function_ref<void(Transport&, WorkState&)>;
  Work issue(Call call, at::Device device, Timeout timeout, Start start);
  // Submits what `calls` issues to the engines as one batch.
  void coalesce(const std::function<void()>& calls);
  // Runs `messages`, the engine's messages that make up one operation, as one batch if the engine can. On
  // NCCL they are then ordered with the collectives and not with the program's messages. The caller holds the
  // order of collectives.
  void together(Transport& engine, WorkState& pending, c10::function_ref<void()> messages);
  // Throws ConfigError if this thread is within coalesce(), of any group.
  void refuse_within_coalesce(std::string_view what) const;

  // Fails the group for good and wakes all waiters in its engines. The first verdict is kept.
  void fail(Verdict verdict) noexcept;
  // The same in two steps, for several groups that share an engine: all of them have the verdict before any
  // waiter wakes. judge() returns false if there already was a verdict.
  bool judge(Verdict verdict) noexcept;
  void wake() noexcept;
  // Translates a world rank to a rank of the group.
  std::optional<int> place_of(std::optional<int> world_rank) const;
  std::optional<Verdict> verdict() const;

  // Calls on_fail when the group fails, or at once if it has failed. Never calls it after its own
  // destruction.
  class FailureWatch {
   public:
    FailureWatch(GroupState& group, std::function<void()> on_fail);
    ~FailureWatch();
    FailureWatch(const FailureWatch&) = delete;
    FailureWatch& operator=(const FailureWatch&) = delete;

   private:
    GroupState& group_;
    std::list<std::function<void()>>::iterator place_;
  };

  // Reports to the control plane where this rank is and what it waits for.
  void note_wait(const Call& call, bool waits) noexcept;
  control::StatusWriter* status() const { return status_.get(); }  // null without a control plane
  void note_end(const Call& call, control::FlightRing::Ticket record, bool failed) noexcept;
  // Number of collectives that a rank had begun when it left the group in order; empty if it has not left.
  std::optional<std::uint64_t> left_after(int rank);

  // What calls have thrown so far: nothing, the refusal of one operation, or the group's failure.
  enum class Told : std::uint8_t { nothing, refusal, failure };
  Told told() const { return told_; }
  void note_told(Told what) noexcept;

  // Keeps an operation whose Work was dropped before it ended, or before any call threw its error.
  void adopt(std::shared_ptr<WorkState> pending) noexcept;
  // Waits for the operation on a separate thread, so that polling can see its completion.
  void watch(std::shared_ptr<WorkState> pending);

  // Watches the deadline of an operation that a stream waits for and the device has not finished.
  void watch_device(c10::intrusive_ptr<c10d::Work> work, const Call& call, AwakeClock::time_point begun,
                    AwakeClock::time_point deadline);

  // True in a process forked from the rank: what it does must not affect the rank.
  bool in_child() const;
  void refuse_in_child(const Call& call) const;  // CommError

  // Returns the number of the model, counting from 1.
  int add_model() { return ++models_; }

  // Stops issuing. Returns the operations in flight, in the order of their start; dropped: those whose Work
  // was dropped.
  struct UnderWay {
    std::vector<std::shared_ptr<WorkState>> all, dropped;
  };
  UnderWay shut();
  // After shut(): releases the engines at once if a peer waits for this rank in a collective that it will not
  // join, so that the peer gets its error.
  void give_way() noexcept;
  // Releases the engines once the operations are over. With in_order = false, or after a failure, leaves at
  // once without waiting for any engine.
  void close(bool in_order) noexcept;

 private:
  int line_of(const Call& call);
  control::FlightRing::Ticket note_begin(const WorkState& pending);
  std::shared_ptr<Transport> usable_engine(const Call& call, at::DeviceType device);
  void reap();
  // Records an operation that an engine has: the World finishes it before it leaves, even if its Work is
  // still held.
  void keep_track(const std::shared_ptr<WorkState>& pending);
  void compare(const WorkState& pending);
  // Wait for peers before an operation of all ranks, and before a message.
  void meet_all(Transport& engine, const WorkState& pending);
  void meet_peer(Transport& engine, const WorkState& pending, std::unique_lock<std::mutex>& order);
  void add_to_batch(const std::shared_ptr<Transport>& engine, const std::shared_ptr<WorkState>& pending);
  void hand_over();  // submits the batch
  // The group whose coalesce() this thread is in: an engine's batch may be per thread.
  static const GroupState*& coalescing();
  ConfigError gone() const;
  void await_device() noexcept;

  const std::shared_ptr<WorldState> world_;
  const std::string name_;
  const std::vector<int> ranks_;
  const int rank_;
  const std::chrono::milliseconds timeout_;

  Transports transports_;
  // Collectives are issued one at a time, so all ranks see one order. Messages do not wait behind them.
  std::mutex issue_mutex_, message_mutex_;
  std::atomic<std::uint64_t> collectives_ = 0, messages_ = 0;
  std::atomic<int> models_ = 0;
  std::atomic<Told> told_ = Told::nothing;
  // Held by coalesce, under both mutexes: the operations in the batch, and the engines that have begun one.
  std::vector<std::shared_ptr<WorkState>> batch_;
  std::map<std::shared_ptr<Transport>, c10::intrusive_ptr<c10d::Work>> batched_works_;

  const std::int64_t key_;
  const std::uint64_t generation_;                 // of the process: different in a child of fork()
  std::shared_ptr<control::StatusWriter> status_;  // null without a control plane
  std::atomic<int> collective_line_ = -1, message_line_ = -1;
  bool has_message_line_ = false;
  // Caches the texts of a call: a loop makes the same call from the same line again and again.
  class Place {
   public:
    const control::CallTexts& texts(const Call& call);

   private:
    const char* file_ = nullptr;
    std::uint_least32_t line_ = 0;
    int operation_ = -1, dtype_ = -1, reduction_ = -1;
    control::CallTexts texts_{};
  };
  Place collectives_place_, messages_place_;  // under the mutexes above

  mutable std::mutex state_mutex_;
  std::optional<Verdict> verdict_;
  std::atomic<bool> failed_ = false;
  bool closed_ = false, left_engines_ = false;
  std::vector<std::weak_ptr<WorkState>> issued_;  // expired and settled ones are removed now and then
  std::size_t issued_limit_ = 64;                 // size at which all of issued_ is scanned
  std::list<std::shared_ptr<WorkState>> dropped_;
  std::list<std::function<void()>> on_fail_;
  std::map<int, std::uint64_t> left_;          // results of left_after()
  std::unique_ptr<DeviceWatch> device_watch_;  // null before the first such operation
  bool without_engines_ = false;               // True once closed: the engines are released or about to be
};

}  // namespace lockstep::detail
