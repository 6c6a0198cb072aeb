#include <lockstep/modules/detail/unready_gradient.h>
#include <lockstep/parallel/ddp/shards.h>

#include <algorithm>
#include <utility>

#include <fmt/format.h>
#include <lockstep/base/error.h>
#include <lockstep/base/log.h>
#include <lockstep/comm/cpu_memory.h>
#include <lockstep/modules/detail/flat_views.h>

namespace lockstep::detail {
namespace {

constexpr const char* kWho = "DistributedOptimizer";

// The first offset at or after `target` where a block of a parameter begins or the bucket ends.
std::int64_t cut_at(std::int64_t target, const ParameterShards::Layout& layout,
                    const std::vector<at::Tensor>& params) {
  for (std::size_t k = 0; k < layout.params.size(); ++k) {
    const auto offset = layout.offsets[k];
    const auto numel = params[layout.params[k]].numel();
    if (target <= offset) return offset;
    const auto blocks = (target - offset + ParameterShards::kBlock - 1) / ParameterShards::kBlock;
    if (blocks * ParameterShards::kBlock < numel) return offset + blocks * ParameterShards::kBlock;
  }
  return layout.size;
}

void check(const std::vector<std::string>& names, const std::vector<at::Tensor>& params) {
  std::vector<std::pair<const char*, std::size_t>> places;
  for (std::size_t i = 0; i < params.size(); ++i) {
    if (!params[i].is_non_overlapping_and_dense())
      throw ConfigError(fmt::format("{}: parameter '{}' is not dense in memory; use parameter.contiguous()",
                                    kWho, names[i]));
    if (params[i].numel() != 0) places.emplace_back(static_cast<const char*>(params[i].const_data_ptr()), i);
  }
  std::sort(places.begin(), places.end());
  for (std::size_t i = 1; i < places.size(); ++i)
    if (places[i - 1].first + params[places[i - 1].second].nbytes() > places[i].first)
      throw ConfigError(fmt::format(
          "{}: parameters '{}' and '{}' share memory but are two tensors; register one tensor under "
          "both names",
          kWho, names[places[i - 1].second], names[places[i].second]));
}

}  // namespace

ParameterShards::ParameterShards(Group group, std::vector<std::string> names, std::vector<at::Tensor> params,
                                 std::vector<Layout> layouts, bool share_weights)
    : group_(std::move(group)),
      names_(std::move(names)),
      params_(std::move(params)),
      layouts_(std::move(layouts)),
      share_weights_(share_weights && group_.size() > 1) {
  check(names_, params_);
  for (std::size_t i = 0; i < params_.size(); ++i) index_[params_[i].unsafeGetTensorImpl()] = i;
  // Allocate everything before moving any parameter, so that an error leaves the model unchanged.
  for (const auto& layout : layouts_) {
    const auto& model = params_[layout.params[0]];
    for (const auto i : layout.params)
      LOCKSTEP_ASSERT(params_[i].scalar_type() == model.scalar_type(),
                      "a bucket has parameters of two types");
    auto& bounds = bounds_.emplace_back();
    for (int r = 0; r < group_.size(); ++r)
      bounds.push_back(cut_at(layout.size * r / group_.size(), layout, params_));
    bounds.push_back(layout.size);
    auto& weights = weights_.emplace_back();
    if (group_.size() == 1) continue;
    if (share_weights_ && !model.is_cpu())
      throw ConfigError(
          fmt::format("share_weights: only CPU tensors can be shared, but parameter '{}' is on {}",
                      names_[layout.params[0]], model.device().str()));
    weights = share_weights_ ? group_.share({layout.size}, model.scalar_type())
                             : flat_memory(group_, layout.size, model.scalar_type(), model).zero_();
  }
  move_parameters();
}

void ParameterShards::move_parameters() {
  at::NoGradGuard no_grad;
  const auto rank = static_cast<std::size_t>(group_.rank());
  slices_.resize(params_.size());
  begins_.resize(params_.size());
  places_.resize(params_.size());
  for (std::size_t b = 0; b < layouts_.size(); ++b)
    for (std::size_t k = 0; k < layouts_[b].params.size(); ++k) {
      const auto i = layouts_[b].params[k];
      const auto offset = layouts_[b].offsets[k];
      auto param = params_[i];
      if (weights_[b].defined()) {
        auto place = view_of(weights_[b], offset, param);
        if (!share_weights_ || rank == 0) place.copy_(param);
        param.set_data(place);
      }
      places_[i] = param.const_data_ptr();
      begins_[i] = std::clamp<std::int64_t>(bounds_[b][rank] - offset, 0, param.numel());
      const auto end = std::clamp<std::int64_t>(bounds_[b][rank + 1] - offset, 0, param.numel());
      slices_[i] = memory_of(param.detach(), begins_[i], end - begins_[i]);
      slice_index_[slices_[i].unsafeGetTensorImpl()] = i;
    }
  // Return the parameters' old memory to the system, because nothing will reuse that much.
  if (weights_[0].defined() && caching_cpu_allocator_is_used()) empty_cpu_cache();
  if (share_weights_) group_.barrier({.tag = "weights are shared"}).wait();
}

void ParameterShards::require_complete() const {
  for (const auto& param : params_)
    if (const auto* text = unready_text(param.grad()); text && *text != kGradientsAreSharded)
      throw ConfigError(*text);
}

void ParameterShards::check_parameters() const {
  require_complete();
  if (reducer.expired())
    throw ConfigError(
        fmt::format("{}: its DistributedDataParallel was destroyed; construct both again", kWho));
  for (std::size_t i = 0; i < params_.size(); ++i) {
    if (params_[i].const_data_ptr() != places_[i])
      throw ConfigError(
          fmt::format("parameter '{}' has moved in memory since the {} was constructed, as by torch::load or "
                      "model->to(). Construct the optimizer after that; lockstep::load may follow",
                      names_[i], kWho));
    if (const auto& gradient = params_[i].grad(); gradient.defined() && !unready_text(gradient))
      throw ConfigError(fmt::format(
          "parameter '{}' has a gradient that was not averaged: run the last backward pass before step() "
          "outside no_sync(), or drop the gradient with {}::zero_grad()",
          names_[i], kWho));
  }
}

void ParameterShards::release() noexcept {
  if (!share_weights_) return;
  for (std::size_t i = 0; i < params_.size(); ++i) {
    try {
      auto param = params_[i];
      param.set_data(param.detach().clone());
      // For example, because there is no room for a copy on every rank.
    } catch (const std::exception& error) {
      log(LogLevel::warn, "parameter '{}' stays in shared memory: {}", names_[i], error.what());
    }
  }
}

std::size_t ParameterShards::find(const at::Tensor& parameter) const {
  const auto found = index_.find(parameter.defined() ? parameter.unsafeGetTensorImpl() : nullptr);
  if (found == index_.end())
    throw ConfigError(fmt::format(
        "{}: got a tensor that its DistributedDataParallel does not reduce; expected a parameter that "
        "requires a gradient and is not listed in DdpOptions::ignore",
        kWho));
  return found->second;
}

std::size_t ParameterShards::find_slice(const at::Tensor& slice) const {
  const auto found = slice_index_.find(slice.unsafeGetTensorImpl());
  return found == slice_index_.end() ? size() : found->second;
}

void ParameterShards::take_gradients() {
  at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < params_.size(); ++i) {
    auto& param = params_[i];
    auto gradient = std::exchange(param.mutable_grad(), {});
    if (!gradient.defined() || slices_[i].numel() == 0) continue;
    if (gradient.is_sparse())
      throw ConfigError(fmt::format(
          "{}: the gradient of parameter '{}' is sparse; only dense ones are supported", kWho, names_[i]));
    if (!same_layout(gradient, param) || gradient.is_conj() || gradient.is_neg())
      gradient = at::empty_like(param).copy_(gradient);
    auto part = memory_of(gradient, begins_[i], slices_[i].numel());
    auto& whole = slices_[i].mutable_grad();
    if (whole.defined())
      whole.add_(part);
    else
      whole = std::move(part);
  }
}

