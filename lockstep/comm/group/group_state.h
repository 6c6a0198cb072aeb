// What the copies of a Group share on one rank.
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

// Shared with the operations under way, which may outlast the group.
using Transports = std::map<at::DeviceType, std::shared_ptr<Transport>>;

// Why nobody should wait any longer.
struct Verdict {
  std::string cause;
  std::optional<int> rank;  // of the world: who failed, where known
  CommError::Kind kind = CommError::Kind::stopped;
};

// Why a process that was forked from that rank of the world is refused.
std::string forked_text(int rank);

// The same on every rank, whatever its library: FNV-1a.
std::int64_t hash_of(const std::string& text);

class GroupState : public std::enable_shared_from_this<GroupState> {
 public:
  // key: the same on every member, and of no other group.
  GroupState(std::shared_ptr<WorldState> world, std::string name, const std::string& key,
             std::vector<int> ranks, int rank, std::chrono::milliseconds timeout, Transports transports);
  ~GroupState();

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(ranks_.size()); }
  const std::vector<int>& ranks() const { return ranks_; }
  const std::string& name() const { return name_; }
  std::chrono::milliseconds timeout() const { return timeout_; }
  WorldState& world() const { return *world_; }
  std::shared_ptr<Transport> transport(at::DeviceType device) const;  // null where there is none
  void check_open() const;                                            // ConfigError when the World is gone
  // The device on which small values travel.
  at::Device control_device() const;

  // Starts an operation: order, sequence number, observers, the comparison of calls. `start` hands the
  // tensors to the engine. Errors that the caller can fix have been thrown before.
  using Start = c10::function_ref<void(Transport&, WorkState&)>;
  Work issue(Call call, at::Device device, Timeout timeout, Start start);
  // What `calls` issues goes to the engines as one.
  void coalesce(const std::function<void()>& calls);
  // The engine's messages that an operation is made of, as one where the engine can: on NCCL they go the way
  // of collectives then, and not between the messages of the program. Of who holds the order of collectives.
  void together(Transport& engine, WorkState& pending, c10::function_ref<void()> messages);
  // ConfigError where this thread is within coalesce(), of whatever group.
  void refuse_within_coalesce(std::string_view what) const;

  // The group is of no use from here on: wakes whoever waits in its engines. The first verdict stays.
  void fail(Verdict verdict) noexcept;
  // The same in two steps, for several groups that share an engine: all know the verdict before any of them
  // is woken by it. judge() is false where there was a verdict already.
  bool judge(Verdict verdict) noexcept;
  void wake() noexcept;
  // The place in the group of a rank of the world.
  std::optional<int> place_of(std::optional<int> world_rank) const;
  std::optional<Verdict> verdict() const;

  // Has on_fail called when the group fails, at once if it has failed; not after it is destroyed.
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

  // For the control plane: where this rank is, and what it waits for.
  void note_wait(const Call& call, bool waits) noexcept;
  control::StatusWriter* status() const { return status_.get(); }  // null where there is no control plane
  void note_end(const Call& call, control::FlightRing::Ticket record, bool failed) noexcept;
  // How many collectives that rank had begun when it let go of the group in order; nothing: it did not.
  std::optional<std::uint64_t> left_after(int rank);

  // What calls have thrown: nothing, or the refusal of one operation, or what ended the group.
  enum class Told : std::uint8_t { nothing, refusal, failure };
  Told told() const { return told_; }
  void note_told(Told what) noexcept;

  // Takes over an operation whose Work was dropped, and which has not ended or of whose failure nobody has heard.
  void adopt(std::shared_ptr<WorkState> pending) noexcept;
  // Waits for it on a thread of its own, so that its completion can be seen by polling.
  void watch(std::shared_ptr<WorkState> pending);

  // What a device has still to do of an operation that a stream waits for.
  void watch_device(c10::intrusive_ptr<c10d::Work> work, const Call& call, AwakeClock::time_point begun,
                    AwakeClock::time_point deadline);

  // This process was forked from the rank: whatever it does is not the rank's doing.
  bool in_child() const;
  void refuse_in_child(const Call& call) const;  // CommError

  // Returns the number of the model, from 1.
  int add_model() { return ++models_; }

  // Nothing more is issued. Returns the operations under way, in the order of their start; dropped: those among
  // them whose Work is gone.
  struct UnderWay {
    std::vector<std::shared_ptr<WorkState>> all, dropped;
  };
  UnderWay shut();
  // After shut(): where a peer waits for this rank in a collective that it will not come to, lets go of the
  // engines now, so that the peer gets its error.
  void give_way() noexcept;
  // Lets go of the engines, for what is under way is over; in_order = false, or after a failure: leaves at
  // once, and no engine is waited for.
  void close(bool in_order) noexcept;

 private:
  int line_of(const Call& call);
  control::FlightRing::Ticket note_begin(const WorkState& pending);
  std::shared_ptr<Transport> usable_engine(const Call& call, at::DeviceType device);
  void reap();
  // What an engine has been given: the World finishes it before it leaves, also where the Work is still held.
  void keep_track(const std::shared_ptr<WorkState>& pending);
  void compare(const WorkState& pending);
  // Before an operation of all ranks, and before a message.
  void meet_all(Transport& engine, const WorkState& pending);
  void meet_peer(Transport& engine, const WorkState& pending, std::unique_lock<std::mutex>& order);
  void add_to_batch(const std::shared_ptr<Transport>& engine, const std::shared_ptr<WorkState>& pending);
  void hand_over();  // what is in the batch
  // Whose coalesce() this thread is in: an engine's batch may be the thread's, too.
  static const GroupState*& coalescing();
  ConfigError gone() const;
  void await_device() noexcept;

  const std::shared_ptr<WorldState> world_;
  const std::string name_;
  const std::vector<int> ranks_;
  const int rank_;
  const std::chrono::milliseconds timeout_;

  Transports transports_;
  // One collective is issued at a time, so all ranks see one order. Messages do not wait behind them.
  std::mutex issue_mutex_, message_mutex_;
  std::atomic<std::uint64_t> collectives_ = 0, messages_ = 0;
  std::atomic<int> models_ = 0;
  std::atomic<Told> told_ = Told::nothing;
  // Of who holds both, to coalesce: what is in the batch, and the engines that have begun one.
  std::vector<std::shared_ptr<WorkState>> batch_;
  std::map<std::shared_ptr<Transport>, c10::intrusive_ptr<c10d::Work>> batched_works_;

  const std::int64_t key_;
  const std::uint64_t generation_;                 // of processes: another one in a child of fork()
  std::shared_ptr<control::StatusWriter> status_;  // null where there is no control plane
  std::atomic<int> collective_line_ = -1, message_line_ = -1;
  bool has_message_line_ = false;
  // A loop makes the same call from the same line again and again: its texts are made once.
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
  std::vector<std::weak_ptr<WorkState>> issued_;  // those that are gone or settled are removed now and then
  std::size_t issued_limit_ = 64;                 // when issued_ is looked through as a whole
  std::list<std::shared_ptr<WorkState>> dropped_;
  std::list<std::function<void()>> on_fail_;
  std::map<int, std::uint64_t> left_;          // what left_after() has found out
  std::unique_ptr<DeviceWatch> device_watch_;  // from the first such operation on
  bool without_engines_ = false;               // closed, and they are gone or going
};

}  // namespace lockstep::detail
