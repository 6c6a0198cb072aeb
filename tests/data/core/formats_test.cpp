#include <lockstep/data/core/formats.h>

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <random>

#include <lockstep/base/error.h>
#include <lockstep/os/mapped_file.h>

#include "support/errors.h"

namespace lockstep::testing {
namespace {

using detail::ArrayHeader;
using detail::Element;

std::span<const std::byte> bytes(const std::string& text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

std::string npy(const std::string& header, std::size_t data, int version = 1) {
  std::string file = std::string("\x93NUMPY") + static_cast<char>(version) + '\0';
  for (int i = 0; i < (version == 1 ? 2 : 4); ++i) file += static_cast<char>(header.size() >> (8 * i));
  return file + header + std::string(data, 'x');
}

std::string described(const std::string& type, const std::string& order, const std::string& shape) {
  return "{'descr': '" + type + "', 'fortran_order': " + order + ", 'shape': " + shape + ", }    \n";
}

TEST(Npy, headers_of_every_version_and_type_are_read) {
  const std::vector<std::tuple<std::string, Element, bool>> types = {
      {"|b1", Element::boolean, false}, {"|u1", Element::u8, false},    {"|i1", Element::i8, false},
      {"<u2", Element::u16, false},     {"<i2", Element::i16, false},   {"<u4", Element::u32, false},
      {"<i4", Element::i32, false},     {"<u8", Element::u64, false},   {"<i8", Element::i64, false},
      {"<f2", Element::f16, false},     {"<f4", Element::f32, false},   {"<f8", Element::f64, false},
      {"<c8", Element::c64, false},     {"<c16", Element::c128, false}, {">f4", Element::f32, true},
      {">i8", Element::i64, true},      {">u1", Element::u8, false},    {"=f8", Element::f64, false}};
  for (const auto& [type, element, swapped] : types)
    for (const int version : {1, 2, 3}) {
      const auto file = npy(described(type, "False", "(2, 3)"), 6 * detail::bytes_of(element), version);
      const auto header = detail::parse_npy("a.npy", bytes(file));
      EXPECT_EQ(header.element, element) << type;
      EXPECT_EQ(header.swapped, swapped) << type;
      EXPECT_FALSE(header.fortran);
      EXPECT_EQ(header.shape, (std::vector<std::int64_t>{2, 3}));
      EXPECT_EQ(header.count, 6);
      EXPECT_EQ(header.offset, file.size() - 6 * detail::bytes_of(element));
    }
}

TEST(Npy, shapes_and_orders_are_read_as_python_writes_them) {
  const std::vector<std::pair<std::string, std::vector<std::int64_t>>> shapes = {
      {"()", {}},         {"(5,)", {5}},        {"(5)", {5}},       {"(1, 2, 3,)", {1, 2, 3}},
      {"(0, 9)", {0, 9}}, {"(3L, 4L)", {3, 4}}, {"( 2,2 )", {2, 2}}};
  for (const auto& [text, shape] : shapes) {
    const auto file = npy(described("<f4", "True", text), 4 * 12);
    const auto header = detail::parse_npy("a.npy", bytes(file));
    EXPECT_EQ(header.shape, shape) << text;
    EXPECT_TRUE(header.fortran);
  }
  // Keys in another order, other quotes, no trailing comma; more data after the array.
  const auto file = npy(R"({"shape": (2,), "fortran_order": False, "descr": "<i4"})", 100);
  EXPECT_EQ(detail::parse_npy("a.npy", bytes(file)).shape, (std::vector<std::int64_t>{2}));
}

TEST(Npy, what_is_none_is_refused_with_its_name) {
  const auto good = described("<f4", "False", "(2,)");
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"", "not an .npy file"},
      {"hello, world", "not an .npy file"},
      {"\x93NUM", "not an .npy file"},
      {"\x93NUMPY", "truncated"},
      {std::string("\x1f\x8b\x08\x00", 4), "gunzip"},
      {std::string("PK\x03\x04", 4), "unzip"},
      {npy(good, 8, 4), ".npy version: expected 1 to 3, got 4"},
      {npy(good, 8, 0), "expected 1 to 3, got 0"},
      {npy(good, 7), "truncated file: expected 8 bytes of array data, got 7"},
      {npy(good, 0).substr(0, 40), "truncated .npy header"},
      {std::string("\x93NUMPY\x02\0\xff\xff\xff\xff{", 13), "expected at most 65536 bytes, got 4294967295"},
      {npy("", 0), "expected '{'"},
      {npy("{}", 0), "is missing"},
      {npy(described("<f4", "False", "(2,)") + "x", 8), "after the dictionary"},
      {npy(described("<f4", "False", "(2,)") + std::string(1, '\0'), 8), "after the dictionary"},
      {npy(described("|O", "False", "(2,)"), 16), "unsupported type '|O'"},
      {npy(described("<U4", "False", "(2,)"), 32), "unsupported type"},
      {npy(described("f4", "False", "(2,)"), 8), "unsupported type"},
      {npy(described("<f16", "False", "(2,)"), 32), "unsupported type"},
      {npy(described("", "False", "(2,)"), 8), "unsupported type"},
      {npy("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (2,)}", 8), "structured"},
      {npy(described("<f4", "Maybe", "(2,)"), 8), "expected True or False"},
      {npy(described("<f4", "False", "2"), 8), "expected '('"},
      {npy(described("<f4", "False", "(2"), 8), "expected a number"},
      {npy(described("<f4", "False", "(-2,)"), 8), "expected a number"},
      {npy(described("<f4", "False", "(2 3)"), 8), "or ')' in the shape"},
      {npy(described("<f4", "False", "(,)"), 8), "expected a number"},
      {npy(described("<f4", "False", "(9223372036854775808,)"), 8), "2^63 or larger"},
      {npy(described("<f4", "False", "(4611686018427387904, 4)"), 8), "more elements than a file can hold"},
      {npy(described("<f4", "False", "(0, 4611686018427387904, 4)"), 8),
       "more elements than a file can hold"},
      {npy(described("<f4", "False", "(4611686018427387903,)"), 8), "more elements than a file can hold"},
      {npy(described("<f4", "False", "(1000000000000,)"), 8), "truncated"},
      {npy("{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (2,)}", 8),
       "unknown or duplicate key 'descr'"},
      {npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2,), 'more': 1}", 8), "key 'more'"},
      {npy("{'descr': '<f4', 'fortran_order': False}", 8), "'shape' is missing"},
      {npy("{'descr': '<f4\\n', 'fortran_order': False, 'shape': (2,)}", 8), "unexpected character"},
      {npy("{'descr: ", 8), "unterminated"},
  };
  for (const auto& [file, part] : cases)
    EXPECT_THAT(error_of<ConfigError>([&, &file = file] { detail::parse_npy("dir/a.npy", bytes(file)); }),
                AllOf(::testing::StartsWith("dir/a.npy: "), HasSubstr(part)))
        << file;
  std::string many = "(";
  for (int i = 0; i < 65; ++i) many += "1,";
  EXPECT_THAT(error_of<ConfigError>(
                  [&] { detail::parse_npy("a", bytes(npy(described("<f4", "False", many + ")"), 8))); }),
              HasSubstr("64 dimensions"));
}