void ParameterShards::keep_gradients() {
  at::NoGradGuard no_grad;
  for (auto& slice : slices_)
    if (auto& gradient = slice.mutable_grad(); gradient.defined()) gradient = gradient.clone();
}

void ParameterShards::drop_gradients() {
  for (auto& slice : slices_) slice.mutable_grad().reset();
}

void ParameterShards::drop_unreduced_gradients() {
  for (const auto& param : params_) param.mutable_grad().reset();
}

std::vector<at::Tensor> ParameterShards::pieces(const at::Tensor& flat, std::size_t bucket) const {
  const auto& bounds = bounds_[bucket];
  std::vector<at::Tensor> pieces;
  for (std::size_t r = 0; r + 1 < bounds.size(); ++r)
    pieces.push_back(memory_of(flat, bounds[r], bounds[r + 1] - bounds[r]));
  return pieces;
}

void ParameterShards::before_update() {
  check_parameters();
  if (share_weights_) group_.barrier({.tag = "weights are not read"}).wait();
}

void ParameterShards::after_update() {
  // Lets autograd detect weights that it saved for a later backward and that have changed since.
  for (const auto& param : params_) param.unsafeGetTensorImpl()->bump_version();
  if (group_.size() == 1) return;
  if (share_weights_) {
    group_.barrier({.tag = "weights are updated"}).wait();
    return;
  }
  at::NoGradGuard no_grad;
  std::vector<Work> works;
  for (std::size_t b = 0; b < layouts_.size(); ++b) {
    auto all = pieces(weights_[b], b);
    auto mine = all[static_cast<std::size_t>(group_.rank())];
    works.push_back(group_.all_gather(std::move(all), std::move(mine), {.tag = "weights"}));
  }
  for (auto& work : works) work.wait();
}

