// The cuda_ipc transport, for the ranks of one host that use the same or different GPUs: CUDA memory and
// events shared between processes.
#include <map>
#include <memory>
#include <mutex>

#include <ATen/ATen.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <fmt/format.h>
#include <lockstep/base/error.h>
#include <lockstep/base/log.h>
#include <lockstep/comm/c10d/op_transport.h>
#include <lockstep/comm/transports/cuda_ipc/engine/engine.h>
#include <lockstep/comm/transports/cuda_ipc/engine/gpu.h>
#include <lockstep/comm/transports/cuda_ipc/engine/mail.h>
#include <lockstep/comm/transports/shm/backend.h>
#include <lockstep/comm/transports/shm/queue_work.h>
#include <lockstep/kernels/kernels.h>

namespace lockstep::cuda_ipc {

// Like LibTorch's own guards: keeps track of threads that are on a device without a context.
OnDevice::OnDevice(int device) : before_(c10::cuda::ExchangeDevice(static_cast<c10::DeviceIndex>(device))) {}
OnDevice::~OnDevice() {
  try {
    c10::cuda::MaybeSetDevice(static_cast<c10::DeviceIndex>(before_));
  } catch (...) {  // the process is exiting and CUDA is already unloaded
  }
}

}  // namespace lockstep::cuda_ipc

namespace lockstep::detail {
namespace {

using cuda_ipc::Arena;
using cuda_ipc::check;
using cuda_ipc::Mail;
using cuda_ipc::OnDevice;
using cuda_ipc::Order;
using cuda_ipc::Peers;

c10::cuda::CUDAStream current_stream(int device) {
  return c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(device));
}

// Allocates tensors in the arena of a device. They may be resized, like LibTorch's own.
class ArenaAllocator final : public c10::Allocator {
 public:
  static ArenaAllocator& of(int device) {
    static std::mutex mutex;
    static auto& all = *new std::map<int, ArenaAllocator*>;
    std::lock_guard lock(mutex);
    auto& allocator = all[device];
    if (allocator == nullptr) allocator = new ArenaAllocator(device);
    return *allocator;
  }

  c10::DataPtr allocate(std::size_t bytes) override {
    auto* memory = arena_.allocate(bytes, current_stream(device_));
    auto* block = new Block{&arena_, memory, device_};
    return {memory, block, &free_block, at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(device_))};
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    const OnDevice here(device_);
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, current_stream(device_)),
          "cannot start a copy");
  }

 private:
  struct Block {
    Arena* arena;
    char* memory;
    int device;
  };
  static void free_block(void* context) {
    const std::unique_ptr<Block> block(static_cast<Block*>(context));
    try {
      block->arena->free(block->memory, current_stream(block->device));
    } catch (...) {  // the process is exiting and CUDA is already unloaded
    }
  }
  explicit ArenaAllocator(int device) : device_(device), arena_(Arena::of(device)) {}

  const int device_;
  Arena& arena_;
};

// For the host the work is complete once everything is enqueued; wait() then makes the current stream wait
// for the rest. The tensors are kept until wait() has returned: whatever that stream does with their memory
// afterwards runs after the operation. The work itself may be kept longer, to query whether the device is
// done.
template <typename Engine>
class DeviceWork final : public QueueWork<Engine> {
 public:
  DeviceWork(int rank, c10d::OpType type, std::vector<at::Tensor> tensors, std::shared_ptr<Engine> engine,
             std::shared_ptr<Order> order)
      : QueueWork<Engine>(rank, type, {}, {}, std::move(engine), /*abandons_shared_only=*/false),
        order_(std::move(order)),
        tensors_(std::move(tensors)) {}

  // Thread-safe, also after wait(). Queries the driver and never blocks.
  bool isCompleted() override {
    if (!c10d::Work::isCompleted()) return false;
    if (this->exception()) return true;
    const OnDevice here(order_->device);
    return cuda_ipc::is_done(cudaEventQuery(order_->done));
  }
  bool wait(std::chrono::milliseconds timeout) override {
    const bool complete = QueueWork<Engine>::wait(timeout);
    take_tensors();
    return complete;
  }
  void settle_or_abandon(const std::exception_ptr& error, int source) override {
    if (error) abandon(take_tensors(), /*shared_only=*/false);
    this->settle(error, source);
  }
  void synchronize() override {
    const OnDevice here(order_->device);
    check(cudaStreamWaitEvent(current_stream(order_->device), order_->done, 0), "cannot wait for an event");
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    TORCH_CHECK(false, "the cuda_ipc transport does not support futures: use wait()");
  }

 private:
  std::vector<at::Tensor> take_tensors() {
    std::lock_guard lock(this->mutex_);
    return std::exchange(tensors_, {});
  }
  const std::shared_ptr<Order> order_;
  std::vector<at::Tensor> tensors_;
};

class CudaIpcBackend final : public OpBackend {
 public:
  explicit CudaIpcBackend(const TransportContext& context)
      : OpBackend(context.rank, context.size()), device_(context.device_index), timeout_(context.timeout) {
    cuda_ipc::Arena::make_room = [] { c10::cuda::CUDACachingAllocator::emptyCache(); };
    auto options = shm_options(context);
    ShmPlace place(*context.store, context.rank, context.size(), options);
    barrier_ = &place.engine->barrier();
    const auto deadline = shm::Clock::now() + context.timeout;
    peers_ = std::make_shared<Peers>(*place.engine, context.rank, context.size(), device_, deadline);
    op_queue_ = std::make_shared<shm::OpQueue>(
        std::make_unique<cuda_ipc::Engine>(std::move(place.engine), peers_), place.group_segment);
    auto messages =
        std::make_shared<shm::Messages>(*barrier_, *place.group_segment, place.tuning.spin, op_queue_);
    mail_ = std::make_shared<Mail>(std::move(messages), peers_);
    init();
  }
  ~CudaIpcBackend() override { leave(); }

