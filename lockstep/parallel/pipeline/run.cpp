#include <lockstep/base/text.h>
#include <lockstep/parallel/pipeline/run.h>

#include <algorithm>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <lockstep/base/error.h>
#include <lockstep/base/span.h>
#include <lockstep/comm/group/error_text.h>
#include <lockstep/nn/dropout.h>

namespace lockstep::detail {
namespace {

using enum PipelineOp;

constexpr int kFirstTag = 1 << 20;  // Leaves lower tags to the program's own messages in the group.

// Detaches values for the next stage, because they are part of another graph.
StageValues handed_on(const StageValues& values, bool with_gradients) {
  StageValues result;
  for (const auto& value : values) {
    result.push_back(value.defined() ? value.detach() : value);
    if (with_gradients && value.defined() && value.requires_grad()) result.back().requires_grad_();
  }
  return result;
}

// Lets a stage begin with an in-place operation, as it could in the whole model: the values must be neither
// leaves nor views of tensors shared with other micro-batches. The memory is the same.
StageValues enterable(const StageValues& values) {
  StageValues result;
  for (const auto& value : values)
    result.push_back(value.defined() && value.layout() == at::kStrided
                         ? at::_unsafe_view(value.contiguous(), value.sizes())
                         : value);
  return result;
}

// If the memory belongs to the previous stage, report in-place changes to autograd.
void note_changes(const StageValues& entered, const StageValues& given) {
  for (std::size_t i = 0; i < entered.size(); ++i)
    if (entered[i].defined() && given[i].defined() && entered[i]._version() > 0)
      given[i].unsafeGetTensorImpl()->bump_version();
}

StageValues gradients_of(const StageValues& values) {
  StageValues result;
  for (const auto& value : values)
    result.push_back(value.defined() && value.requires_grad() ? value.grad() : at::Tensor());
  return result;
}

const char* word_for(PipelineOp op) {
  switch (op) {
    case forward: return "forward";
    case backward: return "backward";
    case input_backward: return "input backward";
    case weight_backward: return "weight backward";
    default: return "transfer";
  }
}

}  // namespace

void refuse_stage_values(const char* what, std::size_t given, std::size_t taken) {
  throw ConfigError(
      fmt::format("stage or loss: expected {} ({}), got {}", what, counted(taken, "value"), given));
}

PipelineRun::PipelineRun(const PipelineRoutes& routes, const PipelineSchedule& schedule, const Stages& stages,
                         PipelineJob job)
    : group_(routes.group),
      schedule_(schedule),
      stages_(stages),
      job_(std::move(job)),
      wire_(routes, job_.site),
      last_(schedule.num_stages() - 1) {
  for (int peer = 0; peer < group_.size(); ++peer) {
    if (routes.channel(peer, /*sends=*/false) == nullptr) continue;
    for (const auto& action : schedule_.ranks[static_cast<std::size_t>(peer)])
      if (is_transfer(action.op) && !is_left_out(action.op))
        if (const auto transfer = transfer_of(action); transfer.sends && transfer.peer == group_.rank())
          wire_.expect(peer, transfer.tag);
  }
}

// Without backward, only forward actions run.
bool PipelineRun::is_left_out(PipelineOp op) const {
  return !job_.backward && op != PipelineOp::forward && op != send_forward && op != receive_forward;
}

PipelineRun::Transfer PipelineRun::transfer_of(PipelineAction action) const {
  const auto [op, s, m] = action;
  const bool sends = op == send_forward || op == send_backward;
  const bool ahead = op == send_forward || op == receive_forward;
  const bool with_next = op == send_forward || op == receive_backward;
  const int boundary = with_next ? s : s - 1;
  return {.sends = sends,
          .ahead = ahead,
          .peer = rank_of(with_next ? s + 1 : s - 1),
          .tag = kFirstTag + 2 * (boundary * schedule_.microbatches + m) + (ahead ? 0 : 1)};
}

void PipelineRun::split(const StageValues& whole, std::vector<StageValues>& parts, const char* what) const {
  const auto count = schedule_.microbatches;
  parts.resize(static_cast<std::size_t>(count));
  std::optional<std::int64_t> batch;
  for (const auto& value : whole) {
    if (!value.defined() || value.dim() == 0) {
      for (auto& part : parts) part.push_back(value);
      continue;
    }
    const auto size = value.size(0);
    if (batch && *batch != size)
      throw ConfigError(
          fmt::format("{} must have the same number of samples, got {} and {}", what, *batch, size));
    batch = size;
    if (size == 0 || size % count != 0)
      throw ConfigError(
          fmt::format("{0} of {1} samples cannot be divided into {2} micro-batches; use a multiple of {2}",
                      what, size, count));
    const auto chunk = size / count;
    for (int m = 0; m < count; ++m)
      parts[static_cast<std::size_t>(m)].push_back(value.narrow(0, m * chunk, chunk));
  }
}

void PipelineRun::prepare() {
  if (here(0)) {
    if (job_.inputs.empty())
      throw ConfigError(fmt::format("rank {} runs the first stage: expected inputs, got none", world_rank()));
    for (const auto& value : job_.inputs)
      if (value.defined() && value.requires_grad() && !value.is_leaf())
        throw ConfigError(
            "inputs were computed from tensors that require a gradient, which would not "
            "reach them. Move that computation into the first stage, or detach() the inputs");
    split(job_.inputs, inputs_, "inputs");
  }
  if (!here(last_)) return;
  losses_.resize(static_cast<std::size_t>(schedule_.microbatches));
  outputs_.resize(static_cast<std::size_t>(schedule_.microbatches));
  if (job_.loss) split(job_.targets, targets_, "targets");
}

void PipelineRun::run() {
  const auto now = [] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  };
  try {
    prepare();
  } catch (const std::exception&) {
    fail(fmt::format("rank {}", world_rank()));
  }
  for (const auto& action : schedule_.ranks[static_cast<std::size_t>(group_.rank())]) {
    if (is_left_out(action.op)) continue;
    const double begin = now();
    const Span span(SpanKind::pipeline, spans_wanted() ? to_string(action) : std::string());
    act(action);
    moments_.push_back({action, begin, now()});
  }
  wire_.finish();
  agree();
}

