// A rank for tests/faults: runs a training loop, and ends in the requested way. Its events go to the file
// $FAULTS_EVENTS, one JSON object per line with the time of CLOCK_MONOTONIC, because its output goes through
// a launcher that may be dead.
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <iostream>
#include <string>
#include <thread>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <lockstep/lockstep.h>
#include <CLI/CLI.hpp>
#include "cmake/multicall.h"

namespace lockstep::testing::victim {

namespace {

using std::chrono::milliseconds;

struct Request {
  int target = 1;  // --rank: the rank that the faults apply to, except for --steps and --stop.
  int steps = 1'000'000, at = 20, gib = 0, ms = 1000, attempts = 1'000'000;
  std::string phase = "between", fault, backend = "auto";
  bool stop = false, ignore_signals = false, helpers = false, uncaught = false;
};

Request parse(int argc, char** argv) {
  Request request;
  CLI::App app("a rank that comes to a bad end");
  app.add_option("--rank", request.target);
  app.add_option("--steps", request.steps);
  app.add_option("--backend", request.backend);
  app.add_option("--phase", request.phase, "where ranks spend their time")
      ->check(CLI::IsMember({"before_init", "in_init", "in_collective", "between", "compute"}));
  app.add_option("--gib", request.gib, "of memory that is in use, in pages of 4 KiB");
  app.add_option("--fault", request.fault)
      ->check(CLI::IsMember({"throw", "abort", "segv", "exit0", "exit0-early", "sleep", "oom"}));
  app.add_option("--at", request.at, "the step of the fault");
  app.add_option("--ms", request.ms, "how long to sleep");
  app.add_option("--attempts", request.attempts, "the fault happens in that many attempts of the job");
  app.add_flag("--stop", request.stop, "asks stop_requested() and saves");
  app.add_flag("--ignore-signals", request.ignore_signals, "SIGTERM and SIGINT");
  app.add_flag("--helpers", request.helpers, "starts processes of its own, one of them a daemon");
  app.add_flag("--uncaught", request.uncaught, "lets a CommError end the process");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    std::exit(app.exit(error));
  }
  return request;
}

int number(const char* variable) {
  const char* text = std::getenv(variable);
  return text ? std::atoi(text) : 0;
}

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    if (static_cast<unsigned char>(c) < ' ')
      out += fmt::format("\\u{:04x}", static_cast<unsigned>(c));
    else
      out += c;
  }
  return out + '"';
}

void tell(const std::string& event, const std::string& text = {}, int step = -1) {
  static const int file = [] {
    const char* path = std::getenv("FAULTS_EVENTS");
    return path ? ::open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600) : -1;
  }();
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  const auto line = fmt::format(
      "{{\"t\":{}.{:09},\"rank\":{},\"pid\":{},\"attempt\":{},\"event\":{},\"step\":{},\"text\":{}}}\n",
      now.tv_sec, now.tv_nsec, number("RANK"), ::getpid(), number("LOCKSTEP_RESTART_COUNT"), quoted(event),
      step, quoted(text));
  [[maybe_unused]] auto written = ::write(file, line.data(), line.size());
}

