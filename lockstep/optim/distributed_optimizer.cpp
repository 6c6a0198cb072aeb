#include <lockstep/optim/distributed_optimizer.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <span>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <lockstep/base/error.h>
#include <lockstep/modules/detail/flat_views.h>
#include <lockstep/modules/replicas.h>
#include <lockstep/optim/detail/group_options.h>
#include <lockstep/parallel/ddp/reducer.h>
#include <lockstep/parallel/ddp/shards.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

namespace lockstep::detail {
namespace {

using torch::optim::Optimizer;
using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamGroup;
using torch::optim::OptimizerParamState;

constexpr auto kBlock = ParameterShards::kBlock;

// A parameter's state for any optimizer. step is -1 if there is none.
struct State {
  std::int64_t step = -1;
  std::array<at::Tensor, 4> tensors = {};  // the first one is the master
};

template <typename Base>
at::Tensor master_of(const Base& state) {
  const auto* own = dynamic_cast<const ParamState<Base>*>(&state);  // LibTorch's own has none
  return own != nullptr ? own->master : at::Tensor();
}

[[noreturn]] void refuse_state() {
  throw ConfigError(
      "DistributedOptimizer: cannot save or load its state: expected an optimizer with the options and state "
      "of torch::optim's Adam, AdamW, SGD, RMSprop or Adagrad, got one with its own");
}

// Checks the options, because they are the same on every rank; some ranks may have no state.
void require_known_state(const Optimizer& optimizer) {
  const auto* options = &optimizer.defaults();
  if (dynamic_cast<const torch::optim::AdamOptions*>(options) == nullptr &&
      dynamic_cast<const torch::optim::AdamWOptions*>(options) == nullptr &&
      dynamic_cast<const torch::optim::SGDOptions*>(options) == nullptr &&
      dynamic_cast<const torch::optim::RMSpropOptions*>(options) == nullptr &&
      dynamic_cast<const torch::optim::AdagradOptions*>(options) == nullptr)
    refuse_state();
}

template <typename Adam>
State of_adam(const Adam& state) {
  return {state.step(), {master_of(state), state.exp_avg(), state.exp_avg_sq(), state.max_exp_avg_sq()}};
}

State read(const OptimizerParamState& state) {
  if (const auto* adam = dynamic_cast<const torch::optim::AdamParamState*>(&state)) return of_adam(*adam);
  if (const auto* adamw = dynamic_cast<const torch::optim::AdamWParamState*>(&state)) return of_adam(*adamw);
  if (const auto* rms = dynamic_cast<const torch::optim::RMSpropParamState*>(&state))
    return {rms->step(), {at::Tensor(), rms->square_avg(), rms->momentum_buffer(), rms->grad_avg()}};
  if (const auto* adagrad = dynamic_cast<const torch::optim::AdagradParamState*>(&state))
    return {adagrad->step(), {at::Tensor(), adagrad->sum()}};
  if (const auto* sgd = dynamic_cast<const torch::optim::SGDParamState*>(&state))
    return {0, {master_of(*sgd), sgd->momentum_buffer()}};
  refuse_state();
}

template <typename Adam>
std::unique_ptr<OptimizerParamState> adam_state(const State& given) {
  auto state = std::make_unique<ParamState<Adam>>();
  state->step(given.step);
  state->master = given.tensors[0];
  state->exp_avg(given.tensors[1]);
  state->exp_avg_sq(given.tensors[2]);
  state->max_exp_avg_sq(given.tensors[3]);
  return state;
}

std::unique_ptr<OptimizerParamState> make(const Optimizer& optimizer, const State& given) {
  const auto& defaults = optimizer.defaults();
  if (dynamic_cast<const torch::optim::AdamOptions*>(&defaults))
    return adam_state<torch::optim::AdamParamState>(given);
  if (dynamic_cast<const torch::optim::AdamWOptions*>(&defaults))
    return adam_state<torch::optim::AdamWParamState>(given);
  if (dynamic_cast<const torch::optim::RMSpropOptions*>(&defaults)) {
    auto state = std::make_unique<torch::optim::RMSpropParamState>();
    state->step(given.step);
    state->square_avg(given.tensors[1]);
    state->momentum_buffer(given.tensors[2]);
    state->grad_avg(given.tensors[3]);
    return state;
  }
  if (dynamic_cast<const torch::optim::AdagradOptions*>(&defaults)) {
    auto state = std::make_unique<torch::optim::AdagradParamState>();
    state->step(given.step);
    state->sum(given.tensors[1]);
    return state;
  }
  auto state = std::make_unique<ParamState<torch::optim::SGDParamState>>();
  state->master = given.tensors[0];
  state->momentum_buffer(given.tensors[1]);
  return state;
}

State state_of(Optimizer& optimizer, const at::Tensor& parameter) {
  const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
  return found == optimizer.state().end() ? State{} : read(*found->second);
}

OptimizerParamGroup like(const OptimizerParamGroup& group, std::vector<at::Tensor> params) {
  if (!group.has_options()) return OptimizerParamGroup(std::move(params));
  return {std::move(params), group.options().clone()};
}

template <typename Base>
bool copy_options(const OptimizerOptions& from, OptimizerOptions& to) {
  const auto* given = dynamic_cast<const ParamGroupOptions<Base>*>(&from);
  auto* own = dynamic_cast<ParamGroupOptions<Base>*>(&to);
  if (given == nullptr || own == nullptr) return false;
  *own = *given;
  return true;
}

template <typename Adam>
std::string adam_text(const Adam& o) {
  return fmt::format("lr {}, betas {} {}, eps {}, weight_decay {}, amsgrad {}", o.lr(),
                     std::get<0>(o.betas()), std::get<1>(o.betas()), o.eps(), o.weight_decay(), o.amsgrad());
}

std::string text_of(const OptimizerOptions& options) {
  if (const auto* adam = dynamic_cast<const torch::optim::AdamOptions*>(&options)) return adam_text(*adam);
  if (const auto* adamw = dynamic_cast<const torch::optim::AdamWOptions*>(&options)) return adam_text(*adamw);
  if (const auto* sgd = dynamic_cast<const torch::optim::SGDOptions*>(&options))
    return fmt::format("lr {}, momentum {}, dampening {}, weight_decay {}, nesterov {}", sgd->lr(),
                       sgd->momentum(), sgd->dampening(), sgd->weight_decay(), sgd->nesterov());
  if (const auto* rms = dynamic_cast<const torch::optim::RMSpropOptions*>(&options))
    return fmt::format("lr {}, alpha {}, eps {}, weight_decay {}, momentum {}, centered {}", rms->lr(),
                       rms->alpha(), rms->eps(), rms->weight_decay(), rms->momentum(), rms->centered());
  if (const auto* adagrad = dynamic_cast<const torch::optim::AdagradOptions*>(&options))
    return fmt::format("lr {}, lr_decay {}, weight_decay {}, initial_accumulator_value {}, eps {}",
                       adagrad->lr(), adagrad->lr_decay(), adagrad->weight_decay(),
                       adagrad->initial_accumulator_value(), adagrad->eps());
  try {
    return fmt::format("lr {}", options.get_lr());
  } catch (const c10::Error&) {  // a user-defined type without get_lr
    return "user-defined options";
  }
}

// Uses eight partial sums, so that the compiler can vectorise; the order is always the same.
template <typename T, typename Power>
double power_of_block(const T* values, std::int64_t count, Power power) {
  std::array<double, 8> sums{};
  std::int64_t i = 0;
  for (; i + 8 <= count; i += 8)
    for (std::int64_t k = 0; k < 8; ++k)
      sums[static_cast<std::size_t>(k)] += power(static_cast<double>(values[i + k]));
  for (; i < count; ++i) sums[static_cast<std::size_t>(i % 8)] += power(static_cast<double>(values[i]));
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

double larger(double a, double b) { return std::isnan(a) || b <= a ? a : b; }  // keeps a NaN

template <typename T>
void powers_of(const T* values, std::int64_t count, double norm_type, double* blocks) {
  for (std::int64_t begin = 0; begin < count; begin += kBlock, ++blocks) {
    const auto* block = values + begin;
    const auto length = std::min(kBlock, count - begin);
    if (std::isinf(norm_type)) {
      for (std::int64_t i = 0; i < length; ++i) {
        const double size = std::abs(static_cast<double>(block[i]));
        *blocks = larger(*blocks, size);
      }
    } else if (norm_type == 2) {
      *blocks = power_of_block(block, length, [](double value) { return value * value; });
    } else {
      *blocks =
          power_of_block(block, length, [&](double value) { return std::pow(std::abs(value), norm_type); });
    }
  }
}

// Reduces a CPU tensor, via `device` if the group has no transport for CPU tensors.
void reduce_on_cpu(Group& group, at::Tensor& tensor, at::Device device, AllReduceOptions options) {
  const bool cpu = !group.backend(at::kCPU).empty();
  auto there = cpu ? tensor : tensor.to(device);
  group.all_reduce(there, std::move(options)).wait();
  if (!cpu) tensor.copy_(there);
}

double tree(std::span<const double> values) {
  if (values.empty()) return 0;
  if (values.size() == 1) return values[0];
  std::size_t left = 1;
  while (2 * left < values.size()) left *= 2;
  return tree(values.first(left)) + tree(values.subspan(left));
}

}  // namespace

ShardedOptimizer::ShardedOptimizer(DdpBase& ddp, DistributedOptimizerOptions options)
    : share_weights_(options.share_weights), shards_(ddp.shard(options.share_weights)) {}

ShardedOptimizer::~ShardedOptimizer() {
  if (auto reducer = shards_->reducer.lock())
    reducer->unshard();
  else
    shards_->release();
}

void ShardedOptimizer::require_same_options(const Optimizer& self) const {
  std::vector<std::string> lines;
  for (const auto& group : self.param_groups()) {
    const auto* manner = dynamic_cast<const UpdateMode*>(&group.options());
    if (manner != nullptr && manner->capturable)
      throw ConfigError("DistributedOptimizer does not support capturable; use the plain optimizer");
    std::vector<std::size_t> members;
    for (const auto& slice : group.params()) members.push_back(find(slice));
    lines.push_back(fmt::format("group {}: {}, master_weights {}, parameters {}", lines.size(),
                                text_of(group.options()), manner != nullptr && manner->master_weights,
                                fmt::join(members, " ")));
  }
  require_same_lines(group(), lines, "DistributedOptimizer: options differ between ranks");
}

void ShardedOptimizer::drop_gradients() { shards_->drop_gradients(); }
void ShardedOptimizer::require_complete() const { shards_->require_complete(); }
void ShardedOptimizer::drop_unreduced_gradients() { shards_->drop_unreduced_gradients(); }

Group& ShardedOptimizer::group() const { return shards_->group(); }

ParamGroups ShardedOptimizer::all_parameters() const {
  std::vector<at::Tensor> params;
  for (std::size_t i = 0; i < shards_->size(); ++i) params.push_back(shards_->param(i));
  return {OptimizerParamGroup(std::move(params))};
}

ParamGroups ShardedOptimizer::slices_of(const ParamGroups& groups) const {
  ParamGroups sliced;
  for (const auto& group : groups) {
    std::vector<at::Tensor> slices;
    for (const auto& param : group.params()) slices.push_back(shards_->slice(shards_->find(param)));
    sliced.push_back(like(group, std::move(slices)));
  }
  return sliced;
}

std::size_t ShardedOptimizer::find(const at::Tensor& slice) const {
  const auto param = shards_->find_slice(slice);
  if (param == shards_->size())
    throw ConfigError(
        "a parameter group was added to a DistributedOptimizer; pass all groups to its constructor");
  return param;
}

ParamGroups ShardedOptimizer::whole_groups(const Optimizer& self) const {
  ParamGroups whole;
  for (const auto& group : self.param_groups()) {
    std::vector<at::Tensor> params;
    for (const auto& slice : group.params()) params.push_back(shards_->param(find(slice)));
    whole.push_back(like(group, std::move(params)));
  }
  return whole;
}

void ShardedOptimizer::copy_group_options(const Optimizer& self, Optimizer& whole) const {
  for (std::size_t g = 0; g < self.param_groups().size(); ++g)
    whole.param_groups()[g].set_options(self.param_groups()[g].options().clone());
}

void ShardedOptimizer::begin_step(const Optimizer& self) {
  for (const auto& group : self.param_groups())
    for (const auto& slice : group.params()) (void)find(slice);  // check that none was added
  shards_->before_update();
  // A slice has its own version counter, so copy writes to the parameter into it. With shared weights, a
  // rank's writes do not change the versions on the other ranks.
  versions_.resize(shards_->size(), -1);
  for (std::size_t i = 0; i < versions_.size(); ++i)
    if (share_weights_ || static_cast<std::int64_t>(shards_->param(i)._version()) != versions_[i])
      shards_->slice(i).unsafeGetTensorImpl()->bump_version();
}

void ShardedOptimizer::end_step() {
  if (const auto sink = span_sink()) {  // Inner reported this rank's slices only
    std::size_t parameters = 0;
    for (std::size_t i = 0; i < shards_->size(); ++i) parameters += shards_->param(i).nbytes();
    sink->note("memory.parameters", std::to_string(parameters));
  }
  shards_->drop_gradients();
  shards_->drop_unreduced_gradients();
  shards_->after_update();
  for (std::size_t i = 0; i < versions_.size(); ++i)
    versions_[i] = static_cast<std::int64_t>(shards_->param(i)._version());
}

at::Tensor ShardedOptimizer::clip_grad_norm(double max_norm, ClipGradNormOptions options) {
  if (options.group)
    throw ConfigError("DistributedOptimizer::clip_grad_norm: remove {.group}; the optimizer uses its own");
  if (!(options.norm_type > 0))
    throw ConfigError(
        fmt::format("clip_grad_norm: norm_type: expected a number above 0, got {}", options.norm_type));
  require_complete();
  at::NoGradGuard no_grad;
  std::int64_t blocks = 0;
  for (std::size_t i = 0; i < shards_->size(); ++i)
    blocks += (shards_->param(i).numel() + kBlock - 1) / kBlock;
  auto powers = at::zeros({blocks}, at::kDouble);
  auto* at_param = powers.mutable_data_ptr<double>();
  std::vector<at::Tensor> gradients;
  for (std::size_t i = 0; i < shards_->size(); ++i) {
    const auto& gradient = shards_->slice(i).grad();
    if (gradient.defined()) {
      gradients.push_back(gradient);
      auto* here = at_param + shards_->slice_begin(i) / kBlock;
      if (gradient.is_cpu() && gradient.scalar_type() == at::kFloat) {
        powers_of(gradient.const_data_ptr<float>(), gradient.numel(), options.norm_type, here);
      } else {
        const auto sizes = gradient.is_complex() ? gradient.abs() : gradient;
        const auto wide = sizes.to(at::kCPU, at::kDouble).contiguous();
        powers_of(wide.const_data_ptr<double>(), wide.numel(), options.norm_type, here);
      }
    }
    at_param += (shards_->param(i).numel() + kBlock - 1) / kBlock;
  }
  // Each block is nonzero on one rank only, so the sum equals that rank's value, even if it is NaN or
  // infinite.
  reduce_on_cpu(group(), powers, shards_->param(0).device(), {.tag = "clip_grad_norm"});
  const std::span values(powers.const_data_ptr<double>(), static_cast<std::size_t>(blocks));
  double norm = 0;
  if (std::isinf(options.norm_type)) {
    for (const double value : values) norm = larger(norm, value);
  } else {
    norm = options.norm_type == 2 ? std::sqrt(tree(values)) : std::pow(tree(values), 1 / options.norm_type);
  }
  if (options.error_if_nonfinite && !std::isfinite(norm))
    throw Error(fmt::format("clip_grad_norm: cannot clip: the gradients' norm of order {} is {}",
                            options.norm_type, norm));
  bool is_double = false;  // a property of the model, so it is the same on all ranks
  for (std::size_t i = 0; i < shards_->size(); ++i)
    is_double = is_double || shards_->param(i).scalar_type() == at::kDouble;
  const auto result = at::scalar_tensor(norm, at::TensorOptions(is_double ? at::kDouble : at::kFloat));
  const auto factor = at::clamp_max(at::mul((result + 1e-6).reciprocal(), max_norm), 1.0);
  for (auto& gradient : gradients) gradient.mul_(factor.to(gradient.device()));
  return result;
}

std::unique_ptr<Optimizer> ShardedOptimizer::whole() {
  require_known_state(self());
  require_same_options(self());
  auto whole = make_whole();
  const auto count = shards_->size();
  std::vector<State> mine(count);
  // Exchange which state tensors exist, their dtypes and the step counts: a rank with an empty slice of a
  // parameter does not know them.
  constexpr std::size_t kFields = std::tuple_size_v<decltype(State::tensors)>;
  auto told = at::full({static_cast<std::int64_t>(count * (kFields + 1))}, -1, at::kLong);
  auto* told_values = told.mutable_data_ptr<std::int64_t>();
  for (std::size_t i = 0; i < count; ++i) {
    mine[i] = state_of(self(), shards_->slice(i));
    if (shards_->slice(i).numel() == 0) continue;
    told_values[i * (kFields + 1)] = mine[i].step;
    for (std::size_t f = 0; f < kFields; ++f)
      if (const auto& tensor = mine[i].tensors[f]; tensor.defined())
        told_values[i * (kFields + 1) + 1 + f] = static_cast<std::int64_t>(tensor.scalar_type());
  }
  reduce_on_cpu(group(), told, shards_->param(0).device(), {.op = ReduceOp::MAX, .tag = "optimizer state"});

  std::vector<State> all(count);
  for (std::size_t f = 0; f < kFields; ++f) {
    std::map<std::int64_t, std::vector<char>> types;  // and the parameters that have each type
    for (std::size_t i = 0; i < count; ++i)
      if (const auto type = told_values[i * (kFields + 1) + 1 + f]; type >= 0)
        types.try_emplace(type, count).first->second[i] = 1;
    for (const auto& [type, wanted] : types) {
      auto gathered = shards_->gather(wanted, static_cast<at::ScalarType>(type),
                                      [&](std::size_t i, const at::Tensor& part) {
                                        if (mine[i].tensors[f].defined()) part.copy_(mine[i].tensors[f]);
                                      });
      for (std::size_t i = 0; i < count; ++i)
        if (wanted[i] != 0) all[i].tensors[f] = std::move(gathered[i]);
    }
  }
  for (std::size_t i = 0; i < count; ++i) {
    all[i].step = told_values[i * (kFields + 1)];
    if (all[i].step >= 0) whole->state()[shards_->param(i).unsafeGetTensorImpl()] = make(*whole, all[i]);
  }
  return whole;
}

void ShardedOptimizer::take(Optimizer& whole) {
  require_known_state(self());
  at::NoGradGuard no_grad;
  auto& groups = self().param_groups();
  if (whole.param_groups().size() != groups.size())
    throw ConfigError(fmt::format("the loaded optimizer has {} parameter groups; expected {}",
                                  whole.param_groups().size(), groups.size()));
  for (std::size_t g = 0; g < groups.size(); ++g) {
    // In place, because references to the options may exist.
    const auto& given = whole.param_groups()[g].options();
    auto& own = groups[g].options();
    if (!copy_options<torch::optim::AdamOptions>(given, own) &&
        !copy_options<torch::optim::AdamWOptions>(given, own) &&
        !copy_options<torch::optim::SGDOptions>(given, own))
      groups[g].set_options(given.clone());
  }
  for (std::size_t i = 0; i < shards_->size(); ++i) {
    const auto& slice = shards_->slice(i);
    auto state = state_of(whole, shards_->param(i));
    self().state().erase(slice.unsafeGetTensorImpl());
    if (state.step < 0) continue;
    for (auto& tensor : state.tensors) {
      if (!tensor.defined()) continue;
      if (!same_layout(tensor, shards_->param(i)))
        tensor = at::empty_like(shards_->param(i), tensor.options()).copy_(tensor);
      tensor = memory_of(tensor, shards_->slice_begin(i), slice.numel()).clone();
    }
    self().state()[slice.unsafeGetTensorImpl()] = make(self(), state);
  }
}

}  // namespace lockstep::detail
