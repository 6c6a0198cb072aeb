#include <lockstep/os/signals.h>

#include <sys/signalfd.h>

#include <cerrno>
#include <system_error>

namespace lockstep::detail {

control::Fd take_signals(std::initializer_list<int> first, std::initializer_list<int> more) {
  sigset_t set;
  ::sigemptyset(&set);
  for (const auto& list : {first, more})
    for (int signal : list) {
      struct sigaction current {};
      if (::sigaction(signal, nullptr, &current) == 0 && current.sa_handler != SIG_IGN)
        ::sigaddset(&set, signal);
    }
  ::pthread_sigmask(SIG_BLOCK, &set, nullptr);
  control::Fd fd(::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!fd) throw std::system_error(errno, std::generic_category(), "signalfd");
  return fd;
}

}  // namespace lockstep::detail