  const std::string getBackendName() const override { return "cuda_ipc"; }
  bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override {
    std::int64_t bytes = 0;
    TORCH_CHECK(size >= 0 && !__builtin_mul_overflow(size, options.dtype().itemsize(), &bytes),
                "a tensor of ", size, " elements cannot be allocated");
    auto& allocator = ArenaAllocator::of(device_);
    c10::Storage storage(c10::Storage::use_byte_size_t(), bytes,
                         allocator.allocate(static_cast<std::size_t>(bytes)), &allocator, /*resizable=*/true);
    auto tensor = at::detail::make_tensor<c10::TensorImpl>(
        std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CUDA), options.dtype());
    tensor.unsafeGetTensorImpl()->set_sizes_contiguous({size});
    return tensor;
  }

  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = timeout; }
  void interrupt(const std::string& cause) {
    if (shm::fork_generation() != generation_) return;
    interrupted_ = true;
    op_queue_->interrupt(cause);
    mail_->interrupt(cause);
  }
  void leave() {
    // A forked child has the memory but none of the threads: what it does must not affect this rank.
    if (shm::fork_generation() != generation_ || left_.exchange(true)) return;
    if (!peers_->finish(*barrier_, shm::Clock::now() + timeout_.load(), interrupted_) && !interrupted_)
      log(LogLevel::warn,
          "rank {} leaves a group of {} ranks while its GPU still works for it: a rank has ended, or the "
          "group's timeout of {} ms has passed",
          rank_, size_, timeout_.load().count());
    mail_->close();
    op_queue_->close();
    // What their threads release last belongs to CUDA, which may be unloaded soon if the process exits.
    mail_->wait_for_threads(kLetGo);
    op_queue_->wait_for_threads(kLetGo);
  }
  std::string absent() const { return op_queue_->absent(); }

 protected:
  at::Device device() const override { return {at::kCUDA, static_cast<c10::DeviceIndex>(device_)}; }

  WorkPtr post(Request request) override {
    TORCH_CHECK(shm::fork_generation() == generation_,
                "a process that was forked from a rank cannot use the rank's groups");
    TORCH_CHECK(!request.finish, "the cuda_ipc transport supports only dense tensors");
    const auto timeout = request.timeout.count() > 0 ? request.timeout : timeout_.load();
    auto order = std::make_shared<Order>(device_);
    {
      const OnDevice here(device_);
      check(cudaEventRecord(order->ready, current_stream(device_)), "cannot record an event");
    }
    request.op.order = order;
    auto prepare = [&](const auto& engine) {
      using Engine = typename std::decay_t<decltype(engine)>::element_type;
      auto work = c10::make_intrusive<DeviceWork<Engine>>(rank_, request.type, std::move(request.keep),
                                                          engine, order);
      work->prepare(nullptr, std::move(request.explain));
      return work;
    };
    if (point_to_point(request.op.call.operation)) {
      auto work = prepare(mail_);
      request.op.done = [work](const std::exception_ptr& error, int source) {
        work->settle_or_abandon(error, source);
      };
      const int peer = request.op.call.root;
      work->set_item(mail_->post(std::move(request.op), peer, request.tag, timeout));
      return work;
    }
    auto work = prepare(op_queue_);
    const bool soon = request.asynchronous || request.op.call.bytes >= kLarge;
    post_to(*op_queue_, work, std::move(request.op), timeout, soon);
    return work;
  }

 private:
  // An operation that waits on the host delays the device, and for this many bytes it is worth waking the
  // thread.
  static constexpr std::int64_t kLarge = 256 << 10;
  // usually immediate, unless the driver blocks them
  static constexpr std::chrono::milliseconds kLetGo{2000};

  const std::uint64_t generation_ = shm::fork_generation();
  const int device_;
  std::atomic<std::chrono::milliseconds> timeout_;
  std::atomic<bool> interrupted_ = false, left_ = false;
  std::shared_ptr<Peers> peers_;
  shm::Barrier* barrier_ = nullptr;  // the op queue's
  std::shared_ptr<shm::OpQueue> op_queue_;
  std::shared_ptr<Mail> mail_;
};

class CudaIpcTransport final : public OpTransport<CudaIpcBackend> {
 public:
  CudaIpcTransport(c10::intrusive_ptr<CudaIpcBackend> backend, int device)
      : OpTransport(std::move(backend)), device_(device) {}
  Traits traits() const override {
    auto traits = OpTransport::traits();
    traits.on_device = true;
    return traits;
  }
  std::string absent(std::uint64_t /*sequence*/) override { return own().absent(); }
  bool capturing() const override {
    const OnDevice here(device_);  // the default stream is that of the current device
    return cuda_ipc::is_capturing(current_stream(device_));
  }

 private:
  const int device_;
};

}  // namespace

std::string gpu_of(int device) { return cuda_ipc::text(cuda_ipc::device_id(device)); }

bool cuda_ipc_available() { return kernels::available() && c10::cuda::device_count() > 0; }

std::unique_ptr<Transport> make_cuda_ipc_transport(const TransportContext& context) {
  const int devices = c10::cuda::device_count();
  if (devices == 0)
    throw ConfigError("backend 'cuda_ipc' requires a GPU, and this process sees none; use a CPU backend");
  if (context.device_index >= devices)
    throw ConfigError(
        fmt::format("backend 'cuda_ipc': device cuda:{} does not exist; this process sees {} GPUs",
                    context.device_index, devices));
  return std::make_unique<CudaIpcTransport>(c10::make_intrusive<CudaIpcBackend>(context),
                                            context.device_index);
}

}  // namespace lockstep::detail
