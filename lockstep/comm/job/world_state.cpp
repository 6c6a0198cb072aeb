#include <lockstep/comm/job/world_state.h>

#include <unistd.h>

#include <algorithm>
#include <set>
#include <thread>

#include <ATen/Context.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <lockstep/base/environment.h>
#include <lockstep/base/log.h>
#include <lockstep/comm/c10d/backends.h>
#include <lockstep/comm/c10d/store.h>
#include <lockstep/comm/cpu_memory.h>
#include <lockstep/comm/group/error_text.h>
#include <lockstep/comm/group/work_state.h>
#include <lockstep/comm/job/rendezvous.h>
#include <lockstep/comm/job/stop.h>
#include <lockstep/comm/transports/shm/engine/fork.h>
#include <lockstep/comm/transports/threads/threads.h>
#include <lockstep/os/exit_status.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

namespace lockstep::detail {

using std::chrono::milliseconds;

namespace {

milliseconds limit(const Timeout& given, const char* variable, milliseconds fallback) {
  auto value = given ? given : env::duration(variable);
  return value ? checked_timeout(*value) : fallback;
}

Verdict verdict_of(const control::Failure& failure) {
  return {failure.text(), failure.rank >= 0 ? std::optional(failure.rank) : std::nullopt, failure.kind};
}

std::string given_or(const std::string& given, const char* variable, const char* fallback) {
  return !given.empty() ? given : env::text(variable).value_or(fallback);
}

// Interval between two checks whether the operations in flight are over when the World leaves.
constexpr std::chrono::microseconds kFirstNap(50), kLongestNap(5000);
// How long it waits for that without a word.
constexpr std::chrono::seconds kPatience(1);

}  // namespace

WorldState::WorldState(Identity identity, WorldOptions options, std::shared_ptr<ThreadsJob> threads)
    : identity_(std::move(identity)),
      timeout_(limit(options.timeout, "LOCKSTEP_TIMEOUT", std::chrono::minutes(30))),
      join_timeout_(limit(options.join_timeout, "LOCKSTEP_JOIN_TIMEOUT", std::chrono::minutes(5))),
      backend_(!options.backend.empty() ? options.backend
               : threads                ? "auto"  // the environment variable is for processes
                                        : env::text("LOCKSTEP_BACKEND").value_or("auto")),
      compares_calls_(env::flag("LOCKSTEP_CHECK", false)),
      cpu_allocator_(options.cpu_allocator.value_or(env::flag("LOCKSTEP_CPU_ALLOCATOR", true))),
      threads_(std::move(threads)),
      metrics_folder_(given_or(options.metrics, "LOCKSTEP_METRICS", "")),
      metrics_format_(given_or(options.metrics_format, "LOCKSTEP_METRICS_FORMAT", "jsonl")),
      nodes_(static_cast<std::size_t>(identity_.size), 0),
      generation_(shm::fork_generation()) {}

void WorldState::join() {
  set_log_prefix(fmt::format("rank {}", identity_.rank));
  check_backend_text(backend_, threads_ != nullptr);  // first, because it needs no other rank
  const auto format = parse_metric_format("metrics_format", metrics_format_);
  if (!metrics_folder_.empty())
    metrics_ = std::make_unique<MetricLog>(metrics_folder_, format, identity_.rank);
  if (threads_) {
    channel_ = threads_->store();
  } else if (identity_.size == 1) {
    channel_ = std::make_shared<control::LocalStore>();
    identity_.local_rank = 0, identity_.local_size = 1;
  } else {
    auto tell = [self = weak_from_this()](const control::Failure& failure) {
      auto state = self.lock();
      if (!state) return;
      state->fail(verdict_of(failure));
    };
    auto membership = join_job(identity_, join_timeout_, tell);
    channel_ = client_ = membership.client;
    prefix_ = membership.prefix;
    address_ = membership.address;
    nodes_ = choose_nodes(membership.nodes);
  }
  if (client_) tell_of_exceptions(client_);
  // Weak, because an abandoned engine may keep the store alive longer than this object.
  auto failed = [self = weak_from_this()] {
    auto state = self.lock();
    return state && state->failed_ ? state->verdict().cause : std::string();
  };
  store_ = c10::make_intrusive<JobStore>(channel_, prefix_, join_timeout_, failed);

  if (cpu_allocator_) use_caching_cpu_allocator();
  backends_ = choose_backends(backend_, identity_, nodes_, threads_ != nullptr);
  if (auto index = choose_device(backends_, identity_))
    device_ = at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(*index));
  std::vector<int> all(static_cast<std::size_t>(identity_.size));
  for (int r = 0; r < identity_.size; ++r) all[static_cast<std::size_t>(r)] = r;
  auto group = make_group(std::move(all), {.name = "world"});
  std::lock_guard lock(mutex_);
  default_group_ = std::move(group);
}

