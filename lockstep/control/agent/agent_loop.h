// The agent's thread: the sockets of ranks and of other agents, and the state of this host's ranks.
#pragma once

#include <atomic>
#include <deque>
#include <future>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <lockstep/control/agent/agent.h>
#include <lockstep/control/agent/process.h>
#include <lockstep/control/board/board.h>
#include <lockstep/control/board/flight.h>
#include <lockstep/control/coordinator/coordinator.h>
#include <lockstep/control/link/acceptor.h>
#include <lockstep/control/link/secure_link.h>
#include <lockstep/os/socket.h>

namespace lockstep::control {

class Agent::Loop : public std::enable_shared_from_this<Agent::Loop> {
 public:
  explicit Loop(AgentOptions options);
  ~Loop();
  void start();
  void end();  // Writes pending output first, if there is a reader.

  void post(std::function<void()> command);
  int orders_fd() const { return orders_event_.get(); }
  std::vector<Order> take_orders();
  int oldest_world() const { return oldest_world_; }
  std::string address() const { return address_; }

  // Called on the loop's thread.
  void rank_started(int rank, int pid);
  void rank_ended(int rank, Ended how);
  void node_done();
  void leave_hosts();
  void stop(int signal);
  void paused(bool paused);

 private:
  // A connected process of this host. Its rank is the one it claims.
  struct Connection {
    Fd fd;
    FrameBuffer in;
    std::string out;
    int pid = 0;
    int rank = -1, world = 0;
    std::uint32_t serial = 0;  // Unique among connections.
    bool here = false;         // True while the rank is in the job: it has joined and not left.
    // True if only this process was refused and the job continues; its messages are ignored.
    bool refused = false;
    bool attached = false;  // True if it has received the board.
    bool watched = false;   // True if it also holds its lock on the board.
    bool closed = false;
  };
  // Another host's agent.
  struct Node {
    Fd fd;
    std::unique_ptr<SecureLink> link;
    FrameBuffer in;
    std::string out;
    int number = -1;
    std::string from;
    Clock::time_point heard = Clock::now();
    bool told = false;  // True if its silence has been reported.
    bool closed = false;
  };
  // A rank whose connection or lock is gone; how it ended will be known in a moment.
  struct Dying {
    int rank = 0, pid = 0;
    Clock::time_point since = Clock::now();
  };
  struct LocalRank {
    int pid = 0;  // Of the process that `lockstep run` started.
    bool ended = false;
    std::optional<Clock::time_point> stopped;
    bool told = false;
    std::optional<Ended> how = {};
    std::string error = {};  // Reported by the rank.
  };

  void run();
  template <typename F>
  void guard(F&& part) noexcept;
  void complain(const std::string& what) noexcept;
  void turn(std::chrono::milliseconds limit);
  void tick();
  void look_at_silence(Node& node);
  std::string why_closed(int error) const;
  void accept_ranks();
  void accept_nodes();
  void serve(Connection& connection);
  void receive(Connection& connection, Frame frame);
  void attach(Connection& connection, const Hello& hello);
  void watch(int rank, int pid);
  void gone(Connection& connection);
  void look_at_dying();
  void report_end(int rank, Ended how);
  void send_rows(int rank);
  bool is_active(int rank, const Rows& rows);
  void send_flights();
  void look_at_stops();
  void look_at(int rank, int pid, const std::optional<ProcessState>& process, LocalRank& state);

  void serve(Node& node);
  void receive(Node& node, Frame frame);
  void send(Node& node, const Frame& frame);
  void lost(Node& node, bool closed, const std::string& why);
  void connect_to_head();
  void head_unreachable(const std::string& why, bool configuration);

  void up(Frame frame);              // To the coordinator.
  void deliver(const Frame& frame);  // To ranks of this host.
  void push(Order order);
  void write(Connection& connection, const Frame& frame);
  static bool flush(int fd, std::string& out);
  bool all_written() const;
  void fail_here(Failure failure);
  void note_desertion();

  const AgentOptions options_;
  std::thread thread_, connector_;
  std::future<void> thread_done_, connector_done_;
  std::atomic<bool> ending_ = false;
  std::atomic<int> oldest_world_ = 0;  // Oldest World that some rank is in.
  Fd wake_, orders_event_, listener_;
  std::optional<Acceptor> acceptor_;
  std::string address_;

  std::mutex mutex_;  // Guards the members used by other threads.
  std::vector<std::function<void()>> commands_;
  std::deque<Order> orders_;

  std::unique_ptr<Coordinator> coordinator_;  // Null: it runs on another host.
  std::list<Connection> connections_;
  std::list<Node> nodes_;     // On the coordinator: the other nodes. Otherwise: the coordinator.
  std::deque<Frame> unsent_;  // For a coordinator that has not been reached yet.
  std::shared_ptr<Board> board_;
  int board_size_ = 0;
  // Number of each rank's step times that the coordinator has received.
  std::map<int, std::uint64_t> times_seen_;
  // Whether a rank's threads are active, and when that was checked.
  std::map<int, std::pair<Clock::time_point, bool>> activity_;
  std::map<int, LocalRank> ranks_;
  std::vector<Dying> dying_;
  std::atomic<bool> troubled_ = false;  // True once something has gone wrong in this attempt.
  bool paused_ = false, any_came_ = false, too_many_files_ = false;
  bool started_ = false, finished_ = false;  // Orders given.
  bool failed_ = false;                      // True if there is no coordinator to give orders any more.
  int agent_rank_ = -1;
  std::uint32_t last_serial_ = 0;
  std::optional<Attach> head_holder_;   // The process that runs the coordinator.
  std::string own_address_;             // This host's address as seen by the coordinator.
  std::optional<std::string> refusal_;  // For ranks that join after the refusal.
  Clock::time_point last_tick_{}, accepts_again_{}, next_trouble_{};
};

}  // namespace lockstep::control
