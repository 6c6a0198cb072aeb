// The transport between processes: bits, deaths, stops, and what is left behind.
#include "comm/shm/processes.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <fstream>
#include <random>
#include <thread>

#include <lockstep/base/host.h>
#include <lockstep/comm/reduce.h>

#include "support/errors.h"

namespace lockstep::shm {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;
using TestClock = std::chrono::steady_clock;  // of the test itself, which has no threads

// Memory of the arena or of the process, at random.
class Buffer {
 public:
  Buffer(std::size_t count, bool shared)
      : shared_(shared),
        data_(static_cast<float*>(shared ? Arena::instance().allocate(count * 4)
                                         : std::malloc(count * 4 + 1))) {}
  ~Buffer() {
    if (shared_)
      Arena::instance().free(data_);
    else
      std::free(data_);
  }
  float* data() const { return data_; }

 private:
  const bool shared_;
  float* const data_;
};

void fill(float* data, std::size_t count, int rank, unsigned seed) {
  std::minstd_rand random(seed * 31 + static_cast<unsigned>(rank) + 1);
  for (std::size_t i = 0; i < count; ++i) {
    data[i] = static_cast<float>(random()) / 1e6f - 1000;
    if (random() % 997 == 0) data[i] = std::numeric_limits<float>::infinity();
    if (random() % 1999 == 0) data[i] = std::numeric_limits<float>::quiet_NaN();
  }
}

// What one process gets that adds the ranks' data by the tree.
bool is_the_tree_of(const float* result, std::size_t count, int ranks, unsigned seed) {
  std::vector<std::vector<float>> all(static_cast<std::size_t>(ranks), std::vector<float>(count));
  std::vector<const void*> pointers;
  for (int r = 0; r < ranks; ++r) {
    fill(all[static_cast<std::size_t>(r)].data(), count, r, seed);
    pointers.push_back(all[static_cast<std::size_t>(r)].data());
  }
  std::vector<float> expected(count);
  detail::reduce_tree(Dtype::float32, ReduceOp::SUM, pointers, expected.data(), count);
  return std::memcmp(result, expected.data(), count * 4) == 0;
}

std::vector<int> statuses(Processes& processes) {
  std::vector<int> all;
  for (const auto& each : processes.wait()) all.push_back(each.status);
  return all;
}

// In 200 sums each, of random sizes, from memory of either kind: over all chunk sizes and waits.
TEST(ShmProcesses, always_give_the_bits_of_the_tree) {
  for (int ranks : {2, 3, 5, 8})
    for (std::size_t chunk : {std::size_t{4096}, std::size_t{65536}}) {
      Processes processes(ranks,
                          [&](Member& member) {
                            std::minstd_rand sizes(5);  // the same on every rank
                            std::minstd_rand own(static_cast<unsigned>(member.rank + 1));
                            for (unsigned i = 0; i < 200; ++i) {
                              const std::size_t count = sizes() % 3 == 0 ? sizes() % 60000 : sizes() % 4000;
                              const bool alike = sizes() % 2 == 0, shared = sizes() % 2 == 0;
                              Buffer buffer(count, alike ? shared : own() % 2 == 0);
                              fill(buffer.data(), count, member.rank, i);
                              member.all_reduce(buffer.data(), count);
                              if (!is_the_tree_of(buffer.data(), count, ranks, i)) return 1;
                            }
                            return 0;
                          },
                          {.spin = microseconds(ranks == 2 ? 20 : 0), .chunk = chunk, .claim = chunk});
      EXPECT_EQ(statuses(processes), std::vector<int>(static_cast<std::size_t>(ranks), 0));
    }
}

constexpr int kLost = 7, kWrong = 8;

// Sums without end; tells by its status that a peer was lost. Every sum that is returned is right.
int sum_until_a_peer_is_lost(Member& member) {
  std::minstd_rand sizes(11);
  for (unsigned i = 0;; ++i) {
    const std::size_t count = sizes() % 2 == 0 ? sizes() % 3000 : sizes() % 100000;
    Buffer buffer(count, sizes() % 2 == 0);
    for (std::size_t k = 0; k < count; ++k) buffer.data()[k] = static_cast<float>(member.rank + 1);
    try {
      member.all_reduce(buffer.data(), count);
    } catch (const PeerLost&) {
      return kLost;
    }
    const auto expected = static_cast<float>(member.ranks * (member.ranks + 1) / 2);
    for (std::size_t k = 0; k < count; ++k)
      if (buffer.data()[k] != expected) return kWrong;
  }
}

TEST(ShmProcesses, survivors_of_a_kill_at_any_moment_are_woken_and_return_nothing_partial) {
  std::minstd_rand random(3);
  std::vector<double> times;
  for (int i = 0; i < 200; ++i) {
    const int ranks = i % 2 == 0 ? 2 : 4, victim = static_cast<int>(random() % static_cast<unsigned>(ranks));
    Processes processes(ranks, sum_until_a_peer_is_lost);
    ASSERT_TRUE(processes.met());
    std::this_thread::sleep_for(microseconds(random() % 20000));
    const auto killed = TestClock::now();
    processes.kill(victim, SIGKILL);
    const auto ended = processes.wait();
    for (int r = 0; r < ranks; ++r) {
      if (r == victim) continue;
      const auto& each = ended[static_cast<std::size_t>(r)];
      EXPECT_EQ(each.status, kLost) << "kill " << i << ", rank " << r << " of " << ranks;
      times.push_back(std::chrono::duration<double, std::milli>(each.at - killed).count());
    }
  }
  std::sort(times.begin(), times.end());
  const auto p99 = times[times.size() * 99 / 100];
  RecordProperty("median_ms", std::to_string(times[times.size() / 2]));
  RecordProperty("p99_ms", std::to_string(p99));
  EXPECT_LT(p99, 1000) << "of a machine that does something else as well";
}

// By the kernel, so that no sanitizer keeps a record of each byte.
bool fill_memory(std::size_t bytes) {
  return ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0) !=
         MAP_FAILED;
}

