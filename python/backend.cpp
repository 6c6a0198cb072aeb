#include "backend.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <map>
#include <sstream>
#include <thread>

#include <ATen/Parallel.h>
#include <ATen/record_function.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <lockstep/base/environment.h>

namespace lockstep::python {
namespace {

using std::chrono::milliseconds;

constexpr char kTimedOut[] = "Timed out waiting for other ranks";  // PyTorch looks for the first two words

std::string first_line(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::string link_target(const char* path) {
  char text[256];
  const auto size = ::readlink(path, text, sizeof text);
  return size < 0 ? std::string() : std::string(text, static_cast<std::size_t>(size));
}

// Identifies the processes that can share memory: those that an abstract socket can reach.
struct Place {
  std::string host, kernel, network, user;
  static Place own() {
    char name[256] = {};
    ::gethostname(name, sizeof name - 1);
    return {name, first_line("/proc/sys/kernel/random/boot_id"), link_target("/proc/self/ns/net"),
            std::to_string(::geteuid())};
  }
  std::string packed() const { return fmt::format("{}\n{}\n{}\n{}", host, kernel, network, user); }
  static Place unpack(const std::vector<std::uint8_t>& bytes) {
    std::istringstream lines(std::string(bytes.begin(), bytes.end()));
    Place place;
    for (auto* field : {&place.host, &place.kernel, &place.network, &place.user}) std::getline(lines, *field);
    return place;
  }
};

std::string place_key(int rank) { return fmt::format("place {}", rank); }

void check_places(c10d::Store& store, int rank, int size) {
  const auto packed = Place::own().packed();
  store.set(place_key(rank), std::vector<std::uint8_t>(packed.begin(), packed.end()));
  std::map<std::string, std::pair<Place, std::vector<int>>> places;
  for (int r = 0; r < size; ++r) {
    const auto place = Place::unpack(store.get(place_key(r)));
    auto& [first, ranks] = places[place.kernel + place.network + place.user];
    if (ranks.empty()) first = place;
    ranks.push_back(r);
  }
  if (places.size() == 1) return;
  std::string text;
  for (const auto& [_, each] : places)
    text += fmt::format("\n  rank{} {}: host {}, user {}, network {}", each.second.size() > 1 ? "s" : "",
                        fmt::join(each.second, ", "), each.first.host, each.first.user, each.first.network);
  TORCH_CHECK(
      false,
      "the backend 'lockstep' connects processes through shared memory, so all ranks must be on one host, of one "
      "user and in one network namespace. This group has several:",
      text, "\nFor groups that span hosts use another backend, such as gloo.");
}

detail::ShmOptions shm_options(const c10d::DistributedBackendOptions& options) {
  const auto local = env::integer("LOCAL_WORLD_SIZE", 1, 1 << 20).value_or(1);
  return {.timeout = std::chrono::duration_cast<milliseconds>(options.timeout),
          .local_ranks = std::max(options.group_size, static_cast<int>(local)),
          .threads = at::get_num_threads(),
          .store_keys = {place_key(options.group_rank)}};
}

c10::intrusive_ptr<c10d::Store> meeting_store(const c10d::DistributedBackendOptions& options) {
  check_places(*options.store, options.group_rank, options.group_size);
  return options.store;
}

// Without c10::Error's backtrace.
std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& c10_error) {
    return c10_error.what_without_backtrace();
  } catch (const std::exception& other) {
    return other.what();
  }
}

struct Living {
  std::uint64_t generation;
  std::weak_ptr<shm::OpQueue> op_queue;
  std::weak_ptr<shm::Messages> messages;
};
std::mutex living_mutex;
// Never destroyed: backends may outlive the program's static objects.
auto& living = *new std::map<const TorchBackend*, Living>;

}  // namespace

TorchBackend::TorchBackend(const c10d::DistributedBackendOptions& options)
    : ShmBackend(meeting_store(options), options.group_rank, options.group_size, shm_options(options)),
      options_(c10::make_intrusive<Options>("lockstep", timeout())) {
  options_->group_name = options.group_id;
  for (auto rank : options.global_ranks_in_group)
    options_->global_ranks_in_group.push_back(static_cast<std::uint64_t>(rank));
  std::lock_guard lock(living_mutex);
  living[this] = {shm::fork_generation(), op_queue(), messages()};
}

TorchBackend::~TorchBackend() {
  std::lock_guard lock(living_mutex);
  living.erase(this);
}

c10::intrusive_ptr<c10d::Backend::Options> TorchBackend::getBackendOptions() { return options_; }

void TorchBackend::setTimeout(milliseconds timeout) {
  ShmBackend::setTimeout(timeout);
  options_->timeout = timeout;
}

