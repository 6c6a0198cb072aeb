// The module's only exported function, and the transport that it makes.
#include <chrono>
#include <future>
#include <thread>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <lockstep/base/environment.h>
#include <lockstep/base/error.h>
#include <lockstep/base/start_thread.h>
#include <lockstep/comm/c10d/transport.h>
#include <lockstep/comm/reduce/reduce.h>
#include <lockstep/comm/transports/mpi/module/backend.h>
#include <lockstep/comm/transports/mpi/module/progress.h>

namespace lockstep::detail {
namespace {

using std::chrono::milliseconds;

constexpr std::int64_t kChunk = std::int64_t{1} << 30;
constexpr int kLowestTagBound = 32767;  // the tag bound that every MPI guarantees

double seconds(milliseconds time) { return std::chrono::duration<double>(time).count(); }

// "No limit" means a month.
milliseconds limit_of(const TransportContext& context) {
  return context.timeout > milliseconds::zero() ? context.timeout : milliseconds(std::chrono::hours(24 * 30));
}

// The program's own MPI may number the processes differently from the launcher.
void check_world(const TransportContext& context) {
  int size = 0, rank = 0;
  check_mpi(MPI_Comm_size(MPI_COMM_WORLD, &size), "MPI_Comm_size");
  check_mpi(MPI_Comm_rank(MPI_COMM_WORLD, &rank), "MPI_Comm_rank");
  if (size != context.world_size)
    throw ConfigError(fmt::format(
        "MPI_COMM_WORLD has {} ranks but the job has {}: start all ranks with one mpirun, from the "
        "MPI that Lockstep loads (set LOCKSTEP_MPI to openmpi or mpich to choose it)",
        size, context.world_size));
  const int expected = context.ranks.at(static_cast<std::size_t>(context.rank));
  if (rank != expected)
    throw ConfigError(
        fmt::format("this process is rank {} in MPI_COMM_WORLD but rank {} in the job: do not set RANK; "
                    "mpirun numbers the ranks",
                    rank, expected));
}

// MPI's creation of a communicator cannot be cancelled. So the members first wait for one another in the
// store, with a deadline; MPI then finds all of them present.
void meet(const TransportContext& context) {
  if (!context.store) return;
  const auto key = [](int rank) { return fmt::format("mpi/here/{}", rank); };
  std::vector<std::string> keys;
  for (int r = 0; r < context.size(); ++r) keys.push_back(key(r));
  context.store->set(key(context.rank), "1");
  std::string problem;
  try {
    context.store->wait(keys, limit_of(context));
    return;
  } catch (const std::exception& error) {
    problem = error.what();
  }
  std::vector<int> absent;
  try {
    for (int r = 0; r < context.size(); ++r)
      if (!context.store->check({key(r)})) absent.push_back(r);
  } catch (const std::exception&) {  // the store is gone; report its first error
  }
  if (absent.empty())
    throw Error(fmt::format("the ranks of group '{}' could not find one another in the store: {}",
                            context.group, problem));
  throw Error(fmt::format(
      "the ranks of group '{}' did not all arrive within {:.3f} s: rank {} of {} waited for rank {}",
      context.group, seconds(limit_of(context)), context.rank, context.size(), fmt::join(absent, ", ")));
}

int tag_of(const std::string& group) {
  std::uint32_t hash = 2166136261u;  // FNV-1a: the same on every rank
  for (const char c : group) hash = (hash ^ static_cast<unsigned char>(c)) * 16777619u;
  return static_cast<int>(hash % static_cast<std::uint32_t>(kLowestTagBound));
}

MPI_Comm make_communicator(const std::vector<int>& ranks, int tag) {
  MPI_Group world{}, members{};
  MPI_Comm comm = MPI_COMM_NULL;
  check_mpi(MPI_Comm_group(MPI_COMM_WORLD, &world), "MPI_Comm_group");
  check_mpi(MPI_Group_incl(world, static_cast<int>(ranks.size()), ranks.data(), &members), "MPI_Group_incl");
  check_mpi(MPI_Comm_create_group(MPI_COMM_WORLD, members, tag, &comm), "MPI_Comm_create_group");
  MPI_Group_free(&members);
  MPI_Group_free(&world);
  check_mpi(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  return comm;
}

// On a separate thread instead of the progress thread: two groups created in different orders on two ranks
// would deadlock there, and a peer that dies meanwhile would block every other group.
MPI_Comm connect(const TransportContext& context) {
  std::packaged_task<MPI_Comm()> task(
      [ranks = context.ranks, tag = tag_of(context.group)] { return make_communicator(ranks, tag); });
  auto made = task.get_future();
  start_thread("connecting MPI", std::move(task)).detach();
  if (made.wait_for(limit_of(context)) != std::future_status::ready) {
    Progress::get().leave_mpi_alone();
    throw Error(fmt::format(
        "MPI did not connect the {} ranks of group '{}' within {:.3f} s; the waiting thread is abandoned, "
        "and MPI will not be finalised",
        context.size(), context.group, seconds(limit_of(context))));
  }
  try {
    return made.get();
  } catch (const std::exception& error) {
    Progress::get().leave_mpi_alone();
    throw Error(
        fmt::format("MPI could not connect the ranks of group '{}': {}", context.group, error.what()));
  }
}

int highest_tag() {
  void* value = nullptr;
  int found = 0;
  check_mpi(MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, static_cast<void*>(&value), &found),
            "MPI_Comm_get_attr");
  return found != 0 ? *static_cast<int*>(value) : kLowestTagBound;
}

class MpiTransport final : public Transport {
 public:
  explicit MpiTransport(const TransportContext& context)
      : group_(context.group), patience_(limit_of(context)) {
    const auto chunk = env::integer("LOCKSTEP_MPI_CHUNK", 1, kChunk).value_or(kChunk);
    Progress::get().start(patience_);
    check_world(context);
    meet(context);
    link_ = std::make_shared<MpiLink>(connect(context), context.rank, context.size(), highest_tag(), chunk);
    backend_ = c10::make_intrusive<MpiBackend>(link_);
    Progress::get().group_made();
  }

