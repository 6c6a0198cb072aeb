// Operations that the library issues for the program name the program's line, not one of the library's.
#include <unistd.h>

#include <filesystem>
#include <mutex>
#include <set>
#include <string>

#include "parallel/models.h"
#include "support/ranks.h"

namespace lockstep::testing {
namespace {

// "OPERATION TAG at FILE" of each operation that does not name this file.
class ForeignSites final : public Observer {
 public:
  void started(const Call& call) noexcept override {
    const auto site = detail::site_text(call);
    std::lock_guard lock(mutex_);
    ++count_;
    if (!site.starts_with("call_site_test.cpp:"))
      foreign_.insert(std::string(name(call.operation)) + " " + call.tag + " at " + site);
  }
  int take_count() {
    std::lock_guard lock(mutex_);
    return std::exchange(count_, 0);
  }
  std::set<std::string> foreign() {
    std::lock_guard lock(mutex_);
    return foreign_;
  }

 private:
  std::mutex mutex_;
  int count_ = 0;
  std::set<std::string> foreign_;
};

TEST(CallSite, is_the_programs) {
  on_every_rank([](World& world) {
    LOCKSTEP_NEEDS_RANKS(2);
    Group group = world.group();
    const auto file = std::filesystem::temp_directory_path() /
                      ("lockstep-call-site-" + std::to_string(group.broadcast_value(::getpid())));
    auto sites = std::make_shared<ForeignSites>();
    world.add_observer(sites);
    torch::nn::Sequential net(torch::nn::Linear(3, 4), torch::nn::BatchNorm1d(4), torch::nn::Linear(4, 2));
    EXPECT_EQ(convert_sync_batchnorm(*net, group), 1);
    const auto step = [&](auto& model) {
      for (int i = 0; i < 2; ++i) {
        model(numbers(900 + i, {4, 3})).square().sum().backward();
        EXPECT_GT(sites->take_count(), 0);
      }
    };
    DistributedDataParallel ddp(net, group, {.find_unused_parameters = true, .check_replicas_every = 1});
    EXPECT_GT(sites->take_count(), 0);
    step(ddp);
    SyncBatchNorm1d norm(torch::nn::BatchNorm1dOptions(3), group);
    step(norm);
    torch::nn::Linear plain(3, 2);
    DistributedDataParallel(plain, group).join([] {});
    EXPECT_GT(sites->take_count(), 0);
    check_replicas(*net, group);
    EXPECT_GT(sites->take_count(), 0);
    save(file, {.model = net, .group = group});
    EXPECT_GT(sites->take_count(), 0);
    load(file, {.model = net, .group = group});
    EXPECT_GT(sites->take_count(), 0);
    EXPECT_THAT(sites->foreign(), ::testing::IsEmpty());
    world.remove_observer(sites);
    if (world.is_main()) std::filesystem::remove(file);
  });
}

}  // namespace
}  // namespace lockstep::testing
