// Keeps memory until the process ends that an unstoppable user may still access. It stays reachable, so that
// leak checkers see that this is intended.
#pragma once

#include <any>
#include <list>
#include <mutex>
#include <utility>

namespace lockstep::detail {

inline void leave_behind(std::any object) noexcept {
  static std::mutex mutex;
  static auto& all = *new std::list<std::any>;
  std::lock_guard lock(mutex);
  all.push_back(std::move(object));
}

}  // namespace lockstep::detail
