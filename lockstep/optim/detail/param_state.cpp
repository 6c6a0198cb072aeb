#include <lockstep/optim/detail/param_state.h>

#include <ATen/ATen.h>

namespace lockstep::detail {

at::Tensor followed_master(const at::Tensor& master, const at::Tensor& parameter) {
  const auto now = parameter.detach().to(at::kFloat);
  if (!master.defined()) return now.is_alias_of(parameter) ? now.clone() : now;
  const auto rounded = master.to(parameter.scalar_type());
  // In place, because a captured graph may refer to it.
  if (master.device() == now.device())
    return at::where_out(const_cast<at::Tensor&>(master), rounded == parameter, master, now);
  return at::where(rounded.to(now.device()) == parameter, master.to(now.device()), now);
}

void copy_rounded(at::TensorList parameters, at::TensorList masters) {
  at::_foreach_copy_(parameters, masters);
}

void make_fit(at::Tensor& moment, const at::Tensor& target) {
  auto made = at::zeros_like(target, {}, at::MemoryFormat::Preserve);
  if (moment.defined()) made.copy_(moment);
  moment = made;
}

}  // namespace lockstep::detail
