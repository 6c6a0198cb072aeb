// Ranks of several hosts as threads of this process: the ranks of a host share one mapping, and hosts are
// connected by a Network. A sanitizer sees all of it.
#pragma once

#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include <lockstep/comm/transports/hierarchy/engine/engine.h>
#include <lockstep/comm/transports/hierarchy/engine/mail.h>

#include "comm/transports/shm/engine/threads.h"

namespace lockstep::hierarchy {

// Where a message waits for its receiver, which takes it from the sender's memory: nothing is copied in
// between.
class Network {
 public:
  struct Letter {
    const void* data;
    std::size_t bytes;
    bool taken = false;
  };
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::tuple<int, int, int>, std::deque<std::shared_ptr<Letter>>> letters;  // from, to, tag
  std::size_t sent = 0, messages = 0;                                                // bytes
};

class ThreadLinks final : public Links {
 public:
  ThreadLinks(std::shared_ptr<Network> network, int rank) : network_(std::move(network)), rank_(rank) {}

  TransferPtr send(int to, const void* data, std::size_t bytes, int tag) override {
    auto transfer = std::make_unique<Under>();
    transfer->letter = std::make_shared<Network::Letter>(Network::Letter{data, bytes});
    transfer->from = {rank_, to, tag};
    std::lock_guard lock(network_->mutex);
    network_->letters[{rank_, to, tag}].push_back(transfer->letter);
    network_->sent += bytes;
    ++network_->messages;
    network_->changed.notify_all();
    return transfer;
  }
  TransferPtr receive(int from, void* data, std::size_t bytes, int tag) override {
    auto transfer = std::make_unique<Under>();
    transfer->from = {from, rank_, tag};
    transfer->target = data;
    transfer->bytes = bytes;
    std::lock_guard lock(network_->mutex);
    transfer->number = expected_[transfer->from]++;
    return transfer;
  }
  TransferPtr receive_any(void* data, std::size_t bytes, int tag) override {
    return receive(kAnybody, data, bytes, tag);
  }
  std::exception_ptr lost(int) override { return nullptr; }
  void cancel(Transfer& transfer) override {
    std::lock_guard lock(network_->mutex);
    static_cast<Under&>(transfer).cancelled = true;
    network_->changed.notify_all();
  }
  int wait(Transfer& transfer, Clock::time_point deadline) override {
    auto& under = static_cast<Under&>(transfer);
    std::unique_lock lock(network_->mutex);
    auto there = [&] {
      if (!cause_.empty()) throw shm::Interrupted(cause_);
      if (under.cancelled) throw shm::Interrupted("cancelled");
      if (under.letter) return under.letter->taken;
      if (std::get<0>(under.from) == kAnybody) {
        for (auto& [key, waiting] : network_->letters)
          if (std::get<1>(key) == rank_ && std::get<2>(key) == std::get<2>(under.from) && !waiting.empty()) {
            under.from = key;
            under.number = taken_[key];
            return true;
          }
        return false;
      }
      auto& waiting = network_->letters[under.from];
      // In the order of posting.
      return !waiting.empty() && taken_[under.from] == under.number;
    };
    while (!there())
      if (Clock::now() >= deadline)
        throw shm::TimedOut("the deadline has passed");
      else  // a deadline may be beyond a clock's range
        network_->changed.wait_until(lock, std::min(deadline, Clock::now() + std::chrono::seconds(1)));
    if (under.letter) return std::get<1>(under.from);
    auto letter = network_->letters[under.from].front();
    network_->letters[under.from].pop_front();
    ++taken_[under.from];
    if (letter->bytes != under.bytes) std::abort();  // like Gloo
    std::memcpy(under.target, letter->data, under.bytes);
    letter->taken = true;
    network_->changed.notify_all();
    return std::get<0>(under.from);
  }
  void interrupt(const std::string& cause) override {
    std::lock_guard lock(network_->mutex);
    if (cause_.empty()) cause_ = cause;
    network_->changed.notify_all();
  }

 private:
  struct Under final : Transfer {
    std::shared_ptr<Network::Letter> letter;  // of a send
    std::tuple<int, int, int> from;
    void* target = nullptr;
    std::size_t bytes = 0;
    std::uint64_t number = 0;
    bool cancelled = false;
  };
  static constexpr int kAnybody = -1;
  const std::shared_ptr<Network> network_;
  const int rank_;
  std::string cause_;
  std::map<std::tuple<int, int, int>, std::uint64_t> expected_, taken_;
};

// A group: the host of each rank.
class HostRanks {
 public:
  explicit HostRanks(const std::vector<int>& nodes, Engine::Tuning tuning = {.window = 4096})
      : network(std::make_shared<Network>()) {
    for (int r = 0; r < static_cast<int>(nodes.size()); ++r) {
      Hosts hosts(nodes, r);
      auto& of_host = hosts_[hosts.host()];
      if (!of_host) of_host = std::make_shared<Host>();
      Host& host = *of_host;
      const auto neighbours = static_cast<int>(hosts.neighbours().size());
      std::unique_ptr<shm::Engine> inside;
      if (neighbours > 1) {
        if (!host.region) {
          host.region = static_cast<char*>(
              std::aligned_alloc(128, (shm::Region::size_for(neighbours) + 127) / 128 * 128));
          shm::Region(host.region, neighbours).prepare();
        }
        inside = std::make_unique<shm::Engine>(shm::Region(host.region, neighbours), hosts.place(),
                                               shm::Engine::Tuning{.chunk = 16384, .claim = 8192},
                                               host.memory, hosts.neighbours());
      }
      auto links = std::make_shared<ThreadLinks>(network, r);
      std::shared_ptr<shm::Messages> messages;
      shm::Barrier* barrier = inside ? &inside->barrier() : nullptr;
      engines_.push_back(std::make_shared<Engine>(hosts, std::move(inside), links,
                                                  neighbours > 1 ? &host.memory : nullptr, tuning));
      // Their thread may still run for a moment after they are closed.
      auto owner = std::make_shared<std::pair<std::shared_ptr<Host>, std::shared_ptr<Engine>>>(
          of_host, engines_.back());
      if (barrier != nullptr)
        messages = std::make_shared<shm::Messages>(*barrier, host.memory, std::chrono::nanoseconds(0),
                                                   std::move(owner), true);
      mails_.push_back(std::make_shared<Mail>(hosts, messages, barrier, links));
    }
  }
  ~HostRanks() {
    for (auto& mail : mails_) mail->close();
  }
  Engine& engine(int rank) { return *engines_[static_cast<std::size_t>(rank)]; }
  Mail& mail(int rank) { return *mails_[static_cast<std::size_t>(rank)]; }
  void run(const std::function<void(int rank, Engine& engine)>& body) {
    std::vector<std::thread> threads;
    for (std::size_t r = 0; r < engines_.size(); ++r)
      threads.emplace_back([&, r] { body(static_cast<int>(r), *engines_[r]); });
    for (auto& thread : threads) thread.join();
  }

  const std::shared_ptr<Network> network;

 private:
  struct Host {
    shm::ThreadMemory memory;
    char* region = nullptr;
    Host() = default;
    Host(const Host&) = delete;
    Host& operator=(const Host&) = delete;
    ~Host() { std::free(region); }
  };
  std::map<int, std::shared_ptr<Host>> hosts_;
  std::vector<std::shared_ptr<Engine>> engines_;
  std::vector<std::shared_ptr<Mail>> mails_;
};

}  // namespace lockstep::hierarchy