// The kernel frees a large process slowly; that it is dead is known at once.
TEST(ShmProcesses, a_death_is_known_within_100_ms_whatever_the_size_of_the_dead) {
  for (std::size_t megabytes : {std::size_t{20}, std::size_t{8192}}) {
    if (host::system_memory().available < (megabytes + 2048) << 20) {
      std::printf("[  SKIPPED ] %zu MiB: there is not as much memory\n", megabytes);
      continue;
    }
    std::vector<double> times;
    for (int repeat = 0; repeat < (megabytes > 1000 ? 1 : 5); ++repeat) {
      const testing::Folder folder;
      Processes processes(2, [&](Member& member) {
        if (member.rank == 1 && !fill_memory(megabytes << 20)) return kWrong;
        float data = 1;
        member.all_reduce(&data, 1);
        if (member.rank == 1) ::pause();
        folder.write("waits", "");
        try {
          member.all_reduce(&data, 1);
        } catch (const PeerLost&) {
          return kLost;
        }
        return kWrong;
      });
      const auto limit = TestClock::now() + seconds(60);
      while (!std::filesystem::exists(folder / "waits") && TestClock::now() < limit)
        std::this_thread::sleep_for(milliseconds(1));
      std::this_thread::sleep_for(milliseconds(300));
      const auto killed = TestClock::now();
      processes.kill(1, SIGKILL);
      const auto ended = processes.wait();
      EXPECT_EQ(ended[0].status, kLost);
      times.push_back(std::chrono::duration<double, std::milli>(ended[0].at - killed).count());
    }
    std::sort(times.begin(), times.end());
    RecordProperty("of_" + std::to_string(megabytes) + "_mib_ms", std::to_string(times[times.size() / 2]));
    EXPECT_LT(times[times.size() / 2], 100) << megabytes << " MiB";
  }
}

TEST(ShmProcesses, a_rank_that_dies_while_a_group_is_made_is_named) {
  char name[] = "/tmp/lockstep_shm_XXXXXX";
  const std::filesystem::path folder = ::mkdtemp(name);
  Processes processes(3, [&](Member& member) {
    auto words = words_in(folder, "second");
    if (member.rank == 1)
      words.get = [get = words.get](const std::string& key) {
        if (key == "rank 2") ::raise(SIGKILL);  // the others can reach it by now
        return get(key);
      };
    try {
      Station second(member.rank, member.ranks, {}, words, Clock::now() + seconds(60), [] {});
    } catch (const PeerLost& lost) {
      return lost.rank == 1 ? kLost : kWrong;
    }
    return 0;
  });
  EXPECT_EQ(statuses(processes), (std::vector<int>{kLost, -1, kLost}));
  std::filesystem::remove_all(folder);
}

