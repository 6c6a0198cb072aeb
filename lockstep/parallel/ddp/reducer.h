// DdpReducer: the part of DistributedDataParallel that does not depend on the type of the module. It handles
// a gradient from the moment autograd stores it in p.grad() to the end of backward.
//
// A round is one backward pass that communicates. It begins when the gradient of an output is computed (or
// that of a parameter, if forward bypassed DDP) and ends in autograd's callback at the end of the pass. In
// the first round gradients stay where they are, and the order in which they become ready is recorded. At its
// end, buckets are allocated in rank 0's order and filled. In later rounds each gradient is copied into its
// bucket as soon as it is ready, and a bucket is reduced when it and all earlier buckets are full.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <lockstep/base/error.h>
#include <lockstep/comm/group.h>
#include <lockstep/comm/group/model_scope.h>
#include <lockstep/parallel/ddp.h>
#include <torch/csrc/autograd/variable.h>

namespace lockstep::detail {

class ParameterShards;

// A file name above members is the file that defines them and those after them, up to the next name. One
// beside a member is for that member only.
class DdpReducer : public std::enable_shared_from_this<DdpReducer> {
 public:
  // parameters.cpp
  DdpReducer(std::shared_ptr<torch::nn::Module> module, Group group, DdpOptions options);
  ~DdpReducer();

  // Verifies that all ranks have the same parameters, broadcasts rank 0's values and installs the gradient
  // hooks. Not in the constructor, because the hooks hold a weak_ptr to this.
  void start();

  // reducer.cpp
  void before_forward(const std::vector<at::Tensor>& inputs);
  void after_forward(const std::vector<at::Tensor>& outputs);
  void no_sync(bool begin) { no_sync_ += begin ? 1 : -1; }
  void reduce_now();
  void discard_micro_batches();
  void discard();                                                            // broken_pass.cpp
  void join(const std::function<void()>& body, const JoinOptions& options);  // join.cpp
  void samples(std::int64_t count);
  void set_hook(CommHook hook);
  void sync_buffers(int root);
  std::vector<std::int64_t> bucket_sizes() const;
  DdpCounts counts() const { return counts_; }

  // sharding.cpp
  // Shards the parameters: from now on each rank gets the average of its own shard only, and p.grad() cannot
  // be read after backward.
  std::shared_ptr<ParameterShards> shard(bool share_weights);
  void unshard();

 private:
  using Accumulator = decltype(torch::autograd::impl::grad_accumulator(at::Tensor()));
  struct Param {
    std::string name;
    at::Tensor tensor;
    // Owning reference: autograd drops the node, and our hook with it, when no one else holds it.
    Accumulator accumulator = {};
    std::uintptr_t hook = 0;
    const torch::autograd::FunctionPreHook* pre_hook = nullptr;  // Set with micro-batches or shards.
    std::optional<std::size_t> bucket = {};
    at::Tensor view = {};  // View of its place in the bucket.
    // True if this gradient is reduced where autograd allocated it, without a bucket copy. It has a bucket to
    // itself, whose address changes every pass.
    bool in_place = false;
    bool sparse = false;
    bool used = false;  // True if it got a gradient in this step, also inside no_sync().
    int fired = 0;      // Number of gradients in this pass.
    // Number of gradients per pass; with static_graph, as counted in the first round (0: unused).
    int expected = 1;
    // Sums of micro-batches, a binary counter: levels[i] sums 2^i of them.
    std::vector<at::Tensor> levels = {};
    // Sum of all micro-batches, if it has a wider type than the gradient.
    at::Tensor sum = {};
    // True while the previous value of p.grad() is set aside in `before`.
    bool aside = false;
    at::Tensor before = {};  // Value of p.grad() before the first micro-batch.
    at::Tensor kept = {};    // Value of p.grad() to restore if no rank used the parameter.
    bool ready() const { return fired >= expected && expected > 0; }
  };
  struct Bucket {
    GradBucket shown;
    std::vector<std::size_t> params;
    std::size_t missing;
    std::string tag;
    std::int64_t bytes = 0;
    std::vector<std::int64_t> offsets = {};  // Offsets of the parameters, in elements.
    std::int64_t elements = 0;
    std::optional<Work> work = {};
    std::function<void()> complete = {};
    std::vector<std::pair<Param*, at::Tensor>> moving = {};  // Gradients not copied in yet.
  };
  // A registered parameter, frozen or not, as it was when the hooks were installed.
  struct Watched {
    std::string name;
    at::Tensor tensor;
    bool requires_grad;
    const void* accumulator = nullptr;
  };
  // A backward pass that threw, here or on a peer, before all ranks had reached its end.
  struct BrokenPass {
    std::string text;
    std::optional<std::size_t> missing = {};  // Number of collectives that peers still issue in it, if known.
    std::vector<Work> started = {};
    bool known_to_all = false;
  };
  // Data exchanged by the ranks at the start of a round inside join().
  struct Announcement {
    std::int64_t samples = 0;
    std::int64_t active = 0;
    std::int64_t problem = 0;  // A JoinProblem.
    // Hash of the first input's sizes without dim 0; 0: unknown or not needed.
    std::uint64_t first_input = 0;
  };

  // How a step treated a parameter on one rank. The maximum over the ranks wins.
  static constexpr char kNothing = 0, kKept = 1, kUsed = 2;

  // reducer.cpp
  void tell_memory() const;  // buckets.cpp
  // True if there are no buckets: gradients stay where autograd stored them.
  bool direct() const { return alone_ && !hook_; }
  void on_gradient(std::size_t index, const at::Tensor& given);
  void on_output(bool sync);
  void before_step();
  void begin_round();
  void end_round();
  void reset_round();
  void forget_micro_batches(bool restore);