std::shared_ptr<GroupState> WorldState::default_group() const {
  std::lock_guard lock(mutex_);
  if (!default_group_) throw ConfigError("this World has left the job: it has no groups");
  return default_group_;
}

std::shared_ptr<GroupState> WorldState::make_group(std::vector<int> ranks, GroupOptions options) {
  const auto text = fmt::format("[{}]", fmt::join(ranks, ", "));
  auto place = std::find(ranks.begin(), ranks.end(), identity_.rank);
  auto sorted = ranks;
  std::sort(sorted.begin(), sorted.end());
  if (ranks.empty() || sorted.front() < 0 || sorted.back() >= identity_.size ||
      std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end())
    throw ConfigError(
        fmt::format("World::group: expected different ranks from 0 to {}, got {}", identity_.size - 1, text));
  if (place == ranks.end())
    throw ConfigError(
        fmt::format("World::group: rank {} is not one of the ranks {}: only its members make a group",
                    identity_.rank, text));
  if (closed_) throw ConfigError("this World has left the job: it cannot make groups");

  const auto name = options.name.empty() ? "world" + text : options.name;
  auto fail = [&](Verdict verdict) {
    CommError::Details details;
    details.operation = "making a group";
    details.group = name;
    details.rank = static_cast<int>(place - ranks.begin());
    details.size = static_cast<int>(ranks.size());
    details.cause = std::move(verdict.cause);
    details.kind = verdict.kind;
    note_told();
    throw CommError(std::move(details));
  };
  if (in_child()) fail({forked_text(identity_.rank), std::nullopt, CommError::Kind::engine});

  TransportContext context;
  context.ranks = ranks;
  for (int rank : ranks) context.nodes.push_back(nodes_.at(static_cast<std::size_t>(rank)));
  context.rank = static_cast<int>(place - ranks.begin());
  context.world_size = identity_.size;
  context.timeout = options.timeout ? checked_timeout(*options.timeout) : timeout_;
  context.address = address_;
  context.local_ranks = identity_.local_size.value_or(0);
  context.device_index = device_.is_cuda() ? device_.index() : identity_.local_rank.value_or(0);
  context.failed = [self = weak_from_this()] {
    auto state = self.lock();
    return !state || state->failed_;
  };
  const auto members = fmt::format("{}", fmt::join(sorted, ","));
  {
    // Members agree on this name because each has made the same number of groups of these ranks.
    std::lock_guard lock(mutex_);
    // Hashed, because a list of ranks may be longer than the store's keys.
    context.group = fmt::format("{:016x}/{}#{}", static_cast<std::uint64_t>(hash_of(members)), ranks.size(),
                                group_counts_[members]++);
  }
  context.store = c10::make_intrusive<c10d::PrefixStore>("group/" + context.group, store_);
  if (ranks.size() > 1) {
    try {
      agree_on_order(context, join_timeout_);
    } catch (...) {
      // No rank got the group, so the next attempt uses the same name.
      std::lock_guard lock(mutex_);
      --group_counts_[members];
      throw;
    }
  }
  if (failed_) fail(verdict());
  Transports transports;
  try {
    transports = make_transports(backends_, context, threads_.get());
  } catch (const ConfigError&) {
    throw;
  } catch (const std::exception& error) {
    // The control plane knows more about a peer that died than the engine that could not reach it.
    if (dynamic_cast<const Error*>(&error) == nullptr) await_failure(milliseconds(500));
    const auto* kinded = dynamic_cast<const Kinded*>(&error);
    fail(failed_ ? verdict()
                 : Verdict{plain_text(error), {}, kinded ? kinded->kind() : CommError::Kind::engine});
  }
  auto group =
      std::make_shared<GroupState>(shared_from_this(), name, prefix_ + context.group, std::move(ranks),
                                   context.rank, context.timeout, std::move(transports));
  std::lock_guard lock(mutex_);
  std::erase_if(groups_, [](const auto& known) { return known.expired(); });
  groups_.push_back(group);
  // A verdict that arrived meanwhile did not know this group.
  if (verdict_) group->fail(*verdict_);
  return group;
}