std::vector<at::Tensor> ParameterShards::gather(const std::vector<char>& wanted, at::ScalarType type,
                                                const Part& part) const {
  at::NoGradGuard no_grad;
  std::vector<at::Tensor> whole(params_.size());
  for (std::size_t b = 0; b < layouts_.size(); ++b) {
    const auto& layout = layouts_[b];
    if (std::none_of(layout.params.begin(), layout.params.end(), [&](auto i) { return wanted[i] != 0; }))
      continue;
    const auto& model = params_[layout.params[0]];
    const auto flat = at::zeros({layout.size}, model.options().dtype(type).requires_grad(false));
    for (std::size_t k = 0; k < layout.params.size(); ++k) {
      const auto i = layout.params[k];
      if (wanted[i] != 0 && slices_[i].numel() != 0)
        part(i, memory_of(flat, layout.offsets[k] + begins_[i], slices_[i].numel()));
    }
    if (group_.size() > 1) {
      auto all = pieces(flat, b);
      auto mine = all[static_cast<std::size_t>(group_.rank())];
      group_.all_gather(std::move(all), std::move(mine), {.tag = "optimizer state"}).wait();
    }
    for (std::size_t k = 0; k < layout.params.size(); ++k) {
      const auto i = layout.params[k];
      if (wanted[i] != 0) whole[i] = view_of(flat, layout.offsets[k], params_[i]).clone();
    }
  }
  return whole;
}

void ParameterShards::note_versions() {
  if (!share_weights_) return;
  versions_.clear();
  for (const auto& param : params_) versions_.push_back(param._version());
}

void ParameterShards::check_versions() const {
  for (std::size_t i = 0; i < versions_.size(); ++i)
    if (params_[i]._version() != versions_[i])
      throw ConfigError(fmt::format(
          "forward has written to parameter '{}', whose memory all ranks share: with {{.share_weights = "
          "true}}, forward may write to buffers only",
          names_[i]));
}

}  // namespace lockstep::detail