  ~MpiTransport() override {
    if (!link_->drain(patience_))
      interrupt(fmt::format("group '{}' was destroyed before an operation on it had finished", group_),
                CommError::Kind::stopped);
    const bool clean = !link_->failed();
    link_->fail(fmt::format("group '{}' was destroyed", group_));
    // MPI_Comm_free is a collective by the standard but local in both libraries, so no rank waits for
    // another.
    std::packaged_task<void()> close([link = link_, clean] {
      link->gates.clear();
      MPI_Comm comm = link->comm;
      if (clean && mpi_is_up()) MPI_Comm_free(&comm);
      Progress::get().group_gone();
    });
    auto closed = close.get_future();
    Progress::get().call(
        [task = std::make_shared<std::packaged_task<void()>>(std::move(close))] { (*task)(); });
    // The program may finalise MPI next, so no thread of ours may be inside MPI then.
    if (clean) closed.wait_for(patience_);
  }

  Traits traits() const override {
    return {.avg = true, .unequal = true, .completes_unwatched = true, .keeps_inputs = true};
  }

  c10d::Backend& backend() override { return *backend_; }

  // Complex numbers too: without any_dtype, Group passes them as pairs of real numbers.
  bool reduces(Dtype dtype, ReduceOp op) const override { return reducible(dtype, op); }

  void interrupt(const std::string& cause, CommError::Kind) noexcept override {
    Progress::get().leave_mpi_alone();
    link_->fail(cause);
    Progress::get().works_failed();
  }

 private:
  const std::string group_;
  const milliseconds patience_;
  std::shared_ptr<MpiLink> link_;
  c10::intrusive_ptr<MpiBackend> backend_;
};

}  // namespace
}  // namespace lockstep::detail

extern "C" __attribute__((visibility("default"))) lockstep::detail::Transport* lockstep_make_mpi_transport(
    const lockstep::detail::TransportContext& context) {
  return new lockstep::detail::MpiTransport(context);
}
