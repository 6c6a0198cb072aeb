// Memory that somebody may still use who cannot be stopped is kept until the process ends. It stays
// reachable: a leak checker sees that it is meant.
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
