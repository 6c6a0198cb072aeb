#include <lockstep/launch/network.h>

#include <lockstep/base/error.h>

#include "support/errors.h"

namespace lockstep::testing {
namespace {

TEST(Endpoint, has_a_host_and_a_port) {
  using Pair = std::pair<std::string, int>;
  EXPECT_EQ(detail::parse_endpoint("--master", "node1:29500"), Pair("node1", 29500));
  EXPECT_EQ(detail::parse_endpoint("--master", "10.0.0.1:1"), Pair("10.0.0.1", 1));
  EXPECT_EQ(detail::parse_endpoint("--master", "[fd00::1]:65535"), Pair("fd00::1", 65535));
  for (const char* text :
       {"", "node1", "node1:", ":1", "node1:0", "node1:65536", "node1:1x", "fd00::1:1", "[]:1"})
    EXPECT_THAT(
        error_of<ConfigError>([&] { detail::parse_endpoint("--master", text); }),
        AllOf(HasSubstr("--master: expected HOST:PORT"), HasSubstr("got '" + std::string(text) + "'")));
}

TEST(Ports, are_ports) {
  EXPECT_GT(detail::free_port(), 0);
  EXPECT_EQ(detail::port_beside(29500), 29501);
  EXPECT_EQ(detail::port_beside(65535), 65534);
}

TEST(Interfaces, have_the_loopback_among_them) {
  EXPECT_THAT(detail::network_interfaces(), ::testing::Contains("lo"));
}

}  // namespace
}  // namespace lockstep::testing
