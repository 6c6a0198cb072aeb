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

// How long a rank that ends waits to learn which rank is to blame. Longer than the coordinator takes to
// decide.
constexpr std::chrono::milliseconds kVerdict(2000);

std::atomic<int> came = 0;
std::atomic<std::int64_t> came_at = 0;
std::atomic<control::Client*> told = nullptr;  // never destroyed: a handler may run at any time
std::terminate_handler terminate_before = nullptr;
// process that installed the handlers; a child of fork() inherits them but is not a rank
std::atomic<pid_t> process = 0;

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

// The launcher forwards a signal that one rank received to all ranks, including that one, so a signal within
// a second is the same request. A later one is deliberate.
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
    return {Fault::Kind::exception, "an exception that is not a std::exception"};
  }
}

// Reports to the control plane. Returns true if the text of the exception is shown elsewhere or need not be
// shown, so this process can stay silent: `lockstep run` shows the first failure with its text, and
// exceptions that differ from it. Under other launchers each rank prints its own text, and a rank that fails
// because of another one only says so.
bool tell_of_exception(control::Client& client) {
  const auto fault = current_fault();
  client.tell(fault);
  if (client.is_launched()) return client.failure(kVerdict).has_value();
  const auto failure = client.failure();
  if (!failure || failure->rank < 0 || failure->rank == client.rank() ||
      fault.kind != control::Fault::Kind::uncaught_comm)
    return false;
  log(LogLevel::error, "rank {} ends because rank {} failed", client.rank(), failure->rank);
  return true;
}

void on_terminate() {
  auto* client = told.load();
  const bool shown = client && !in_child() && std::current_exception() && tell_of_exception(*client);
  // The program's own handler always runs. The C++ library's handler would print the text again.
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