void use_memory(int gib) {
  const auto length = static_cast<std::size_t>(gib) << 30;
  auto* memory = static_cast<char*>(
      ::mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (memory == MAP_FAILED) throw std::runtime_error("no memory");
  ::madvise(memory, length, MADV_NOHUGEPAGE);
  for (std::size_t i = 0; i < length; i += 4096) memory[i] = 1;
}

[[noreturn]] void wait_for_the_end() {
  for (;;) ::pause();
}

void start_helpers() {
  if (::fork() == 0) {
    tell("helper", "child");
    wait_for_the_end();
  }
  if (::fork() == 0) {
    ::setsid();
    if (::fork() == 0) {
      for (int fd = 0; fd < 3; ++fd) ::close(fd);
      tell("helper", "daemon");
      wait_for_the_end();
    }
    ::_exit(0);
  }
}

std::string hash(const at::Tensor& tensor) {
  const auto* bytes = static_cast<const unsigned char*>(tensor.const_data_ptr());
  std::uint64_t value = 14695981039346656037u;
  for (std::size_t i = 0; i < tensor.nbytes(); ++i) value = (value ^ bytes[i]) * 1099511628211u;
  return fmt::format("{:016x}", value);
}

void segfault() {
  auto* page =
      static_cast<volatile char*>(::mmap(nullptr, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  *page = 1;
}

void commit(const Request& request, const std::string& fault) {
  tell("fault", fault, request.at);
  if (fault == "throw") throw std::runtime_error("the victim's own words");
  if (fault == "abort") std::abort();
  if (fault == "segv") segfault();
  if (fault == "exit0") ::_exit(0);
  if (fault == "sleep") std::this_thread::sleep_for(milliseconds(request.ms));
  if (fault == "oom")
    for (;;) use_memory(1);
}

// One step's work apart from the collective.
void work(const Request& request, bool target) {
  if (request.phase == "between") std::this_thread::sleep_for(milliseconds(10));
  if (request.phase == "compute" && target) {
    const auto end = std::chrono::steady_clock::now() + milliseconds(20);
    while (std::chrono::steady_clock::now() < end) at::ones({64, 64}).matmul(at::ones({64, 64}));
  }
}

int train(const Request& request, lockstep::World& world) {
  const bool target = world.rank() == request.target;
  const bool faulty = target && !request.fault.empty() && number("LOCKSTEP_RESTART_COUNT") < request.attempts;
  auto values =
      at::arange(request.phase == "in_collective" ? 1 << 20 : 1 << 10, at::kFloat) / (world.rank() + 3.0);
  for (int step = 0; step < request.steps; ++step) {
    world.step(step);
    if (step == 1) tell("training", {}, step);
    if (request.stop && world.stop_requested()) {
      tell("saved", hash(values), step);
      std::cout << "saved at step " << step << std::endl;
      return 0;
    }
    if (faulty && step == request.at) {
      for (int line = 1; line <= 30; ++line)
        std::cout << "rank " << world.rank() << " says " << line << " of 30" << std::endl;
      commit(request, request.fault);
      if (request.fault == "exit0-early") return 0;
    }
    work(request, target);
    values = (values * 0.999 + 0.001 * (world.rank() + step)).contiguous();
    world.group().all_reduce(values, {.op = lockstep::ReduceOp::AVG}).wait();
  }
  tell("done", hash(values), request.steps);
  std::cout << "hash " << hash(values) << std::endl;
  return 0;
}

// Reports an error where the caller gets it: the rest of the way to main() takes time too.
template <typename Body>
auto telling(Body body) {
  auto show = [](const char* kind, const std::exception& error) {
    tell(kind, error.what());
    std::cout << kind << ": " << error.what() << std::endl;
  };
  try {
    return body();
  } catch (const lockstep::CommError& error) {
    show("CommError", error);
    throw;
  } catch (const lockstep::ConfigError& error) {
    show("ConfigError", error);
    throw;
  } catch (const lockstep::Error& error) {
    show("Error", error);
    throw;
  }
}

int run(const Request& request) {
  const int rank = number("RANK"), size = number("WORLD_SIZE");
  const bool target = rank == request.target;
  if (request.ignore_signals)
    for (int each : {SIGTERM, SIGINT}) ::signal(each, SIG_IGN);
  const char* agent = std::getenv("LOCKSTEP_AGENT");
  tell("start", agent ? agent : "");
  if (request.helpers && target) start_helpers();
  if (request.gib > 0 && target) use_memory(request.gib);
  if (request.phase == "before_init" && target) {
    tell("holding");
    wait_for_the_end();
  }
  // One rank arrives late, so that the others are inside for a while.
  if (request.phase == "in_init" && !target && (rank == size - 1 || rank == size - 2))
    std::this_thread::sleep_for(milliseconds(150));
  tell("joining");
  auto world = telling([&] { return lockstep::World::from_environment({.backend = request.backend}); });
  tell("joined");
  return telling([&] { return train(request, world); });
}

}  // namespace

MULTICALL_MAIN(victim) {
  const auto request = parse(argc, argv);
  try {
    const int status = run(request);
    tell("left");
    return status;
  } catch (const lockstep::CommError&) {
    if (request.uncaught) throw;
    return 4;
  } catch (const lockstep::ConfigError&) {
    return 3;
  } catch (const lockstep::Error&) {
    return 5;
  }
}

}  // namespace lockstep::testing::victim