// Changes each byte of a valid header in turn, or cuts the file there: it must be read, or rejected with a
// ConfigError.
TEST(Npy, damage_at_any_byte_is_an_error_or_harmless) {
  const auto good = npy(described("<f4", "False", "(2, 3)"), 24);
  int refused = 0;
  const auto attempt = [&](const std::string& file) {
    try {
      const auto header = detail::parse_npy("a", bytes(file));
      EXPECT_LE(header.offset + static_cast<std::size_t>(header.count) * detail::bytes_of(header.element),
                file.size());
    } catch (const ConfigError&) {
      ++refused;
    }
  };
  for (std::size_t i = 0; i < good.size() - 24; ++i) {
    attempt(good.substr(0, i));
    for (int value = 0; value < 256; value += 3) {
      auto file = good;
      file[i] = static_cast<char>(value);
      attempt(file);
    }
  }
  EXPECT_GT(refused, 3000);
}

std::string idx(const std::vector<std::uint32_t>& shape, int type, std::size_t data) {
  std::string file = {0, 0, static_cast<char>(type), static_cast<char>(shape.size())};
  for (const auto each : shape)
    for (int shift = 24; shift >= 0; shift -= 8) file += static_cast<char>(each >> shift);
  return file + std::string(data, 'x');
}

TEST(Idx, headers_of_every_type_are_read) {
  for (const auto& [type, element] : std::vector<std::pair<int, Element>>{{8, Element::u8},
                                                                          {9, Element::i8},
                                                                          {11, Element::i16},
                                                                          {12, Element::i32},
                                                                          {13, Element::f32},
                                                                          {14, Element::f64}}) {
    const auto size = detail::bytes_of(element);
    const auto file = idx({3, 2}, type, 6 * size);
    const auto header = detail::parse_idx("a", bytes(file));
    EXPECT_EQ(header.element, element);
    EXPECT_EQ(header.swapped, size > 1);
    EXPECT_EQ(header.shape, (std::vector<std::int64_t>{3, 2}));
    EXPECT_EQ(header.offset, 12u);
  }
}

