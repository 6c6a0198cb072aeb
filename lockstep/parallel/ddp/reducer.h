// The part of DistributedDataParallel that does not depend on the type of the module: what happens to a
// gradient between autograd's leaving it in p.grad() and the end of backward.
//
// A round is one backward pass that communicates. It begins with the gradient of an output (or of a
// parameter, where forward did not go through us) and ends with autograd's callback at the end of the pass.
// In the first round gradients stay where they are and the order of their coming is learned; at its end
// buckets are made in rank 0's order and filled. From then on a gradient goes to its place in a bucket as
// soon as it is there, and a bucket is reduced when it and all before it are full.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <lockstep/comm/group.h>
#include <lockstep/comm/group/model_scope.h>
#include <lockstep/parallel/ddp.h>
#include <torch/csrc/autograd/variable.h>

namespace lockstep::detail {

class ParameterShards;

// "'a', 'b' and 3 more".
std::string names_of(const std::vector<std::string>& names);

class DdpReducer : public std::enable_shared_from_this<DdpReducer> {
 public:
  DdpReducer(std::shared_ptr<torch::nn::Module> module, Group group, DdpOptions options);
  ~DdpReducer();

  // Verifies that all ranks have the same parameters, broadcasts rank 0's values and installs the gradient hooks.
  // Not in the constructor, because the hooks hold a weak_ptr to this.
  void start();

  void before_forward(const std::vector<at::Tensor>& inputs);
  void after_forward(const std::vector<at::Tensor>& outputs);
  void no_sync(bool begin) { no_sync_ += begin ? 1 : -1; }
  void reduce_now();
  void discard_micro_batches();
  void discard();
  void join(const std::function<void()>& body, const JoinOptions& options);
  void samples(std::int64_t count);
  void set_hook(CommHook hook);
  void sync_buffers(int root);
  std::vector<std::int64_t> bucket_sizes() const;
  DdpCounts counts() const { return counts_; }
  // From now on every rank gets the average of its own part alone, and p.grad() cannot be read after backward
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
    const torch::autograd::FunctionPreHook* pre_hook = nullptr;  // with micro-batches or shards
    std::optional<std::size_t> bucket = {};
    at::Tensor view = {};   // its place there
    bool in_place = false;  // a bucket of its own, whose memory is the gradient's, from pass to pass another
    bool sparse = false;
    bool used = false;  // in this step, also inside no_sync()
    int fired = 0;      // in this pass
    int expected = 1;   // with static_graph, after the first round: how often it fires; 0: unused here
    std::vector<at::Tensor> levels = {};  // sums of micro-batches, a binary counter: 2^i of them in levels[i]
    at::Tensor sum = {};                  // of all of them, where it is wider than the gradient
    bool aside = false;                   // what p.grad() held before the first of them is set aside
    at::Tensor before = {};               // there
    at::Tensor kept = {};                 // what it held, where it may be left alone
    bool ready() const { return fired >= expected && expected > 0; }
  };
  struct Bucket {
    GradBucket shown;
    std::vector<std::size_t> params;
    std::size_t missing;
    std::string tag;
    std::int64_t bytes = 0;
    std::vector<std::int64_t> offsets = {};  // of the parameters, in elements
    std::int64_t elements = 0;
    std::optional<Work> work = {};
    std::function<void()> complete = {};
    std::vector<std::pair<Param*, at::Tensor>> moving = {};  // gradients that are not in it yet
  };
  // A registered parameter as it was when the hooks were installed; frozen ones too.
  struct Watched {
    std::string name;
    at::Tensor tensor;
    bool requires_grad;
    const void* accumulator = nullptr;
  };
  // A backward pass that ended with an exception, here or on another rank, when the ranks were not all at its end.
  struct BrokenPass {
    std::string text;
    std::optional<std::size_t> missing = {};  // collectives that the peers still issue in it, if known
    std::vector<Work> started = {};
    bool known_to_all = false;
  };
  // What ranks exchange at the start of a round inside join().
  struct Announcement {
    std::int64_t samples = 0;
    std::int64_t active = 0;
    std::int64_t problem = 0;       // a JoinProblem
    std::uint64_t first_input = 0;  // hash of its sizes without dim 0; 0: unknown, or not needed
  };

