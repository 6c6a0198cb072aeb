// Unit: a module holder whose call can be intercepted. Several techniques build on it.
//
//   struct NetImpl : torch::nn::Module {
//     lockstep::Unit<torch::nn::BatchNorm2d> norm{16};   // instead of torch::nn::BatchNorm2d norm{16}
//     NetImpl() { register_module("norm", norm); }
//     at::Tensor forward(const at::Tensor& x) { return norm(x); }
//   };
//
// C++ binds module calls statically: LinearImpl::forward is not virtual, and replacing a registered child has
// no effect. Unit<M> behaves like M, from which it derives, except for its call, which is forwarded to the
// module until something is attached to it. An attachment belongs to the module, so every copy of the holder
// sees it. A call that bypasses the holder (norm->forward(x)) is not intercepted; when its gradient reaches
// the module's parameters, backward() throws ConfigError.
#pragma once

#include <atomic>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <lockstep/comm/group.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

namespace lockstep {
namespace detail {

// A module, or an attachment of one, whose forward communicates and so waits for the other ranks.
class CommunicatesInForward {
 public:
  virtual ~CommunicatesInForward() = default;
};
// True if the module or one of its submodules communicates in forward.
bool meets_in_forward(torch::nn::Module& module);

// A module, or an attachment of one, whose parameters are this rank's slices of whole ones.
class HoldsSlices {
 public:
  virtual ~HoldsSlices() = default;
  virtual const Group& slices_over() const = 0;
};
// The first such module, among the module and its submodules, whose group has more than one rank.
struct SplitModule {
  std::string name;
  Group group;
};
std::optional<SplitModule> find_split(const torch::nn::Module& module);

// Intercepts a module's call on behalf of a technique.
class Attachment : public std::enable_shared_from_this<Attachment> {
 public:
  explicit Attachment(std::string what);
  Attachment(const Attachment&) = delete;
  Attachment& operator=(const Attachment&) = delete;
  virtual ~Attachment();

  const std::string& what() const { return what_; }  // "SyncBatchNorm"
  // Replaces the module's forward. Notes the backward passes that come through.
  at::Tensor operator()(const at::Tensor& input);

 protected:
  virtual at::Tensor forward(const at::Tensor& input) = 0;

 private:
  friend void attach(torch::nn::Module&, const std::string&, std::shared_ptr<Attachment>, bool);
  struct Watch;
  std::string what_;
  std::atomic<int> pass_ = -1;  // Id of the last backward pass that came through here.
  std::vector<std::unique_ptr<Watch>> watches_;
};

// The state that a Unit adds to a LibTorch module.
class UnitSlot {
 public:
  virtual ~UnitSlot() = default;
  // Same as a call of the holder, for code that does not know the module's type. Throws ConfigError if
  // forward does not take one tensor and return one.
  virtual at::Tensor call(const at::Tensor& input) = 0;
  // The class, of those it derives from, that defines its forward.
  virtual const std::type_info& forward_of() const = 0;
  std::shared_ptr<Attachment> attachment;
};

[[noreturn]] void refuse_call(const torch::nn::Module& module);
[[noreturn]] void refuse_clone(const Attachment& attachment);

template <typename F>
struct MemberOf;
template <typename R, typename C, typename... A>
struct MemberOf<R (C::*)(A...)> {
  using type = C;
};
template <typename R, typename C, typename... A>
struct MemberOf<R (C::*)(A...) const> {
  using type = C;
};

template <typename Impl>
class UnitImpl final : public Impl, public UnitSlot {
 public:
  using Impl::Impl;
  explicit UnitImpl(const Impl& other) : Impl(other) {}

  at::Tensor call(const at::Tensor& input) override {
    if (attachment) return (*attachment)(input);
    if constexpr (requires {
                    { this->Impl::forward(input) } -> std::same_as<at::Tensor>;
                  })
      return Impl::forward(input);
    else
      refuse_call(*this);
  }

  const std::type_info& forward_of() const override {
    if constexpr (requires { typename MemberOf<decltype(&Impl::forward)>::type; })
      return typeid(typename MemberOf<decltype(&Impl::forward)>::type);
    else
      return typeid(Impl);  // Overloaded, or a template.
  }

  // Clones to a Unit's module. Throws if something is attached, because attachments refer to their module.
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<at::Device>& device = std::nullopt) const override {
    if (attachment) refuse_clone(*attachment);
    auto copy = Impl::clone(device);
    // If a class derived from LibTorch's modules does not override clone(), it is cloned as its base class.
    if constexpr (std::is_copy_constructible_v<Impl>)
      if (const auto same = std::dynamic_pointer_cast<Impl>(copy)) return std::make_shared<UnitImpl>(*same);
    return copy;
  }
};

// '*' stands for any text without a dot.
bool name_matches(std::string_view pattern, std::string_view name);

// Null if the module was not made by a Unit.
UnitSlot* slot_of(torch::nn::Module* module);

// Attaches to a Unit's module. name: the module's name, for errors. watch: treat a gradient that did not come
// through the attachment as an error. Throws ConfigError if something is already attached.
void attach(torch::nn::Module& module, const std::string& name, std::shared_ptr<Attachment> attachment,
            bool watch = true);

// While an object exists, gradients of weights are not watched: in the weight part of a backward pass, the
// path through the attachment belongs to an earlier pass.
class WeightPart {
 public:
  WeightPart();
  WeightPart(const WeightPart&) = delete;
  WeightPart& operator=(const WeightPart&) = delete;
  ~WeightPart();
};

[[noreturn]] void refuse_arguments(const Attachment& attachment, std::size_t count);

}  // namespace detail

template <typename M>
class Unit : public M {
  using Impl = typename M::ContainedType;

 public:
  using is_unit = void;

  Unit() : Unit(std::shared_ptr<Impl>(std::make_shared<detail::UnitImpl<Impl>>())) {}
  Unit(std::nullptr_t) : M(nullptr) {}
  // Takes the result of register_module. Nothing can be attached to a module that was not made by a Unit.
  Unit(std::shared_ptr<Impl> module) : M(std::move(module)), slot_(detail::slot_of(this->get())) {}
  template <typename Head, typename... Tail>
    requires(!std::is_base_of_v<M, std::remove_cvref_t<Head>> &&
             !std::is_convertible_v<Head, std::shared_ptr<Impl>> &&
             !std::is_same_v<std::remove_cvref_t<Head>, std::nullptr_t>)
  explicit Unit(Head&& head, Tail&&... tail)
      : Unit(std::shared_ptr<Impl>(std::make_shared<detail::UnitImpl<Impl>>(std::forward<Head>(head),
                                                                            std::forward<Tail>(tail)...))) {}

  template <typename... Args>
  decltype(auto) operator()(Args&&... args) {
    using Result = decltype(std::declval<Impl&>().forward(std::forward<Args>(args)...));
    if (!slot_ || !slot_->attachment) [[likely]]
      return static_cast<Result>(this->get()->forward(std::forward<Args>(args)...));
    if constexpr (std::is_same_v<Result, at::Tensor> && sizeof...(Args) == 1 &&
                  (std::is_convertible_v<Args, const at::Tensor&> && ...))
      return (*slot_->attachment)(args...);
    else
      detail::refuse_arguments(*slot_->attachment, sizeof...(Args));
  }

 private:
  detail::UnitSlot* slot_ = nullptr;
};

}  // namespace lockstep
