#include <lockstep/comm/job/stop.h>

#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <mutex>

#include <lockstep/base/error.h>
#include <lockstep/base/log.h>
#include <lockstep/comm/group/error_text.h>
#include <lockstep/comm/group/work_state.h>

namespace lockstep::detail {
namespace {

// How long a rank that ends waits to hear who is to blame. Longer than the coordinator takes to decide.
constexpr std::chrono::milliseconds kVerdict(2000);

std::atomic<int> came = 0;
std::atomic<std::int64_t> came_at = 0;
std::atomic<control::Client*> told = nullptr;  // kept alive for good: a handler may run at any time
std::terminate_handler terminate_before = nullptr;
std::atomic<pid_t> process = 0;  // whose handlers these are; a child of fork() inherits them and is no rank

void keep(const std::shared_ptr<control::Client>& client) {
  static std::mutex mutex;
  static auto* clients = new std::vector<std::shared_ptr<control::Client>>;
  if (!client || told.load() == client.get()) return;
  std::lock_guard lock(mutex);
  clients->push_back(client);
  told = client.get();
}

bool in_child() { return process != ::getpid(); }

std::int64_t now_ms() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000 + now.tv_nsec / 1'000'000;
}

// The launcher passes the signal that one rank got on to all, also to that one: what comes within a second is
// the same request. A later one is meant.
void on_signal(int signal) {
  if (in_child()) {
    ::signal(signal, SIG_DFL);
    ::raise(signal);
  } else if (came == 0) {
    came_at = now_ms();
    came = signal;
    if (auto* client = told.load()) client->request_stop(signal);
  } else if (now_ms() - came_at > 1000) {
    ::signal(signal, SIG_DFL);
    ::raise(signal);
  }
}

control::Fault current_fault() {
  using control::Fault;
  try {
    throw;
  } catch (const CommError& error) {
    return {Fault::Kind::uncaught_comm, error.what()};
  } catch (const std::exception& error) {
    return {Fault::Kind::exception, plain_text(error)};
  } catch (...) {
    return {Fault::Kind::exception, "something that is not a std::exception"};
  }
}

// Tells the control plane. Returns whether the text of the exception is shown, or need not be, so that this
// process keeps silent: `lockstep run` shows the first failure with its text, and exceptions that differ from
// it. Under other launchers each rank speaks for itself, and who fails because of another says only that.
bool tell_of_exception(control::Client& client) {
  const auto fault = current_fault();
  client.tell(fault);
  if (client.is_launched()) return client.failure(kVerdict).has_value();
  const auto failure = client.failure();
  if (!failure || failure->rank < 0 || failure->rank == client.rank() ||
      fault.kind != control::Fault::Kind::uncaught_comm)
    return false;
  log(LogLevel::error, "rank {} ends because of the failure of rank {}", client.rank(), failure->rank);
  return true;
}

void on_terminate() {
  auto* client = told.load();
  const bool shown = client && !in_child() && std::current_exception() && tell_of_exception(*client);
  // A handler of the program's own runs in any case; that of the C++ library would show the text again.
  if (terminate_before && !(shown && terminate_before == __gnu_cxx::__verbose_terminate_handler))
    terminate_before();
  std::abort();
}

}  // namespace

void catch_stop_signals(const std::shared_ptr<control::Client>& client) {
  keep(client);
  if (in_child()) came = 0, process = ::getpid();
  static std::once_flag once;
  std::call_once(once, [] {
    for (int signal : {SIGTERM, SIGINT}) {
      struct sigaction current {};
      if (::sigaction(signal, nullptr, &current) != 0 || current.sa_handler != SIG_DFL) continue;
      struct sigaction ours {};
      ours.sa_handler = on_signal;
      ours.sa_flags = SA_RESTART;
      ::sigaction(signal, &ours, nullptr);
    }
  });
}

bool stop_signal_came() { return came != 0; }

void tell_of_exceptions(const std::shared_ptr<control::Client>& client) {
  keep(client);
  if (in_child()) came = 0, process = ::getpid();
  static std::once_flag once;
  std::call_once(once, [] { terminate_before = std::set_terminate(on_terminate); });
}

void tell_of_checkpoint() {
  auto* client = told.load();
  if (const auto status = client ? client->status() : nullptr) status->committed();
}

}  // namespace lockstep::detail