  // What a step did with a parameter on some rank: the most counts.
  static constexpr char kNothing = 0, kKept = 1, kUsed = 2;

  void tell_memory() const;
  bool direct() const { return alone_ && !hook_; }  // no buckets: gradients stay where autograd leaves them
  void on_gradient(std::size_t index, const at::Tensor& given);
  void on_output(bool sync);
  void before_step();
  void begin_round();
  void end_round();
  void reset_round();
  void forget_micro_batches(bool restore);

  // ddp_broken_pass.cpp
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

  // Between passes p.grad() may be unready (unready_gradient.h): in the middle of a sum, and where an optimizer
  // has the gradients of this rank's part.
  void make_gradients_unready(const std::string& text);
  void clear_unready_gradients();
  void prepare_gradients();  // a pass begins
  void before_gradient(std::size_t index);

  // buckets.cpp
  void set_aside(Param& param);         // what was there before the first micro-batch
  void fold(Param& param);              // a micro-batch's gradient into its sums
  bool wide(const Param& param) const;  // its bucket has floats, so that it is rounded once
  void make_buckets(int root, const std::vector<char>& used, bool shadow);
  bool may_be_in_place(const Param& param) const;
  // holders: of the gradient's memory, where nobody has it that could not be seen here.
  void fill(Param& param, std::size_t holders = 1);
  void adopt(Param& param, std::size_t holders);  // its gradient, as its bucket
  void launch_ready();
  void move(Bucket& bucket);
  void launch(Bucket& bucket);
  void complete(Bucket& bucket);
  void reduce_sparse(Param& param);
  std::vector<char> agree_on_most(std::vector<char> mine);  // the largest of all ranks, each
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
  std::optional<GroupModel> model_;  // from start() on, unless alone
  const DdpOptions options_;
  const bool alone_;  // nobody to reduce with
  const bool check_every_graph_;
  bool zero_copy_ = false;
  const std::set<std::size_t>* shared_sizes_ = nullptr;  // of the gradients that are to be reduced in place
  DdpCounts counts_;
  CommHook hook_;
  std::shared_ptr<ParameterShards> shards_;  // where an optimizer updates a part on each rank

  std::mutex mutex_;  // a model on several devices: one autograd thread each
  std::vector<Param> params_;
  std::vector<std::pair<std::string, at::Tensor>> buffers_;
  std::vector<Watched> watched_;
  std::vector<const void*> structure_;  // the modules and their parameters, compared by address only
  bool graph_checked_ = false;
  // Of the last forward, until its graph is checked.
  std::vector<torch::autograd::Edge> input_edges_;
  std::set<const void*> input_memory_;
  bool unready_ = false;  // p.grad() of params_ is unready, if nothing has replaced it
  std::vector<Bucket> buckets_;
  bool buckets_made_ = false;

  int no_sync_ = 0;
  bool sync_ = true;  // as the last forward found it

  std::optional<BrokenPass> broken_;
  bool in_round_ = false;
  std::weak_ptr<int> round_;  // expired: the pass has ended
  int unsynced_task_ =
      -1;  // autograd's number of the last pass through the output of a forward inside no_sync()
  std::size_t launched_ = 0;
  std::vector<std::size_t> order_;  // of the first round
  std::int64_t rounds_ = 0;
  std::int64_t checked_at_ = 0;
  int micro_batch_ = 0;

  std::vector<char> used_;  // with static_graph: on any rank

  bool joining_ = false;
  bool throw_early_ = false;
  std::optional<std::int64_t> batch_dim_;  // JoinOptions
  std::string sequence_first_;             // a module of which the batch is not dim 0 of the inputs
  std::int64_t join_problem_ = 0;
  std::uint64_t first_input_ = 0;
  int last_active_ = 0;       // the first rank that had data at the last announcement where any had
  bool uneven_ = false;       // some rank has run out while others went on
  std::int64_t samples_ = 0;  // of forwards since the last round
  std::optional<std::int64_t> told_samples_;  // by the user
  std::optional<double> weight_;  // of this rank's gradients in this round; none: all count the same
};

}  // namespace lockstep::detail
