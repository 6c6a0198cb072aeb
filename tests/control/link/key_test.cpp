#include <lockstep/control/link/key.h>

#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>

#include <lockstep/base/error.h>

#include "support/environment.h"
#include "support/errors.h"
#include "support/folder.h"

namespace lockstep::testing {
namespace {

namespace fs = std::filesystem;
using control::job_key;
using control::make_key_file;
using control::make_key_text;

const std::string kDigits = "00112233445566778899aabbccddeeff00112233445566778899AABBCCDDEEFF";

class Key : public ::testing::Test {
 protected:
  std::string file(const std::string& text, mode_t mode = 0600) {
    const auto path = folder_.write("key" + std::to_string(++files_), text);
    EXPECT_EQ(::chmod(path.c_str(), mode), 0);
    return path;
  }
  std::string refusal(const std::string& path) {
    return error_of<ConfigError>([&] { (void)job_key(path); });
  }

  const Folder folder_;
  int files_ = 0;
  ScopedEnvironment none_{{{"LOCKSTEP_KEY", std::nullopt}, {"LOCKSTEP_KEY_FILE", std::nullopt}}};
};

TEST_F(Key, a_new_one_is_64_digits_and_never_the_same) {
  const auto one = make_key_text(), other = make_key_text();
  EXPECT_THAT(one, ::testing::MatchesRegex("[0-9a-f]+\n"));
  EXPECT_EQ(one.size(), 65);
  EXPECT_NE(one, other);
}

TEST_F(Key, a_new_file_is_for_this_user_alone_and_never_an_old_one) {
  const std::string path = folder_ / "new";
  const auto umask = ::umask(0);
  make_key_file(path);
  ::umask(umask);
  struct stat status {};
  ASSERT_EQ(::stat(path.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 07777, 0600);
  const auto key = job_key(path);
  ASSERT_TRUE(key);
  EXPECT_EQ(key->size(), control::kKeySize);

  EXPECT_THAT(error_of<ConfigError>([&] { make_key_file(path); }),
              AllOf(HasSubstr(path), HasSubstr("already exists")));
  EXPECT_EQ(job_key(path), key);
  // Not through a link planted by another user.
  const std::string link = folder_ / "link";
  fs::create_symlink(folder_ / "elsewhere", link);
  EXPECT_THAT(error_of<ConfigError>([&] { make_key_file(link); }), HasSubstr("already exists"));
  EXPECT_FALSE(fs::exists(folder_ / "elsewhere"));
  EXPECT_THAT(error_of<ConfigError>([&] { make_key_file(folder_ / "no" / "key"); }),
              HasSubstr("No such file"));
}

TEST_F(Key, the_file_given_goes_before_the_variables) {
  const auto given = file(std::string(64, '1')), named = file(std::string(64, '2') + "\r\n", 0400);
  EXPECT_EQ(job_key(""), std::nullopt);
  ScopedEnvironment key("LOCKSTEP_KEY", kDigits);
  EXPECT_EQ(job_key("")->substr(14, 4), std::string("\xee\xff\x00\x11", 4));
  ScopedEnvironment key_file("LOCKSTEP_KEY_FILE", named);
  EXPECT_EQ(job_key(""), std::string(32, '\x22'));
  EXPECT_EQ(job_key(given), std::string(32, '\x11'));
}

TEST_F(Key, a_file_that_others_can_read_is_refused) {
  for (mode_t mode : {0640, 0604, 0660, 0620, 0601, 0644, 0777, 0700, 0500, 04600}) {
    const auto path = file(kDigits, mode);
    EXPECT_THAT(refusal(path), HasSubstr("chmod 600 " + path)) << mode;
    ScopedEnvironment variable("LOCKSTEP_KEY_FILE", path);
    EXPECT_THAT(refusal(""), AllOf(HasSubstr("LOCKSTEP_KEY_FILE"), HasSubstr("chmod 600 " + path))) << mode;
  }
}

TEST_F(Key, a_file_of_another_user_is_refused_also_behind_a_link) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can make a file of another user";
  const auto path = file(kDigits);
  ASSERT_EQ(::chown(path.c_str(), 12345, 12345), 0);
  const std::string link = folder_ / "link";
  fs::create_symlink(path, link);
  EXPECT_THAT(refusal(path), AllOf(HasSubstr("user 12345"), HasSubstr(path)));
  EXPECT_THAT(refusal(link), AllOf(HasSubstr("user 12345"), HasSubstr(link)));
}

TEST_F(Key, what_is_not_a_file_is_refused_at_once) {
  const std::string pipe = folder_ / "pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_THAT(refusal(pipe), HasSubstr("not a regular file"));
  EXPECT_THAT(refusal(folder_.path()), HasSubstr("not a regular file"));
  EXPECT_THAT(refusal("/dev/null"), HasSubstr("not a regular file"));
  EXPECT_THAT(refusal(folder_ / "none"), HasSubstr("No such file"));
}

TEST_F(Key, what_is_not_a_key_is_refused_without_being_shown) {
  for (const std::string& bad :
       {std::string(), std::string("abc"), kDigits.substr(1), kDigits + "0", kDigits + "\n\n",
        std::string(" ").append(kDigits), std::string("x").append(kDigits, 1), kDigits.substr(1) + "\n",
        kDigits + "\n" + kDigits, std::string(100000, 'a'), kDigits.substr(2) + std::string(2, '\0')}) {
    const auto text = refusal(file(bad));
    EXPECT_THAT(text, HasSubstr("64 hexadecimal digits")) << bad.size();
    EXPECT_THAT(text, Not(HasSubstr("778899")));
  }
  ScopedEnvironment variable("LOCKSTEP_KEY", kDigits.substr(2));
  EXPECT_THAT(refusal(""), AllOf(HasSubstr("LOCKSTEP_KEY"), Not(HasSubstr("778899"))));
}

}  // namespace
}  // namespace lockstep::testing