std::vector<std::shared_ptr<GroupState>> WorldState::live_groups() const {
  std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<GroupState>> groups;
  for (const auto& known : groups_)
    if (auto group = known.lock()) groups.push_back(std::move(group));
  return groups;
}

void WorldState::fail(Verdict verdict) noexcept {
  if (in_child()) return;
  try {
    if (judge(std::move(verdict))) wake();
  } catch (const std::exception& error) {
    log(LogLevel::error, "could not notify every group of a failure: {}", error.what());
  }
}

bool WorldState::judge(Verdict verdict) {
  bool first = false;
  {
    std::lock_guard lock(mutex_);
    first = !verdict_;
    if (first) verdict_ = verdict;
    verdict = *verdict_;
    failed_ = true;
  }
  // Even if another thread is already notifying the groups: the next call must find the verdict.
  for (auto& group : live_groups()) group->judge(verdict);
  return first;
}

void WorldState::wake() {
  if (channel_) channel_->wake();
  for (auto& group : live_groups()) group->wake();
}

void WorldState::await_failure(milliseconds limit) {
  if (!client_) return;
  if (failed_) {
    judge({});
    return;
  }
  // The groups get the verdict on the thread that receives it, but here it must be known at once.
  if (auto failure = client_->failure(limit)) judge(verdict_of(*failure));
}

namespace {

std::string left_key(const std::string& prefix, std::int64_t group, int rank) {
  return fmt::format("{}left/{:016x}/{}", prefix, static_cast<std::uint64_t>(group), rank);
}

}  // namespace

void WorldState::note_left(std::int64_t group, int rank, std::uint64_t collectives) noexcept {
  if (!client_) return;
  try {
    const control::StoreRequest request{.call = control::StoreCall::set,
                                        .keys = {left_key(prefix_, group, rank)},
                                        .values = {std::to_string(collectives)}};
    client_->ask(request, control::Clock::now(), [] { return false; });
  } catch (const std::exception&) {  // the request is written; no caller waits for the answer
  }
}

