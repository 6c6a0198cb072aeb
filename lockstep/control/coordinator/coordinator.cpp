#include <lockstep/control/coordinator/coordinator.h>

#include <algorithm>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace lockstep::control {

Coordinator::Coordinator(Options options, Ports ports)
    : options_(std::move(options)), ports_(std::move(ports)) {}

int Coordinator::add_node(const NodeHello& hello) {
  int node = hello.node;
  if (options_.launches) {
    if (hello.num_nodes != options_.num_nodes)
      throw ConfigError(fmt::format("--nnodes differs between hosts: {} on node 0 and {} on node {}",
                                    options_.num_nodes, hello.num_nodes, node));
    if (node < 0 || node >= options_.num_nodes)
      throw detail::bad_value(
          "--node-rank",
          fmt::format("an integer from 0 to {} with --nnodes {}", options_.num_nodes - 1, options_.num_nodes),
          std::to_string(node));
    if (nodes_.contains(node))
      throw ConfigError(
          fmt::format("two hosts have --node-rank {}: {} and {}; give each host its own, from 0 to {}", node,
                      nodes_[node].address, hello.address, options_.num_nodes - 1));
  } else {
    node = nodes_.empty() ? 0 : nodes_.rbegin()->first + 1;
  }
  nodes_[node] = {.local_ranks = hello.local_ranks,
                  .address = hello.address,
                  .agent_rank = hello.agent_rank,
                  .agent_pid = hello.agent_pid};
  if (options_.launches && static_cast<int>(nodes_.size()) == options_.num_nodes) start();
  return node;
}

void Coordinator::start() {
  size_ = 0;
  for (auto& [number, node] : nodes_) {
    node.first_rank = size_;
    node.done = false;
    size_ += node.local_ranks;
  }
  ranks_.clear();
  groups_.clear();
  group_seen_.clear();
  told_.clear();
  flights_.clear();
  stragglers_ = {};
  store_ = {};
  failure_.reset();
  suspicion_.reset();
  deadlock_.clear();
  refused_.reset();
  stop_at_.reset();
  start_at_.reset();
  for (const auto& [number, node] : nodes_) {
    for (int r = node.first_rank; r < node.first_rank + node.local_ranks; ++r) ranks_[r].node = number;
    ports_.order(number, Start{.attempt = attempt_,
                               .first_rank = node.first_rank,
                               .world_size = size_,
                               .address = options_.address});
  }
}

void Coordinator::node_lost(int node, bool closed, const std::string& why) {
  auto found = nodes_.find(node);
  if (found == nodes_.end() || found->second.lost) return;
  found->second.lost = true;
  std::vector<int> lost;
  for (auto& [number, rank] : ranks_)
    if (rank.node == node && !rank.ended && (options_.launches || rank.here)) lost.push_back(number);
  if (!lost.empty() && !finished_) {
    const Node& host = found->second;
    Failure failure;
    if (closed && host.agent_rank >= 0) {
      failure = failure_of(host.agent_rank,
                           fmt::format("has ended, and with it the agent of the host at {} (rank{} {})",
                                       host.address, lost.size() > 1 ? "s" : "", fmt::join(lost, ", ")));
    } else {
      failure.cause = fmt::format("the host at {} with rank{} {} is lost: {}", host.address,
                                  lost.size() > 1 ? "s" : "", fmt::join(lost, ", "), why);
    }
    fail(std::move(failure));
  }
  for (int number : lost) ranks_[number].here = false;
  if (options_.launches) node_done(node);
}

