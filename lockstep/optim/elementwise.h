// Which optimizers update each element of a parameter from that element's own gradient and state, and so can
// work on a part of the parameters: LibTorch's and ours, and those of a user that say so.
//
//   template <>
//   struct lockstep::ElementwiseOptimizer<Lion> : std::true_type {
//     using Options = LionOptions;   // what its constructor takes behind the parameters
//   };
//
// An optimizer that uses more of a parameter than one element, such as its norm (LARS, LAMB), its rows and
// columns (Adafactor, Muon) or all parameters at once (LBFGS), is none: on parts it would compute something
// else, without an error.
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
