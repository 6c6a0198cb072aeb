#include <lockstep/control/link/acceptor.h>

#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <functional>
#include <random>
#include <thread>

#include "support/errors.h"

namespace lockstep::testing {
namespace {

using namespace std::chrono_literals;
using namespace control;
using Clock = std::chrono::steady_clock;

const std::string kKey(32, 'k');

std::size_t open_descriptors() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return static_cast<std::size_t>(std::distance(begin(all), end(all)));
}

class DoorTest : public ::testing::Test {
 protected:
  DoorTest()
      : acceptor_(listen_tcp("127.0.0.1", 0, 0), kKey, "job",
                  [this](const auto& line) { lines_.push_back(line); }) {}

  int port() const { return acceptor_.listener().port; }
  Fd stranger(const std::string& says = "") {
    Fd fd = connect_tcp("127.0.0.1", port(), 60s);
    EXPECT_EQ(::send(fd.get(), says.data(), says.size(), MSG_NOSIGNAL), static_cast<ssize_t>(says.size()));
    return fd;
  }

  // Serves like an agent's loop, until `done` or for the given time; keeps the guests.
  bool serve(const std::function<bool()>& done, std::chrono::milliseconds limit = 60s) {
    for (const auto end = Clock::now() + limit; Clock::now() < end;) {
      pollfd poll{acceptor_.fd(), POLLIN, 0};
      ::poll(&poll, 1, 100);
      for (auto& guest : acceptor_.serve()) guests_.push_back(std::move(guest));
      EXPECT_LE(acceptor_.held(), Acceptor::kMostStrangers);
      if (done()) return true;
    }
    return false;
  }
  // Number of refusals reported.
  int told() const {
    int sum = 0;
    for (const auto& line : lines_) {
      int count = 1;
      std::sscanf(line.c_str(), "refused %d connections", &count);
      sum += count;
    }
    return sum;
  }
  bool closed(const Fd& fd) {
    char byte = 0;
    const auto size = ::recv(fd.get(), &byte, 1, MSG_PEEK);
    return size == 0 || (size < 0 && errno == ECONNRESET);
  }

  std::vector<std::string> lines_;
  Acceptor acceptor_;
  std::vector<Acceptor::Guest> guests_;
};

// A caller on its own thread, as on another host.
class Caller {
 public:
  explicit Caller(int port, const std::string& key = kKey, const std::string& context = "job")
      : thread_([=, this] { run(port, key, context); }) {}
  ~Caller() { thread_.join(); }

  bool done() const { return done_; }
  bool proven() const { return proven_; }

 private:
  void run(int port, const std::string& key, const std::string& context) {
    fd_ = connect_tcp("127.0.0.1", port, 60s);
    SecureLink link(SecureLink::Side::caller, key, context);
    try {
      while (!link.proven()) {
        const auto output = link.take_output();
        if (::send(fd_.get(), output.data(), output.size(), MSG_NOSIGNAL) < 0) break;
        pollfd poll{fd_.get(), POLLIN, 0};
        ::poll(&poll, 1, 60000);
        char bytes[100];
        const auto size = ::recv(fd_.get(), bytes, sizeof bytes, 0);
        if (size <= 0) break;
        link.receive({bytes, static_cast<std::size_t>(size)});
      }
    } catch (const FrameError&) {
    }
    if ((proven_ = link.proven())) {
      link.send("hello");
      const auto output = link.take_output();
      EXPECT_EQ(::send(fd_.get(), output.data(), output.size(), MSG_NOSIGNAL),
                static_cast<ssize_t>(output.size()));
    }
    done_ = true;
  }