void Coordinator::receive(int node, const Frame& frame) {
  auto rank = [&] {
    if (frame.rank < 0 || frame.rank >= kMostRanks)
      throw FrameError(fmt::format("a message has invalid rank {}", frame.rank));
    return frame.rank;
  };
  // A second process with the same rank may have sent messages before it learned that it was refused.
  if (auto known = ranks_.find(frame.rank); frame.kind != Kind::hello && known != ranks_.end() &&
                                            known->second.node >= 0 && known->second.node != node)
    return;
  switch (frame.kind) {
    case Kind::hello: return hello(node, frame.id, Hello::decode(frame.payload));
    case Kind::rank_ended: return rank_ended(rank(), decode_ended(frame.payload));
    case Kind::leave: return leave(rank());
    case Kind::fault: return fault(rank(), Fault::decode(frame.payload));
    case Kind::group: {
      auto group = GroupMade::decode(frame.payload);
      group_seen_[group.key] = Clock::now();
      groups_[group.key] = std::move(group);
      return;
    }
    case Kind::rows: {
      auto& state = ranks_[rank()];
      state.rows = Rows::decode(frame.payload);
      state.rows_at = Clock::now();
      ++state.looks;
      for (const Row& row : state.rows.rows) {
        if (row.message) continue;
        auto& reached = state.reached.try_emplace(row.key, -1).first->second;
        reached = std::max(reached, row.sequence);
      }
      note_steps(frame.rank, state);
      return;
    }
    case Kind::store: {
      const int who = rank();
      auto answer = [this, who, id = frame.id](StoreReply reply) {
        send(who, {.kind = Kind::reply, .rank = who, .id = id, .payload = reply.encode()});
      };
      return store_.handle(who, StoreRequest::decode(frame.payload), answer, frame.id);
    }
    case Kind::missing: {  // A rank's join timeout has passed: report the missing ranks to all.
      if (auto who = ranks_.find(rank()); who != ranks_.end() && who->second.welcomed)
        return;  // The last rank joined meanwhile, and the welcome is on its way.
      Failure failure;
      failure.cause = missing_text();
      return fail(std::move(failure));
    }
    case Kind::stop: {
      Reader in(frame.payload);
      return stop(in.integer(1, 127));
    }
    case Kind::stop_count: {
      Reader in(frame.payload);
      ranks_[rank()].stop_count = in.number(0, INT64_MAX);
      if (stop_at_)
        send(frame.rank,
             {.kind = Kind::stop_at, .rank = frame.rank, .payload = Writer().number(*stop_at_).take()});
      return decide_stop();
    }
    case Kind::node_done: return node_done(node);
    case Kind::flight:
      if (options_.launches && ranks_.contains(rank())) flights_[rank()] = RankFlight::decode(frame.payload);
      return;
    default:
      throw FrameError(
          fmt::format("the coordinator received a message of kind {}", static_cast<int>(frame.kind)));
  }
}

void Coordinator::hello(int node, std::uint32_t from, const Hello& hello) {
  auto refuse_it = [&](std::string text) {
    ports_.send(node, {.kind = Kind::refused, .rank = hello.rank, .id = from, .payload = std::move(text)});
  };
  // A running job is not disturbed by a process that joins late.
  auto contradicts = [&](std::string text) {
    if (has_begun()) return refuse_it(std::move(text));
    came_.emplace(hello.host, hello.pid);
    refuse(text);
  };
  if (refused_) {
    came_.emplace(hello.host, hello.pid);
    return refuse_it(*refused_);
  }
  if (size_ == 0) size_ = hello.size;
  if (hello.size != size_)
    return contradicts(
        fmt::format("ranks disagree on WORLD_SIZE: {} on rank {}, and {} on the ranks before it", hello.size,
                    hello.rank, size_));
  if (auto other = ranks_.find(hello.rank); other != ranks_.end() && other->second.here) {
    const Hello& card = *other->second.card;
    return contradicts(fmt::format(
        "two processes have RANK={}: process {} on {} and process {} on {}; give each its own, from 0 to {}",
        hello.rank, card.pid, card.host, hello.pid, hello.host, size_ - 1));
  }
  if (options_.launches && hello.attempt != attempt_)
    return refuse_it(
        fmt::format("this process belongs to attempt {} of the job, but the job is at attempt {}",
                    hello.attempt, attempt_));
  for (const auto& [number, other] : ranks_)
    if (other.card && other.card->version != hello.version)
      return contradicts(
          fmt::format("ranks run different versions of lockstep: {} on rank {} and {} on rank {}",
                      other.card->version, number, hello.version, hello.rank));
  Rank& rank = ranks_[hello.rank];
  came_.emplace(hello.host, hello.pid);
  rank.node = node;
  rank.card = hello;
  rank.here = true;
  rank.welcomed = false;
  rank.reached.clear();
  rank.ended.reset();
  rank.comm_fault.reset();
  if (failure_)
    return send(hello.rank, {.kind = Kind::verdict, .rank = hello.rank, .payload = encode(*failure_)});
  if (stop_signal_) send(hello.rank, {.kind = Kind::stop_prepare, .rank = hello.rank});
  for (const auto& [number, other] : ranks_)
    if (other.ended && !other.card)
      return fail(failure_of(number, other.ended->text() + " before it joined"));
  const auto here = std::count_if(ranks_.begin(), ranks_.end(), [&](const auto& each) {
    return each.second.here && !each.second.welcomed && each.second.card->world == hello.world;
  });
  if (here == size_) all_came();
}

