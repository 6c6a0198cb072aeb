// Access to the fields of pairs, tuples, arrays, torch::data's Examples and plain structs as tuples of
// references. Internal.
#pragma once

#include <array>
#include <cstddef>
#include <map>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace lockstep::detail {

template <typename T>
constexpr bool is_vector = false;
template <typename T>
constexpr bool is_vector<std::vector<T>> = true;
template <typename T>
constexpr bool is_map = false;
template <typename K, typename V>
constexpr bool is_map<std::map<K, V>> = true;

template <typename T>
concept tuple_like = requires { std::tuple_size<T>::value; };
template <typename T>
concept example = requires {
  typename T::DataType;
  typename T::TargetType;
};

// Counts an aggregate's members: the largest number of initializers that it accepts.
struct Anything {
  template <typename T>
  operator T() const;
};
template <typename T, std::size_t... I>
consteval bool made_of(std::index_sequence<I...>) {
  return requires { T{(static_cast<void>(I), Anything())...}; };
}
template <typename T, std::size_t N = 8>
consteval std::size_t count_members() {
  if constexpr (N == 0)
    return 0;
  else if constexpr (made_of<T>(std::make_index_sequence<N>()))
    return made_of<T>(std::make_index_sequence<9>()) ? 0 : N;
  else
    return count_members<T, N - 1>();
}

template <typename T>
consteval std::size_t count_fields() {
  if constexpr (tuple_like<T>)
    return std::tuple_size_v<T>;
  else if constexpr (example<T>)
    return std::is_void_v<typename T::TargetType> ? 1 : 2;
  else if constexpr (std::is_aggregate_v<T> && !std::is_array_v<T>)
    return count_members<T>();
  else
    return 0;
}
template <typename T>
constexpr std::size_t num_fields = count_fields<T>();
template <typename T>
concept has_fields = num_fields<T> > 0;

template <has_fields T>
auto fields_of(T& x) {
  constexpr auto N = num_fields<T>;
  if constexpr (tuple_like<T>) {
    return std::apply([](auto&... each) { return std::tie(each...); }, x);
  } else if constexpr (N == 1) {
    auto& [a] = x;
    return std::tie(a);
  } else if constexpr (N == 2) {
    auto& [a, b] = x;
    return std::tie(a, b);
  } else if constexpr (N == 3) {
    auto& [a, b, c] = x;
    return std::tie(a, b, c);
  } else if constexpr (N == 4) {
    auto& [a, b, c, d] = x;
    return std::tie(a, b, c, d);
  } else if constexpr (N == 5) {
    auto& [a, b, c, d, e] = x;
    return std::tie(a, b, c, d, e);
  } else if constexpr (N == 6) {
    auto& [a, b, c, d, e, f] = x;
    return std::tie(a, b, c, d, e, f);
  } else if constexpr (N == 7) {
    auto& [a, b, c, d, e, f, g] = x;
    return std::tie(a, b, c, d, e, f, g);
  } else {
    auto& [a, b, c, d, e, f, g, h] = x;
    return std::tie(a, b, c, d, e, f, g, h);
  }
}

// Rebuilds T with other field types.
template <typename T, typename... Fields>
struct Rebuilt {
  // A struct is kept if its members keep their types.
  static auto from(Fields... fields) {
    if constexpr (requires { T{std::move(fields)...}; } &&
                  std::is_same_v<decltype(fields_of(std::declval<T&>())), std::tuple<Fields&...>>)
      return T{std::move(fields)...};
    else
      return std::tuple<Fields...>(std::move(fields)...);
  }
};
template <template <typename, typename> typename Example, typename A, typename B, typename... Fields>
  requires example<Example<A, B>>
struct Rebuilt<Example<A, B>, Fields...> {
  static auto from(Fields... fields) {
    if constexpr (sizeof...(Fields) == 2)
      return Example<Fields...>(std::move(fields)...);
    else
      return Example<Fields..., B>(std::move(fields)...);  // without a target
  }
};
template <typename A, typename B, typename... Fields>
struct Rebuilt<std::pair<A, B>, Fields...> {
  static auto from(Fields... fields) { return std::pair<Fields...>(std::move(fields)...); }
};
template <typename... T, typename... Fields>
struct Rebuilt<std::tuple<T...>, Fields...> {
  static auto from(Fields... fields) { return std::tuple<Fields...>(std::move(fields)...); }
};
template <typename T, std::size_t N, typename Field, typename... Fields>
struct Rebuilt<std::array<T, N>, Field, Fields...> {
  static auto from(Field field, Fields... fields) {
    return std::array<Field, N>{std::move(field), std::move(fields)...};
  }
};

template <typename T, typename... Fields>
auto rebuilt(Fields... fields) {
  return Rebuilt<T, Fields...>::from(std::move(fields)...);
}

}  // namespace lockstep::detail
