// A rank without LibTorch that repeatedly accesses the job's store and reports the duration of each access: a
// set and a get of the same key. The events are as in victim.cpp.
#include <fcntl.h>
#include <time.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <iostream>
#include <string>
#include <thread>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <lockstep/control/client.h>
#include <lockstep/version.h>

namespace {

using namespace lockstep;
using control::Clock;

int number(const char* variable) {
  const char* text = std::getenv(variable);
  return text ? std::atoi(text) : 0;
}

double now() { return std::chrono::duration<double>(Clock::now().time_since_epoch()).count(); }

void tell(int file, const std::string& event, const std::string& more) {
  const auto line = fmt::format("{{\"t\":{:.9f},\"rank\":{},\"pid\":{},\"event\":\"{}\"{}}}\n", now(),
                                number("RANK"), ::getpid(), event, more);
  [[maybe_unused]] auto written = ::write(file, line.data(), line.size());
}

double ask_once(control::Client& client, const std::string& key) {
  const auto deadline = Clock::now() + std::chrono::seconds(30);
  auto never = [] { return false; };
  const auto begin = Clock::now();
  client.ask({.call = control::StoreCall::set, .keys = {key}, .values = {"value"}}, deadline, never);
  client.ask({.call = control::StoreCall::get, .keys = {key}, .values = {}}, deadline, never);
  return std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
}

}  // namespace

// store_probe SECONDS
int main(int argc, char** argv) {
  const char* name = std::getenv("LOCKSTEP_AGENT");
  const char* events = std::getenv("FAULTS_EVENTS");
  if (argc != 2 || !name || !events) return 2;
  const int file = ::open(events, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  try {
    auto socket = control::connect_local(name);
    if (!socket) throw Error("there is no agent");
    auto client = control::Client::make(std::move(*socket));
    client->join({.rank = number("RANK"),
                  .size = number("WORLD_SIZE"),
                  .pid = ::getpid(),
                  .attempt = number("LOCKSTEP_RESTART_COUNT"),
                  .version = kVersion,
                  .host = "probe"},
                 std::chrono::seconds(30), [](const control::Failure&) {});
    tell(file, "joined", "");
    const auto key = fmt::format("probe/{}", number("RANK"));
    for (const double end = now() + std::atof(argv[1]); now() < end;) {
      std::vector<std::string> operations;  // When each began, and how many microseconds it took.
      for (int i = 0; i < 10; ++i) {
        const double begin = now();
        operations.push_back(fmt::format("[{:.6f},{:.1f}]", begin, ask_once(*client, key)));
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
      }
      tell(file, "ops", fmt::format(",\"ops\":[{}]", fmt::join(operations, ",")));
    }
    client->leave();
    tell(file, "done", "");
    return 0;
  } catch (const std::exception& error) {
    std::cout << "store_probe: " << error.what() << std::endl;
    return 4;
  }
}
