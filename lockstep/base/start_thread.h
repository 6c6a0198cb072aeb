// Starts a thread of the library, or throws an error that names what could not be started.
#pragma once

#include <cerrno>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

namespace lockstep::detail {

// For a thread or a process. The text names the limits if one of them was the cause.
inline std::system_error not_created(const std::string& what, int error) {
  return {error, std::generic_category(),
          what + " cannot be created" +
              (error == EAGAIN ? " (the limits are pids.max of the cgroup and ulimit -u)" : "")};
}

// `task` is the thread's purpose: "the ranks' output". Throws std::system_error.
template <typename F>
std::thread start_thread(const std::string& task, F&& body) {
  try {
    return std::thread(std::forward<F>(body));
  } catch (const std::system_error& error) {
    throw not_created("a thread for " + task, error.code().value());
  }
}

}  // namespace lockstep::detail
