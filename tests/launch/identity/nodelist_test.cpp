#include <lockstep/launch/identity/nodelist.h>

#include <lockstep/base/error.h>

#include "support/errors.h"

namespace lockstep::testing {
namespace {

using detail::expand_nodelist;
using Hosts = std::vector<std::string>;

TEST(Nodelist, hosts_are_written_out_in_order) {
  const std::vector<std::pair<std::string, Hosts>> cases = {
      {"vm", {"vm"}},
      {"a,b", {"a", "b"}},
      {"b,a,b", {"b", "a", "b"}},
      {"gpu[1-3]", {"gpu1", "gpu2", "gpu3"}},
      {"gpu[01-03,7],login", {"gpu01", "gpu02", "gpu03", "gpu7", "login"}},
      {"n[08-11]", {"n08", "n09", "n10", "n11"}},
      {"n[8-11]", {"n8", "n9", "n10", "n11"}},
      {"n[098-101]", {"n098", "n099", "n100", "n101"}},
      {"n[5]", {"n5"}},
      {"n[7-7,3]", {"n7", "n3"}},
      {"a[1-3,7]b[01-02],c", {"a1b01", "a1b02", "a2b01", "a2b02", "a3b01", "a3b02", "a7b01", "a7b02", "c"}},
      {"r[0-1][0-1]", {"r00", "r01", "r10", "r11"}},
      {"[1-2]", {"1", "2"}},
      {"n[1-2].rack-3.example.org", {"n1.rack-3.example.org", "n2.rack-3.example.org"}},
      {"a_b[0]-x", {"a_b0-x"}},
  };
  for (const auto& [text, hosts] : cases) EXPECT_EQ(expand_nodelist("LIST", text), hosts) << text;
}

TEST(Nodelist, what_is_no_list_is_refused_and_named) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"", "characters, got 0"},
      {",", "missing host at character 1"},
      {"a,", "missing host at the end"},
      {"a,,b", "missing host at character 3"},
      {"(null)", "missing host at character 1"},
      {"None assigned", "unexpected ' ' at character 5"},
      {"a b", "' '"},
      {"a[1", "missing ']' at the end"},
      {"a[", "missing number"},
      {"a[]", "missing number"},
      {"a[1,]", "missing number"},
      {"a[1-]", "missing number"},
      {"a[-1]", "missing number"},
      {"a[1-2-3]", "missing ']'"},
      {"a[x]", "missing number"},
      {"a[[1]]", "missing number"},
      {"a]", "unexpected ']' at character 2"},
      {"a[3-1]", "counts down"},
      {"a[1-99999999999]", "11 digits"},
      {"a[0-999999999]", "at most 65536 hosts"},
      {"a[0-999][0-999]", "at most 65536 hosts"},
      {"a[0-65535],b", "at most 65536 hosts"},
      {"a;rm -rf", "';'"},
      {std::string(300, 'a'), "255"},
      {std::string(70000, 'a'), "characters, got 70000"},
  };
  for (const auto& [text, part] : cases)
    EXPECT_THAT(error_of<ConfigError>([&, &list = text] { expand_nodelist("LIST", list); }),
                AllOf(HasSubstr("LIST: expected a list of hosts"), HasSubstr(part)))
        << text.substr(0, 100);
}

TEST(Nodelist, the_largest_one_is_taken) {
  const auto hosts = expand_nodelist("LIST", "n[00000-65535]");
  EXPECT_EQ(hosts.size(), 65536u);
  EXPECT_EQ(hosts.back(), "n65535");
}

}  // namespace
}  // namespace lockstep::testing
