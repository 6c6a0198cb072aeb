#include <lockstep/comm/transports/shm/backend.h>

#include <limits>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <lockstep/base/environment.h>
#include <lockstep/comm/engine_work.h>
#include <lockstep/comm/reduce.h>
#include <lockstep/comm/transport.h>
#include <lockstep/comm/transports/shm/station.h>

namespace lockstep::detail {
namespace {

using std::chrono::milliseconds;

// Of operations that failed: a peer may still read or write them, so they are never used again.
void abandon(std::vector<at::Tensor> tensors) {
  static std::mutex mutex;
  static auto* kept = new std::vector<at::Tensor>;
  std::lock_guard lock(mutex);
  for (auto& tensor : tensors)
    if (tensor.defined() && tensor.nbytes() > 0 &&
        shm::Arena::instance().find(tensor.const_data_ptr(), 1).segment != 0)
      kept->push_back(std::move(tensor));
}

// Of a lane or of messages: whoever waits does the work.
template <typename Engine>
class ShmWork final : public EngineWork {
 public:
  using ItemPtr = std::shared_ptr<typename Engine::Item>;
  ShmWork(int rank, c10d::OpType type, std::vector<at::Tensor> inputs, std::vector<at::Tensor> outputs,
          std::shared_ptr<Engine> engine)
      : EngineWork(rank, type, std::move(inputs), std::move(outputs)), engine_(std::move(engine)) {}

  void set_item(ItemPtr item) { item_ = std::move(item); }
  void settle_or_abandon(const std::exception_ptr& error, int source) {
    if (error) abandon(tensors());
    settle(error, source);
  }

  bool wait(milliseconds timeout) override {
    if (!isCompleted()) {
      const auto limit = timeout > milliseconds(0) ? timeout : milliseconds(std::chrono::hours(24 * 365));
      Waiting here;
      engine_->wait(*item_, shm::Clock::now() + limit);
    }
    return EngineWork::wait(kNoTimeout);
  }

