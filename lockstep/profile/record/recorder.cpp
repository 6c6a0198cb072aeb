#include <lockstep/profile/record/recorder.h>

#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>

#include <fmt/format.h>

namespace lockstep::profile {

namespace {

// True for spans that say what a thread does. A pipeline action or user range only says what for.
bool says_what(SpanKind kind) {
  return kind == SpanKind::operation || kind == SpanKind::wait || kind == SpanKind::data ||
         kind == SpanKind::optimizer;
}

std::int64_t thread_time() noexcept {
  timespec time{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return std::int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

constexpr std::int64_t kMemoryEvery = 500'000;  // ns

std::atomic<std::uint64_t> recorders = 0;

}  // namespace

std::int64_t steady_now() noexcept {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

struct Recorder::ThreadRecord {
  struct Open {
    std::size_t place;  // index into events, or an invalid one
    bool says;
  };
  std::mutex mutex;
  std::int32_t number = 0;
  std::int64_t id = 0;  // the system's ID
  std::string title;
  std::vector<Event> events;
  std::vector<Open> open;
  int saying = 0;  // number of open spans that say what the thread does
  // Cache of names, so that most lookups avoid the lock shared by all threads. Used only by this thread.
  struct Hash : std::hash<std::string_view> {
    using is_transparent = void;
  };
  std::unordered_map<std::string, std::int32_t, Hash, std::equal_to<>> names;
  static constexpr auto kNowhere = static_cast<std::size_t>(-1);
};

Recorder::Recorder(bool with_memory) : id_(++recorders), with_memory_(with_memory) {}
Recorder::~Recorder() = default;

Recorder::ThreadRecord& Recorder::thread_record() noexcept {
  thread_local std::uint64_t owner = 0;
  thread_local ThreadRecord* mine = nullptr;
  if (owner == id_) return *mine;
  std::lock_guard lock(mutex_);
  auto& place = thread_records_[std::this_thread::get_id()];
  if (!place) {
    place = std::make_unique<ThreadRecord>();
    place->number = static_cast<std::int32_t>(thread_records_.size() - 1);
    place->id = ::syscall(SYS_gettid);
    place->title = fmt::format("thread {}", place->id);
  }
  owner = id_;
  mine = place.get();
  return *mine;
}

std::int32_t Recorder::name_of(std::string_view text) {
  std::lock_guard lock(mutex_);
  return name_under_lock(text);
}

std::int32_t Recorder::name_under_lock(std::string_view text) {
  const auto [place, is_new] =
      names_.try_emplace(std::string(text), static_cast<std::int32_t>(texts_.size()));
  if (is_new) texts_.emplace_back(text);
  return place->second;
}

void Recorder::begin(SpanKind kind, std::string_view name, std::int64_t bytes, detail::SpanOf of) noexcept {
  ThreadRecord& thread_record = this->thread_record();
  const bool says = says_what(kind);
  ThreadRecord::Open open{ThreadRecord::kNowhere, says};
  // Before taking the thread record's lock: mutex_, which this needs, must be locked first.
  const auto known = recording_.load(std::memory_order_acquire) ? known_name(thread_record, name) : -1;
  const auto transfer = known >= 0 && of.group != 0 ? transfer_of(of) : -1;
  std::lock_guard lock(thread_record.mutex);
  if (known >= 0) {
    open.place = thread_record.events.size();
    const auto depth = static_cast<std::int32_t>(thread_record.open.size());
    thread_record.events.push_back(
        {.kind = kind, .name = known, .thread = thread_record.number, .depth = depth});
    count_.fetch_add(1, std::memory_order_relaxed);
    Event& event = thread_record.events.back();
    event.bytes = bytes;
    event.transfer = transfer;
    if (says && thread_record.saying == 0) event.cpu_begin = thread_time();
    event.begin = steady_now();
  }
  thread_record.saying += says;
  thread_record.open.push_back(open);
}

std::int32_t Recorder::known_name(ThreadRecord& thread_record, std::string_view name) {
  const auto known = thread_record.names.find(name);
  return known != thread_record.names.end()
             ? known->second
             : thread_record.names.emplace(std::string(name), name_of(name)).first->second;
}

std::int64_t Recorder::transfer_of(const detail::SpanOf& of) {
  std::lock_guard lock(mutex_);
  const auto place = running_.find({of.group, of.sequence, of.message});
  return place == running_.end() ? -1 : static_cast<std::int64_t>(place->second);
}

void Recorder::end() noexcept {
  ThreadRecord& thread_record = this->thread_record();
  std::lock_guard lock(thread_record.mutex);
  if (thread_record.open.empty()) return;
  const auto open = thread_record.open.back();
  thread_record.open.pop_back();
  thread_record.saying -= open.says;
  if (open.place >= thread_record.events.size()) return;  // opened in an earlier window
  Event& event = thread_record.events[open.place];
  event.end = steady_now();
  if (open.says && thread_record.saying == 0) event.cpu_end = thread_time();
}

void Recorder::flops(std::int64_t count) noexcept {
  ThreadRecord& thread_record = this->thread_record();
  std::lock_guard lock(thread_record.mutex);
  if (!thread_record.open.empty() && thread_record.open.back().place < thread_record.events.size())
    thread_record.events[thread_record.open.back().place].flops += count;
}

bool Recorder::wants_memory() noexcept {
  if (!with_memory_ || !recording_.load(std::memory_order_relaxed)) return false;
  auto next = next_memory_.load(std::memory_order_relaxed);
  const auto now = steady_now();
  return now >= next && next_memory_.compare_exchange_strong(next, now + kMemoryEvery);
}

void Recorder::memory(std::int64_t bytes) noexcept {
  std::lock_guard lock(mutex_);
  if (recording_ && with_memory_) memory_.push_back({steady_now(), bytes});
}

void Recorder::note(std::string_view what, std::string_view value) noexcept {
  std::lock_guard lock(mutex_);
  notes_.insert_or_assign(std::string(what), std::string(value));
}

void Recorder::started(const Call& call) noexcept {
  const auto now = steady_now();
  const bool message = detail::point_to_point(call.operation);
  if (over_ || (!message && !recording_.load(std::memory_order_relaxed))) return;
  const auto tag = name_of(call.tag);
  ThreadRecord& thread_record = this->thread_record();
  std::lock_guard lock(mutex_);
  std::int64_t nth = 0;
  if (message) nth = messages_[{call.group_key, call.root, call.tag, call.operation == Operation::send}]++;
  if (!recording_) return;
  const auto [group, is_new] =
      group_numbers_.try_emplace(call.group_key, static_cast<std::int32_t>(groups_.size()));
  if (is_new) groups_.push_back({call.group_key, call.group, call.rank, call.size});
  running_[{call.group_key, call.sequence, message}] = transfers_.size();
  transfers_.push_back({.operation = call.operation,
                        .group = group->second,
                        .sequence = call.sequence,
                        .bytes = call.bytes,
                        .tag = tag,
                        .peer = message ? call.root : -1,
                        .nth = nth,
                        .begin = now});
  // This thread is already waiting for it.
  std::lock_guard inner(thread_record.mutex);
  if (thread_record.open.empty() || thread_record.open.back().place >= thread_record.events.size()) return;
  Event& event = thread_record.events[thread_record.open.back().place];
  if (event.kind == SpanKind::wait && event.transfer < 0)
    event.transfer = static_cast<std::int64_t>(transfers_.size()) - 1;
}

void Recorder::ended(const Call& call, bool failed) noexcept {
  if (!recording_.load(std::memory_order_relaxed)) return;
  const auto now = steady_now();
  std::lock_guard lock(mutex_);
  const auto place = running_.find({call.group_key, call.sequence, detail::point_to_point(call.operation)});
  if (place == running_.end()) return;
  transfers_[place->second].end = now;
  transfers_[place->second].unfinished = failed;
  running_.erase(place);
}

void Recorder::start() {
  thread_record();  // creates the main thread's record
  std::lock_guard lock(mutex_);
  for (auto& [thread, thread_record] : thread_records_) {
    std::lock_guard inner(thread_record->mutex);
    thread_record->events.clear();
    for (auto& open : thread_record->open) open.place = ThreadRecord::kNowhere;
  }
  steps_.clear();
  memory_.clear();
  transfers_.clear();
  running_.clear();
  origin_ = step_begin_ = steady_now();
  main_thread_ = std::this_thread::get_id();
  recording_.store(true, std::memory_order_release);
  mark();
}

// Records the CPU time at a step's border, which lies between operators.
void Recorder::mark() {
  const auto known = thread_records_.find(std::this_thread::get_id());
  if (known == thread_records_.end()) return;
  ThreadRecord& thread_record = *known->second;
  std::lock_guard lock(thread_record.mutex);
  if (thread_record.saying > 0) return;
  const auto now = steady_now(), used = thread_time();
  thread_record.events.push_back({.kind = SpanKind::range,
                                  .name = name_under_lock("step"),
                                  .thread = thread_record.number,
                                  .depth = static_cast<std::int32_t>(thread_record.open.size()),
                                  .begin = now,
                                  .end = now,
                                  .cpu_begin = used,
                                  .cpu_end = used});
}

void Recorder::step(std::int64_t number) {
  std::lock_guard lock(mutex_);
  if (!recording_) return;
  const auto now = steady_now();
  steps_.push_back({number, step_begin_, now});
  step_begin_ = now;
  mark();
}

std::size_t Recorder::steps() {
  std::lock_guard lock(mutex_);
  return steps_.size();
}

RankProfile Recorder::stop() {
  std::lock_guard lock(mutex_);
  recording_ = false;
  const auto now = steady_now();
  RankProfile profile;
  profile.origin = origin_;
  profile.names = texts_;
  profile.groups = groups_;
  profile.notes = notes_;
  profile.threads.resize(thread_records_.size());
  profile.thread_ids.resize(thread_records_.size());
  for (auto& [thread, thread_record] : thread_records_) {
    std::lock_guard inner(thread_record->mutex);
    const bool is_main = thread == main_thread_;
    if (is_main) profile.main_thread = thread_record->number;
    profile.threads[static_cast<std::size_t>(thread_record->number)] =
        is_main ? "main" : thread_record->title;
    profile.thread_ids[static_cast<std::size_t>(thread_record->number)] = thread_record->id;
    for (Event& event : thread_record->events) {
      if (event.end == 0) event.end = std::max(now, event.begin);  // it may have begun after `now` was read
      event.begin -= origin_;
      event.end -= origin_;
      profile.events.push_back(event);
    }
    thread_record->events = {};
    for (auto& open : thread_record->open) open.place = ThreadRecord::kNowhere;
  }
  count_ = 0;
  profile.steps = std::move(steps_);
  for (auto& step : profile.steps) step.begin -= origin_, step.end -= origin_;
  profile.memory = std::move(memory_);
  for (auto& sample : profile.memory) sample.time -= origin_;
  for (auto& transfer : transfers_) {
    if (transfer.end == 0) {
      transfer.end = std::max(now, transfer.begin);
      transfer.unfinished = true;
    }
    transfer.begin -= origin_;
    transfer.end -= origin_;
    profile.transfers.push_back(transfer);
  }
  transfers_ = {};
  running_.clear();
  groups_.clear();
  group_numbers_.clear();
  return profile;
}

}  // namespace lockstep::profile
