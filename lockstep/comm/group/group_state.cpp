#include <lockstep/comm/group/group_state.h>

#include <algorithm>
#include <exception>
#include <thread>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <lockstep/base/crew.h>
#include <lockstep/base/log.h>
#include <lockstep/base/span.h>
#include <lockstep/base/start_thread.h>
#include <lockstep/comm/group/connect_barrier.h>
#include <lockstep/comm/group/host_call.h>
#include <lockstep/comm/group/model_scope.h>
#include <lockstep/comm/group/work_state.h>
#include <lockstep/comm/job/world_state.h>
#include <lockstep/comm/transports/shm/engine/fork.h>

namespace lockstep::detail {

using std::chrono::milliseconds;

namespace {

// How long to wait for an engine that is being released: the process may exit afterwards.
constexpr milliseconds kLeaveWait(500);

}  // namespace

std::int64_t hash_of(const std::string& text) {
  std::uint64_t hash = 14695981039346656037u;
  for (unsigned char c : text) hash = (hash ^ c) * 1099511628211u;
  return static_cast<std::int64_t>(hash);
}

GroupState::GroupState(std::shared_ptr<WorldState> world, std::string name, const std::string& key,
                       std::vector<int> ranks, int rank, milliseconds timeout, Transports transports)
    : world_(std::move(world)),
      name_(std::move(name)),
      ranks_(std::move(ranks)),
      rank_(rank),
      timeout_(timeout),
      transports_(std::move(transports)),
      key_(hash_of(key)),
      generation_(shm::fork_generation()) {
  control::Client* client = world_->client();
  status_ = client && size() > 1 ? client->status() : nullptr;
  if (!status_) return;
  client->tell(control::GroupMade{key_, name_, ranks_});
  collective_line_ = status_->add_line(key_, name_, false);
}

int GroupState::line_of(const Call& call) {
  return point_to_point(call.operation) ? message_line_ : collective_line_;
}

const control::CallTexts& GroupState::Place::texts(const Call& call) {
  using Texts = control::CallTexts;
  if (!call.far_site.empty() || call.site.file_name() != file_ || call.site.line() != line_) {
    file_ = call.far_site.empty() ? call.site.file_name() : nullptr;
    line_ = call.site.line();
    Texts::set(texts_.site, site_text(call));
  }
  if (static_cast<int>(call.operation) != operation_) {
    operation_ = static_cast<int>(call.operation);
    dtype_ = reduction_ = -1;
    Texts::set(texts_.operation, lockstep::name(call.operation));
  }
  if (static_cast<int>(call.dtype) != dtype_) {
    dtype_ = static_cast<int>(call.dtype);
    Texts::set(texts_.dtype, call.operation == Operation::barrier ? "" : lockstep::name(call.dtype));
  }
  if (static_cast<int>(call.reduction) != reduction_) {
    reduction_ = static_cast<int>(call.reduction);
    Texts::set(texts_.reduction, reduces(call.operation) ? lockstep::name(call.reduction) : "");
  }
  return texts_;
}

control::FlightRing::Ticket GroupState::note_begin(const WorkState& pending) {
  if (!status_) return control::FlightRing::kNone;
  const Call& call = pending.call();
  const bool message = point_to_point(call.operation);
  if (message && !has_message_line_) {
    has_message_line_ = true;  // under message_mutex_
    message_line_ = status_->add_line(key_, name_, true);
  }
  const control::Begun begun{.key = key_,
                             .sequence = static_cast<std::int64_t>(call.sequence),
                             .count = call.count,
                             .bytes = call.bytes,
                             .peer = message || rooted(call.operation) ? call.root : -1,
                             .message = message,
                             .at = pending.begun()};
  return status_->began(line_of(call), begun, (message ? messages_place_ : collectives_place_).texts(call));
}

void GroupState::note_end(const Call& call, control::FlightRing::Ticket record, bool failed) noexcept {
  if (status_) status_->ended(line_of(call), static_cast<std::int64_t>(call.sequence), record, failed);
}

void GroupState::note_wait(const Call& call, bool waits) noexcept {
  if (!status_) return;
  const auto sequence = static_cast<std::int64_t>(call.sequence);
  if (waits)
    status_->waits(line_of(call), sequence);
  else
    status_->waited(line_of(call), sequence);
}

std::optional<std::uint64_t> GroupState::left_after(int rank) {
  {
    std::lock_guard lock(state_mutex_);
    if (auto known = left_.find(rank); known != left_.end()) return known->second;
  }
  const auto begun = world_->left_after(key_, rank);
  std::lock_guard lock(state_mutex_);
  if (begun) left_[rank] = *begun;
  return begun;
}

// Operations in flight hold the group, so there are none. During stack unwinding the group is left at once.
GroupState::~GroupState() { close(/*in_order=*/std::uncaught_exceptions() == 0); }

std::shared_ptr<Transport> GroupState::transport(at::DeviceType device) const {
  std::lock_guard lock(state_mutex_);
  auto found = transports_.find(device);
  return found == transports_.end() ? nullptr : found->second;
}

at::Device GroupState::control_device() const {
  return transport(at::kCPU) ? at::Device(at::kCPU) : world_->device();
}

void GroupState::meet_all(Transport& engine, const WorkState& pending) {
  auto* first = engine.connect_barrier(/*of_all=*/true);
  if (first == nullptr) return;
  first->await(
      {}, pending.left(), [&](bool waits) { note_wait(pending.call(), waits); },
      [this] { return failed_.load(); });
  const HostCall here(*this, engine, pending);
  engine.open();
}

// Other messages need not wait for two ranks that have not met: the order of messages is released meanwhile.
// Both ranks hold their own order again when they enter the call.
void GroupState::meet_peer(Transport& engine, const WorkState& pending, std::unique_lock<std::mutex>& order) {
  auto* first = engine.connect_barrier(/*of_all=*/false);
  const int peer = pending.call().root;
  if (first == nullptr || first->has_entered(peer)) return;
  order.unlock();
  first->await(
      peer, pending.left(), [&](bool waits) { note_wait(pending.call(), waits); },
      [this] { return failed_.load(); });
  for (;;) {
    order.lock();
    if (first->enter(peer)) return;
    order.unlock();
    if (failed_) throw Error("it was interrupted");
    if (Clock::now() >= pending.deadline()) throw Error("the deadline has passed");
    std::this_thread::sleep_for(milliseconds(5));
  }
}

Work GroupState::issue(Call call, at::Device device, Timeout timeout, Start start) {
  const auto limit = timeout ? checked_timeout(*timeout) : timeout_;
  call.group = name_;
  call.group_key = key_;
  call.rank = rank_;
  call.size = size();
  refuse_in_child(call);
  const Span span(SpanKind::wait, lockstep::name(call.operation), call.bytes);
  const bool batched = coalescing() == this;  // then coalesce holds the mutexes
  if (!batched) refuse_within_coalesce(lockstep::name(call.operation));
  std::unique_lock order(point_to_point(call.operation) ? message_mutex_ : issue_mutex_, std::defer_lock);
  if (!batched) order.lock();
  reap();
  call.sequence = point_to_point(call.operation) ? messages_ : collectives_;
  const auto engine = usable_engine(call, device.type());
  if (!engine->traits().captures && engine->capturing())
    throw ConfigError(fmt::format("{} over {} cannot be captured in a CUDA graph; use nccl",
                                  lockstep::name(call.operation), engine->backend().getBackendName()));
  ++(point_to_point(call.operation) ? messages_ : collectives_);
  const bool compared = ModelScope::mark(*this, models_, call) || world_->compares_calls();

  auto pending = std::make_shared<WorkState>(shared_from_this(), engine, std::move(call), limit);
  pending->by_messages = point_to_point(pending->call().operation);
  pending->record = note_begin(*pending);
  world_->observe([&](Observer& observer) { observer.started(pending->call()); });
  try {
    at::AutoDispatchBelowAutograd below_autograd;
    c10::NoGradGuard no_grad;
    // Not within an engine's batch, which would block the comparison.
    if (compared && !engine->traits().compares_calls && !pending->by_messages &&
        !(batched && engine->backend().supportsCoalescing()))
      compare(*pending);
    // All ranks take part in a batch, whatever it contains.
    if (!pending->by_messages || batched)
      meet_all(*engine, *pending);
    else if (pending->call().count > 0)
      meet_peer(*engine, *pending, order);
    if (batched) add_to_batch(engine, pending);
    CallScope scope(&pending->call());
    const HostCall here(*this, *engine, *pending);
    start(*engine, *pending);
  } catch (const std::exception& error) {
    if (order.owns_lock()) order.unlock();
    pending->fail_at_issue(error);
  }
  if (!batched) keep_track(pending);
  return Work(std::move(pending));
}

std::string forked_text(int rank) {
  return fmt::format(
      "this process was forked from rank {} and cannot use that rank's groups; fork before creating the "
      "World, or exec a separate program",
      rank);
}

bool GroupState::in_child() const { return shm::fork_generation() != generation_; }

// Takes no lock: a thread of the parent may have held one at the fork, and it does not exist here to release
// it.
void GroupState::refuse_in_child(const Call& call) const {
  if (!in_child()) return;
  auto details = details_of(call);
  details.cause = forked_text(ranks_[static_cast<std::size_t>(rank_)]);
  throw CommError(std::move(details));
}

void GroupState::keep_track(const std::shared_ptr<WorkState>& pending) {
  std::lock_guard lock(state_mutex_);
  // Most have been waited for and destroyed when the next one is issued.
  while (!issued_.empty() && issued_.back().expired()) issued_.pop_back();
  if (issued_.size() >= issued_limit_) {
    std::erase_if(issued_, [](const auto& each) {
      const auto known = each.lock();
      return !known || known->settled();
    });
    issued_limit_ = std::max<std::size_t>(64, 2 * issued_.size());
  }
  issued_.push_back(pending);
}

// A separate collective: one all-gather of a few hundred bytes per rank, completed before data moves.
void GroupState::compare(const WorkState& pending) {
  const auto& call = pending.call();
  const auto device = control_device();
  auto engine = transport(device.type());
  if (!engine) throw gone();
  meet_all(*engine, pending);
  const HostCall here(*this, *engine, pending);
  const auto length = static_cast<std::int64_t>(packed_size(size()));
  auto packed = pack(call);
  auto mine = at::empty({length}, at::kByte);
  std::copy(packed.begin(), packed.end(), mine.mutable_data_ptr<std::uint8_t>());
  mine = mine.to(device);
  auto all = at::empty({length * size()}, at::TensorOptions(at::kByte).device(device));
  c10d::AllgatherOptions options;
  options.timeout = pending.left();
  engine->backend()._allgather_base(all, mine, options)->wait(options.timeout);
  all = all.to(at::kCPU);

  std::vector<Call> calls;
  for (int r = 0; r < size(); ++r)
    calls.push_back(unpack({all.const_data_ptr<std::uint8_t>() + r * length, packed.size()}, size()));
  std::vector<const Call*> pointers;
  for (const Call& each : calls) pointers.push_back(&each);
  if (auto mismatch = find_mismatch(pointers)) throw KindedError(CommError::Kind::mismatch, *mismatch);
}

ConfigError GroupState::gone() const {
  return ConfigError(fmt::format("group '{}' is used after its World was destroyed", name_));
}

void GroupState::check_open() const {
  std::lock_guard lock(state_mutex_);
  if (closed_) throw gone();
}

std::optional<int> GroupState::place_of(std::optional<int> world_rank) const {
  auto place = world_rank ? std::find(ranks_.begin(), ranks_.end(), *world_rank) : ranks_.end();
  if (place == ranks_.end()) return std::nullopt;
  return static_cast<int>(place - ranks_.begin());
}

std::shared_ptr<Transport> GroupState::usable_engine(const Call& call, at::DeviceType device) {
  std::lock_guard lock(state_mutex_);
  const auto engine = transports_.find(device);
  if (closed_ || (!verdict_ && engine == transports_.end())) throw gone();
  if (!verdict_) return engine->second;
  auto details = details_of(call);
  details.cause = verdict_->cause;
  details.peer = place_of(verdict_->rank);
  details.kind = verdict_->kind;
  note_told(Told::failure);
  throw CommError(std::move(details));
}

void GroupState::note_told(Told what) noexcept {
  if (what > told_) told_ = what;
  world_->note_told();
}

void GroupState::fail(Verdict verdict) noexcept {
  if (judge(std::move(verdict))) wake();
}

bool GroupState::judge(Verdict verdict) noexcept {
  if (in_child()) return false;
  std::lock_guard lock(state_mutex_);
  if (verdict_) return false;
  verdict_ = std::move(verdict);
  failed_ = true;
  return true;
}

void GroupState::wake() noexcept {
  if (in_child()) return;
  Transports engines;
  Verdict verdict;
  {
    std::lock_guard lock(state_mutex_);
    verdict = *verdict_;
    engines = transports_;
    for (const auto& tell : on_fail_) tell();
  }
  for (auto& [device, engine] : engines) engine->interrupt(verdict.cause, verdict.kind);
}

GroupState::FailureWatch::FailureWatch(GroupState& group, std::function<void()> on_fail) : group_(group) {
  std::lock_guard lock(group_.state_mutex_);
  if (group_.verdict_) on_fail();
  place_ = group_.on_fail_.insert(group_.on_fail_.end(), std::move(on_fail));
}

GroupState::FailureWatch::~FailureWatch() {
  std::lock_guard lock(group_.state_mutex_);
  group_.on_fail_.erase(place_);
}

std::optional<Verdict> GroupState::verdict() const {
  if (!failed_) return std::nullopt;
  std::lock_guard lock(state_mutex_);
  return verdict_;
}

void GroupState::adopt(std::shared_ptr<WorkState> pending) noexcept {
  try {
    if (pending->needs_watching()) pending->done();  // polling it starts a watch
    {
      std::lock_guard lock(state_mutex_);
      if (!closed_) return dropped_.push_back(std::move(pending));
    }
    if (pending->settled()) return;  // logged when the World ended
    // This releases the engine, which may wait for peers: do not block the dropping thread for long.
    Crew crew;
    crew.start([pending = std::move(pending)]() mutable { pending.reset(); });
    crew.wait(kLeaveWait);
  } catch (const std::exception& error) {
    fail({fmt::format("an operation was dropped and could not be tracked: {}", error.what()), std::nullopt,
          CommError::Kind::engine});
  }
}

void GroupState::watch(std::shared_ptr<WorkState> pending) {
  start_thread("waiting for a message", [pending = std::move(pending)] {
    try {
      pending->await(std::nullopt);
    } catch (const std::exception&) {  // the next wait throws it again
    }
  }).detach();
}

void GroupState::watch_device(c10::intrusive_ptr<c10d::Work> work, const Call& call,
                              AwakeClock::time_point begun, AwakeClock::time_point deadline) {
  auto what = fmt::format("{} #{}", lockstep::name(call.operation), call.sequence);
  std::lock_guard lock(state_mutex_);
  if (without_engines_ || verdict_) return;
  if (!device_watch_)
    device_watch_ = std::make_unique<DeviceWatch>(
        world_->device(), [group = weak_from_this()](std::string cause, CommError::Kind kind) {
          if (const auto still = group.lock()) still->fail({std::move(cause), std::nullopt, kind});
        });
  device_watch_->add(std::move(work), std::move(what), begun, deadline);
}

void GroupState::reap() {
  std::vector<std::shared_ptr<WorkState>> candidates;
  {
    std::lock_guard lock(state_mutex_);
    if (dropped_.empty()) return;
    candidates.assign(dropped_.begin(), dropped_.end());
  }
  // done() settles operations that have ended. A failure becomes the group's verdict, which the caller checks
  // next.
  for (auto& pending : candidates) pending->done();
  std::lock_guard lock(state_mutex_);
  dropped_.remove_if(
      [](const auto& pending) { return pending->settled() && !(pending->failed() && !pending->heard()); });
}

// Waits for the device while the engines still exist and the work can be aborted: when they are destroyed
// they wait for it without a deadline.
void GroupState::await_device() noexcept {
  const auto deadline = AwakeClock::now() + timeout_;
  DeviceWatch* watch = nullptr;
  {
    std::lock_guard lock(state_mutex_);
    watch = device_watch_.get();  // only this thread destroys it
  }
  try {
    while (watch != nullptr && !failed_ && AwakeClock::now() < deadline && !watch->idle())
      std::this_thread::sleep_for(milliseconds(1));
  } catch (const std::exception&) {  // the process is exiting and the device's library is already unloaded
  }
}

GroupState::UnderWay GroupState::shut() {
  UnderWay under_way;
  std::lock_guard lock(state_mutex_);
  closed_ = true;
  for (const auto& each : std::exchange(issued_, {}))
    if (auto pending = each.lock()) under_way.all.push_back(std::move(pending));
  under_way.dropped.assign(dropped_.begin(), dropped_.end());
  return under_way;
}

void GroupState::give_way() noexcept {
  Transports engines;
  {
    std::lock_guard lock(state_mutex_);
    engines = transports_;
  }
  for (auto& [device, engine] : engines)
    if (engine->is_awaited()) engine->leave();
}

void GroupState::close(bool in_order) noexcept {
  // The engines' threads belong to the parent, and so does everything they hold: leak them here.
  if (in_child()) {
    new Transports(std::move(transports_));
    new std::list(std::move(dropped_));
    static_cast<void>(device_watch_.release());
    return;
  }
  std::list<std::shared_ptr<WorkState>> dropped;
  {
    std::lock_guard lock(state_mutex_);
    closed_ = true;
    if (std::exchange(left_engines_, true)) return;
    dropped.swap(dropped_);
  }
  if (status_) {
    for (int line : {collective_line_.exchange(-1), message_line_.exchange(-1)}) status_->drop_line(line);
  }
  if (in_order) await_device();
  if (!in_order) fail({"this rank is leaving", std::nullopt});
  Transports engines;
  std::unique_ptr<DeviceWatch> watch;
  {
    std::lock_guard lock(state_mutex_);
    engines.swap(transports_);
    watch.swap(device_watch_);
    without_engines_ = true;
  }
  watch.reset();
  // Peers notice that our connections end, and must learn that this is in order.
  const bool looked_at = std::any_of(engines.begin(), engines.end(),
                                     [](const auto& each) { return !each.second->traits().wakes_waiters; });
  if (!failed_ && looked_at) world_->note_left(key_, rank_, collectives_);
  for (auto& [device, engine] : engines) engine->leave();
  if (!failed_) return;  // destroys `engines` and `dropped`, in order

  // An engine that was interrupted should end at once. If one does not, do not wait for it.
  try {
    Crew crew;
    // If no thread can be started, they are destroyed here.
    crew.start([engines = std::move(engines), dropped = std::move(dropped)]() mutable {
      dropped.clear();
      engines.clear();
    });
    crew.wait(kLeaveWait);
  } catch (const std::exception&) {  // out of memory
  }
}

}  // namespace lockstep::detail
