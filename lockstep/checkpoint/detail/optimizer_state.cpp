#include <lockstep/checkpoint/detail/optimizer_state.h>

#include <algorithm>
#include <set>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <lockstep/base/error.h>
#include <lockstep/checkpoint/format/format_error.h>
#include <lockstep/optim/detail/group_options.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

namespace lockstep::detail {
namespace {

constexpr const char* kMaster = "master_param";

// Options and state of each kind of optimizer, field by field: visit(name, reference). Made: state created on
// load.
struct AdamFields {
  using Options = torch::optim::AdamOptions;
  using State = torch::optim::AdamParamState;
  using Made = ParamState<State>;
  static constexpr const char* kind = "Adam";
  template <typename O, typename V>
  static void options(O& o, V&& visit) {
    visit("lr", o.lr()), visit("betas", o.betas()), visit("eps", o.eps());
    visit("weight_decay", o.weight_decay()), visit("amsgrad", o.amsgrad());
  }
  template <typename S, typename V>
  static void state(S& s, V&& visit) {
    visit("step", s.step()), visit("exp_avg", s.exp_avg()), visit("exp_avg_sq", s.exp_avg_sq());
    visit("max_exp_avg_sq", s.max_exp_avg_sq());
  }
};
struct AdamWFields : AdamFields {
  using Options = torch::optim::AdamWOptions;
  using State = torch::optim::AdamWParamState;
  using Made = ParamState<State>;
  static constexpr const char* kind = "AdamW";
};
struct SGDFields {
  using Options = torch::optim::SGDOptions;
  using State = torch::optim::SGDParamState;
  using Made = ParamState<State>;
  static constexpr const char* kind = "SGD";
  template <typename O, typename V>
  static void options(O& o, V&& visit) {
    visit("lr", o.lr()), visit("momentum", o.momentum()), visit("dampening", o.dampening());
    visit("weight_decay", o.weight_decay()), visit("nesterov", o.nesterov());
  }
  template <typename S, typename V>
  static void state(S& s, V&& visit) {
    visit("momentum_buffer", s.momentum_buffer());
  }
};
struct RMSpropFields {
  using Options = torch::optim::RMSpropOptions;
  using State = torch::optim::RMSpropParamState;
  using Made = State;
  static constexpr const char* kind = "RMSprop";
  template <typename O, typename V>
  static void options(O& o, V&& visit) {
    visit("lr", o.lr()), visit("alpha", o.alpha()), visit("eps", o.eps());
    visit("weight_decay", o.weight_decay()), visit("momentum", o.momentum()), visit("centered", o.centered());
  }
  template <typename S, typename V>
  static void state(S& s, V&& visit) {
    visit("step", s.step()), visit("square_avg", s.square_avg());
    visit("momentum_buffer", s.momentum_buffer()), visit("grad_avg", s.grad_avg());
  }
};
struct AdagradFields {
  using Options = torch::optim::AdagradOptions;
  using State = torch::optim::AdagradParamState;
  using Made = State;
  static constexpr const char* kind = "Adagrad";
  template <typename O, typename V>
  static void options(O& o, V&& visit) {
    visit("lr", o.lr()), visit("lr_decay", o.lr_decay()), visit("weight_decay", o.weight_decay());
    visit("initial_accumulator_value", o.initial_accumulator_value()), visit("eps", o.eps());
  }
  template <typename S, typename V>
  static void state(S& s, V&& visit) {
    visit("step", s.step()), visit("sum", s.sum());
  }
};

// Calls use(fields) for the optimizer's kind, which its options determine: Lockstep's derive from LibTorch's.
template <typename Use>
auto with_fields(torch::optim::Optimizer& optimizer, Use&& use) {
  auto& options = optimizer.defaults();
  if (dynamic_cast<AdamFields::Options*>(&options)) return use(AdamFields{});
  if (dynamic_cast<AdamWFields::Options*>(&options)) return use(AdamWFields{});
  if (dynamic_cast<SGDFields::Options*>(&options)) return use(SGDFields{});
  if (dynamic_cast<RMSpropFields::Options*>(&options)) return use(RMSpropFields{});
  if (dynamic_cast<AdagradFields::Options*>(&options)) return use(AdagradFields{});
  throw ConfigError("unsupported optimizer: expected Adam, AdamW, SGD, RMSprop or Adagrad");
}

// Visits a group's options, including those that only Lockstep's optimizers have.
template <typename Fields, typename V>
void visit_options(torch::optim::OptimizerOptions& options, V&& visit) {
  Fields::options(dynamic_cast<typename Fields::Options&>(options), visit);
  if (auto* own = dynamic_cast<ParamGroupOptions<typename Fields::Options>*>(&options))
    visit("maximize", own->maximize);
}

// Visits a parameter's state, including what only Lockstep's optimizers have.
template <typename Fields, typename V>
void visit_state(torch::optim::OptimizerParamState& state, V&& visit) {
  auto* own = dynamic_cast<typename Fields::Made*>(&state);
  if constexpr (requires { own->count_steps(); })
    if (own != nullptr) own->count_steps();
  Fields::state(dynamic_cast<typename Fields::State&>(state), visit);
  if constexpr (requires { own->master; })
    if (own != nullptr) visit(kMaster, own->master);
}

// Dtype of the optimizer's state for this parameter.
at::ScalarType state_dtype(const torch::optim::OptimizerParamGroup& group, const at::Tensor& parameter) {
  const auto* manner = dynamic_cast<const UpdateMode*>(&group.options());
  const bool master = manner != nullptr && manner->master_weights && has_master(parameter);
  return master ? at::kFloat : parameter.scalar_type();
}

std::vector<double> numbers(const std::tuple<double, double>& pair) {
  return {std::get<0>(pair), std::get<1>(pair)};
}
std::vector<double> numbers(double number) { return {number}; }
std::vector<double> numbers(bool flag) { return {flag ? 1.0 : 0.0}; }

void set(std::tuple<double, double>& pair, const std::vector<double>& given) {
  pair = {given.at(0), given.at(1)};
}
void set(double& number, const std::vector<double>& given) { number = given.at(0); }
void set(bool& flag, const std::vector<double>& given) { flag = given.at(0) != 0; }

std::string tensor_name(const std::string& parameter, const char* field) {
  return fmt::format("optimizer/{}/{}", parameter, field);
}

std::string difference(const std::vector<std::string>& ours, const std::vector<std::string>& saved) {
  const std::set<std::string> a(ours.begin(), ours.end()), b(saved.begin(), saved.end());
  std::vector<std::string> only_ours, only_saved;
  std::set_difference(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(only_ours));
  std::set_difference(b.begin(), b.end(), a.begin(), a.end(), std::back_inserter(only_saved));
  only_ours.resize(std::min<std::size_t>(only_ours.size(), 4));
  only_saved.resize(std::min<std::size_t>(only_saved.size(), 4));
  return fmt::format("only here: [{}], only in the file: [{}]", fmt::join(only_ours, ", "),
                     fmt::join(only_saved, ", "));
}

// Calls visit(group, parameter, name) for every parameter.
template <typename Visit>
void each_parameter(torch::optim::Optimizer& optimizer, const ParameterNames& names, Visit&& visit) {
  for (std::size_t g = 0; g < names.size(); ++g)
    for (std::size_t i = 0; i < names[g].size(); ++i)
      visit(optimizer.param_groups()[g], optimizer.param_groups()[g].params()[i], names[g][i]);
}

}  // namespace

ParameterNames parameter_names(const torch::optim::Optimizer& optimizer,
                               const std::vector<NamedTensor>& model) {
  std::map<const void*, std::string> known;
  for (const auto& [name, tensor] : model) known.emplace(tensor.unsafeGetTensorImpl(), name);
  ParameterNames names;
  for (const auto& group : optimizer.param_groups()) {
    auto& own = names.emplace_back();
    for (const auto& parameter : group.params()) {
      const auto found = known.find(parameter.unsafeGetTensorImpl());
      own.push_back(found != known.end() ? found->second
                                         : fmt::format("group{}.{}", names.size() - 1, own.size()));
    }
  }
  return names;
}

OptimizerManifest describe(torch::optim::Optimizer& optimizer, const ParameterNames& names,
                           std::vector<NamedTensor>& tensors) {
  return with_fields(optimizer, [&](auto fields) {
    using Fields = decltype(fields);
    OptimizerManifest manifest;
    manifest.kind = Fields::kind;
    for (std::size_t g = 0; g < names.size(); ++g) {
      auto& group = manifest.groups.emplace_back();
      group.parameters = names[g];
      visit_options<Fields>(optimizer.param_groups()[g].options(), [&](const char* name, const auto& value) {
        group.options[name] = numbers(value);
      });
    }
    each_parameter(optimizer, names, [&](const auto&, const at::Tensor& parameter, const std::string& name) {
      const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
      if (found == optimizer.state().end() || found->second == nullptr) return;
      manifest.counts[name];  // also records a state without numbers
      visit_state<Fields>(*found->second, [&](const char* field, auto& value) {
        if constexpr (std::is_same_v<std::decay_t<decltype(value)>, at::Tensor>) {
          if (value.defined()) tensors.push_back({tensor_name(name, field), value});
        } else {
          manifest.counts[name][field] = value;
        }
      });
    });
    return manifest;
  });
}

void want_state(torch::optim::Optimizer& optimizer, const ParameterNames& names,
                const OptimizerManifest& saved, const InFile& in_file, const Want& want) {
  with_fields(optimizer, [&](auto fields) {
    using Fields = decltype(fields);
    if (saved.kind != Fields::kind)
      throw FormatError(
          fmt::format("the file has the state of {}, but the optimizer is {}", saved.kind, Fields::kind));
    if (saved.groups.size() != names.size())
      throw FormatError(fmt::format("the file has {} parameter groups, but the optimizer has {}",
                                    saved.groups.size(), names.size()));
    for (std::size_t g = 0; g < names.size(); ++g) {
      auto sorted = [](std::vector<std::string> list) {
        std::sort(list.begin(), list.end());
        return list;
      };
      if (sorted(saved.groups[g].parameters) != sorted(names[g]))
        throw FormatError(fmt::format("parameter group {} has different parameters: {}", g,
                                      difference(names[g], saved.groups[g].parameters)));
      visit_options<Fields>(
          optimizer.param_groups()[g].options(), [&](const char* option, const auto& value) {
            const auto& options = saved.groups[g].options;
            const auto found = options.find(option);
            if (found == options.end() && std::string_view(option) == "maximize")
              return;  // LibTorch's optimizers lack it
            if (found == options.end() || found->second.size() != numbers(value).size())
              throw FormatError(fmt::format("the optimizer option '{}' is missing or invalid", option));
          });
    }
    each_parameter(optimizer, names, [&](auto& group, const at::Tensor& parameter, const std::string& name) {
      const auto counts = saved.counts.find(name);
      if (counts == saved.counts.end()) return;
      const auto dtype = state_dtype(group, parameter);
      typename Fields::Made state;
      visit_state<Fields>(state, [&](const char* field, auto& value) {
        if constexpr (std::is_same_v<std::decay_t<decltype(value)>, at::Tensor>) {
          const auto there = in_file(tensor_name(name, field));
          if (!there || (field == kMaster && dtype == parameter.scalar_type())) return;
          const bool wide = there == at::kFloat && has_master(parameter);
          want(tensor_name(name, field),
               wide ? at::empty({}, at::kFloat).expand(parameter.sizes()) : parameter);
        } else if (!counts->second.contains(field)) {
          throw FormatError(fmt::format("the optimizer's '{}' of '{}' is missing", field, name));
        }
      });
    });
  });
}

std::function<void()> prepare_state(torch::optim::Optimizer& optimizer, const ParameterNames& names,
                                    const OptimizerManifest& saved,
                                    const std::map<std::string, at::Tensor>& read) {
  using States = std::vector<std::pair<void*, std::unique_ptr<torch::optim::OptimizerParamState>>>;
  return with_fields(optimizer, [&](auto fields) -> std::function<void()> {
    using Fields = decltype(fields);
    auto states = std::make_shared<States>();
    each_parameter(optimizer, names, [&](auto& group, const at::Tensor& parameter, const std::string& name) {
      auto& [key, made] = states->emplace_back(parameter.unsafeGetTensorImpl(), nullptr);
      const auto counts = saved.counts.find(name);
      if (counts == saved.counts.end()) return;  // saved without state, so it gets none
      const auto dtype = state_dtype(group, parameter);
      auto state = std::make_unique<typename Fields::Made>();
      visit_state<Fields>(*state, [&](const char* field, auto& value) {
        if constexpr (std::is_same_v<std::decay_t<decltype(value)>, at::Tensor>) {
          const auto found = read.find(tensor_name(name, field));
          if (found == read.end()) return;
          value = found->second;
          if (parameter.is_cpu() && parameter.is_contiguous() && value.scalar_type() == dtype) return;
          value = at::empty_like(parameter.detach(), parameter.options().dtype(dtype),
                                 at::MemoryFormat::Preserve);
          value.copy_(found->second);
        } else {
          value = counts->second.at(field);
        }
      });
      made = std::move(state);
    });
    return [&optimizer, states, saved] {
      for (std::size_t g = 0; g < saved.groups.size(); ++g)
        visit_options<Fields>(optimizer.param_groups()[g].options(), [&](const char* option, auto& value) {
          const auto found = saved.groups[g].options.find(option);
          if (found != saved.groups[g].options.end()) set(value, found->second);
        });
      for (auto& [key, state] : *states) {
        if (state != nullptr)
          optimizer.state()[key] = std::move(state);
        else
          optimizer.state().erase(key);
      }
    };
  });
}

}  // namespace lockstep::detail