// A name may be used again when a group of that name has been made, though its words lay in the same place.
TEST(ShmProcesses, groups_of_one_name_follow_one_another) {
  char name[] = "/tmp/lockstep_shm_XXXXXX";
  const std::filesystem::path folder = ::mkdtemp(name);
  Processes processes(3, [&](Member& member) {
    for (int i = 0; i < 20; ++i) {
      if (member.rank == i % 3) std::this_thread::sleep_for(milliseconds(5));
      auto again = join(folder, "again", member.rank, member.ranks);
      again.messages->close();
      again.lane->close();
    }
    return 0;
  });
  EXPECT_EQ(statuses(processes), (std::vector<int>{0, 0, 0}));
  std::filesystem::remove_all(folder);
}

TEST(ShmProcesses, a_stopped_rank_is_waited_for_and_the_bits_are_the_same) {
  Processes processes(3, [&](Member& member) {
    for (unsigned i = 0; i < 300; ++i) {
      const std::size_t count = 20000;
      Buffer buffer(count, i % 2 == 0);
      fill(buffer.data(), count, member.rank, i);
      member.all_reduce(buffer.data(), count);
      if (!is_the_tree_of(buffer.data(), count, 3, i)) return 1;
    }
    return 0;
  });
  ASSERT_TRUE(processes.met());
  for (int i = 0; i < 5; ++i) {
    processes.kill(i % 3, SIGSTOP);
    std::this_thread::sleep_for(milliseconds(50));
    processes.kill(i % 3, SIGCONT);
    std::this_thread::sleep_for(milliseconds(10));
  }
  EXPECT_EQ(statuses(processes), (std::vector<int>{0, 0, 0}));
}

TEST(ShmProcesses, messages_of_all_sizes_arrive_whole_in_the_order_of_their_tag) {
  constexpr int kRanks = 3, kRounds = 300;
  Processes processes(kRanks, [](Member& member) {
    auto size_of = [](int from, int i) {
      return static_cast<std::size_t>((from * 7919 + i * 104729) % (i % 5 == 0 ? 300000 : 2000));
    };
    const int to = (member.rank + 1) % kRanks, from = (member.rank + kRanks - 1) % kRanks;
    std::atomic<bool> sent = true;
    std::thread sender([&] {
      for (int i = 0; i < kRounds; ++i) {
        std::vector<char> data(size_of(member.rank, i), static_cast<char>(i));
        try {
          member.send(data.data(), data.size(), to, i % 2);
        } catch (const std::exception&) {
          sent = false;
        }
      }
    });
    bool right = true;
    for (int i = 0; i < kRounds; ++i) {
      std::vector<char> data(size_of(from, i), 99), expected(data.size(), static_cast<char>(i));
      member.receive(data.data(), data.size(), from, i % 2);
      right = right && data == expected;
    }
    sender.join();
    return sent && right ? 0 : 1;
  });
  EXPECT_EQ(statuses(processes), (std::vector<int>{0, 0, 0}));
}

TEST(ShmProcesses, a_message_that_does_not_fit_is_an_error_at_both_ends) {
  Processes processes(2, [](Member& member) {
    std::vector<char> data(member.rank == 0 ? 100 : 50);
    try {
      if (member.rank == 0)
        member.send(data.data(), data.size(), 1, 0);
      else
        member.receive(data.data(), data.size(), 0, 0);
    } catch (const Mismatch& error) {
      return std::string(error.what()).find("size") != std::string::npos ? kLost : kWrong;
    }
    return 0;
  });
  EXPECT_EQ(statuses(processes), (std::vector<int>{kLost, kLost}));
}

TEST(ShmProcesses, whoever_waits_for_a_message_of_one_that_is_killed_is_told) {
  Processes processes(2, [](Member& member) {
    char data[10];
    try {
      if (member.rank == 0) member.receive(data, sizeof data, 1, 0);
    } catch (const PeerLost&) {
      return kLost;
    }
    ::pause();
    return 0;
  });
  ASSERT_TRUE(processes.met());
  std::this_thread::sleep_for(milliseconds(100));
  processes.kill(1, SIGKILL);
  EXPECT_EQ(processes.wait()[0].status, kLost);
}

