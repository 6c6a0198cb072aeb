// Files that are written completely or not at all, through all kinds of failures.
#include <lockstep/os/file.h>

#include <fcntl.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include <lockstep/base/error.h>

#include "support/errors.h"

namespace lockstep::testing {
namespace {

using namespace detail;
namespace fs = std::filesystem;

std::span<const std::byte> file_bytes(std::string_view text) { return std::as_bytes(std::span(text)); }

class Files : public ::testing::Test {
 protected:
  Files() {
    std::string pattern = (fs::temp_directory_path() / "lockstep-files-XXXXXX").string();
    folder_ = ::mkdtemp(pattern.data());
  }
  ~Files() override { fs::remove_all(folder_); }

  std::string path(const std::string& name = "run") const { return (folder_ / name).string(); }
  std::string contents(const std::string& name = "run") const {
    std::ifstream in(path(name), std::ios::binary);
    std::ostringstream text;
    text << in.rdbuf();
    return text.str();
  }
  std::size_t entries() const {
    return static_cast<std::size_t>(std::distance(fs::directory_iterator(folder_), fs::directory_iterator()));
  }
  void put(std::string_view text, const std::string& name = "run") const {
    PartialFile file(path(name));
    file.write(file_bytes(text));
    file.commit();
  }
  fs::path folder_;
};
class PartialFileTest : public Files {};
class WholeFileTest : public Files {};

TEST_F(PartialFileTest, a_file_appears_when_it_is_whole) {
  {
    PartialFile file(path());
    file.write(file_bytes("0000 rest"));
    EXPECT_FALSE(fs::exists(path()));
    file.write_at(0, "1234");
    file.commit();
  }
  EXPECT_EQ(contents(), "1234 rest");
  EXPECT_EQ(entries(), 1);
}

TEST_F(PartialFileTest, large_and_small_pieces_keep_their_order) {
  std::string all;
  PartialFile file(path());
  for (std::size_t size : {10u, 1u << 20, 3u, (1u << 20) - 1, 1u, 0u, 3u << 20, 700'000u, 700'000u, 5u}) {
    const std::string piece(size, static_cast<char>('a' + all.size() % 26));
    file.write(file_bytes(piece));
    all += piece;
  }
  file.commit();
  EXPECT_EQ(contents(), all);
}

TEST_F(PartialFileTest, the_earlier_file_stays_until_the_new_one_is_whole) {
  put("earlier");
  try {
    PartialFile file(path());
    file.write(file_bytes("new"));
    throw std::runtime_error("in the middle");
  } catch (const std::runtime_error&) {
  }
  EXPECT_EQ(contents(), "earlier");
  EXPECT_EQ(entries(), 1);
  put("new");
  EXPECT_EQ(contents(), "new");
}

// A full disk, simulated for any user: no file may grow beyond a limit.
TEST_F(PartialFileTest, a_file_that_cannot_grow_is_an_error_and_leaves_nothing) {
  put("earlier");
  rlimit before{};
  ::getrlimit(RLIMIT_FSIZE, &before);
  rlimit small = before;
  small.rlim_cur = 100'000;
  auto* const handler = std::signal(SIGXFSZ, SIG_IGN);
  ::setrlimit(RLIMIT_FSIZE, &small);
  const std::string piece(64'000, 'x');
  std::string problem;
  for (bool buffered : {true, false}) {
    problem = error_of<ConfigError>([&] {
      PartialFile file(path());
      for (int i = 0; i < 40; ++i) file.write(file_bytes(piece));
      if (buffered) file.write(file_bytes(std::string(3 << 20, 'x')));
      file.commit();
    });
    EXPECT_THAT(problem, AllOf(HasSubstr("cannot write '" + path() + "'"), HasSubstr("File too large")));
    EXPECT_EQ(contents(), "earlier");
    EXPECT_EQ(entries(), 1);
  }
  ::setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
}

TEST_F(PartialFileTest, a_full_disk_is_an_error_and_leaves_nothing) {
  const pid_t child = ::fork();
  if (child == 0) {  // A file system of its own, which ends with the process.
    if (::unshare(CLONE_NEWNS) != 0 || ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        ::mount("small", folder_.c_str(), "tmpfs", 0, "size=1m") != 0)
      ::_exit(77);
    put("earlier");
    std::string problem;
    try {
      PartialFile file(path());
      for (int i = 0; i < 3; ++i) file.write(file_bytes(std::string(1 << 20, 'x')));
      file.commit();
    } catch (const ConfigError& error) {
      problem = error.what();
    }
    const bool said = problem.find("No space left on device") != std::string::npos;
    ::_exit(said && contents() == "earlier" && entries() == 1 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  if (WEXITSTATUS(status) == 77) GTEST_SKIP() << "this user may not mount a small file system";
  EXPECT_EQ(status, 0);
}

TEST_F(PartialFileTest, a_writer_that_is_killed_leaves_the_earlier_file_and_the_next_one_goes_on) {
  put("earlier");
  for (int round = 0; round < 20; ++round) {
    const pid_t child = ::fork();
    if (child == 0) {
      for (int i = 0;; ++i) {
        PartialFile file(path());
        const std::string whole(1000 + static_cast<std::size_t>(i % 7) * 300'000,
                                static_cast<char>('a' + i % 7));
        for (std::size_t at = 0; at < whole.size(); at += 50'000)
          file.write(file_bytes(whole).subspan(at, std::min<std::size_t>(50'000, whole.size() - at)));
        file.commit();
      }
    }
    ::usleep(2'000 + static_cast<useconds_t>(round) * 1'000);
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    const auto now = contents();
    ASSERT_TRUE(now == "earlier" || now == std::string(now.size(), now[0])) << now.size();
    if (now != "earlier") {
      EXPECT_EQ((now.size() - 1000) % 300'000, 0);
      EXPECT_EQ(now[0], static_cast<char>('a' + (now.size() - 1000) / 300'000));
    }
  }
  put("after");
  EXPECT_EQ(contents(), "after");
  EXPECT_EQ(entries(), 1);
}

TEST_F(PartialFileTest, readers_see_one_whole_file_or_the_other_while_writers_take_turns) {
  put(std::string(100'000, 'a'));
  std::atomic<bool> stop{false};
  std::atomic<int> written{0};
  std::vector<std::thread> writers;
  for (char letter : {'b', 'c', 'd'})
    writers.emplace_back([&, letter] {
      while (!stop) {
        try {
          put(std::string(100'000 + static_cast<std::size_t>(letter), letter));
          ++written;
        } catch (const ConfigError& error) {
          EXPECT_THAT(error.what(), HasSubstr("another process is writing it now"));
        }
      }
    });
  for (int i = 0; i < 300 || written < 20; ++i) {
    WholeFile file(path());
    std::string text(file.size(), '\0');
    file.read(0, std::as_writable_bytes(std::span(text)));
    ASSERT_EQ(text, std::string(text.size(), text[0]));
    ASSERT_TRUE(text.size() == 100'000 || text.size() == 100'000u + static_cast<unsigned char>(text[0]));
  }
  stop = true;
  for (auto& writer : writers) writer.join();
  EXPECT_GT(written, 0);
}

TEST_F(PartialFileTest, places_where_no_file_can_be_are_named) {
  EXPECT_THAT(error_of<ConfigError>([&] { put("x", "missing/run"); }),
              AllOf(HasSubstr(path("missing")), HasSubstr("No such file or directory")));
  fs::create_directory(path("folder"));
  EXPECT_THAT(error_of<ConfigError>([&] { put("x", "folder"); }), HasSubstr("it is a directory"));
  EXPECT_THAT(error_of<ConfigError>([&] { put("x", "folder/"); }), HasSubstr("names no file"));
  EXPECT_THAT(error_of<ConfigError>([] { PartialFile(""); }), HasSubstr("names no file"));
  // A link planted by another user, which would be written through.
  put("secret", "target");
  fs::create_symlink(path("target"), path(".run.partial"));
  EXPECT_THAT(error_of<ConfigError>([&] { put("x"); }), HasSubstr("cannot write"));
  fs::remove(path(".run.partial"));
  fs::create_hard_link(path("target"), path(".run.partial"));
  EXPECT_THAT(error_of<ConfigError>([&] { put("x"); }), HasSubstr("not a plain file of this user"));
  EXPECT_EQ(contents("target"), "secret");
}

TEST_F(PartialFileTest, links_are_followed_and_stay) {
  fs::create_directory(path("data"));
  put("earlier", "data/real");
  fs::create_symlink("data/real", path("first"));          // Relative to its own folder.
  fs::create_symlink(path("first"), path("data/second"));  // Absolute.
  fs::create_symlink("data/second", path("run"));
  put("new");
  EXPECT_EQ(contents("data/real"), "new");
  for (const char* link : {"first", "data/second", "run"}) EXPECT_TRUE(fs::is_symlink(path(link))) << link;
  EXPECT_FALSE(fs::is_symlink(path("data/real")));
  EXPECT_EQ(entries(), 3);  // data, first, run: nothing else is left.

  fs::create_symlink("data/later", path("dangling"));
  put("created", "dangling");
  EXPECT_TRUE(fs::is_symlink(path("dangling")));
  EXPECT_EQ(contents("data/later"), "created");

  fs::create_symlink("missing/later", path("nowhere"));
  EXPECT_THAT(error_of<ConfigError>([&] { put("x", "nowhere"); }),
              AllOf(HasSubstr("missing"), HasSubstr("No such file or directory")));
  fs::create_symlink("data", path("to_folder"));
  EXPECT_THAT(error_of<ConfigError>([&] { put("x", "to_folder"); }), HasSubstr("it is a directory"));
  fs::create_symlink("round", path("round"));
  EXPECT_THAT(error_of<ConfigError>([&] { put("x", "round"); }),
              AllOf(HasSubstr(path("round")), HasSubstr("Too many levels of symbolic links")));
}

TEST_F(PartialFileTest, what_is_no_regular_file_is_refused_and_stays) {
  ASSERT_EQ(::mkfifo(path("pipe").c_str(), 0600), 0);
  fs::create_symlink("pipe", path("link"));
  for (const char* name : {"pipe", "link"})
    EXPECT_THAT(error_of<ConfigError>([&] { put("x", name); }),
                AllOf(HasSubstr("cannot write '" + path(name) + "'"), HasSubstr("it is a pipe (FIFO)"),
                      HasSubstr("use a regular file")));
  EXPECT_TRUE(fs::is_fifo(path("pipe")));
  EXPECT_TRUE(fs::is_symlink(path("link")));

  // A pipe that is created while the file is being written.
  {
    PartialFile file(path("late"));
    ASSERT_EQ(::mkfifo(path("late").c_str(), 0600), 0);
    EXPECT_THAT(error_of<ConfigError>([&] { file.commit(); }), HasSubstr("it is a pipe (FIFO)"));
  }
  EXPECT_TRUE(fs::is_fifo(path("late")));
  EXPECT_EQ(entries(), 3);

  if (::mknod(path("full").c_str(), S_IFCHR | 0600, makedev(1, 7)) != 0)
    GTEST_SKIP() << "this user may not make a device";
  EXPECT_THAT(error_of<ConfigError>([&] { put("x", "full"); }), HasSubstr("it is a character device"));
  EXPECT_TRUE(fs::is_character_file(path("full")));
}

TEST_F(PartialFileTest, a_name_without_a_folder_is_in_this_one) {
  const auto before = fs::current_path();
  fs::current_path(folder_);
  PartialFile file("plain");
  file.write(file_bytes("x"));
  file.commit();
  fs::current_path(before);
  EXPECT_EQ(contents("plain"), "x");
}

TEST_F(WholeFileTest, what_is_no_file_is_an_error_and_never_waits) {
  EXPECT_THAT(error_of<ConfigError>([&] { WholeFile(path("none")); }),
              AllOf(HasSubstr("cannot read '" + path("none") + "'"), HasSubstr("No such file")));
  EXPECT_THAT(error_of<ConfigError>([&] { WholeFile(folder_.string()); }),
              HasSubstr("it is not a regular file"));
  ASSERT_EQ(::mkfifo(path("pipe").c_str(), 0600), 0);
  EXPECT_THAT(error_of<ConfigError>([&] { WholeFile(path("pipe")); }), HasSubstr("it is not a regular file"));
}

TEST_F(WholeFileTest, a_file_that_becomes_shorter_is_an_error) {
  put("0123456789");
  WholeFile file(path());
  fs::resize_file(path(), 4);
  std::byte room[10];
  EXPECT_THAT(error_of<ConfigError>([&] { file.read(0, room); }), HasSubstr("became shorter"));
  file.read(1, std::span(room).first(3));
  EXPECT_EQ(static_cast<char>(room[0]), '1');
}

TEST(ChecksumTest, every_changed_byte_changes_it) {
  auto of = [](std::string_view text) {
    Checksum checksum;
    checksum.add(file_bytes(text.substr(0, text.size() / 3)));
    checksum.add(file_bytes(text.substr(text.size() / 3)));
    return checksum.digits();
  };
  std::string text(1000, 'a');
  const auto sum = of(text);
  EXPECT_EQ(sum.size(), Checksum::kDigits);
  EXPECT_EQ(sum, of(text));
  for (std::size_t i = 0; i < text.size(); ++i) {
    text[i] = 'b';
    EXPECT_NE(of(text), sum);
    text[i] = 'a';
  }
  EXPECT_EQ(of(""), "99aa06d3014798d86001c324468d497f");  // As printed by xxhash's own program.
}

}  // namespace
}  // namespace lockstep::testing
