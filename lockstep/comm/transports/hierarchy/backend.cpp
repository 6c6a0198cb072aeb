// Transport for groups that span hosts: shared memory within each host, gloo or MPI between hosts.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <lockstep/base/environment.h>
#include <lockstep/comm/c10d/op_transport.h>
#include <lockstep/comm/transports/hierarchy/c10d_links.h>
#include <lockstep/comm/transports/hierarchy/engine/engine.h>
#include <lockstep/comm/transports/hierarchy/engine/mail.h>
#include <lockstep/comm/transports/shm/backend.h>
#include <lockstep/comm/transports/shm/queue_work.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

namespace lockstep::detail {
namespace {

using hierarchy::C10dLinks;
using hierarchy::Hosts;
using hierarchy::Mail;

std::vector<int> far_ranks(const TransportContext& context) {
  const Hosts hosts(context.nodes, context.rank);
  std::vector<int> ranks;
  for (int r = 0; r < hosts.size(); ++r)
    if (hosts.host_of(r) != hosts.host()) ranks.push_back(r);
  return ranks;
}

class HierarchyBackend final : public OpBackend {
 public:
  HierarchyBackend(const TransportContext& context, std::string name, std::unique_ptr<Transport> between)
      : OpBackend(context.rank, context.size()),
        name_(std::move(name)),
        timeout_(context.timeout),
        links_(std::make_shared<C10dLinks>(std::move(between), far_ranks(context))) {
    const Hosts hosts(context.nodes, context.rank);
    std::unique_ptr<shm::Engine> inside;
    std::shared_ptr<shm::GroupSegment> group_segment;
    std::chrono::nanoseconds spin{};
    if (hosts.neighbours().size() > 1) {
      auto options = shm_options(context);
      options.names = hosts.neighbours();
      auto store =
          c10::make_intrusive<c10d::PrefixStore>(fmt::format("host {}", hosts.host()), context.store);
      ShmPlace place(*store, hosts.place(), static_cast<int>(hosts.neighbours().size()), options);
      inside = std::move(place.engine);
      group_segment = std::move(place.group_segment);
      spin = place.tuning.spin;
    }
    shm::Barrier* barrier = inside ? &inside->barrier() : nullptr;
    hierarchy::Engine::Tuning tuning;
    // For measurements. Ranks with different values get a mismatch error.
    tuning.window = static_cast<std::size_t>(
        env::integer("LOCKSTEP_WINDOW", 64, 1 << 30).value_or(static_cast<std::int64_t>(tuning.window)));
    op_queue_ = std::make_shared<shm::OpQueue>(
        std::make_unique<hierarchy::Engine>(hosts, std::move(inside), links_, group_segment.get(), tuning),
        group_segment);
    std::shared_ptr<shm::Messages> messages;
    if (barrier != nullptr)
      messages =
          std::make_shared<shm::Messages>(*barrier, *group_segment, spin, op_queue_, /*has_others=*/true);
    mail_ = std::make_shared<Mail>(hosts, std::move(messages), barrier, links_);
    init();
  }
  ~HierarchyBackend() override {
    leave();
    if (is_own()) links_->close();
  }

  const std::string getBackendName() const override { return name_; }
  bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override {
    return shared_tensor(size, options);
  }

  bool is_own() const { return shm::fork_generation() == generation_; }
  const std::shared_ptr<shm::OpQueue>& op_queue() const { return op_queue_; }
  void interrupt(const std::string& cause) {
    if (!is_own()) return;
    op_queue_->interrupt(cause);
    links_->interrupt(cause);
    mail_->interrupt(cause);
  }
  void leave() {
    if (!is_own()) return;
    mail_->close();
    op_queue_->close();
  }

 protected:
  WorkPtr post(Request request) override {
    TORCH_CHECK(is_own(), "a process that was forked from a rank cannot use the rank's groups");
    const auto timeout = request.timeout.count() > 0 ? request.timeout : timeout_;
    auto prepare = [&](const auto& engine) {
      using Engine = typename std::decay_t<decltype(engine)>::element_type;
      auto work = c10::make_intrusive<QueueWork<Engine>>(rank_, request.type, std::move(request.keep),
                                                         std::move(request.results), engine, false);
      work->prepare(std::move(request.finish), std::move(request.explain));
      return work;
    };
    if (point_to_point(request.op.call.operation)) {
      auto work = prepare(mail_);
      request.op.done = [work](const std::exception_ptr& error, int source) {
        work->settle_or_abandon(error, source);
      };
      work->set_item(mail_->post(std::move(request.op), request.tag, timeout));
      return work;
    }
    auto work = prepare(op_queue_);
    post_to(*op_queue_, work, std::move(request.op), timeout, request.asynchronous);
    return work;
  }

 private:
  const std::string name_;
  const std::uint64_t generation_ = shm::fork_generation();
  const std::chrono::milliseconds timeout_;
  const std::shared_ptr<C10dLinks> links_;
  std::shared_ptr<shm::OpQueue> op_queue_;
  std::shared_ptr<Mail> mail_;
};

class HierarchyTransport final : public OpTransport<HierarchyBackend> {
 public:
  using OpTransport::OpTransport;

  Traits traits() const override {
    auto traits = OpTransport::traits();
    traits.completes_unwatched = false;
    return traits;
  }
  OpSink* parts() override { return own().is_own() ? own().op_queue().get() : nullptr; }
  // Links may still write to any of them.
  void abandon(std::vector<at::Tensor> tensors) noexcept override {
    try {
      detail::abandon(std::move(tensors), false);
    } catch (...) {  // out of memory: then they are leaked
    }
  }
  std::string absent(std::uint64_t /*sequence*/) override { return own().op_queue()->absent(); }
  bool is_awaited() override { return own().op_queue()->is_awaited(); }
};

}  // namespace

std::unique_ptr<Transport> make_hierarchy_transport(const TransportContext& context, const std::string& name,
                                                    MakeTransport* make_between) {
  auto between = context;
  between.store = c10::make_intrusive<c10d::PrefixStore>("between", context.store);
  return std::make_unique<HierarchyTransport>(
      c10::make_intrusive<HierarchyBackend>(context, name, make_between(between)));
}

}  // namespace lockstep::detail
