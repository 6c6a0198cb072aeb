// How processes join a job, and the errors when they cannot.
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include "support/errors.h"
#include "support/process.h"

namespace lockstep::testing {
namespace {

Program probe(int port, int rank, int size, std::map<std::string, std::string> more = {},
              std::vector<std::string> arguments = {}) {
  Program program{{LOCKSTEP_JOIN_PROBE},
                  {{"RANK", std::to_string(rank)},
                   {"WORLD_SIZE", std::to_string(size)},
                   {"MASTER_ADDR", "127.0.0.1"},
                   {"MASTER_PORT", std::to_string(port)},
                   {"LOCKSTEP_JOIN_TIMEOUT", "60s"}}};
  for (auto& [name, value] : more) program.environment[name] = value;
  program.command.insert(program.command.end(), arguments.begin(), arguments.end());
  return program;
}

// A join timeout that expires soon, but is long enough for ranks that start at the same time: it depends on
// how long a start takes on this machine.
std::map<std::string, std::string> short_join_timeout() {
  const auto alone = run(probe(free_port(), 0, 1));
  EXPECT_EQ(alone.status, 0) << alone.output;
  return {{"LOCKSTEP_JOIN_TIMEOUT", std::to_string(1 + static_cast<int>(2 * alone.seconds)) + "s"}};
}

TEST(Join, local_ranks_are_worked_out_where_they_are_missing) {
  const int port = free_port();
  const auto outcomes = run_together({probe(port, 0, 3), probe(port, 1, 3), probe(port, 2, 3)});
  for (std::size_t r = 0; r < 3; ++r) {
    EXPECT_EQ(outcomes[r].status, 0) << outcomes[r].output;
    EXPECT_THAT(outcomes[r].output,
                HasSubstr("rank " + std::to_string(r) + " of 3, local " + std::to_string(r) + " of 3, shm"));
  }
}

TEST(Join, ranks_that_do_not_come_are_named) {
  const int port = free_port();
  const auto soon = short_join_timeout();
  const auto outcomes = run_together({probe(port, 0, 4, soon), probe(port, 2, 4, soon)});
  EXPECT_EQ(outcomes[0].status, 4);
  EXPECT_THAT(outcomes[0].output, AllOf(HasSubstr("these did not join: 1, 3"), HasSubstr("these did: 0, 2")));
  EXPECT_LT(outcomes[0].seconds, 60) << "without this timeout it is 5 minutes";
  EXPECT_EQ(outcomes[1].status, 4) << outcomes[1].output;
}

TEST(Join, an_agent_that_is_not_there_is_named_with_what_may_be_the_reason) {
  const auto outcome = run(probe(free_port(), 0, 2, {{"LOCKSTEP_AGENT", "lockstep/nobody"}}));
  EXPECT_EQ(outcome.status, 3) << outcome.output;
  EXPECT_THAT(outcome.output, AllOf(HasSubstr("LOCKSTEP_AGENT=lockstep/nobody"),
                                    HasSubstr("or this process is in a different network namespace")));
}

TEST(Join, two_processes_of_one_rank_are_refused) {
  const int port = free_port();
  const auto outcomes = run_together({probe(port, 0, 3), probe(port, 1, 3), probe(port, 1, 3)});
  for (const auto& outcome : outcomes) {
    EXPECT_EQ(outcome.status, 3) << outcome.output;
    EXPECT_THAT(outcome.output, HasSubstr("two processes have RANK=1"));
    EXPECT_LT(outcome.seconds, 45) << "a rank waited for the timeout of 60 s";
  }
}

TEST(Join, ranks_that_disagree_on_the_size_are_refused) {
  const int port = free_port();
  const auto outcomes = run_together({probe(port, 0, 2), probe(port, 1, 3)});
  for (const auto& outcome : outcomes) {
    EXPECT_EQ(outcome.status, 3) << outcome.output;
    EXPECT_THAT(outcome.output, HasSubstr("disagree on WORLD_SIZE"));
  }
}

TEST(Join, one_local_rank_twice_on_a_host_is_refused) {
  const int port = free_port();
  const std::map<std::string, std::string> local{{"LOCAL_RANK", "0"}, {"LOCAL_WORLD_SIZE", "2"}};
  for (const auto& outcome : run_together({probe(port, 0, 2, local), probe(port, 1, 2, local)})) {
    EXPECT_EQ(outcome.status, 3) << outcome.output;
    EXPECT_THAT(outcome.output, HasSubstr("both have LOCAL_RANK=0"));
  }
}

const std::string kKey(64, 'a');

// An address of no host, reserved for documentation.
TEST(Join, a_head_that_is_not_there_is_named) {
  const auto outcome = run(probe(
      23, 1, 2, {{"LOCKSTEP_JOIN_TIMEOUT", "1s"}, {"MASTER_ADDR", "192.0.2.77"}, {"LOCKSTEP_KEY", kKey}}));
  EXPECT_EQ(outcome.status, 4) << outcome.output;
  EXPECT_THAT(outcome.output, HasSubstr("cannot reach the coordinator of the job at 192.0.2.77:23"));
}

TEST(Join, several_hosts_without_a_key_are_refused_with_what_helps) {
  const std::map<std::string, std::string> far{{"MASTER_ADDR", "192.0.2.77"}},
      near{{"LOCAL_RANK", "0"}, {"LOCAL_WORLD_SIZE", "1"}};
  for (const auto& environment : {far, near}) {
    const auto outcome = run(probe(free_port(), 0, 2, environment));
    EXPECT_EQ(outcome.status, 3) << outcome.output;
    EXPECT_THAT(outcome.output,
                AllOf(HasSubstr("lockstep key --output job.key"), HasSubstr("LOCKSTEP_KEY_FILE=job.key")));
  }
}

// Another process has taken the coordinator's port.
TEST(Join, a_port_in_use_is_named) {
  const int listener = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  ASSERT_EQ(::bind(listener, reinterpret_cast<sockaddr*>(&address), length), 0);
  ASSERT_EQ(::listen(listener, 4), 0);
  ASSERT_EQ(::getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length), 0);
  const int port = ntohs(address.sin_port);
  const auto outcome =
      run(probe(port, 0, 2, {{"LOCAL_RANK", "0"}, {"LOCAL_WORLD_SIZE", "1"}, {"LOCKSTEP_KEY", kKey}}));
  EXPECT_EQ(outcome.status, 3) << outcome.output;
  EXPECT_THAT(outcome.output, HasSubstr("127.0.0.1:" + std::to_string(port)));
  ::close(listener);
}

TEST(Join, an_mpi_of_another_size_is_refused) {
  const std::string flavours = LOCKSTEP_MPI_FLAVOURS;
  if (flavours.empty()) GTEST_SKIP() << "no MPI was found when this was built";
  const int port = free_port();
  // Without mpirun each process is a separate MPI world.
  for (const auto& outcome : run_together({probe(port, 0, 2, {}, {"mpi"}), probe(port, 1, 2, {}, {"mpi"})})) {
    EXPECT_EQ(outcome.status, 3) << outcome.output;
    EXPECT_THAT(outcome.output, AllOf(HasSubstr("MPI_COMM_WORLD has 1 ranks"), HasSubstr("the job has 2")));
  }
  EXPECT_THAT(run(probe(port, 0, 1, {{"LOCKSTEP_MPI", "lam"}}, {"mpi"})).output,
              HasSubstr("LOCKSTEP_MPI='lam'"));
}

TEST(Join, a_process_may_leave_and_join_again) {
  const int port = free_port();
  for (const auto& outcome :
       run_together({probe(port, 0, 2, {}, {"gloo", "again"}), probe(port, 1, 2, {}, {"gloo", "again"})})) {
    EXPECT_EQ(outcome.status, 0) << outcome.output;
    EXPECT_THAT(outcome.output, HasSubstr("joined again"));
  }
}

TEST(Join, a_peer_that_ends_in_the_middle_is_noticed_and_named) {
  const int port = free_port();
  const auto outcomes =
      run_together({probe(port, 0, 2, {}, {"gloo", "vanish"}), probe(port, 1, 2, {}, {"gloo", "vanish"})});
  EXPECT_EQ(outcomes[0].status, 0) << outcomes[0].output;
  EXPECT_THAT(
      outcomes[0].output,  // If rank 1 hosted the agent and has exited, its status is unknown.
      AllOf(HasSubstr("rank 1 (pid "), AnyOf(HasSubstr("exited with status 0"), HasSubstr("has ended"))));
}

TEST(Join, a_rank_that_is_done_may_leave_while_others_are_in_the_operation) {
  const int port = free_port();
  std::vector<Program> ranks;
  for (int r = 0; r < 3; ++r) ranks.push_back(probe(port, r, 3, {}, {"gloo", "late"}));
  for (const auto& outcome : run_together(ranks)) {
    EXPECT_EQ(outcome.status, 0) << outcome.output;
    EXPECT_THAT(outcome.output, HasSubstr("gathered"));
  }
}

TEST(Join, children_of_a_rank_are_none) {
  const int port = free_port();
  for (const auto& outcome : run_together(
           {probe(port, 0, 2, {}, {"gloo", "helpers"}), probe(port, 1, 2, {}, {"gloo", "helpers"})})) {
    EXPECT_EQ(outcome.status, 0) << outcome.output;
    EXPECT_THAT(outcome.output, HasSubstr("helped"));
  }
}

TEST(Join, an_operation_that_was_dropped_and_failed_is_an_exit_status) {
  for (const char* backend : {"shm", "gloo"}) {
    const int port = free_port();
    const auto outcomes =
        run_together({probe(port, 0, 2, {}, {backend, "drop"}), probe(port, 1, 2, {}, {backend, "drop"})});
    EXPECT_EQ(outcomes[0].status, 1) << outcomes[0].output;
    EXPECT_THAT(outcomes[0].output,
                AllOf(HasSubstr("dropped"), HasSubstr("never waited for has failed: recv")));
    EXPECT_EQ(outcomes[1].status, 0) << outcomes[1].output;

    const auto launched = run({{LOCKSTEP_PROGRAM, "run", "-n", "2", LOCKSTEP_JOIN_PROBE, backend, "drop"}});
    EXPECT_EQ(launched.status, 1) << launched.output;
    EXPECT_THAT(launched.output, HasSubstr("rank 0"));
  }
}

TEST(Join, a_failure_that_nobody_has_heard_of_is_an_exit_status) {
  for (const char* backend : {"shm", "gloo"})
    for (const char* what : {"drop another", "look only"}) {
      const int port = free_port();
      const auto outcomes =
          run_together({probe(port, 0, 2, {}, {backend, what}), probe(port, 1, 2, {}, {backend, what})});
      EXPECT_EQ(outcomes[0].status, 1) << backend << ", " << what << ": " << outcomes[0].output;
      EXPECT_THAT(outcomes[0].output,
                  AllOf(HasSubstr("dropped"), HasSubstr("never waited for has failed: ")));
    }
}

TEST(Join, a_world_that_an_exception_leaves_waits_for_nothing) {
  for (const char* backend : {"shm", "gloo"}) {
    const int port = free_port();
    const auto outcomes = run_together(
        {probe(port, 0, 2, {}, {backend, "unwind"}), probe(port, 1, 2, {}, {backend, "unwind"})});
    EXPECT_EQ(outcomes[0].status, 0) << outcomes[0].output;
    EXPECT_THAT(outcomes[0].output, AllOf(HasSubstr("caught: a bug"), HasSubstr("stopped: all_reduce #1"),
                                          HasSubstr("this rank is leaving")));
  }
}

TEST(Join, who_holds_the_agent_stays_as_long_as_others_work) {
  const int port = free_port();
  const auto soon = short_join_timeout();
  const auto outcomes =
      run_together({probe(port, 0, 2, soon, {"gloo", "stays"}), probe(port, 1, 2, soon, {"gloo", "stays"})});
  EXPECT_EQ(outcomes[1].status, 0) << outcomes[1].output;
  EXPECT_THAT(outcomes[1].output, HasSubstr("worked alone"));
  EXPECT_EQ(outcomes[0].status, 0) << outcomes[0].output;
}

TEST(Join, a_stopped_server_of_the_store_keeps_nobody) {
  const int port = free_port();
  const std::map<std::string, std::string> patient{{"LOCKSTEP_STOP_GRACE", "10m"}};
  const auto outcomes = run_together({probe(port, 0, 2, patient, {"gloo", "stopped server"}),
                                      probe(port, 1, 2, patient, {"gloo", "stopped server"})});
  EXPECT_EQ(outcomes[1].status, 0) << outcomes[1].output;
}

TEST(Join, a_rank_that_leaves_by_an_exception_frees_the_other) {
  const int port = free_port();
  const auto outcomes =
      run_together({probe(port, 0, 2, {}, {"gloo"}), probe(port, 1, 2, {}, {"gloo", "a bug"})});
  EXPECT_EQ(outcomes[1].status, 5);
  EXPECT_THAT(outcomes[1].output,
              AllOf(HasSubstr("leaves the job because of an exception"), HasSubstr("a bug")));
  EXPECT_EQ(outcomes[0].status, 0) << outcomes[0].output;
}

}  // namespace
}  // namespace lockstep::testing
