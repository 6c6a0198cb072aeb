// The C++ side of tests/parity/train_test.py: reads DIR/cases.json and DIR/in.bin, and writes its results to
// DIR/out.bin for comparison.
#include <fstream>
#include <iostream>
#include <limits>

#include <lockstep/lockstep.h>
#include <torch/torch.h>
#include <nlohmann/json.hpp>
#include "cmake/multicall.h"

namespace lockstep::testing::train_probe {

namespace {

using nlohmann::json;
using torch::Tensor;

std::ifstream in;
std::ofstream out;

at::ScalarType dtype_of(const std::string& name) {
  if (name == "float32") return torch::kFloat;
  if (name == "float64") return torch::kDouble;
  if (name == "bfloat16") return torch::kBFloat16;
  return torch::kHalf;
}

// JSON has no infinity.
double number(const json& value) {
  return value.is_string() ? std::numeric_limits<double>::infinity() : value.get<double>();
}

Tensor read_like(const json& description) {
  const auto shape = description.at("shape").get<std::vector<std::int64_t>>();
  const auto options = torch::TensorOptions(dtype_of(description.at("dtype")));
  auto values = torch::empty(shape, options);
  in.read(static_cast<char*>(values.data_ptr()), static_cast<std::streamsize>(values.nbytes()));
  auto result =
      torch::empty_strided(shape, description.at("strides").get<std::vector<std::int64_t>>(), options);
  return result.copy_(values);
}

void write(const Tensor& tensor) {
  const auto values = tensor.detach().contiguous();
  out.write(static_cast<const char*>(values.data_ptr()), static_cast<std::streamsize>(values.nbytes()));
}
void write(double value) { out.write(reinterpret_cast<const char*>(&value), sizeof value); }

template <typename Options>
Options adam_options(const json& given) {
  Options options;
  options.lr = given.value("lr", options.lr);
  if (given.contains("betas")) options.betas = {given["betas"][0], given["betas"][1]};
  options.eps = given.value("eps", options.eps);
  options.weight_decay = given.value("weight_decay", options.weight_decay);
  options.amsgrad = given.value("amsgrad", options.amsgrad);
  options.maximize = given.value("maximize", options.maximize);
  return options;
}

lockstep::SGDOptions sgd_options(const json& given) {
  lockstep::SGDOptions options;
  options.lr = given.value("lr", options.lr);
  options.momentum = given.value("momentum", options.momentum);
  options.dampening = given.value("dampening", options.dampening);
  options.weight_decay = given.value("weight_decay", options.weight_decay);
  options.nesterov = given.value("nesterov", options.nesterov);
  options.maximize = given.value("maximize", options.maximize);
  return options;
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const json& each,
                                                        const std::vector<Tensor>& parameters) {
  const auto& given = each.at("options");
  if (each["optimizer"] == "Adam")
    return std::make_unique<lockstep::Adam>(parameters, adam_options<lockstep::AdamOptions>(given));
  if (each["optimizer"] == "AdamW")
    return std::make_unique<lockstep::AdamW>(parameters, adam_options<lockstep::AdamWOptions>(given));
  return std::make_unique<lockstep::SGD>(parameters, sgd_options(given));
}

template <typename State>
void write_adam_state(const State& state) {
  for (const auto* tensor : {&state.exp_avg(), &state.exp_avg_sq(), &state.max_exp_avg_sq()})
    if (tensor->defined()) write(*tensor);
}

void write_state(const torch::optim::OptimizerParamState& state) {
  if (const auto* adam = dynamic_cast<const torch::optim::AdamParamState*>(&state)) write_adam_state(*adam);
  if (const auto* adamw = dynamic_cast<const torch::optim::AdamWParamState*>(&state))
    write_adam_state(*adamw);
  if (const auto* sgd = dynamic_cast<const torch::optim::SGDParamState*>(&state))
    if (sgd->momentum_buffer().defined()) write(sgd->momentum_buffer());
}

std::vector<Tensor> read_parameters(const json& each) {
  std::vector<Tensor> parameters;
  for (const auto& description : each.at("tensors"))
    parameters.push_back(read_like(description).requires_grad_());
  return parameters;
}

void read_gradients(const json& each, std::size_t step, std::vector<Tensor>& parameters) {
  for (std::size_t i = 0; i < parameters.size(); ++i)
    parameters[i].mutable_grad() =
        each.at("present").at(step).at(i).get<bool>() ? read_like(each["tensors"][i]) : Tensor();
}

void run_optimizer(const json& each) {
  auto parameters = read_parameters(each);
  auto optimizer = make_optimizer(each, parameters);
  for (std::size_t step = 0; step < each.at("present").size(); ++step) {
    read_gradients(each, step, parameters);
    optimizer->step();
  }
  for (const auto& parameter : parameters) {
    write(parameter);
    const auto found = optimizer->state().find(parameter.unsafeGetTensorImpl());
    if (found != optimizer->state().end()) write_state(*found->second);
  }
}

void run_clip(const json& each) {
  auto parameters = read_parameters(each);
  read_gradients(each, 0, parameters);
  if (each.contains("clip_value")) {
    lockstep::clip_grad_value(parameters, each["clip_value"]);
  } else {
    write(lockstep::clip_grad_norm(parameters, each.at("max_norm"),
                                   {.norm_type = number(each.at("norm_type"))}));
  }
  for (const auto& parameter : parameters)
    if (parameter.grad().defined()) write(parameter.grad());
}

void run_scaler(const json& each) {
  auto parameters = read_parameters(each);
  lockstep::SGD optimizer(parameters, {.lr = 0.1});
  lockstep::GradScaler scaler(
      {.init_scale = each.at("init_scale"), .growth_interval = each.at("growth_interval")});
  for (std::size_t step = 0; step < each.at("present").size(); ++step) {
    read_gradients(each, step, parameters);
    write(scaler.scale(torch::full({}, 0.3)));
    if (step % 2 == 0) scaler.unscale_(optimizer);
    scaler.step(optimizer);
    scaler.update();
    write(scaler.current_scale());
    for (const auto& parameter : parameters) write(parameter);
  }
  for (const auto& [name, value] : scaler.state()) write(value);
}

void run_autocast(const json& each) {
  auto parameters = read_parameters(each);  // Input, weight, bias, weight.
  Tensor result;
  {
    lockstep::Autocast guard(at::kCPU, dtype_of(each.at("to")));
    auto hidden = torch::relu(torch::linear(parameters[0], parameters[1], parameters[2]));
    hidden = torch::layer_norm(hidden, {hidden.size(-1)});
    result = torch::softmax(torch::matmul(hidden, parameters[3]), -1);
  }
  write(result.to(torch::kFloat));
  result.sum().backward();
  for (const auto& parameter : parameters) write(parameter.grad());
}

lockstep::LRSchedule schedule_of(const json& o) {
  const auto kind = o.at("kind").get<std::string>();
  if (kind == "ConstantLR") return lockstep::ConstantLROptions{o["factor"], o["total_iters"]};
  if (kind == "LinearLR")
    return lockstep::LinearLROptions{o["start_factor"], o["end_factor"], o["total_iters"]};
  if (kind == "CosineAnnealingLR") return lockstep::CosineAnnealingLROptions{o["T_max"], o["eta_min"]};
  if (kind == "ExponentialLR") return lockstep::ExponentialLROptions{o["gamma"]};
  return lockstep::LambdaLROptions{[](std::int64_t step) { return 1.0 / static_cast<double>(1 + step); }};
}

void run_schedule(const json& each) {
  auto a = torch::ones({1}).requires_grad_(), b = torch::ones({1}).requires_grad_();
  lockstep::Adam optimizer({lockstep::Adam::group({a}, {.lr = each.at("lrs").at(0)}),
                            lockstep::Adam::group({b}, {.lr = each.at("lrs").at(1)})});
  std::unique_ptr<torch::optim::LRScheduler> scheduler;
  if (each.contains("one_cycle")) {
    const auto& o = each["one_cycle"];
    scheduler = std::make_unique<lockstep::OneCycleLR>(
        optimizer, lockstep::OneCycleLROptions{.max_lr = o["max_lr"],
                                               .total_steps = o["total_steps"],
                                               .pct_start = o["pct_start"],
                                               .anneal_strategy = o["anneal_strategy"] == "cos"
                                                                      ? lockstep::AnnealStrategy::cos
                                                                      : lockstep::AnnealStrategy::linear,
                                               .three_phase = o["three_phase"]});
  } else {
    std::vector<lockstep::LRSchedule> schedules;
    for (const auto& o : each.at("schedules")) schedules.push_back(schedule_of(o));
    scheduler = std::make_unique<lockstep::SequentialLR>(
        optimizer, schedules, each.at("milestones").get<std::vector<std::int64_t>>());
  }
  for (int step = 0;; ++step) {
    for (std::size_t group : {0, 1}) {
      write(optimizer.options(group).lr);
      write(optimizer.options(group).betas.first);
    }
    if (step == each.at("steps")) break;
    scheduler->step();
  }
}

}  // namespace

MULTICALL_MAIN(train_probe) {
  if (argc != 2) {
    std::cerr << "usage: train_probe DIR\n";
    return 2;
  }
  const std::string folder = argv[1];
  std::ifstream cases(folder + "/cases.json");
  in.open(folder + "/in.bin", std::ios::binary);
  out.open(folder + "/out.bin", std::ios::binary);
  in.exceptions(std::ios::failbit | std::ios::eofbit);
  out.exceptions(std::ios::failbit | std::ios::badbit);
  for (const auto& each : json::parse(cases)) {
    const auto what = each.at("what").get<std::string>();
    if (what == "optimizer") run_optimizer(each);
    if (what == "clip") run_clip(each);
    if (what == "scaler") run_scaler(each);
    if (what == "autocast") run_autocast(each);
    if (what == "schedule") run_schedule(each);
  }
  return 0;
}

}  // namespace lockstep::testing::train_probe
