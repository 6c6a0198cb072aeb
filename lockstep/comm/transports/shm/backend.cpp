#include <lockstep/comm/transports/shm/backend.h>

#include <limits>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <lockstep/base/environment.h>
#include <lockstep/comm/c10d/op_transport.h>
#include <lockstep/comm/transports/shm/queue_work.h>

namespace lockstep::detail {
namespace {

using std::chrono::milliseconds;

// Allocates tensors in the arena. They may be resized, like LibTorch's own.
class ArenaAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    void* memory = shm::Arena::instance().allocate(bytes);
    return {memory, memory, raw_deleter(), at::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return [](void* memory) { shm::Arena::instance().free(memory); };
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

shm::Engine::Tuning tuning_for(bool roomy, int ranks) {
  shm::Engine::Tuning tuning;
  tuning.spin = roomy ? std::chrono::microseconds(50) : std::chrono::microseconds(0);
  // Each chunk costs a barrier: if ranks must take turns on a processor, use few and large chunks.
  tuning.chunk = !roomy ? std::size_t{2} << 20 : ranks <= 4 ? std::size_t{256} << 10 : std::size_t{1} << 20;
  // There an additional step also costs more than reading everything.
  if (!roomy) tuning.slot_pull = std::numeric_limits<std::size_t>::max();
  // For measurements. Ranks with different values get a mismatch error.
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

void abandon(std::vector<at::Tensor> tensors, bool shared_only) {
  static std::mutex mutex;
  static auto* kept = new std::vector<at::Tensor>;
  auto is_shared = [](const at::Tensor& tensor) {
    return shm::Arena::instance().find(tensor.const_data_ptr(), 1).segment != 0;
  };
  std::lock_guard lock(mutex);
  for (auto& tensor : tensors)
    if (tensor.defined() && tensor.nbytes() > 0 && (!shared_only || is_shared(tensor)))
      kept->push_back(std::move(tensor));
}

ShmPlace::ShmPlace(c10d::Store& store, int rank, int size, const ShmOptions& options) {
  shm::KeyValue key_value;
  key_value.set = [&](const std::string& key, const std::string& value) {
    store.set(key, std::vector<std::uint8_t>(value.begin(), value.end()));
  };
  key_value.get = [&](const std::string& key) {
    const auto value = store.get(key);
    return std::string(value.begin(), value.end());
  };
  key_value.forget = [&](const std::string& key) {
    try {
      store.deleteKey(key);
      for (const auto& each : options.store_keys) store.deleteKey(each);
    } catch (const std::exception&) {  // some stores do not support it
    }
  };
  auto check = [&] {
    if (options.failed()) throw std::runtime_error("the job has failed");
  };
  const shm::HostInfo host_info{options.local_ranks, options.threads, options.names};
  group_segment = std::make_shared<shm::GroupSegment>(rank, size, host_info, key_value,
                                                      shm::Clock::now() + options.timeout, check);
  tuning = tuning_for(group_segment->roomy(), size);
  engine =
      std::make_unique<shm::Engine>(group_segment->region(), rank, tuning, *group_segment, options.names);
}

ShmBackend::ShmBackend(c10::intrusive_ptr<c10d::Store> store, int rank, int size, const ShmOptions& options)
    : OpBackend(rank, size), timeout_(options.timeout.count()) {
  ShmPlace place(*store, rank, size, options);
  auto& barrier = place.engine->barrier();
  op_queue_ = std::make_shared<shm::OpQueue>(std::move(place.engine), place.group_segment);
  messages_ = std::make_shared<shm::Messages>(barrier, *place.group_segment, place.tuning.spin, op_queue_);
  init();
}

ShmBackend::~ShmBackend() { leave(); }

at::Tensor shared_tensor(std::int64_t size, const at::TensorOptions& options) {
  std::int64_t bytes = 0;
  TORCH_CHECK(size >= 0 && !__builtin_mul_overflow(size, options.dtype().itemsize(), &bytes), "a tensor of ",
              size, " elements cannot be allocated");
  static auto* allocator = new ArenaAllocator;
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes,
                       allocator->allocate(static_cast<std::size_t>(bytes)), allocator, /*resizable=*/true);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), options.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous({size});
  return tensor;
}

OpBackend::WorkPtr ShmBackend::post(Request request) {
  TORCH_CHECK(is_own(), "a process that was forked from a rank cannot use the rank's groups");
  const auto timeout = request.timeout.count() > 0 ? request.timeout : this->timeout();
  auto prepare = [&](const auto& engine) {
    using Engine = typename std::decay_t<decltype(engine)>::element_type;
    auto work =
        c10::make_intrusive<QueueWork<Engine>>(rank_, request.type, std::move(request.keep),
                                               std::move(request.results), engine, true, title(request.op));
    work->prepare(std::move(request.finish), std::move(request.explain));
    return work;
  };
  if (point_to_point(request.op.call.operation)) {
    auto work = prepare(messages_);
    request.op.done = [work](const std::exception_ptr& error, int source) {
      work->settle_or_abandon(error, source);
    };
    const int peer = request.op.call.root;
    work->set_item(messages_->post(std::move(request.op), peer, request.tag, timeout));
    return work;
  }
  auto work = prepare(op_queue_);
  post_to(*op_queue_, work, std::move(request.op), timeout, request.asynchronous);
  return work;
}

void ShmBackend::interrupt(const std::string& cause) {
  if (!is_own()) return;
  op_queue_->interrupt(cause);
  messages_->interrupt(cause);
}

void ShmBackend::leave() {
  if (!is_own()) return;
  messages_->close();
  op_queue_->close();
}

namespace {

class ShmTransport final : public OpTransport<ShmBackend> {
 public:
  using OpTransport::OpTransport;

  // The backend rejects calls from a forked child, with the reason.
  OpSink* parts() override { return own().is_own() ? own().op_queue().get() : nullptr; }
  void abandon(std::vector<at::Tensor> tensors) noexcept override {
    try {
      detail::abandon(std::move(tensors), true);
    } catch (...) {  // out of memory: then they are leaked
    }
  }
  std::string absent(std::uint64_t /*sequence*/) override { return own().absent(); }
  bool is_awaited() override { return own().is_awaited(); }
};

}  // namespace

ShmOptions shm_options(const TransportContext& context) {
  return {.timeout = context.timeout,
          .local_ranks = context.local_ranks,
          .threads = at::get_num_threads(),
          .failed = context.failed};
}

std::unique_ptr<Transport> make_shm_transport(const TransportContext& context) {
  return std::make_unique<ShmTransport>(
      c10::make_intrusive<ShmBackend>(context.store, context.rank, context.size(), shm_options(context)));
}

}  // namespace lockstep::detail
