// Declares which optimizers update each element only from its own gradient and state, and so can work on
// slices of parameters: LibTorch's and Lockstep's, and user-defined ones that specialize this template.
//
//   template <>
//   struct lockstep::ElementwiseOptimizer<Lion> : std::true_type {
//     using Options = LionOptions;   // its constructor's argument after the parameters
//   };
//
// An optimizer that uses more of a parameter than one element, such as its norm (LARS, LAMB), its rows and
// columns (Adafactor, Muon) or all parameters together (LBFGS), is not element-wise: on slices it would
// silently compute something else.
#pragma once

#include <type_traits>

namespace torch::optim {
class Adagrad;
struct AdagradOptions;
class Adam;
struct AdamOptions;
class AdamW;
struct AdamWOptions;
class RMSprop;
struct RMSpropOptions;
class SGD;
struct SGDOptions;
}  // namespace torch::optim

namespace lockstep {

class Adam;
struct AdamOptions;
class AdamW;
struct AdamWOptions;
class SGD;
struct SGDOptions;

template <typename Optimizer>
struct ElementwiseOptimizer : std::false_type {};

namespace detail {
template <typename Given>
struct ElementwiseWith : std::true_type {
  using Options = Given;
};
}  // namespace detail

template <>
struct ElementwiseOptimizer<Adam> : detail::ElementwiseWith<AdamOptions> {};
template <>
struct ElementwiseOptimizer<AdamW> : detail::ElementwiseWith<AdamWOptions> {};
template <>
struct ElementwiseOptimizer<SGD> : detail::ElementwiseWith<SGDOptions> {};
template <>
struct ElementwiseOptimizer<torch::optim::Adagrad> : detail::ElementwiseWith<torch::optim::AdagradOptions> {};
template <>
struct ElementwiseOptimizer<torch::optim::Adam> : detail::ElementwiseWith<torch::optim::AdamOptions> {};
template <>
struct ElementwiseOptimizer<torch::optim::AdamW> : detail::ElementwiseWith<torch::optim::AdamWOptions> {};
template <>
struct ElementwiseOptimizer<torch::optim::RMSprop> : detail::ElementwiseWith<torch::optim::RMSpropOptions> {};
template <>
struct ElementwiseOptimizer<torch::optim::SGD> : detail::ElementwiseWith<torch::optim::SGDOptions> {};

}  // namespace lockstep
