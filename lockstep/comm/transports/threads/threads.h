// Ranks as threads of one process: their transport, and the job that they share.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include <lockstep/comm/c10d/transport.h>
#include <lockstep/comm/transports/threads/engine/hub.h>
#include <lockstep/control/coordinator/store.h>

namespace lockstep::detail {

// One per run_threads(): the groups' hubs by name, and the store.
class ThreadsJob {
 public:
  explicit ThreadsJob(int size);
  // For tests: wraps a group's transport; or null.
  using Wrap = std::function<std::unique_ptr<Transport>(ThreadsJob&, const TransportContext&,
                                                        std::unique_ptr<Transport>)>;
  static inline Wrap wrap = nullptr;
  std::shared_ptr<Hub> hub(const std::string& group, const std::vector<int>& ranks);
  const std::shared_ptr<control::LocalStore>& store() const { return store_; }
  // As World::stop_requested: turns true at the same call on every rank.
  bool stop_requested(int rank);

 private:
  const std::shared_ptr<Whereabouts> whereabouts_;
  const std::shared_ptr<control::LocalStore> store_;
  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<Hub>> hubs_;  // a rank may leave before another one arrives
  std::vector<std::int64_t> stop_counts_;             // number of calls of each rank that returned false
  std::optional<std::int64_t> stop_at_;
};

std::unique_ptr<Transport> make_threads_transport(const TransportContext& context, ThreadsJob& job);

}  // namespace lockstep::detail
