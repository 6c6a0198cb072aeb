// The ranks' output and input.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <regex>
#include <sstream>

#include "cli/session.h"
#include "support/errors.h"
#include "support/folder.h"
#include "support/process.h"

namespace lockstep::testing {
namespace {

namespace fs = std::filesystem;

std::vector<std::string> command(const std::vector<std::string>& options, const std::string& script) {
  std::vector<std::string> all = {LOCKSTEP_PROGRAM, "run", "--quiet"};
  all.insert(all.end(), options.begin(), options.end());
  all.insert(all.end(), {"bash", "-c", script});
  return all;
}

Outcome shell(const std::vector<std::string>& options, const std::string& script) {
  return run({command(options, script)});
}

std::string quoted(const std::vector<std::string>& command) {
  std::string line;
  for (const auto& word : command)
    line.append("'").append(std::regex_replace(word, std::regex("'"), "'\\''")).append("' ");
  return line;
}

std::string text_of(const fs::path& file) {
  std::ostringstream text;
  text << std::ifstream(file).rdbuf();
  return text.str();
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

TEST(Output, has_the_rank_before_each_line_unless_there_is_one) {
  EXPECT_EQ(shell({"-n", "1"}, "echo a; echo b >&2").output.size(), 4u);
  EXPECT_EQ(shell({"-n", "1", "--prefix", "always"}, "echo a").output, "[0] a\n");
  const auto two = shell({"-n", "2"}, "echo a$RANK; echo b$RANK").output;
  EXPECT_THAT(
      two, AllOf(HasSubstr("[0] a0\n"), HasSubstr("[0] b0\n"), HasSubstr("[1] a1\n"), HasSubstr("[1] b1\n")));
  EXPECT_EQ(two.size(), 4 * std::string("[0] a0\n").size());
  EXPECT_EQ(shell({"-n", "2", "--prefix", "never"}, "echo same").output, "same\nsame\n");
}

TEST(Output, of_a_rank_that_is_alone_goes_through_as_it_is) {
  Folder folder;
  const auto in = folder / "in", out = folder / "out";
  ASSERT_EQ(run({{"sh", "-c", "head -c 300000 /dev/urandom > " + word(in)}}).status, 0);
  ASSERT_EQ(run({{"sh", "-c", quoted(command({"-n", "1"}, "cat " + word(in))) + " > " + word(out)}}).status,
            0);
  EXPECT_TRUE(text_of(in) == text_of(out));
}

TEST(Output, keeps_standard_output_and_error_apart) {
  const auto line = quoted(command({"-n", "2"}, "echo out; echo err >&2"));
  EXPECT_EQ(lines_of(run({{"sh", "-c", line + " 2>/dev/null"}}).output).size(), 2u);
  EXPECT_THAT(run({{"sh", "-c", line + " 2>/dev/null"}}).output, Not(HasSubstr("err")));
  EXPECT_THAT(run({{"sh", "-c", line + " >/dev/null"}}).output,
              AllOf(HasSubstr("[1] err\n"), Not(HasSubstr("out"))));
}

TEST(Output, is_never_mixed_within_a_line) {
  // In pieces, which would be mixed if they were passed on as they arrive.
  const auto outcome =
      shell({"-n", "8"},
            "for i in $(seq 500); do for j in 1 2 3; do printf \"<$RANK$RANK$RANK$RANK>\"; done;"
            " printf \" $i\\n\"; done");
  EXPECT_EQ(outcome.status, 0);
  std::map<std::string, int> next;
  const std::regex form("\\[([0-7])\\] (?:<\\1\\1\\1\\1>){3} ([0-9]+)");
  const auto lines = lines_of(outcome.output);
  EXPECT_EQ(lines.size(), 8u * 500u);
  for (const auto& line : lines) {
    std::smatch match;
    ASSERT_TRUE(std::regex_match(line, match, form)) << line;
    EXPECT_EQ(std::stoi(match[2]), ++next[match[1]]);
  }
}

TEST(Output, lines_that_are_too_long_are_cut_and_nothing_is_lost) {
  const auto outcome =
      shell({"-n", "2", "--show", "1"}, "head -c 200000 /dev/zero | tr '\\0' x; echo; echo end");
  const auto lines = lines_of(outcome.output);
  ASSERT_EQ(lines.size(), 5u);
  std::size_t total = 0;
  for (const auto& line : lines) {
    EXPECT_TRUE(line.starts_with("[1] "));
    EXPECT_LE(line.size(), 4u + (64 << 10));
    if (line != "[1] end") total += line.size() - 4;
  }
  EXPECT_EQ(total, 200000u);
}

TEST(Output, of_progress_bars_is_shown_now_and_then) {
  const Sign go_on;
  const auto bar = [&](const std::string& form) {
    return command({"-n", "2"}, "for i in $(seq 45); do printf \"" + form + "\"; sleep 0.05; done; " +
                                    go_on.await() + "; echo; echo $RANK end");
  };
  const auto begin = std::chrono::steady_clock::now();
  Session first(bar("\\rat $i")),
      second(bar("at $i\\r"));  // Before the number and after it, both of which are common.
  for (Session* session : {&first, &second}) {
    EXPECT_TRUE(session->wait_for("[1] at ")) << session->output();
    EXPECT_THAT(session->output(), Not(HasSubstr("end\n")));
  }
  go_on.show();
  for (Session* session : {&first, &second}) {
    EXPECT_EQ(session->wait(), 0);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    const auto lines = lines_of(session->output());
    const auto shown = std::count_if(lines.begin(), lines.end(),
                                     [](const std::string& line) { return line.starts_with("[1] at "); });
    EXPECT_GE(shown, 3) << session->output();
    EXPECT_LE(static_cast<double>(shown), took.count() + 2) << "once a second:\n" << session->output();
    EXPECT_THAT(session->output(), ContainsRegex("\\[1\\] at 45\r?\n"));
    for (const auto& line : lines) EXPECT_THAT(line, ContainsRegex("^\\[[01]\\] (at [0-9]+\r?|[01] end)$"));
  }
}

TEST(Output, that_was_overwritten_at_once_is_not_shown) {
  EXPECT_EQ(shell({"-n", "1", "--prefix", "always"}, "printf 'first\\rsecond\\n'").output, "[0] second\n");
  EXPECT_EQ(shell({"-n", "1", "--prefix", "always"}, "printf 'a line\\r\\n'").output, "[0] a line\r\n");
  EXPECT_EQ(shell({"-n", "1"}, "printf 'first\\rsecond\\n'").output, "first\rsecond\n");
}

TEST(Output, ends_with_a_newline_also_where_the_rank_forgot_it) {
  const auto outcome = shell({"-n", "2"}, "printf \"no newline $RANK\"");
  EXPECT_THAT(outcome.output, AllOf(HasSubstr("[0] no newline 0\n"), HasSubstr("[1] no newline 1\n")));
}

TEST(Output, of_the_ranks_that_are_named_is_shown) {
  const auto shown = [](const char* ranks) {
    auto lines = lines_of(shell({"-n", "4", "--show", ranks, "--prefix", "never"}, "echo $RANK").output);
    std::sort(lines.begin(), lines.end());
    std::string all;
    for (const auto& line : lines) all += line;
    return all;
  };
  EXPECT_EQ(shown("all"), "0123");
  EXPECT_EQ(shown("none"), "");
  EXPECT_EQ(shown("0,2"), "02");
  EXPECT_EQ(shown("1-3"), "123");
  EXPECT_EQ(shown("0,2-3"), "023");
}

TEST(Output, is_kept_in_files_which_are_never_overwritten) {
  Folder folder;
  const auto logs = folder / "a/b";
  const std::vector<std::string> options = {"-n", "2",         "--show", "none", "--max-restarts",
                                            "1",  "--log-dir", logs};
  const auto script = [](const Sign& printed) {
    return "printf \"out $RANK $LOCKSTEP_RESTART_COUNT\"; echo; [ $LOCKSTEP_RESTART_COUNT = 1 ] && exit 0; "
           "[ $RANK = 1 ] && { " +
           printed.await() + "; exit 3; }; " + printed.give() + "; exec sleep 300";
  };
  const auto first = shell(options, script(Sign()));
  EXPECT_EQ(first.status, 0) << first.output;
  EXPECT_EQ(text_of(logs / "rank-0.log"), "out 0 0\n");
  EXPECT_EQ(text_of(logs / "rank-1.log"), "out 1 0\n");
  EXPECT_EQ(text_of(logs / "rank-0.restart-1.log"), "out 0 1\n");
  shell(options, script(Sign()));
  EXPECT_EQ(text_of(logs / "rank-0.log"), "out 0 0\nout 0 0\n");
  const auto bad = shell({"-n", "1", "--log-dir", "/proc/no/such"}, "true");
  EXPECT_EQ(bad.status, 2);
  EXPECT_THAT(bad.output, HasSubstr("--log-dir: cannot create directory '/proc/no/such'"));
}

TEST(Output, to_a_full_log_ends_and_the_rank_goes_on) {
  Folder folder;
  ASSERT_EQ(::symlink("/dev/full", (folder / "rank-0.log").c_str()), 0);
  const auto outcome = shell({"-n", "1", "--log-dir", folder.path()}, "echo one; sleep 0.3; echo two");
  EXPECT_EQ(outcome.status, 0);
  EXPECT_THAT(outcome.output, AllOf(HasSubstr("one\n"), HasSubstr("two\n"), HasSubstr("No space left")));
}

TEST(Output, that_cannot_be_written_is_told_and_makes_the_status) {
  const auto line = quoted(command({"-n", "2"}, "echo one; sleep 0.2; echo two; exit ${STATUS:-0}"));
  const auto outcome = run({{"bash", "-c", line + " >/dev/full"}});
  EXPECT_EQ(outcome.status, 1);
  EXPECT_EQ(outcome.output,
            "lockstep: cannot write to standard output, output is lost: No space left on device\n");
  EXPECT_EQ(run({{"bash", "-c", "STATUS=3 " + line + " >/dev/full"}}).status, 3);
  EXPECT_EQ(run({{"bash", "-c", line + " 2>/dev/full"}}).status, 0);  // There was nothing to print.
  EXPECT_EQ(run({{"bash", "-c", line + " >/dev/full 2>/dev/full"}}).status, 1);
}

TEST(Output, to_a_file_that_may_not_grow_is_told) {
  Folder folder;
  const auto logs = quoted({LOCKSTEP_PROGRAM, "run", "-q", "-n", "2", "--show", "none", "--log-dir",
                            folder.path(), "seq", "1", "10000"});
  const auto outcome = run({{"bash", "-c", "ulimit -f 4; " + logs}});
  EXPECT_EQ(outcome.status, 0) << outcome.output;
  EXPECT_THAT(outcome.output, ContainsRegex("cannot continue the log '.*rank-0.log': File too large"));
  // The ranks inherit the signal's original disposition.
  const auto own = quoted(command({"-n", "1"}, "seq 1 10000 > " + word(folder / "own")));
  EXPECT_THAT(run({{"bash", "-c", "ulimit -f 4; " + own}}).output, HasSubstr("File size limit exceeded"));
}

TEST(Output, that_nobody_reads_ends_no_rank) {
  Folder folder;
  const auto end = folder / "end";
  const auto line = quoted(
      command({"-n", "2"},
              "for i in $(seq 20000); do echo a line that is quite long, so that it fills the pipe; done; "
              "[ $RANK = 0 ] || echo done > " +
                  word(end)));
  const auto outcome = run({{"bash", "-c", line + " | head -n 1; echo ${PIPESTATUS[0]}"}});
  EXPECT_THAT(outcome.output, ContainsRegex("\n0\n$"));
  // On its own line, before or after what head has read.
  const std::string told = "lockstep: standard output has no reader any more; the ranks continue\n";
  EXPECT_THAT(outcome.output, ::testing::AnyOf(::testing::StartsWith(told), HasSubstr("\n" + told)));
  EXPECT_EQ(text_of(end), "done\n");
}

TEST(Output, is_all_there_however_slow_the_reader) {
  const auto line = quoted(command({"-n", "2"}, "for i in $(seq 20000); do echo 0123456789; done"));
  EXPECT_EQ(run({{"bash", "-c", line + " | (sleep 1; wc -l)"}}).output, "40000\n");
}

TEST(Output, that_a_stranger_holds_open_is_not_waited_for) {
  // The pipe is passed to a process that is not a descendant of the launcher.
  Folder folder;
  const auto fifo = folder / "fifo";
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  const auto marker = unique_marker();
  Session stranger({"bash", "-c",
                    "read pid < " + word(fifo) + "; exec 5> /proc/$pid/fd/2; touch " + word(fifo) +
                        ".held; exec -a " + marker + " sleep 300"});
  const auto outcome = shell({"-n", "2"}, "[ $RANK = 0 ] && { echo $$ > " + word(fifo) + "; until [ -e " +
                                              word(fifo) + ".held ]; do sleep 0.1; done; }; echo end");
  EXPECT_EQ(outcome.status, 0);
  EXPECT_THAT(processes_with(marker), Not(::testing::IsEmpty()));
}

// ---- input
// --------------------------------------------------------------------------------------------------

TEST(Input, goes_to_rank_0_or_the_one_that_is_named) {
  const auto script = "read -r line; echo $RANK got $line";
  for (const std::string rank : {"0", "1"}) {
    const auto line = quoted(command({"-n", "2", "--stdin", rank}, script));
    const auto outcome = run({{"sh", "-c", "echo text | " + line}});
    EXPECT_THAT(outcome.output, HasSubstr("[" + rank + "] " + rank + " got text\n"));
    EXPECT_THAT(outcome.output, HasSubstr(rank == "0" ? "[1] 1 got\n" : "[0] 0 got\n"));
  }
  EXPECT_THAT(run({{"sh", "-c", "echo text | " + quoted(command({"-n", "2"}, script))}}).output,
              HasSubstr("0 got text"));
  EXPECT_THAT(
      run({{"sh", "-c", "echo text | " + quoted(command({"-n", "2", "--stdin", "none"}, script))}}).output,
      AllOf(HasSubstr("0 got\n"), HasSubstr("1 got\n")));
}

TEST(Input, may_be_closed_as_may_be_everything) {
  const auto outcome =
      run({{"bash", "-c",
            quoted(command({"-n", "2"}, "cat; [ -e /proc/self/fd/2 ] || exit 5")) + " <&- >&- 2>&-"}});
  EXPECT_EQ(outcome.status, 0);
}

TEST(Input, a_prompt_is_shown_before_its_line_ends) {
  Session session(command(
      {"-n", "2"}, "[ $RANK = 0 ] || exec sleep 300; printf 'name? '; read name; echo hello $name; kill $$"));
  ASSERT_TRUE(session.wait_for("[0] name? ")) << session.output();
  session.type("you\n");
  EXPECT_TRUE(session.wait_for("hello you\n")) << session.output();
}

}  // namespace
}  // namespace lockstep::testing