  // broken_pass.cpp
  void abandon_round();
  void note_broken_pass();
  std::optional<std::size_t> missing_collectives() const;
  void check_passes(bool ended);
  void report_broken_pass();
  void learn_of_broken_pass(const CommError& error);
  void refuse_updates();  // where ranks know of a broken pass: p.grad() cannot be read until discard()

  // parameters.cpp
  void find_parameters();
  void compare_and_synchronize();
  void verify() const;
  void agree_on_zero_copy();
  void install_hooks();
  void install_pre_hooks();
  void remove_hooks();
  std::vector<at::Tensor> parameters_and_buffers() const;
  std::string model_change() const;
  void follow_model();
  void note_inputs(const std::vector<at::Tensor>& inputs);
  void check_graph(const std::vector<at::Tensor>& outputs);

  // reducer.cpp
  // Between passes p.grad() may be unready (unready_gradient.h): in the middle of a sum of micro-batches, or
  // while an optimizer holds this rank's shard of the gradients.
  void make_gradients_unready(const std::string& text);
  void clear_unready_gradients();
  void prepare_gradients();  // Called at the beginning of a pass.
  void before_gradient(std::size_t index);

  // buckets.cpp
  void set_aside(Param& param);         // Moves away the value of p.grad() from before the first micro-batch.
  void fold(Param& param);              // Adds a micro-batch's gradient to its sums.
  bool wide(const Param& param) const;  // True if its bucket holds floats, so that the sum is rounded once.
  void make_buckets(int root, const std::vector<char>& used, bool shadow);
  bool may_be_in_place(const Param& param) const;
  // holders: number of references to the gradient's memory that are known to be harmless.
  void fill(Param& param, std::size_t holders = 1);
  void adopt(Param& param, std::size_t holders);  // Uses the gradient's own memory as its bucket.
  void launch_ready();
  void move(Bucket& bucket);
  void launch(Bucket& bucket);
  void complete(Bucket& bucket);
  void reduce_sparse(Param& param);
  std::vector<char> agree_on_most(std::vector<char> mine);  // Elementwise maximum over the ranks.
  void require_all_gradients() const;
  void settle(bool last, bool shadow = false);

  // sharding.cpp
  Work reduce(const at::Tensor& buffer, const Bucket& bucket);
  std::shared_ptr<ParameterShards> make_shards(bool share_weights);
  void forget_early_buckets();

  // join.cpp
  void note_samples(const std::vector<at::Tensor>& inputs);
  bool announce(std::int64_t samples, bool active);
  void require_known_batch(const std::vector<Announcement>& all) const;
  void follow(const JoinOptions& options);

  const std::shared_ptr<torch::nn::Module> module_;
  Group group_;
  std::optional<GroupModel> model_;  // Set by start(), unless this rank is alone.
  const DdpOptions options_;
  const bool alone_;  // True if the group has only this rank.
  const bool check_every_graph_;
  bool zero_copy_ = false;
  const std::set<std::size_t>* shared_sizes_ = nullptr;  // Sizes of the gradients to reduce in place.
  DdpCounts counts_;
  CommHook hook_;
  std::shared_ptr<ParameterShards> shards_;  // Set while an optimizer updates shards.

  std::mutex mutex_;  // A model on several devices has one autograd thread each.
  std::vector<Param> params_;
  std::vector<std::pair<std::string, at::Tensor>> buffers_;
  std::vector<Watched> watched_;
  std::vector<const void*> structure_;  // The modules and their parameters, compared by address only.
  bool graph_checked_ = false;
  std::vector<torch::autograd::Edge> input_edges_;  // Edges of the last forward, until its graph is checked.
  std::set<const void*> input_memory_;              // Memory of its arguments, likewise.
  bool unready_ = false;  // True while p.grad() of params_ is unready, unless something has replaced it.
  std::vector<Bucket> buckets_;
  bool buckets_made_ = false;

  int no_sync_ = 0;
  bool sync_ = true;  // Value of no_sync_ == 0 at the last forward.

  std::optional<BrokenPass> broken_;
  bool in_round_ = false;
  std::weak_ptr<int> round_;  // Expires when the pass ends.
  // Autograd's id of the last pass through the output of a forward inside no_sync().
  int unsynced_task_ = -1;
  std::size_t launched_ = 0;
  std::vector<std::size_t> order_;  // Order in which gradients became ready in the first round.
  std::int64_t rounds_ = 0;
  std::int64_t checked_at_ = 0;
  int micro_batch_ = 0;

  std::vector<char> used_;  // With static_graph: parameters used on any rank.

  bool joining_ = false;
  bool throw_early_ = false;
  std::optional<std::int64_t> batch_dim_;  // From JoinOptions.
  std::string sequence_first_;             // Name of a module whose batch is not dim 0 of its inputs.
  std::int64_t join_problem_ = 0;
  std::uint64_t first_input_ = 0;
  // First rank with data at the most recent announcement in which any rank had data.
  int last_active_ = 0;
  bool uneven_ = false;                       // True once some rank has run out of data before another.
  std::int64_t samples_ = 0;                  // Number of samples in forwards since the last round.
  std::optional<std::int64_t> told_samples_;  // Number of samples set by the user.
  // Weight of this rank's gradients in this round; empty: all ranks count equally.
  std::optional<double> weight_;
};

}  // namespace lockstep::detail
