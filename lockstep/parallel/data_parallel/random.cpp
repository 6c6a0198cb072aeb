#include <lockstep/parallel/data_parallel/random.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

namespace lockstep::detail {
namespace {

// The only dispatch key of LibTorch that is a per-thread mode without a meaning of its own. Operations fall
// through it, except those that take a generator.
constexpr auto kKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

thread_local ReplicaRandom* current = nullptr;
thread_local std::size_t current_replica = 0;

bool is_generator(const c10::Argument& argument) {
  const auto kind = argument.type()->kind();
  if (kind == c10::TypeKind::OptionalType)
    return argument.type()->expectRef<c10::OptionalType>().getElementType()->kind() ==
           c10::TypeKind::GeneratorType;
  return kind == c10::TypeKind::GeneratorType;
}

// True if the operation runs on the CPU, so that a CPU generator applies.
bool on_cpu(at::ArrayRef<c10::IValue> arguments) {
  for (const auto& each : arguments) {
    if (each.isTensor() && each.toTensor().defined() && !each.toTensor().is_cpu()) return false;
    if (each.isDevice() && !each.toDevice().is_cpu()) return false;
  }
  return true;
}

void with_own_generator(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard once(kKey);
  const auto& arguments = operation.schema().arguments();
  const auto first = stack->size() - arguments.size();
  if (current && on_cpu(at::ArrayRef<c10::IValue>(*stack).slice(first)))
    for (std::size_t i = 0; i < arguments.size(); ++i)
      if (auto& given = (*stack)[first + i]; is_generator(arguments[i]) && given.isNone())
        given = current->generator(current_replica);
  operation.callBoxed(stack);
}

void register_once() {
  static const bool registered = [] {
    // Never undone, because operations may run until the process ends.
    auto* all = new torch::Library(torch::Library::IMPL, "_", kKey, __FILE__, __LINE__);
    all->fallback(torch::CppFunction::makeFallthrough());
    auto* aten = new torch::Library(torch::Library::IMPL, "aten", kKey, __FILE__, __LINE__);
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const auto& name : dispatcher.getAllOpNames()) {
      if (!name.name.starts_with("aten::")) continue;
      const auto operation = dispatcher.findSchema(name);
      if (!operation) continue;
      const auto& arguments = operation->schema().arguments();
      if (std::none_of(arguments.begin(), arguments.end(), is_generator)) continue;
      const auto full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
      aten->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&with_own_generator>());
    }
    return true;
  }();
  (void)registered;
}

// The last step of splitmix64: makes neighbouring seeds give unrelated numbers.
std::uint64_t scrambled(std::uint64_t seed) {
  seed = (seed ^ (seed >> 30)) * 0xbf58476d1ce4e5b9u;
  seed = (seed ^ (seed >> 27)) * 0x94d049bb133111ebu;
  return seed ^ (seed >> 31);
}

}  // namespace

std::vector<std::optional<nn::DropoutStep>> dropout_steps(const std::vector<std::vector<at::Tensor>>& pieces,
                                                          std::int64_t dim) {
  std::vector<std::optional<nn::DropoutStep>> steps(pieces.size(), nn::dropout_step());
  if (pieces.empty() || !steps[0]) return steps;
  std::int64_t first = 0;
  for (std::size_t r = 0; r < pieces.size(); ++r) {
    steps[r]->first_sample += first;
    for (const auto& piece : pieces[r]) {
      if (!piece.defined() || piece.dim() == 0) continue;
      if (dim == 0 || dim + piece.dim() == 0) first += piece.size(0);
      break;
    }
  }
  return steps;
}

ReplicaRandom::ReplicaRandom(std::size_t replicas)
    : outer_(current ? current->shared_from_this() : nullptr),
      outer_replica_(current_replica),
      generators_(replicas) {
  register_once();
}

const at::Generator& ReplicaRandom::generator(std::size_t replica) {
  std::lock_guard lock(mutex_);
  if (!generators_[replica].defined()) {
    auto source = outer_ ? outer_->generator(outer_replica_) : at::detail::getDefaultCPUGenerator();
    std::uint64_t seed = 0;
    {
      std::lock_guard source_lock(source.mutex());
      seed = at::check_generator<at::CPUGeneratorImpl>(source)->random64();
    }
    for (std::size_t i = 0; i < generators_.size(); ++i)
      generators_[i] =
          at::make_generator<at::CPUGeneratorImpl>(scrambled(seed + (i + 1) * 0x9e3779b97f4a7c15u));
  }
  return generators_[replica];
}

ReplicaRandom::Guard::Guard(ReplicaRandom& random, std::size_t replica)
    : key_(kKey), before_(current), replica_before_(current_replica) {
  current = &random;
  current_replica = replica;
}

ReplicaRandom::Guard::~Guard() {
  current = before_;
  current_replica = replica_before_;
}

}  // namespace lockstep::detail