TEST(Idx, what_is_none_is_refused_with_its_name) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"", "truncated"},
      {"ab", "truncated"},
      {"abcd", "not an idx file"},
      {std::string("\x1f\x8b\x08\x00", 4), "gunzip"},
      {idx({2}, 7, 2), "not an idx file"},
      {idx({}, 8, 2), "not an idx file"},
      {idx({2}, 8, 1), "truncated file: expected 2 bytes of array data, got 1"},
      {idx({2}, 8, 3), "has 1 bytes more than its header"},
      {idx({2, 2}, 8, 0).substr(0, 9), "truncated idx header"},
      {idx({0xffffffff, 0xffffffff, 0xffffffff}, 14, 8), "more elements than a file can hold"},
      {idx(std::vector<std::uint32_t>(65, 1), 8, 1), "64 dimensions"},
  };
  for (const auto& [file, part] : cases)
    EXPECT_THAT(error_of<ConfigError>([&, &file = file] { detail::parse_idx("dir/images", bytes(file)); }),
                AllOf(::testing::StartsWith("dir/images: "), HasSubstr(part)));
}

TEST(Cifar, records_are_counted_and_their_labels_checked) {
  std::string file(3 * detail::kCifarRecord, 9);
  EXPECT_EQ(detail::check_cifar10("b", bytes(file)), 3u);
  EXPECT_THAT(error_of<ConfigError>([&] { detail::check_cifar10("d/b.bin", bytes(file + "x")); }),
              HasSubstr("d/b.bin: not a CIFAR-10 binary file: expected a multiple of 3073 bytes, got 9220"));
  EXPECT_THAT(error_of<ConfigError>([&] { detail::check_cifar10("b", bytes("")); }),
              HasSubstr("bytes, got 0"));
  file[2 * detail::kCifarRecord] = 10;
  EXPECT_THAT(error_of<ConfigError>([&] { detail::check_cifar10("b", bytes(file)); }),
              HasSubstr("record 2 has label 10"));
}

TEST(MappedFile, is_the_file_and_changes_stay_in_memory) {
  const auto path = ::testing::TempDir() + "mapped_" + std::to_string(::getpid());
  std::ofstream(path) << "hello";
  {
    detail::MappedFile file(path, detail::MappedFile::Access::writable);
    EXPECT_EQ(std::string(reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()), "hello");
    file.begin()[0] = std::byte('j');
    EXPECT_EQ(std::to_integer<char>(file.bytes()[0]), 'j');
  }
  EXPECT_EQ(std::to_integer<char>(detail::MappedFile(path).bytes()[0]), 'h');
  std::ofstream(path).close();
  EXPECT_EQ(detail::MappedFile(path).bytes().size(), 0u);
  std::filesystem::remove(path);
  EXPECT_THAT(error_of<ConfigError>([&] { detail::MappedFile file(path); }),
              AllOf(HasSubstr(path), HasSubstr("No such file")));
  EXPECT_THAT(error_of<ConfigError>([&] { detail::MappedFile file("/tmp"); }),
              HasSubstr("/tmp: not a regular file"));
  EXPECT_THAT(error_of<ConfigError>([&] { detail::MappedFile file("/dev/null"); }),
              HasSubstr("not a regular file"));
}

}  // namespace
}  // namespace lockstep::testing
