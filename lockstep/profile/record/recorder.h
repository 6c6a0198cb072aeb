// Records what the threads of one rank do during a window of steps.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include <lockstep/profile/record/rank_profile.h>

namespace lockstep::profile {

std::int64_t steady_now() noexcept;  // nanoseconds

class Recorder final : public detail::SpanSink {
 public:
  explicit Recorder(bool with_memory = true);
  ~Recorder() override;

  // Recording takes place between start() and stop(); start() discards earlier data. The caller is the main
  // thread.
  void start();
  void step(std::int64_t number);  // ends one step and begins the next
  // Returns the window's data and closes open spans at the current time. The caller fills in facts about the
  // run.
  RankProfile stop();
  // Declares that nothing will be recorded any more, so that messages need not be counted.
  void retire() noexcept { over_ = true; }
  std::size_t steps();
  std::int64_t events() const noexcept { return count_.load(std::memory_order_relaxed); }

  void begin(SpanKind kind, std::string_view name, std::int64_t bytes, detail::SpanOf of) noexcept override;
  void end() noexcept override;
  void note(std::string_view what, std::string_view value) noexcept override;
  void flops(std::int64_t count) noexcept override;
  void memory(std::int64_t bytes) noexcept;
  // True if it is time for another memory sample: sampling after every operator would cost more than the
  // operators.
  bool wants_memory() noexcept;

  void started(const Call& call) noexcept;
  void ended(const Call& call, bool failed) noexcept;

 private:
  struct ThreadRecord;
  ThreadRecord& thread_record() noexcept;
  void mark();
  std::int32_t name_of(std::string_view text);
  std::int32_t name_under_lock(std::string_view text);  // the same; the caller holds the mutex
  std::int32_t known_name(ThreadRecord& thread_record, std::string_view name);
  std::int64_t transfer_of(const detail::SpanOf& of);

  const std::uint64_t id_;
  const bool with_memory_;
  std::atomic<bool> recording_ = false, over_ = false;
  std::atomic<std::int64_t> count_ = 0;
  std::atomic<std::int64_t> next_memory_ = 0;

  std::mutex mutex_;  // protects everything below; each thread record has its own lock
  std::map<std::thread::id, std::unique_ptr<ThreadRecord>> thread_records_;
  std::unordered_map<std::string, std::int32_t> names_;
  std::vector<std::string> texts_;
  std::int64_t origin_ = 0, step_begin_ = 0;
  std::thread::id main_thread_;
  std::vector<StepOf> steps_;
  std::vector<Sample> memory_;
  std::vector<Transfer> transfers_;
  std::vector<GroupOf> groups_;
  std::map<std::int64_t, std::int32_t> group_numbers_;
  std::map<std::tuple<std::int64_t, std::uint64_t, bool>, std::size_t> running_;  // group, sequence, message
  // Messages are counted from the start of the run, so that both ends agree on their numbers.
  std::map<std::tuple<std::int64_t, int, std::string, bool>, std::int64_t> messages_;
  std::map<std::string, std::string> notes_;
};

}  // namespace lockstep::profile