const char* TorchBackend::title(const detail::Op& op) const {
  constexpr std::array titles = {"lockstep:all_reduce",     "lockstep:reduce",     "lockstep:broadcast",
                                 "lockstep:all_gather",     "lockstep:gather",     "lockstep:scatter",
                                 "lockstep:reduce_scatter", "lockstep:all_to_all", "lockstep:barrier",
                                 "lockstep:send",           "lockstep:recv"};
  // Even without a profiler c10d's Work would create the row, which costs as much as a small operation.
  if (!op.refusal.empty() || !at::hasCallbacks()) return nullptr;
  return titles.at(static_cast<std::size_t>(op.call.operation));
}

void TorchBackend::monitoredBarrier(const c10d::BarrierOptions& options, bool /*wait_all_ranks*/) {
  auto given = options;
  if (given.timeout == c10d::kUnsetTimeout) given.timeout = timeout();
  given.timeout = std::max(given.timeout, milliseconds(1));
  given.asyncOp = false;
  auto work = barrier(given);
  try {
    work->wait();
  } catch (const c10::DistBackendError& error) {
    const std::string text = error.what_without_backtrace();
    if (text.find(kTimedOut) == std::string::npos) throw;
    throw c10::DistBackendError({__func__, __FILE__, static_cast<std::uint32_t>(__LINE__)},
                                fmt::format("Rank {} timed out in monitoredBarrier after {} ms: {}", rank_,
                                            given.timeout.count(), text));
  }
}

void TorchBackend::shutdown() {
  drain();
  leave();
}

void TorchBackend::abort() {
  interrupt("abort() was called");
  leave();
}

void TorchBackend::leave_all() {
  constexpr milliseconds kPatience(500);
  std::vector<std::shared_ptr<shm::OpQueue>> lanes;
  std::vector<std::shared_ptr<shm::Messages>> messages;
  {
    std::lock_guard lock(living_mutex);
    for (const auto& [_, each] : living) {
      if (each.generation != shm::fork_generation()) continue;
      if (auto op_queue = each.op_queue.lock()) lanes.push_back(std::move(op_queue));
      if (auto own = each.messages.lock()) messages.push_back(std::move(own));
    }
  }
  for (const auto& each : messages) each->close();
  for (const auto& each : lanes) each->close();
  const auto until = shm::Clock::now() + kPatience;
  auto all_quiet = [&] {
    return std::all_of(lanes.begin(), lanes.end(), [](const auto& each) { return each->is_idle(); }) &&
           detail::Settling::count() == 0;
  };
  while (!all_quiet() && shm::Clock::now() < until) std::this_thread::sleep_for(milliseconds(1));
}

std::function<std::exception_ptr(std::exception_ptr)> TorchBackend::explanation(const Call& call) {
  return [call, op_queue = op_queue()](const std::exception_ptr& error) {
    const auto where = fmt::format("lockstep: {}, call {} of rank {} in group '{}': ", detail::describe(call),
                                   call.sequence, call.rank, call.group);
    std::string what;
    try {
      std::rethrow_exception(error);
    } catch (const shm::TimedOut&) {
      what = where + kTimedOut;
      if (const auto absent = op_queue->absent(); !absent.empty()) what += ": " + absent;
    } catch (const detail::Refused& refused) {
      what = refused.what();
    } catch (const shm::Mismatch& mismatch) {
      what = std::string("lockstep: ") + mismatch.what();
    } catch (const shm::PeerLost& lost) {
      what = where + lost.what();
    } catch (const std::exception& other) {
      what = where + other.what();
    }
    return std::make_exception_ptr(
        c10::DistBackendError({__func__, __FILE__, static_cast<std::uint32_t>(__LINE__)}, what));
  };
}

// The peers are in the call or will make it: they get the refusal as soon as they arrive, and the group stays
// usable. Messages have no such barrier: the peer waits until this rank makes a correct call.
void TorchBackend::refuse(Operation operation, milliseconds timeout, const std::exception_ptr& error) {
  const auto text = fmt::format("lockstep: rank {} refused {}: {}", rank_, name(operation), text_of(error));
  if (is_own() && !detail::point_to_point(operation)) post_refusal(operation, timeout, text);
  throw c10::DistBackendError({__func__, __FILE__, static_cast<std::uint32_t>(__LINE__)}, text);
}

TorchGroup::TorchGroup(const c10d::DistributedBackendOptions& options,
                       const c10::intrusive_ptr<TorchBackend>& backend)
    : ProcessGroup(options.store, options.group_rank, options.group_size) {
  setDefaultBackend(CUSTOM);
  setBackend(c10::DeviceType::CPU, CUSTOM, c10::intrusive_ptr<c10d::Backend>(backend));
}

}  // namespace lockstep::python
