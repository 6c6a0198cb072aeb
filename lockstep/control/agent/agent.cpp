#include <lockstep/control/agent/agent.h>

#include <chrono>
#include <future>
#include <memory>

#include <lockstep/control/agent/agent_loop.h>

namespace lockstep::control {

Agent::Agent(AgentOptions options) : loop_(std::make_shared<Loop>(std::move(options))) { loop_->start(); }
Agent::~Agent() { loop_->end(); }

int Agent::orders_fd() const { return loop_->orders_fd(); }
std::vector<Order> Agent::take_orders() { return loop_->take_orders(); }
std::string Agent::address() const { return loop_->address(); }
bool Agent::deserted(int world) const { return loop_->oldest_world() > world; }

void Agent::rank_started(int rank, int pid) {
  loop_->post([loop = loop_.get(), rank, pid] { loop->rank_started(rank, pid); });
}
void Agent::rank_ended(int rank, Ended how) {
  loop_->post([loop = loop_.get(), rank, how] { loop->rank_ended(rank, how); });
}
void Agent::leave_hosts() {
  auto done = std::make_shared<std::promise<void>>();
  const auto left = done->get_future();
  loop_->post([loop = loop_.get(), done] {
    loop->leave_hosts();
    done->set_value();
  });
  left.wait_for(std::chrono::seconds(1));
}
void Agent::node_done() {
  loop_->post([loop = loop_.get()] { loop->node_done(); });
}
void Agent::stop(int signal) {
  loop_->post([loop = loop_.get(), signal] { loop->stop(signal); });
}
void Agent::paused(bool paused) {
  loop_->post([loop = loop_.get(), paused] { loop->paused(paused); });
}

}  // namespace lockstep::control
