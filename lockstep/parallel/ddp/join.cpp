// Ranks with fewer steps than their peers. Inside join() every round begins with an exchange: which ranks
// still have data, and how many samples each has. A rank that has run out reports zero samples and follows:
// it contributes zeros to every bucket.
#include <lockstep/base/error.h>
#include <lockstep/modules/replicas.h>
#include <lockstep/modules/unit.h>
#include <lockstep/parallel/ddp/reducer.h>
#include <lockstep/parallel/ddp/shards.h>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/rnn.h>

namespace lockstep::detail {
namespace {

// Reasons why dim 0 of the inputs may not be the batch.
enum JoinProblem : std::int64_t { kNoProblem, kSequenceFirstModule, kInputsDisagree };

// The first module whose batch is dim 1 of its input; empty if there is none.
std::string sequence_first_module(const torch::nn::Module& module) {
  const auto first = [](const torch::nn::Module& each) {
    if (const auto* rnn = dynamic_cast<const torch::nn::RNNImpl*>(&each)) return !rnn->options.batch_first();
    if (const auto* lstm = dynamic_cast<const torch::nn::LSTMImpl*>(&each))
      return !lstm->options.batch_first();
    if (const auto* gru = dynamic_cast<const torch::nn::GRUImpl*>(&each)) return !gru->options.batch_first();
    return dynamic_cast<const torch::nn::MultiheadAttentionImpl*>(&each) != nullptr;
  };
  for (const auto& item : module.named_modules("", /*include_self=*/false))
    if (first(*item.value())) return fmt::format("'{}' ({})", item.key(), item.value()->name());
  return first(module) ? module.name() : "";
}

}  // namespace

// Counts the samples of a forward call.
void DdpReducer::note_samples(const std::vector<at::Tensor>& inputs) {
  const auto dim = batch_dim_.value_or(0);
  const at::Tensor* first = nullptr;
  for (const auto& input : inputs) {
    if (!input.defined() || input.dim() == 0) continue;
    if (!first) first = &input;
    if (joining_ && !batch_dim_ && input.size(0) != first->size(0)) join_problem_ = kInputsDisagree;
  }
  if (!first) {
    ++samples_;
    return;
  }
  if (first->dim() <= dim)
    throw ConfigError(
        fmt::format("JoinOptions::batch_dim is {}, but the first input of forward has the shape [{}]", dim,
                    fmt::join(first->sizes(), ", ")));
  samples_ += first->size(dim);
  if (!joining_ || batch_dim_) return;
  first_input_ = 1;  // FNV-1a over the sizes; never 0
  for (const auto size : first->sizes().slice(1))
    first_input_ = (first_input_ ^ static_cast<std::uint64_t>(size)) * 1099511628211u | 1u;
}

// Exchanges this round's samples. Returns true if any rank still has data.
bool DdpReducer::announce(std::int64_t samples, bool active) {
  const ModelScope scope(model_, /*begins=*/true);
  Announcement mine{samples, active};
  const bool guessed = active && !batch_dim_ && !told_samples_;
  if (guessed) {
    mine.first_input = first_input_;
    mine.problem = sequence_first_.empty() ? join_problem_ : kSequenceFirstModule;
  }
  join_problem_ = kNoProblem;
  told_samples_.reset();
  const auto all = group_.all_gather_values(mine, {.tag = "ddp join"});
  require_known_batch(all);
  std::int64_t total = 0;
  int first_active = -1, first_idle = -1;
  bool equal = true;
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    total += all[rank].samples;
    equal = equal && all[rank].samples == all[0].samples;
    auto& first = all[rank].active ? first_active : first_idle;
    if (first < 0) first = static_cast<int>(rank);
  }
  if (first_active < 0) return false;
  last_active_ = first_active;
  if (first_idle >= 0) {
    uneven_ = true;
    if (throw_early_)
      throw ConfigError(fmt::format(
          "uneven inputs: rank {} ran out of data after {} steps while rank {} has more; remove "
          "{{.throw_on_early_termination = true}} to let join() continue, or use {{.drop_last = true}}",
          first_idle, rounds_, first_active));
  }
  weight_.reset();
  if (!equal && total > 0) weight_ = static_cast<double>(samples) / static_cast<double>(total);
  return true;
}

// Every rank throws if the number of samples would be a guess on any rank.
void DdpReducer::require_known_batch(const std::vector<Announcement>& all) const {
  constexpr const char* kAdvice =
      "Set JoinOptions::batch_dim to the dimension of the inputs that counts samples, or call ddp.samples(n) before "
      "each backward pass";
  const Announcement* known = nullptr;
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    const auto& each = all[rank];
    if (each.problem == kSequenceFirstModule)
      throw ConfigError(fmt::format(
          "join() weights gradients by samples, but dim 0 of the inputs is not the batch in {}. {}",
          sequence_first_.empty() ? "a module" : sequence_first_, kAdvice));
    if (each.problem == kInputsDisagree)
      throw ConfigError(fmt::format(
          "join() weights gradients by samples, but the inputs of rank {} have different sizes in dim 0. {}",
          rank, kAdvice));
    if (each.first_input == 0) continue;
    if (known && known->first_input != each.first_input)
      throw ConfigError(fmt::format(
          "join() weights gradients by samples, but the first inputs of ranks {} and {} differ in a "
          "dimension other than 0. {}",
          known - all.data(), rank, kAdvice));
    known = &each;
  }
}

// Takes part in one round of the ranks that still have data.
void DdpReducer::follow(const JoinOptions& options) {
  at::NoGradGuard no_grad;
  for (auto& param : params_) param.tensor.mutable_grad().reset();
  unready_ = false;
  if (shards_) shards_->drop_gradients();
  in_round_ = true;
  settle(true, true);
  ++rounds_;
  if (options_.broadcast_buffers) sync_buffers(last_active_);
  reset_round();
  if (options.step) options.step();
}

void DdpReducer::join(const std::function<void()>& body, const JoinOptions& options) {
  if (joining_) throw ConfigError("join() cannot be nested");
  if (options_.micro_batches > 1) throw ConfigError("join() cannot be combined with micro_batches above 1");
  if (options.batch_dim && *options.batch_dim < 0)
    throw ConfigError(fmt::format("JoinOptions::batch_dim: expected at least 0, got {}", *options.batch_dim));
  if (!alone_ && meets_in_forward(*module_))
    throw ConfigError(
        "join() cannot be used with SyncBatchNorm, or with another module whose forward waits for every "
        "rank: ranks that have run out of data run no forward");
  if (shards_ && !options.step)
    throw ConfigError(
        "join() with a DistributedOptimizer needs {.step}, because a rank that has run out of data must "
        "still update its part of the parameters");
  struct Restore {
    DdpReducer& self;
    ~Restore() {
      self.joining_ = self.throw_early_ = false;
      self.batch_dim_.reset();
    }
  } restore{*this};
  if (!alone_ && !in_round_) follow_model();
  joining_ = true;
  batch_dim_ = options.batch_dim;
  sequence_first_ = batch_dim_ ? "" : sequence_first_module(*module_);
  join_problem_ = kNoProblem;
  throw_early_ = options.throw_on_early_termination;
  uneven_ = false;
  samples_ = 0;
  told_samples_.reset();
  body();
  if (alone_) return;
  check_passes(in_round_);
  while (announce(0, false)) follow(options);
  weight_.reset();
  if (!uneven_) return;
  if (options.step)
    sync_buffers(last_active_);
  else
    broadcast_tensors(group_, parameters_and_buffers(), last_active_);
}

}  // namespace lockstep::detail