 private:
  const std::shared_ptr<Engine> engine_;
  ItemPtr item_;
};

struct LaneItem final : PartItem {
  c10::intrusive_ptr<ShmWork<shm::Lane>> work;
  void done(const std::exception_ptr& error, int source) override {
    std::exchange(work, {})->settle_or_abandon(error, source);
  }
};

shm::Engine::Tuning tuning(bool roomy, int ranks) {
  shm::Engine::Tuning tuning;
  tuning.spin = roomy ? std::chrono::microseconds(50) : std::chrono::microseconds(0);
  // Each chunk is a meeting: where ranks must take turns on a processor, few and large ones.
  tuning.chunk = !roomy ? std::size_t{2} << 20 : ranks <= 4 ? std::size_t{256} << 10 : std::size_t{1} << 20;
  // And a step more costs more there than reading everything does.
  if (!roomy) tuning.slot_pull = std::numeric_limits<std::size_t>::max();
  // To measure other values; ranks that have different ones are told.
  auto size = [](const char* name, std::size_t fallback) {
    return static_cast<std::size_t>(
        env::integer(name, 64, 1 << 30).value_or(static_cast<std::int64_t>(fallback)));
  };
  tuning.chunk = size("LOCKSTEP_SHM_CHUNK", tuning.chunk);
  tuning.claim = size("LOCKSTEP_SHM_CLAIM", tuning.claim);
  tuning.pull_up_to =
      static_cast<int>(env::integer("LOCKSTEP_SHM_PULL", 1, 1024).value_or(tuning.pull_up_to));
  return tuning;
}

}  // namespace

ShmBackend::ShmBackend(c10::intrusive_ptr<c10d::Store> store, int rank, int size, ShmOptions options)
    : PartBackend(rank, size), timeout_(options.timeout.count()) {
  shm::Words words;
  words.set = [&](const std::string& key, const std::string& value) {
    store->set(key, std::vector<std::uint8_t>(value.begin(), value.end()));
  };
  words.get = [&](const std::string& key) {
    const auto value = store->get(key);
    return std::string(value.begin(), value.end());
  };
  auto check = [&] {
    if (options.failed()) throw std::runtime_error("the job has failed");
  };
  auto station =
      std::make_shared<shm::Station>(rank, size, shm::Company{options.local_ranks, options.threads}, words,
                                     shm::Clock::now() + options.timeout, check);
  const auto how = tuning(station->roomy(), size);
  auto engine = std::make_unique<shm::Engine>(station->region(), rank, how, *station);
  auto& meeting = engine->meeting();
  lane_ = std::make_shared<shm::Lane>(std::move(engine), station);
  messages_ = std::make_shared<shm::Messages>(meeting, *station, how.spin, lane_);
  init();
}

ShmBackend::~ShmBackend() { leave(); }

at::Tensor ShmBackend::allocateTensor(long size, at::TensorOptions options) {
  auto& arena = shm::Arena::instance();
  void* memory = arena.allocate(static_cast<std::size_t>(size) * options.dtype().itemsize());
  return at::from_blob(
      memory, {size}, [](void* pointer) { shm::Arena::instance().free(pointer); }, options);
}

PartBackend::WorkPtr ShmBackend::post(Request request) {
  TORCH_CHECK(is_own(), "a process that was forked from a rank cannot use the rank's groups");
  const auto timeout = request.timeout.count() > 0 ? request.timeout : this->timeout();
  auto prepare = [&](const auto& engine) {
    using Engine = typename std::decay_t<decltype(engine)>::element_type;
    auto work = c10::make_intrusive<ShmWork<Engine>>(rank_, request.type, std::move(request.keep),
                                                     std::move(request.results), engine);
    work->prepare(std::move(request.finish), std::move(request.explain));
    return work;
  };
  if (point_to_point(request.part.call.operation)) {
    auto work = prepare(messages_);
    request.part.done = [work](const std::exception_ptr& error, int source) {
      work->settle_or_abandon(error, source);
    };
    const int peer = request.part.call.root;
    work->set_item(messages_->post(std::move(request.part), peer, request.tag, timeout));
    return work;
  }
  auto work = prepare(lane_);
  auto item = std::make_shared<LaneItem>();
  item->part = std::move(request.part);
  item->work = work;
  work->set_item(item);
  lane_->post(std::move(item), timeout, request.asynchronous);
  return work;
}

void ShmBackend::interrupt(const std::string& cause) {
  lane_->interrupt(cause);
  messages_->interrupt(cause);
}

void ShmBackend::leave() {
  if (!is_own()) return;
  messages_->close();
  lane_->close();
}

namespace {

class ShmTransport final : public Transport {
 public:
  explicit ShmTransport(const TransportContext& context)
      : backend_(c10::make_intrusive<ShmBackend>(context.store, context.rank, context.size(),
                                                 ShmOptions{.timeout = context.timeout,
                                                            .local_ranks = context.local_ranks,
                                                            .threads = at::get_num_threads(),
                                                            .failed = context.failed})) {}

  Traits traits() const override {
    return {.avg = true, .unequal = true, .any_dtype = true, .compares_calls = true, .keeps_inputs = true};
  }
  c10d::Backend& backend() override { return *backend_; }
  bool reduces(Dtype dtype, ReduceOp op) const override { return reducible(dtype, op); }
  void interrupt(const std::string& cause) noexcept override {
    try {
      backend_->interrupt(cause);
    } catch (...) {  // out of memory while waking: the deadline remains
    }
  }
  void leave() noexcept override { backend_->leave(); }
  // A child that was forked is refused by the backend, which says why.
  PartEngine* parts() override { return backend_->is_own() ? backend_->lane().get() : nullptr; }
  void abandon(std::vector<at::Tensor> tensors) noexcept override {
    try {
      detail::abandon(std::move(tensors));
    } catch (...) {  // no memory to note them in: they are not freed either
    }
  }
  std::string absent(std::uint64_t /*sequence*/) override { return backend_->absent(); }

 private:
  const c10::intrusive_ptr<ShmBackend> backend_;
};

}  // namespace

std::unique_ptr<Transport> make_shm_transport(const TransportContext& context) {
  return std::make_unique<ShmTransport>(context);
}

}  // namespace lockstep::detail
