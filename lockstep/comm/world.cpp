#include <lockstep/comm/world.h>

#include <atomic>
#include <exception>
#include <thread>

#include <fmt/format.h>
#include <lockstep/base/log.h>
#include <lockstep/comm/job/world_state.h>
#include <lockstep/comm/transports/threads/threads.h>

namespace lockstep {
namespace {

// Only one World at a time in a process: a second one would use the names of the first.
std::atomic<bool> process_has_world = false;

void (*joined)(const std::shared_ptr<detail::WorldState>&) = nullptr;

World join_as(detail::Identity identity, WorldOptions options) {
  if (process_has_world.exchange(true))
    throw ConfigError(
        "this process already has a World; create one at a time, and use World::group for more groups");
  try {
    auto state = std::make_shared<detail::WorldState>(std::move(identity), std::move(options));
    state->join();
    if (joined) joined(state);
    return World(std::move(state));
  } catch (...) {
    process_has_world = false;
    throw;
  }
}

}  // namespace

void detail::when_joined(void (*call)(const std::shared_ptr<WorldState>&)) { joined = call; }

World World::from_environment(WorldOptions options) {
  return join_as(detail::identity_from_environment(), std::move(options));
}

World init_process_group(const std::string& backend, int rank, int world_size, WorldOptions options) {
  options.backend = backend;
  return join_as(detail::identity_from_environment(rank, world_size), std::move(options));
}

World::World(std::shared_ptr<detail::WorldState> state)
    : state_(std::move(state)), exceptions_at_birth_(std::uncaught_exceptions()) {}

World::~World() {
  if (!state_) return;  // moved from
  const bool unwinding = std::uncaught_exceptions() > exceptions_at_birth_;
  // `lockstep run` reports it itself. A rank that leaves because another rank has failed is not to blame.
  auto* client = state_->client();
  if (unwinding && !(client && (client->is_launched() || client->failure())))
    detail::log(LogLevel::error, "rank {} leaves the job because of an exception", rank());
  state_->close(/*in_order=*/!unwinding);
  if (!state_->in_threads()) process_has_world = false;
}

int World::rank() const { return state_->identity().rank; }
int World::size() const { return state_->identity().size; }
int World::local_rank() const { return state_->identity().local_rank.value_or(0); }
int World::local_size() const { return state_->identity().local_size.value_or(1); }
bool World::in_threads() const { return state_->in_threads(); }
at::Device World::device() const { return state_->device(); }
Group World::group() const { return Group(state_->default_group()); }
Group World::group(std::vector<int> ranks, GroupOptions options) {
  return Group(state_->make_group(std::move(ranks), std::move(options)));
}
void World::add_observer(std::shared_ptr<Observer> observer) { state_->add_observer(std::move(observer)); }
void World::remove_observer(const std::shared_ptr<Observer>& observer) { state_->remove_observer(observer); }
void World::step(std::int64_t step) { state_->step(step); }
void World::log_metric(std::string_view name, double value) { state_->log_metric(name, value, std::nullopt); }
void World::log_metric(std::string_view name, double value, std::int64_t step) {
  state_->log_metric(name, value, step);
}
bool World::stop_requested() { return state_->stop_requested(); }
void World::fail(const std::string& cause, std::optional<int> rank) { state_->fail({cause, rank}); }

void run_threads(int num_ranks, const std::function<void(World&)>& body, WorldOptions options) {
  if (num_ranks < 1 || num_ranks > 1024)
    throw ConfigError(fmt::format("run_threads: expected 1 to 1024 ranks, got {}", num_ranks));
  auto job = std::make_shared<detail::ThreadsJob>(num_ranks);
  std::vector<std::shared_ptr<detail::WorldState>> states;
  for (int r = 0; r < num_ranks; ++r) {
    detail::Identity identity;
    identity.rank = r;
    identity.size = num_ranks;
    identity.local_rank = r;
    identity.local_size = num_ranks;
    identity.launcher = "threads";
    states.push_back(std::make_shared<detail::WorldState>(std::move(identity), options, job));
  }

  std::mutex mutex;
  std::exception_ptr first;
  auto fail = [&](int rank, const std::string& text) {
    {
      std::lock_guard lock(mutex);
      if (first) return;
      first = std::current_exception();
    }
    for (auto& state : states)
      state->judge({fmt::format("rank {} threw: {}", rank, text), rank, CommError::Kind::peer_died});
    for (auto& state : states) state->wake();
  };
  auto run_rank = [&](int rank) {
    auto& state = states[static_cast<std::size_t>(rank)];
    try {
      state->join();
      {
        World world(state);
        // Before ~World, which would report only that this rank is leaving.
        try {
          body(world);
        } catch (const std::exception& error) {
          fail(rank, error.what());
        } catch (...) {
          fail(rank, "an exception that is not a std::exception");
        }
      }
      if (const auto unheard = state->unheard()) std::rethrow_exception(unheard);
    } catch (const std::exception& error) {
      fail(rank, error.what());
    }
  };
  std::vector<std::thread> threads;
  for (int r = 0; r < num_ranks; ++r) threads.emplace_back(run_rank, r);
  for (auto& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
}

}  // namespace lockstep