// Two groups, a thread each: one that waits does not hold up the other.
TEST(ShmProcesses, groups_do_not_wait_for_one_another) {
  const testing::Folder folder;
  Processes processes(2, [&](Member& first) {
    auto second = join(folder, "second", first.rank, first.ranks);
    std::atomic<bool> right = true;
    auto sums = [&](Member& member, int count, int pause_ms) {
      for (int i = 0; i < count; ++i) {
        if (member.rank == 1) std::this_thread::sleep_for(milliseconds(pause_ms));
        std::vector<float> data(5000, 1);
        member.all_reduce(data.data(), data.size());
        if (data[4999] != 2) right = false;
      }
    };
    const auto began = Clock::now();
    std::thread slow([&] { sums(first, 10, 100); });
    sums(second, 200, 0);
    const bool sooner = Clock::now() - began < milliseconds(900);
    slow.join();
    second.messages->close();
    second.lane->close();
    return right && sooner ? 0 : 1;
  });
  EXPECT_EQ(statuses(processes), (std::vector<int>{0, 0}));
}

// Of the whole system.
std::size_t shared_kib() {
  std::ifstream file("/proc/meminfo");
  std::string name;
  for (std::size_t kib = 0; file >> name >> kib; file.ignore(100, '\n'))
    if (name == "Shmem:") return kib;
  throw Error("/proc/meminfo has no Shmem");
}

std::size_t files_in_dev_shm() {
  return static_cast<std::size_t>(
      std::distance(std::filesystem::directory_iterator("/dev/shm"), std::filesystem::directory_iterator()));
}

TEST(ShmProcesses, nothing_is_left_after_all_are_killed) {
  const auto before = files_in_dev_shm();
  const auto shared = shared_kib();
  {
    Processes processes(3, [](Member& member) {
      Buffer large(std::size_t{64} << 18, true);
      std::memset(large.data(), 0, std::size_t{64} << 20);
      member.all_reduce(large.data(), std::size_t{64} << 18);
      ::pause();
      return 0;
    });
    ASSERT_TRUE(processes.met());
    std::this_thread::sleep_for(milliseconds(500));
    EXPECT_EQ(files_in_dev_shm(), before);
    for (int r = 0; r < 3; ++r) processes.kill(r, SIGKILL);
    processes.wait();
  }
  EXPECT_EQ(files_in_dev_shm(), before);
  // Other programs may have taken some meanwhile, and give it back.
  const auto limit = TestClock::now() + seconds(20);
  while (shared_kib() > shared + 100 * 1024 && TestClock::now() < limit)
    std::this_thread::sleep_for(milliseconds(10));
  EXPECT_LT(shared_kib(), shared + 100 * 1024);
}

// Descriptors are few: a rank needs one for each segment of its own, and none for those of its peers.
TEST(ShmProcesses, memory_of_peers_takes_no_descriptors) {
  Processes processes(3, [](Member& member) {
    auto open = [] {
      return std::distance(std::filesystem::directory_iterator("/proc/self/fd"),
                           std::filesystem::directory_iterator());
    };
    constexpr std::size_t kCount = std::size_t{9} << 18;  // a segment each
    std::vector<std::unique_ptr<Buffer>> kept;
    const auto before = open();
    for (int i = 0; i < 20; ++i) {
      std::memset(kept.emplace_back(std::make_unique<Buffer>(kCount, true))->data(), 0, kCount * 4);
      member.all_reduce(kept.back()->data(), kCount);
    }
    return open() - before <= 25 ? 0 : 1;
  });
  EXPECT_EQ(statuses(processes), (std::vector<int>{0, 0, 0}));
}

// A peer that has it mapped keeps nothing of what its owner has freed.
TEST(ShmProcesses, memory_that_is_freed_is_given_back_though_peers_have_seen_it) {
  Processes processes(2, [](Member& member) {
    std::size_t most = 0;
    for (int i = 0; i < 12; ++i) {
      // Larger each time, so that none can take the place of another.
      const std::size_t count = (std::size_t{100} + 8 * static_cast<std::size_t>(i)) << 18;
      Buffer buffer(count, true);
      buffer.data()[0] = 1;
      member.all_reduce(buffer.data(), count);
      most = std::max(most, Arena::instance().figures().held);
    }
    return most < (std::size_t{700} << 20) ? 0 : 1;
  });
  EXPECT_EQ(statuses(processes), (std::vector<int>{0, 0}));
}

}  // namespace
}  // namespace lockstep::shm