void Coordinator::all_came() {
  std::map<int, std::vector<int>> ranks_of_node;
  Welcome welcome;
  for (const auto& [number, rank] : ranks_) {
    ranks_of_node[rank.node].push_back(number);
    welcome.nodes.push_back(rank.node);
    welcome.threads.push_back(rank.card->threads);
  }
  for (const auto& [node, ranks] : ranks_of_node) {
    std::map<int, int> owner;
    for (int number : ranks) {
      const Hello& card = *ranks_[number].card;
      if (card.local_rank < 0) continue;
      auto [other, is_new] = owner.emplace(card.local_rank, number);
      if (!is_new)
        return refuse(fmt::format("ranks {} and {} are on one host ({}) and both have LOCAL_RANK={}",
                                  other->second, number, card.host, card.local_rank));
    }
  }
  stragglers_ = {};
  for (const auto& [node, ranks] : ranks_of_node)
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      const Hello& card = *ranks_[ranks[i]].card;
      welcome.local_rank = card.local_rank >= 0 ? card.local_rank : static_cast<int>(i);
      welcome.local_size = card.local_size > 0 ? card.local_size : static_cast<int>(ranks.size());
      welcome.address = ranks_of_node.size() > 1 ? nodes_[node].address : "";
      ranks_[ranks[i]].welcomed = true;
      send(ranks[i], {.kind = Kind::welcome, .rank = ranks[i], .payload = welcome.encode()});
    }
}

// True if some rank is in its World.
bool Coordinator::has_begun() const {
  return std::any_of(ranks_.begin(), ranks_.end(),
                     [](const auto& each) { return each.second.here && each.second.welcomed; });
}

void Coordinator::refuse(const std::string& text) {
  refused_ = text;
  broadcast({.kind = Kind::refused, .rank = -1, .payload = text});
}

std::string Coordinator::missing_text() const {
  std::vector<int> here, missing;
  for (int r = 0; r < size_; ++r) {
    auto rank = ranks_.find(r);
    (rank != ranks_.end() && rank->second.here ? here : missing).push_back(r);
  }
  return fmt::format("of {} ranks (WORLD_SIZE) these did not join: {}; these did: {}", size_,
                     fmt::join(missing, ", "), fmt::join(here, ", "));
}

int Coordinator::oldest_world() const {
  int oldest = kNoWorld;
  for (const auto& [number, rank] : ranks_)
    if (rank.here) oldest = std::min(oldest, rank.card->world);
  return oldest;
}

void Coordinator::tick(Clock::time_point now) {
  if (options_.launches && size_ == 0 && !finished_ && now - born_ >= options_.join_timeout) {
    std::vector<int> missing;
    for (int number = 0; number < options_.num_nodes; ++number)
      if (!nodes_.contains(number)) missing.push_back(number);
    finish({.status = 1,
            .why = fmt::format(
                "of {} hosts (--nnodes) these did not join within {:.1f} s: {}", options_.num_nodes,
                std::chrono::duration<double>(options_.join_timeout).count(), fmt::join(missing, ", "))});
  }
  if (start_at_ && now >= *start_at_) start();
  look_at_suspicion(now);
  if (!failure_) {
    const auto all = waits(now);
    look_at_waits(all, now);
    if (!failure_) look_at_deadlock(all, now);
  }
  if (!failure_) look_at_pace();
  if (now >= forgets_at_) forget_groups(now);
}

void Coordinator::broadcast(const Frame& frame) {
  for (const auto& [number, node] : nodes_)
    if (!node.lost) ports_.send(number, frame);
}

void Coordinator::order_all(const Order& order) {
  for (const auto& [number, node] : nodes_)
    if (!node.lost) ports_.order(number, order);
}

void Coordinator::send(int rank, Frame frame) {
  auto found = ranks_.find(rank);
  if (found != ranks_.end() && found->second.node >= 0) ports_.send(found->second.node, std::move(frame));
}

}  // namespace lockstep::control
