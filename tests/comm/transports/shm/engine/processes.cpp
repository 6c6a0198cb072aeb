#include "comm/transports/shm/engine/processes.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <future>
#include <sstream>
#include <thread>

#include <lockstep/base/error.h>

namespace lockstep::shm {

using std::chrono::milliseconds;
using std::chrono::seconds;

namespace {

void write_file(const std::filesystem::path& path, const std::string& text) {
  std::ofstream(path.string() + ".part") << text;
  std::filesystem::rename(path.string() + ".part", path);
}

std::string await_file(const std::filesystem::path& path) {
  const auto limit = Clock::now() + seconds(60);
  while (!std::filesystem::exists(path)) {
    if (Clock::now() > limit) throw Error("no process wrote " + path.string());
    std::this_thread::sleep_for(milliseconds(1));
  }
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

}  // namespace

KeyValue words_in(const std::filesystem::path& folder, const std::string& name) {
  const auto file = [=](const std::string& key) { return folder / (name + "." + key); };
  return {.set = [=](const std::string& key, const std::string& value) { write_file(file(key), value); },
          .get = [=](const std::string& key) { return await_file(file(key)); },
          .forget = [=](const std::string& key) { std::filesystem::remove(file(key)); }};
}

Member join(const std::filesystem::path& folder, const std::string& name, int rank, int ranks,
            Engine::Tuning tuning) {
  const auto key_value = words_in(folder, name);
  Member member;
  member.rank = rank;
  member.ranks = ranks;
  member.group_segment =
      std::make_shared<GroupSegment>(rank, ranks, HostInfo{}, key_value, Clock::now() + seconds(60), [] {});
  auto engine = std::make_unique<Engine>(member.group_segment->region(), rank, tuning, *member.group_segment);
  auto& barrier = engine->barrier();
  member.op_queue = std::make_shared<OpQueue>(std::move(engine), member.group_segment);
  member.messages = std::make_shared<Messages>(barrier, *member.group_segment, tuning.spin, member.op_queue);
  return member;
}

void Member::run(Op op) {
  std::promise<void> done;  // set by the thread that does the work
  auto tell = [&](const std::exception_ptr& error, int) {
    if (error)
      done.set_exception(error);
    else
      done.set_value();
  };
  if (detail::point_to_point(op.call.operation)) {
    const auto tag = std::stoll(op.call.tag);
    const int peer = op.call.root;
    op.done = tell;
    auto item = messages->post(std::move(op), peer, tag, seconds(60));
    messages->wait(*item, Clock::now() + seconds(60));
  } else {
    struct Item : detail::OpItem {
      std::function<void(const std::exception_ptr&, int)> tell;
      void done(const std::exception_ptr& error, int source) override { tell(error, source); }
    };
    auto item = std::make_shared<Item>();
    item->op = std::move(op);
    item->tell = tell;
    item->start(seconds(60));
    op_queue->post(item, false);
    op_queue->wait(*item, Clock::now() + seconds(60));
  }
  done.get_future().get();
}

void Member::all_reduce(float* data, std::size_t count) {
  Op op;
  op.call.operation = lockstep::Operation::all_reduce;
  op.call.dtype = Dtype::float32;
  op.call.rank = rank;
  op.call.size = ranks;
  op.call.count = static_cast<std::int64_t>(count);
  op.call.bytes = op.call.count * 4;
  op.call.shape = {op.call.count};
  op.outputs = {data};
  op.item_size = 4;
  run(std::move(op));
}

namespace {

Op message(const Member& member, lockstep::Operation operation, std::size_t bytes, int peer, int tag) {
  Op op;
  op.call.operation = operation;
  op.call.dtype = Dtype::uint8;
  op.call.rank = member.rank;
  op.call.size = member.ranks;
  op.call.root = peer;
  op.call.count = op.call.bytes = static_cast<std::int64_t>(bytes);
  op.call.shape = {op.call.count};
  op.call.tag = std::to_string(tag);
  op.item_size = 1;
  return op;
}

}  // namespace

void Member::send(const void* data, std::size_t bytes, int to, int tag) {
  auto op = message(*this, lockstep::Operation::send, bytes, to, tag);
  op.inputs = {data};
  run(std::move(op));
}

void Member::receive(void* data, std::size_t bytes, int from, int tag) {
  auto op = message(*this, lockstep::Operation::recv, bytes, from, tag);
  op.outputs = {data};
  run(std::move(op));
}

Processes::Processes(int ranks, Body body, Engine::Tuning tuning) : ended_(static_cast<std::size_t>(ranks)) {
  std::fflush(nullptr);
  for (int r = 0; r < ranks; ++r) {
    const pid_t pid = ::fork();
    if (pid == 0) {
      int status = 99;
      try {
        auto member = join(folder_, "group", r, ranks, tuning);
        write_file(folder_ / ("met." + std::to_string(r)), "");
        status = body(member);
        member.messages->close();
        member.op_queue->close();
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %d: %s\n", r, error.what());
      }
      std::fflush(nullptr);
      ::_exit(status);
    }
    pids_.push_back(pid);
  }
}

Processes::~Processes() {
  for (std::size_t r = 0; r < pids_.size(); ++r) kill(static_cast<int>(r), SIGKILL);
  wait();
}

void Processes::kill(int rank, int signal) {
  if (ended_[static_cast<std::size_t>(rank)].at == decltype(Ended::at){}) ::kill(pid(rank), signal);
}

bool Processes::met() {
  for (std::size_t r = 0; r < pids_.size(); ++r)
    while (!std::filesystem::exists(folder_ / ("met." + std::to_string(r)))) {
      if (has_ended(r)) return false;
      std::this_thread::sleep_for(milliseconds(1));
    }
  return true;
}

bool Processes::has_ended(std::size_t rank) {
  Ended& ended = ended_[rank];
  int status = 0;
  if (ended.at == decltype(Ended::at){} && ::waitpid(pids_[rank], &status, WNOHANG) > 0)
    ended = {WIFEXITED(status) ? WEXITSTATUS(status) : -1, WIFSIGNALED(status) ? WTERMSIG(status) : 0,
             std::chrono::steady_clock::now()};
  return ended.at != decltype(Ended::at){};
}

std::vector<Processes::Ended> Processes::wait() {
  for (bool all = false; !all;) {
    all = true;
    for (std::size_t r = 0; r < pids_.size(); ++r) all = has_ended(r) && all;
    if (!all) std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  return ended_;
}

}  // namespace lockstep::shm