void PipelineRun::act(PipelineAction action) {
  auto& place = slot(action.stage, action.microbatch);
  if (is_transfer(action.op)) return transfer(place, action);
  if (!failure_.empty()) return;  // Peers learn of the failure from the messages they wait for.
  try {
    switch (action.op) {
      case PipelineOp::forward: return forward(place, action);
      case weight_backward:
        place.weights.weight_part();
        place.weights = {};  // The input's gradient may still have to be sent.
        return;
      default: return backward(place, action);
    }
  } catch (const CommError& error) {
    if (error.details().group == group_.name()) throw;  // The group has failed: its peers fail by themselves.
    fail(action);
  } catch (...) {
    fail(action);
  }
}

void PipelineRun::forward(Slot& slot, PipelineAction action) {
  const auto [op, s, m] = action;
  const auto number = static_cast<std::size_t>(m);
  const at::AutoGradMode grad_mode(job_.backward);
  if (s == 0) slot.inputs = inputs_[number];
  // Dropout depends on a sample's number in the whole batch.
  std::optional<nn::DropoutScope> shifted;
  if (auto step = nn::dropout_step();
      step && !slot.inputs.empty() && slot.inputs[0].defined() && slot.inputs[0].dim() > 0) {
    step->first_sample += m * slot.inputs[0].size(0);
    shifted.emplace(*step);
  }
  for (const auto& value : slot.inputs)
    if (value.defined()) make_context_current(value.device());
  const auto entered = enterable(slot.inputs);
  slot.outputs = stages_.at(s)(entered);
  if (s > 0 && here(s - 1)) note_changes(entered, this->slot(s - 1, m).outputs);
  if (s == 0 || !job_.backward) slot.inputs.clear();  // No previous stage needs their gradients.
  if (s < last_) {
    if (!here(s + 1)) return;
    this->slot(s + 1, m).inputs = handed_on(slot.outputs, job_.backward);
    if (!job_.backward) slot.outputs.clear();
    return;
  }
  if (!job_.loss) {
    outputs_[number] = handed_on(slot.outputs, false);
    slot.outputs.clear();
    return;
  }
  auto loss = job_.loss(slot.outputs, targets_[number]);
  if (!loss.defined() || loss.numel() != 1)
    throw ConfigError(
        fmt::format("expected a loss with one element, got {}",
                    loss.defined() ? fmt::format("a tensor of {} elements", loss.numel()) : "undefined"));
  if (job_.backward && !loss.requires_grad())
    throw ConfigError("the loss does not require a gradient, because nothing it was computed from does");
  losses_[number] = loss.detach();
  slot.outputs.clear();
  if (job_.backward) slot.outputs = {loss};
}

void PipelineRun::backward(Slot& slot, PipelineAction action) {
  const auto [op, s, m] = action;
  if (s == last_) slot.gradients = {at::full_like(slot.outputs[0], job_.scale)};
  LOCKSTEP_ASSERT(slot.gradients.size() == slot.outputs.size(),
                  "a stage got gradients of values that it did not send");
  PipelineBackward pass(slot.outputs, slot.gradients, slot.inputs);
  if (op == PipelineOp::backward)
    pass.whole();
  else
    pass.input_part();
  auto gradients = gradients_of(slot.inputs);
  slot = {};
  if (op == input_backward) slot.weights = std::move(pass);
  if (s == 0) return;
  if (here(s - 1))
    this->slot(s - 1, m).gradients = std::move(gradients);
  else
    slot.input_gradients = std::move(gradients);
}

void PipelineRun::transfer(Slot& slot, PipelineAction action) {
  const auto [sends, ahead, peer, tag] = transfer_of(action);
  if (sends) {
    auto& values = ahead ? slot.outputs : slot.input_gradients;
    if (failure_.empty()) {
      try {
        wire_.send(values, peer, tag);
        if (!ahead || !job_.backward) values.clear();
        return;
      } catch (const CommError&) {
        throw;
      } catch (...) {
        fail(action);
      }
    }
    wire_.send_failure(failure_, peer, tag);
    return;
  }
  auto message = wire_.receive(peer, tag);
  if (message.failure) {
    if (failure_.empty()) failure_ = *message.failure;
    return;
  }
  (ahead ? slot.inputs : slot.gradients) = std::move(message.values);
}

void PipelineRun::fail(PipelineAction action) {
  fail(fmt::format("rank {}, stage {}, {} of micro-batch {}", world_rank(), action.stage, word_for(action.op),
                   action.microbatch));
}

void PipelineRun::fail(const std::string& where) {
  exception_ = std::current_exception();
  failure_ = fmt::format("{}: {}", where, plain_text(exception_));
  slots_.clear();
}

// Also reports failures so late that no rank was waiting for a message.
void PipelineRun::agree() {
  const auto failures = group_.all_gather_values(std::string_view(failure_), {.tag = "pipeline step"});
  settled_ = true;
  if (exception_) std::rethrow_exception(exception_);
  const auto found =
      std::find_if(failures.begin(), failures.end(), [](const auto& text) { return !text.empty(); });
  if (found != failures.end()) throw Error("Pipeline: a stage failed: " + *found);
}

}  // namespace lockstep::detail
