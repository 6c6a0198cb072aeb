// Validation of headers: anything malformed throws an error that describes the problem.
#include <lockstep/checkpoint/format/safetensors.h>

#include <random>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <lockstep/checkpoint/format/format_error.h>

#include "support/errors.h"

namespace lockstep::testing {
namespace {

using namespace detail;

std::string problem(const std::string& header, std::uint64_t data_bytes = 24) {
  return error_of<FormatError>([&] { parse_header(header, data_bytes); });
}

std::string entry(const std::string& name, const std::string& dtype, const std::string& shape,
                  const std::string& offsets) {
  return fmt::format(R"("{}":{{"dtype":"{}","shape":{},"data_offsets":{}}})", name, dtype, shape, offsets);
}

std::string header_of(const std::vector<std::string>& entries) {
  return fmt::format("{{{}}}", fmt::join(entries, ","));
}

TEST(Safetensors, what_is_encoded_is_parsed_as_it_was) {
  Header header;
  header.metadata = {{"format", "pt"}, {"note", "\"quoted\" \n \xc3\xa4"}, {"", ""}};
  header.tensors = {{"a", "F32", {2, 3}, 0, 0},
                    {"b.c/d", "BF16", {}, 0, 0},
                    {"empty", "I64", {0, 5}, 0, 0},
                    {"\xe2\x82\xac", "BOOL", {7}, 0, 0},
                    {"z", "F8_E4M3", {1, 1, 1}, 0, 0}};
  const auto bytes = encode(header);
  EXPECT_EQ(bytes.size() % 8, 0);
  const auto length = header_length(bytes, bytes.size() + 34);
  EXPECT_EQ(length, bytes.size() - 8);
  EXPECT_EQ(parse_header(bytes.substr(8), 34), header);
  EXPECT_EQ(header.tensors[4].begin, 33);
  EXPECT_EQ(parse_header("{}", 0), Header{});
  EXPECT_EQ(parse_header("{}   ", 0), Header{});
}

TEST(Safetensors, a_length_that_the_file_cannot_hold_is_an_error) {
  auto length_of = [](std::vector<int> bytes, std::uint64_t size) {
    std::string first;
    for (int b : bytes) first += static_cast<char>(b);
    return error_of<FormatError>([&] { header_length(first, size); });
  };
  EXPECT_THAT(length_of({}, 0), HasSubstr("the file has 0 bytes"));
  EXPECT_THAT(length_of({1, 2, 3}, 3), HasSubstr("the file has 3 bytes, too few for a header"));
  EXPECT_THAT(length_of({3, 0, 0, 0, 0, 0, 0, 0}, 10),
              HasSubstr("invalid header length: 3 bytes in a file of 10 bytes"));
  EXPECT_THAT(length_of({255, 255, 255, 255, 255, 255, 255, 255}, 10), HasSubstr("invalid header length"));
  EXPECT_THAT(length_of({0, 0, 0, 0, 1, 0, 0, 0}, std::uint64_t{1} << 60), HasSubstr("4294967296 bytes"));
  EXPECT_EQ(header_length(std::string("\2\0\0\0\0\0\0\0", 8), 10), 2);
}

TEST(Safetensors, what_is_not_json_or_has_another_form_is_an_error) {
  EXPECT_THAT(problem(""), HasSubstr("not JSON"));
  EXPECT_THAT(problem("{"), HasSubstr("not JSON at byte"));
  EXPECT_THAT(problem("{} {}"), HasSubstr("not JSON"));
  EXPECT_THAT(problem("{\"a\xff\":1}"), HasSubstr("not JSON"));
  EXPECT_THAT(problem("[]"), HasSubstr("expected an object, got an array"));
  EXPECT_THAT(problem("7"), HasSubstr("expected an object"));
  EXPECT_THAT(problem("null"), HasSubstr("expected an object, got null"));
  EXPECT_THAT(problem(R"({"a":1})"), HasSubstr("'a' has a number in the wrong place"));
  EXPECT_THAT(problem(R"({"a":[]})"), HasSubstr("'a' has an array in the wrong place"));
  EXPECT_THAT(problem(R"({"a":{}})"), HasSubstr("tensor 'a': missing dtype, shape or data_offsets"));
  EXPECT_THAT(problem(R"({"a":{"dtype":"F32","shape":[]}})"), HasSubstr("missing"));
  EXPECT_THAT(problem(R"({"a":{"dtype":"F32","shape":[],"data_offsets":[0]}})"), HasSubstr("missing"));
  EXPECT_THAT(problem(R"({"a":{"other":1}})"), HasSubstr("tensor 'a': unknown field 'other'"));
  EXPECT_THAT(problem(R"({"a":{"dtype":7}})"), HasSubstr("in the wrong place"));
  EXPECT_THAT(problem(R"({"a":{"dtype":["F32"]}})"), HasSubstr("an array in the wrong place"));
  EXPECT_THAT(problem(R"({"a":{"shape":[[1]]}})"), HasSubstr("an array in the wrong place"));
  EXPECT_THAT(problem(R"({"a":{"shape":[{}]}})"), HasSubstr("an object in the wrong place"));
  EXPECT_THAT(problem(R"({"a":{"shape":"x"}})"), HasSubstr("a string in the wrong place"));
  EXPECT_THAT(problem(R"({"a":{"shape":[-1]}})"), HasSubstr("a negative number"));
  EXPECT_THAT(problem(R"({"a":{"shape":[1.5]}})"), HasSubstr("a non-integer number"));
  EXPECT_THAT(problem(R"({"a":{"shape":[18446744073709551615]}})"), HasSubstr("a number that is too large"));
  EXPECT_THAT(problem(R"({"a":{"data_offsets":[0,1,2]}})"), HasSubstr("a number in the wrong place"));
  EXPECT_THAT(problem(R"({"__metadata__":{"a":1}})"), HasSubstr("a number in the wrong place"));
  EXPECT_THAT(problem(R"({"__metadata__":{"a":{}}})"), HasSubstr("an object in the wrong place"));
  EXPECT_THAT(problem(R"({"__metadata__":"a"})"), HasSubstr("a string in the wrong place"));
}

TEST(Safetensors, what_is_there_twice_is_an_error) {
  const auto a = entry("a", "F32", "[6]", "[0,24]");
  EXPECT_THAT(problem(header_of({a, a})), HasSubstr("duplicate name 'a'"));
  EXPECT_THAT(problem(R"({"__metadata__":{"k":"1","k":"2"}})"),
              HasSubstr("duplicate key 'k' in __metadata__"));
  EXPECT_THAT(problem(R"({"__metadata__":{},"__metadata__":{}})"), HasSubstr("duplicate name"));
  EXPECT_THAT(problem(R"({"a":{"dtype":"F32","dtype":"F32"}})"),
              HasSubstr("tensor 'a': duplicate field 'dtype'"));
}

TEST(Safetensors, bytes_that_do_not_fit_are_an_error) {
  auto one = [](const std::string& dtype, const std::string& shape, const std::string& offsets) {
    return problem(header_of({entry("t", dtype, shape, offsets)}));
  };
  EXPECT_EQ(parse_header(header_of({entry("t", "F32", "[2,3]", "[0,24]")}), 24).tensors.size(), 1);
  EXPECT_THAT(one("F31", "[6]", "[0,24]"), HasSubstr("tensor 't': unknown dtype 'F31'"));
  EXPECT_THAT(one("F32", "[6]", "[0,23]"), HasSubstr("'t': expected 24 bytes, got 23"));
  EXPECT_THAT(one("F32", "[5]", "[0,24]"), HasSubstr("'t': expected 20 bytes, got 24"));
  EXPECT_THAT(one("F32", "[7]", "[0,28]"), HasSubstr("invalid byte range 0 to 28 of 24"));
  EXPECT_THAT(one("F32", "[6]", "[24,0]"), HasSubstr("invalid byte range 24 to 0"));
  EXPECT_THAT(one("F32", "[5]", "[4,24]"), HasSubstr("begins at byte 4, but the previous one ends at 0"));
  EXPECT_THAT(one("F32", "[5]", "[0,20]"),
              HasSubstr("the file has 24 bytes of tensors, but its header describes 20"));
  EXPECT_THAT(one("F32", "[4611686018427387904,4611686018427387904]", "[0,24]"),
              HasSubstr("too many elements"));
  EXPECT_THAT(one("F32", "[4611686018427387904,4]", "[0,0]"),
              HasSubstr("too many elements"));  // 2^66: wraps to 0
  EXPECT_THAT(one("F32", fmt::format("[{}]", std::string(100, '1')), "[0,24]"),
              HasSubstr("a non-integer number"));
  std::string shape = "[1";
  for (int i = 0; i < 100; ++i) shape += ",1";
  shape += ']';
  EXPECT_THAT(one("F32", shape, "[0,4]"), HasSubstr("more than 64 dimensions"));
  EXPECT_THAT(problem(header_of({entry("a", "U8", "[16]", "[0,16]"), entry("b", "U8", "[16]", "[8,24]")})),
              HasSubstr("'b' begins at byte 8, but the previous one ends at 16"));
  EXPECT_THAT(problem(header_of({entry("a", "U8", "[24]", "[0,24]"), entry("b", "U8", "[24]", "[0,24]")})),
              HasSubstr("'b' begins at byte 0"));
}

TEST(Safetensors, deep_nesting_and_long_names_are_no_danger) {
  EXPECT_THAT(problem(std::string(10'000'000, '[')), HasSubstr("expected an object"));
  std::string deep;
  for (int i = 0; i < 1'000'000; ++i) deep += "{\"a\":";
  EXPECT_THAT(problem(deep), HasSubstr("tensor 'a': unknown field 'a'"));
  const auto long_name = problem(fmt::format("{{\"{}\":1}}", std::string(1'000'000, 'x')));
  EXPECT_LT(long_name.size(), 200);
  EXPECT_THAT(problem(R"({"\u001b[31m\n":1})"), HasSubstr("'?[31m?'"));
}

TEST(Safetensors, names_that_cannot_be_written_are_an_error) {
  Header twice;
  twice.tensors = {{"a", "U8", {1}, 0, 0}, {"a", "U8", {1}, 0, 0}};
  EXPECT_THAT(error_of<FormatError>([&] { encode(twice); }), HasSubstr("duplicate tensor name 'a'"));
  Header bytes;
  bytes.tensors = {{"\xff", "U8", {1}, 0, 0}};
  EXPECT_THAT(error_of<FormatError>([&] { encode(bytes); }), HasSubstr("not valid UTF-8"));
}

TEST(Safetensors, a_damaged_header_is_an_error_or_another_header_and_never_more) {
  Header header;
  header.metadata = {{"k", "v"}};
  header.tensors = {{"a", "F32", {2, 3}, 0, 0}, {"b", "BF16", {4}, 0, 0}};
  const auto text = encode(header).substr(8);
  std::mt19937 draw(1);
  int refused = 0;
  for (int round = 0; round < 20'000; ++round) {
    auto damaged = text;
    for (auto changes = 1 + draw() % 3; changes > 0; --changes)
      damaged[draw() % damaged.size()] = static_cast<char>(draw());
    try {
      for (const auto& tensor : parse_header(damaged, 32).tensors) EXPECT_LE(tensor.end, 32);
    } catch (const FormatError&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 10'000);
}

}  // namespace
}  // namespace lockstep::testing
