#include <lockstep/checkpoint/format/manifest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include <lockstep/checkpoint/format/format_error.h>

#include "support/errors.h"

namespace lockstep::testing {
namespace {

using namespace detail;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

Manifest example() {
  Manifest manifest;
  manifest.ranks = 2;
  manifest.optimizer =
      OptimizerManifest{"Adam",
                        {{{{"lr", {0.1}}, {"betas", {0.9, 1.0 / 3}}, {"amsgrad", {1}}}, {"a", "b.c"}},
                         {{{"lr", {5e-324}}}, {}}},
                        {{"a", {{"step", 7}}}, {"b.c", {}}}};
  manifest.states = {{"sampler", {{{"next", 5}}, {{"next", 6}}}},
                     {"scheduler", {{{"base_lr.0", 1.0}, {"n", 3}}}}};
  manifest.values = {{"epoch", 3},
                     {"most", std::numeric_limits<std::int64_t>::max()},
                     {"least", std::numeric_limits<std::int64_t>::min()},
                     {"loss", 0.1 + 0.2},
                     {"whole", 2.0},
                     {"bad", -kInfinity},
                     {"text", std::string("nan \0 \"\n", 8)}};
  return manifest;
}

TEST(Manifest, what_is_encoded_is_decoded_as_it_was) {
  EXPECT_EQ(Manifest::decode(example().encode()), example());
  EXPECT_EQ(Manifest::decode(Manifest{}.encode()), Manifest{});
  Manifest nan;
  nan.values["x"] = std::nan("");
  EXPECT_TRUE(std::isnan(std::get<double>(Manifest::decode(nan.encode()).values["x"])));
  const CheckpointValues state = {{"a", 1}, {"b", 0.5}};
  EXPECT_EQ(Manifest::decode_state(Manifest::encode_state(state)), state);
}

TEST(Manifest, every_double_keeps_its_bits) {
  std::uint64_t bits = 0x9e3779b97f4a7c15;
  for (int i = 0; i < 20'000; ++i) {
    bits = bits * 6364136223846793005u + 1442695040888963407u;
    double value;
    static_assert(sizeof value == sizeof bits);
    std::memcpy(&value, &bits, sizeof value);
    if (std::isnan(value)) continue;
    const CheckpointValues state = {{"x", value}};
    const auto back = std::get<double>(Manifest::decode_state(Manifest::encode_state(state))["x"]);
    ASSERT_EQ(std::memcmp(&back, &value, sizeof value), 0) << value;
  }
}

TEST(Manifest, what_was_not_encoded_by_us_is_an_error) {
  auto problem = [](const std::string& text) {
    return error_of<FormatError>([&] { Manifest::decode(text); });
  };
  EXPECT_THAT(problem(""), HasSubstr("corrupt manifest: JSON error"));
  EXPECT_THAT(problem("[]"), HasSubstr("corrupt manifest: JSON error"));
  EXPECT_THAT(problem("{}"), HasSubstr("corrupt manifest: JSON error"));
  EXPECT_THAT(problem(R"({"version":2})"), HasSubstr("version 2; this program reads version 1"));
  EXPECT_THAT(problem(R"({"version":"1"})"), HasSubstr("expected an integer"));
  EXPECT_THAT(problem(R"({"version":1.0})"), HasSubstr("expected an integer"));
  EXPECT_THAT(problem(R"({"version":1,"version":1})"), HasSubstr("duplicate key"));
  EXPECT_THAT(problem(std::string(100'000, '[')), HasSubstr("nested too deeply"));
  EXPECT_THAT(problem(std::string(40 << 20, ' ')), HasSubstr("too large"));
  EXPECT_THAT(problem(R"({"version":1,"ranks":0,"states":{},"values":{}})"), HasSubstr("at least one rank"));
  EXPECT_THAT(problem(R"({"version":1,"ranks":1e300,"states":{},"values":{}})"),
              HasSubstr("expected an integer"));
  EXPECT_THAT(problem(R"({"version":1,"ranks":2,"states":{"s":[{},{},{}]},"values":{}})"),
              HasSubstr("expected one state per rank"));
  EXPECT_THAT(problem(R"({"version":1,"ranks":1,"states":{},"values":{"a":18446744073709551615}})"),
              HasSubstr("expected an integer"));
  EXPECT_THAT(problem(R"({"version":1,"ranks":1,"states":{},"values":{"a":[1]}})"),
              HasSubstr("expected a number"));
  EXPECT_THAT(problem(R"({"version":1,"ranks":1,"states":{},"values":{"a":{"number":"one"}}})"),
              HasSubstr("expected a number"));
  Manifest text;
  text.values["x"] = "\xff";
  EXPECT_THAT(error_of<FormatError>([&] { text.encode(); }), HasSubstr("not valid UTF-8"));
}

}  // namespace
}  // namespace lockstep::testing