std::optional<std::uint64_t> WorldState::left_after(std::int64_t group, int rank) noexcept {
  if (!client_) return std::nullopt;
  try {
    const auto deadline = control::Clock::now() + std::chrono::seconds(1);
    control::StoreRequest request{.call = control::StoreCall::check,
                                  .keys = {left_key(prefix_, group, rank)}};
    auto failed = [this] { return failed_.load(); };
    if (client_->ask(request, deadline, failed).number == 0) return std::nullopt;
    request.call = control::StoreCall::get;
    return std::stoull(client_->ask(request, deadline, failed).values.at(0));
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

void WorldState::step(std::int64_t step) {
  if (step < 0) throw ConfigError(fmt::format("World::step: expected a step of 0 or more, got {}", step));
  step_.store(step, std::memory_order_relaxed);
  if (auto status = client_ ? client_->status() : nullptr) status->step(step);
  observe([&](Observer& observer) { observer.stepped(step); });
}

void WorldState::log_metric(std::string_view name, double value, std::optional<std::int64_t> step) {
  check_metric_name(name);
  if (step && *step < 0)
    throw ConfigError(fmt::format("log_metric: expected a step of 0 or more, got {}", *step));
  if (const auto current = step_.load(std::memory_order_relaxed); !step && current >= 0) step = current;
  if (metrics_) metrics_->add(name, value, step);
  if (auto status = client_ ? client_->status() : nullptr) status->metric(name, value, step.value_or(-1));
}

bool WorldState::stop_requested() {
  catch_stop_signals(client_);
  if (client_) return client_->stop_requested();
  return threads_ ? threads_->stop_requested(identity_.rank) : stop_signal_came();
}

Verdict WorldState::verdict() const {
  std::lock_guard lock(mutex_);
  return verdict_.value_or(Verdict{});
}

bool WorldState::in_child() const { return shm::fork_generation() != generation_; }

void WorldState::note_told() noexcept {
  if (failed_) told_ = true;
  if (fails_at_exit_.exchange(false)) fail_at_exit(false);
}

// In order: finishes everything in flight, whether its Work is held or not. Nothing more is issued. If no
// call has thrown an error, the program must then learn about operations that failed.
void WorldState::finish_operations(const std::vector<std::shared_ptr<GroupState>>& groups, bool in_order) {
  std::vector<std::shared_ptr<WorkState>> all, dropped;
  for (const auto& group : groups) {
    auto under_way = group->shut();
    std::move(under_way.all.begin(), under_way.all.end(), std::back_inserter(all));
    std::move(under_way.dropped.begin(), under_way.dropped.end(), std::back_inserter(dropped));
  }
  bool told = false;
  const auto tells_at = Clock::now() + kPatience;
  for (auto nap = kFirstNap;; nap = std::min(2 * nap, kLongestNap)) {
    // Polls all of them, because polling makes engines progress.
    bool over = true;
    for (const auto& pending : all) over = pending->done() && over;
    if (over || !in_order) break;
    if (!told && Clock::now() >= tells_at) {
      told = true;
      const auto first =
          std::find_if(all.begin(), all.end(), [](const auto& pending) { return !pending->settled(); });
      if (first != all.end())
        log(LogLevel::warn, "the destructor of World waits for an operation in flight: {}",
            describe((*first)->call()));
    }
    for (const auto& group : groups) group->give_way();
    std::this_thread::sleep_for(nap);
  }
  if (failed_ && (told_ || in_threads())) return;
  // Those that had failed before their Work was dropped may be in the second list alone.
  const std::set<std::shared_ptr<WorkState>> known(all.begin(), all.end());
  std::copy_if(dropped.begin(), dropped.end(), std::back_inserter(all),
               [&](const auto& pending) { return !known.contains(pending); });
  for (const auto& pending : all) {
    if (pending->failed() && pending->heard()) continue;
    if (pending->failed())
      log(LogLevel::error, "an operation whose result was never waited for has failed: {}",
          pending->error().what());
    else if (!pending->settled())
      log(LogLevel::error,
          "an operation whose result was never waited for did not finish, because another one failed: {}",
          describe(pending->call()));
    else
      continue;
    if (!in_threads() && !fails_at_exit_.exchange(true)) fail_at_exit(true);
  }
  const auto lost = std::find_if(dropped.begin(), dropped.end(),
                                 [](const auto& pending) { return pending->failed() && !pending->heard(); });
  if (lost != dropped.end()) unheard_ = std::make_exception_ptr((*lost)->error());
}

void WorldState::close(bool in_order) noexcept {
  // In a child of fork() the World is the parent's: leave alone what it holds.
  if (in_child()) {
    new auto(default_group_);
    return;
  }
  if (closed_.exchange(true)) return;
  const bool unwinding = !in_order;
  observe([](Observer& observer) { observer.leaving(); });
  try {
    auto groups = live_groups();
    in_order = in_order && !failed_ && std::none_of(groups.begin(), groups.end(), [](const auto& group) {
                 return group->verdict().has_value();
               });
    if (!unwinding) finish_operations(groups, in_order);
    for (auto group = groups.rbegin(); group != groups.rend(); ++group) (*group)->close(in_order);
    {
      std::lock_guard lock(mutex_);
      default_group_.reset();
      groups_.clear();
    }
    groups.clear();
    if (!client_) return;
    if (unwinding && !failed_) client_->tell(control::Fault{control::Fault::Kind::unwinding, {}});
    leave_job(*client_, !unwinding && !failed_);
  } catch (const std::exception& error) {
    log(LogLevel::warn, "error while leaving the job: {}", error.what());
  }
}

void WorldState::add_observer(std::shared_ptr<Observer> observer) {
  if (!observer) throw ConfigError("add_observer: the observer is null");
  std::lock_guard lock(mutex_);
  observers_.push_back(std::move(observer));
  observed_ = true;
}

void WorldState::remove_observer(const std::shared_ptr<Observer>& observer) {
  std::lock_guard lock(mutex_);
  std::erase(observers_, observer);
  observed_ = !observers_.empty();
}

std::vector<std::shared_ptr<Observer>> WorldState::observers() const {
  std::lock_guard lock(mutex_);
  return observers_;
}

}  // namespace lockstep::detail