  Fd fd_;
  std::atomic<bool> proven_ = false, done_ = false;
  std::thread thread_;
};

TEST_F(DoorTest, who_proves_the_key_comes_in_and_is_heard) {
  Caller caller(port());
  ASSERT_TRUE(serve([&] { return caller.done(); }));
  EXPECT_TRUE(caller.proven());
  ASSERT_EQ(guests_.size(), 1);
  EXPECT_EQ(guests_[0].from, "127.0.0.1");
  char bytes[100];
  const auto size = ::recv(guests_[0].fd.get(), bytes, sizeof bytes, 0);
  ASSERT_GT(size, 0);
  guests_[0].link.receive({bytes, static_cast<std::size_t>(size)});
  EXPECT_EQ(guests_[0].link.next(), "hello");
  EXPECT_EQ(acceptor_.held(), 0);
  EXPECT_THAT(lines_, ::testing::IsEmpty());
  EXPECT_GT(acceptor_.next_deadline(), 50s);
}

TEST_F(DoorTest, an_old_key_or_an_old_attempt_stays_outside) {
  {
    Caller key(port(), std::string(32, 'x')), attempt(port(), kKey, "job, the attempt before");
    ASSERT_TRUE(serve([&] { return key.done() && attempt.done(); }));
    EXPECT_FALSE(key.proven() || attempt.proven());
  }
  ASSERT_TRUE(serve([&] { return told() == 2; }));
  EXPECT_THAT(lines_.back(), AllOf(HasSubstr("at 127.0.0.1:" + std::to_string(port())),
                                   HasSubstr("from 127.0.0.1: it did not prove the key")));
  EXPECT_THAT(guests_, ::testing::IsEmpty());

  const auto held = stranger();
  serve([&] { return acceptor_.held() == 1; });
  acceptor_.change_context("job, attempt 1");
  EXPECT_EQ(acceptor_.held(), 0);
  Caller before(port()), now(port(), kKey, "job, attempt 1");
  ASSERT_TRUE(serve([&] { return before.done() && now.done(); }));
  EXPECT_FALSE(before.proven());
  EXPECT_TRUE(now.proven());
}

TEST_F(DoorTest, the_silent_and_the_slow_are_dropped_after_a_second) {
  SecureLink half(SecureLink::Side::caller, kKey, "job");
  const auto hello = half.take_output();
  const auto begin = Clock::now();
  const auto silent = stranger(), started = stranger(hello.substr(0, 20)), stuck = stranger(hello);
  ASSERT_TRUE(serve([&] { return acceptor_.held() == 3; }));
  ASSERT_TRUE(serve([&] { return acceptor_.held() == 0; }));
  EXPECT_GE(Clock::now() - begin, Acceptor::kPatience);
  EXPECT_TRUE(closed(silent) && closed(started));
  EXPECT_THAT(lines_.at(0), HasSubstr("within 1000 ms"));
  // It has received 40 bytes of the listener and no more.
  char bytes[100];
  EXPECT_EQ(::recv(stuck.get(), bytes, sizeof bytes, 0), 40);
  EXPECT_TRUE(closed(stuck));
}

TEST_F(DoorTest, other_protocols_random_bytes_and_lengths_are_refused_at_once) {
  std::mt19937 random(4);
  std::vector<std::string> all = {"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
                                  std::string("\xff\xff\xff\x7f\x01\0\0\0", 8), std::string(100000, 'x'),
                                  std::string("lockstp1") + std::string(33, 'x')};
  for (int i = 0; i < 30; ++i) {
    std::string bytes(1 + random() % 3000, '\0');
    for (auto& byte : bytes) byte = static_cast<char>(random());
    bytes[0] = 'x';
    all.push_back(std::move(bytes));
  }
  std::vector<Fd> strangers;
  for (const auto& bytes : all) strangers.push_back(stranger(bytes));
  std::size_t refused = 0;
  EXPECT_TRUE(serve([&] {
    refused = 0;
    for (const auto& fd : strangers) refused += closed(fd);
    return refused == all.size();
  }));
  for (const auto& line : lines_) EXPECT_THAT(line, Not(HasSubstr("within")));
  EXPECT_THAT(guests_, ::testing::IsEmpty());
}

TEST_F(DoorTest, who_hangs_up_is_forgotten) {
  stranger(), stranger("lock");
  ASSERT_TRUE(serve([&] { return told() == 2; }));
  EXPECT_THAT(lines_[0], HasSubstr("disconnected"));
}

TEST_F(DoorTest, a_crowd_does_not_keep_a_true_peer_out) {
  // Both ends of the crowd belong to this process.
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  if (limit.rlim_max < 2000)
    GTEST_SKIP() << "this process may have " << limit.rlim_max << " files open, not 2000";
  limit.rlim_cur = std::max<rlim_t>(limit.rlim_cur, 2000);
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
  const auto before = open_descriptors();
  {
    // Held open and silent, some with the start of a greeting; they arrive while the true caller does.
    std::vector<Fd> crowd;
    std::atomic<bool> stop = false;
    std::atomic<int> came = 0;
    std::thread mob([&] {
      for (int i = 0; i < 1500 && !stop; ++i, ++came) crowd.push_back(stranger(i % 3 ? "" : "lockstp1"));
    });
    // If each stranger held its place for a second, 64 at a time, a caller behind a thousand of them would
    // wait for 15 s. Like a host's agent, a refused caller retries: on a busy machine its thread may get no
    // core within the 20 ms that the acceptor grants.
    const auto comes_in = [&] {
      for (const auto end = Clock::now() + 10s; Clock::now() < end;) {
        Caller caller(port());
        EXPECT_TRUE(serve([&] { return caller.done(); }));
        if (caller.proven()) return Clock::now() < end;
      }
      return false;
    };
    EXPECT_TRUE(serve([&] { return came > 1000; }));
    for (int i = 0; i < 5; ++i) EXPECT_TRUE(comes_in());
    EXPECT_TRUE(serve([&] { return came == 1500; }));
    EXPECT_TRUE(comes_in());
    stop = true;
    mob.join();
    EXPECT_EQ(guests_.size(), 6);
    // At most 64 of the crowd are connected at a time.
    EXPECT_LE(open_descriptors(), before + crowd.size() + guests_.size() + 1 + Acceptor::kMostStrangers);
    EXPECT_TRUE(serve([&] { return acceptor_.held() == 0; }));
    guests_.clear();
  }
  EXPECT_EQ(open_descriptors(), before);
}

TEST_F(DoorTest, it_has_nothing_to_do_while_nobody_can_be_let_in) {
  std::vector<Fd> crowd;
  for (std::size_t i = 0; i < 6 * Acceptor::kMostStrangers; ++i) crowd.push_back(stranger());
  // All are accepted in the end, and dropped; that takes a call now and then, not all the time.
  int calls = 0;
  EXPECT_TRUE(serve([&] { return ++calls, closed(crowd.back()); }));
  EXPECT_GT(calls, 10);
  EXPECT_LT(calls, 1000);
  EXPECT_EQ(acceptor_.held(), 0);
}

TEST_F(DoorTest, refusals_are_told_once_a_second) {
  const auto begin = Clock::now();
  int sent = 0;
  serve([&] { return stranger("x"), ++sent, false; }, 2500ms);
  EXPECT_TRUE(serve([&] { return acceptor_.held() == 0 && acceptor_.next_deadline() > 10s; }));
  const auto seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  EXPECT_GE(lines_.size(), 3);
  EXPECT_LE(static_cast<double>(lines_.size()), seconds + 1);
  EXPECT_EQ(told(), sent);
}

TEST_F(DoorTest, without_descriptors_left_it_neither_spins_nor_dies) {
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  std::vector<Fd> crowd;
  for (int i = 0; i < 3; ++i) crowd.push_back(stranger());
  std::vector<Fd> filler;
  const rlimit low{open_descriptors() + 20, limit.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &low), 0);
  for (int fd; (fd = ::dup(0)) >= 0;) filler.emplace_back(fd);
  EXPECT_TRUE(serve([&] { return closed(crowd[0]) && closed(crowd[1]) && closed(crowd[2]); }));
  pollfd poll{acceptor_.fd(), POLLIN, 0};
  EXPECT_EQ(::poll(&poll, 1, 0), 0);
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
  filler.clear();
  Caller caller(port());
  EXPECT_TRUE(serve([&] { return caller.done(); }));
  EXPECT_TRUE(caller.proven());
  EXPECT_TRUE(serve([&] { return !lines_.empty(); }));
  EXPECT_THAT(lines_[0], HasSubstr("too many open files"));
}

}  // namespace
}  // namespace lockstep::testing
