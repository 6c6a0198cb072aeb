// Code that must not compile. A comment after each such line states the expected error.
#include <lockstep/lockstep.h>
#include <torch/torch.h>

using namespace lockstep;

namespace {

struct PlainNet : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x, bool twice) { return twice ? x + x : x; }
};

[[maybe_unused]] void data_parallel_over_processes(Group group, at::Tensor x) {
  torch::nn::ModuleList list;
  DistributedDataParallel parts(list, group);
  parts(x);  // refused: the model has no forward() (ModuleList, ModuleDict and ParameterList have none)

  torch::nn::Linear linear(2, 2);
  DistributedDataParallel ddp(linear, group);
  auto y = ddp->forward(x, x);  // refused: the model's forward() does not accept these arguments
  y.sum().backward();

  PlainNet net;
  DistributedDataParallel plain(net, group);
  plain(x);  // refused: the model's forward() does not accept these arguments
  DistributedDataParallel<PlainNet>(PlainNet(), group);  // refused: use of deleted function
  plain(x, true);

  DistributedOptimizer<torch::optim::LBFGS> lbfgs(ddp, 1.0);  // refused: each rank updates a part of every
  lbfgs.zero_grad();
}

}  // namespace
