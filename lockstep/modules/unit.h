// A module holder whose call can be intercepted: the place around a call that techniques need.
//
//   struct NetImpl : torch::nn::Module {
//     lockstep::Unit<torch::nn::BatchNorm2d> norm{16};   // instead of torch::nn::BatchNorm2d norm{16}
//     NetImpl() { register_module("norm", norm); }
//     at::Tensor forward(const at::Tensor& x) { return norm(x); }
//   };
//
// C++ binds module calls statically: LinearImpl::forward is not virtual, and replacing a registered child
// changes nothing. Unit<M> is M (it derives from the holder) in every respect but its call, which passes
// through until something is attached to the module. What is attached belongs to the module: every copy of
// the holder sees it. A call round the holder (norm->forward(x)) is not intercepted; when its gradient
// reaches the module's parameters, that is a ConfigError.
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

// A module, or what is attached to one, whose forward waits for the other ranks.
class CommunicatesInForward {
 public:
  virtual ~CommunicatesInForward() = default;
};
bool meets_in_forward(torch::nn::Module& module);  // it, or one below it

// A module, or what is attached to one, whose parameters are this rank's slices of whole ones.
class HoldsSlices {
 public:
  virtual ~HoldsSlices() = default;
  virtual const Group& slices_over() const = 0;
};
// The first such module, it or below it, whose group has more than one rank.
struct SplitModule {
  std::string name;
  Group group;
};
std::optional<SplitModule> find_split(const torch::nn::Module& module);

// What a technique puts around a module's call.
class Attachment : public std::enable_shared_from_this<Attachment> {
 public:
  explicit Attachment(std::string what);
  Attachment(const Attachment&) = delete;
  Attachment& operator=(const Attachment&) = delete;
  virtual ~Attachment();

  const std::string& what() const { return what_; }  // "SyncBatchNorm"
  // In place of the module's forward, and watched.
  at::Tensor operator()(const at::Tensor& input);

 protected:
  virtual at::Tensor forward(const at::Tensor& input) = 0;

 private:
  friend void attach(torch::nn::Module&, const std::string&, std::shared_ptr<Attachment>, bool);
  struct Watch;
  std::string what_;
  std::atomic<int> pass_ = -1;  // the last backward pass that came through here
  std::vector<std::unique_ptr<Watch>> watches_;
};

// What a Unit's module has beside LibTorch's.
class UnitSlot {
 public:
  virtual ~UnitSlot() = default;
  // As the holder's call, for who does not know the module's type. ConfigError where it takes more than a
  // tensor.
  virtual at::Tensor call(const at::Tensor& input) = 0;
  virtual const std::type_info& forward_of()
      const = 0;  // the class whose forward it is, of those it derives from
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
      return typeid(Impl);  // overloads, or a template
  }

  // A Unit's too; what is attached knows the module that it belongs to.
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<at::Device>& device = std::nullopt) const override {
    if (attachment) refuse_clone(*attachment);
    auto copy = Impl::clone(device);
    // A class that is derived from LibTorch's modules and has no clone() of its own comes as one of theirs.
    if constexpr (std::is_copy_constructible_v<Impl>)
      if (const auto same = std::dynamic_pointer_cast<Impl>(copy)) return std::make_shared<UnitImpl>(*same);
    return copy;
  }
};

// '*' stands for any text without a dot.
bool name_matches(std::string_view pattern, std::string_view name);

// Null where the module was not made by a Unit.
UnitSlot* slot_of(torch::nn::Module* module);

// name is the module's, for errors. ConfigError where something else is attached. watch: a gradient that did
// not come through the attachment is an error.
void attach(torch::nn::Module& module, const std::string& name, std::shared_ptr<Attachment> attachment,
            bool watch = true);

// While it lives gradients may be those of weights alone, whose way through the attachment was gone before,
// in another backward pass. They are not watched.
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
  // What register_module returns. A module that was not made by a Unit cannot have anything attached.
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
