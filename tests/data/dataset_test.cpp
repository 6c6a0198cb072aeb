#include <unistd.h>

#include <filesystem>
#include <fstream>

#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include "support/errors.h"
#include "support/values.h"

namespace lockstep::testing {
namespace {

namespace fs = std::filesystem;
using Numbers = std::vector<std::int64_t>;

TEST(TensorDataset, a_batch_is_the_rows_in_new_memory) {
  const auto x = at::randn({50, 3, 2}), y = at::arange(50);
  TensorDataset dataset(x, y);
  EXPECT_EQ(dataset.size(), 50);
  const auto [one_x, one_y] = dataset.get(7);
  EXPECT_SAME(one_x, x[7]);
  EXPECT_SAME(one_y, y[7]);
  const auto before = x.clone();
  for (const Numbers& indices : {Numbers{3, 1, 4, 1, 5}, Numbers{10, 11, 12}, Numbers{}, Numbers{49}}) {
    const auto list = at::tensor(indices, at::kLong);
    auto [bx, by] = dataset.get_batch(indices);
    EXPECT_SAME(bx, x.index_select(0, list));
    EXPECT_SAME(by, y.index_select(0, list));
    bx.fill_(0);
  }
  EXPECT_SAME(x, before);
}

TEST(TensorDataset, rows_of_any_kind_are_those_of_index_select) {
  const Numbers indices = {5, 0, 5, 2};
  const auto list = at::tensor(indices, at::kLong);
  for (const auto type : {at::kBool, at::kByte, at::kShort, at::kInt, at::kLong, at::kHalf, at::kBFloat16,
                          at::kFloat, at::kDouble, at::kComplexFloat, at::kComplexDouble})
    for (const auto& sizes : {Numbers{6}, Numbers{6, 1}, Numbers{6, 3}, Numbers{6, 2, 5}, Numbers{6, 0}}) {
      const auto x = at::randint(0, 100, sizes, at::kLong).to(type);
      EXPECT_SAME(TensorDataset(x).get_batch(indices)[0], x.index_select(0, list));
    }
  const auto wide = at::randn({4, 12});
  for (const auto& x :
       {wide.t(), wide.t().slice(0, 0, 12, 2), wide.view({12, 4}).slice(1, 0, 2), wide.expand({6, 4, 12}),
        at::_neg_view(wide.view({12, 4})), at::randn({12}, at::kComplexFloat).conj()})
    EXPECT_SAME(TensorDataset(x).get_batch(indices)[0].resolve_conj().resolve_neg(),
                x.index_select(0, list).resolve_conj().resolve_neg());
}

TEST(TensorDataset, gradients_flow_into_tensors_that_want_them) {
  auto x = at::randn({5, 2}).requires_grad_();
  TensorDataset(x).get_batch(Numbers{1, 1, 3})[0].sum().backward();
  EXPECT_SAME(x.grad(), at::tensor({0, 0, 2, 2, 0, 0, 1, 1, 0, 0}, at::kFloat).view({5, 2}));
}

TEST(TensorDataset, what_has_no_equal_rows_is_refused) {
  EXPECT_THAT(error_of<ConfigError>([] { TensorDataset(at::ones({3}), at::ones({4})); }),
              HasSubstr("tensor 1 has 4 rows, but tensor 0 has 3"));
  EXPECT_THAT(error_of<ConfigError>([] { TensorDataset(at::ones({3}), at::Tensor()); }),
              HasSubstr("tensor 1 is undefined"));
  EXPECT_THAT(error_of<ConfigError>([] { TensorDataset(at::ones({})); }), HasSubstr("tensor 0 is a scalar"));
  TensorDataset dataset(at::ones({3}));
  EXPECT_THAT(error_of<ConfigError>([&] { dataset.get(3); }),
              HasSubstr("index 3 is out of range for a dataset of 3"));
  EXPECT_THAT(error_of<ConfigError>([&] { dataset.get(-1); }), HasSubstr("index -1"));
  EXPECT_THAT(error_of<ConfigError>([&] { dataset.get_batch(Numbers{0, 3}); }), HasSubstr("index 3"));
}

TEST(MapDataset, is_the_callable) {
  MapDataset squares(5, [](std::int64_t i) { return i * i; });
  EXPECT_EQ(squares.size(), 5);
  EXPECT_EQ(squares.get(3), 9);
  EXPECT_THAT(error_of<ConfigError>([&] { squares.get(5); }), HasSubstr("index 5"));
  EXPECT_THAT(error_of<ConfigError>([] { MapDataset(-2, [](std::int64_t i) { return i; }); }),
              HasSubstr("expected 0 or more, got -2"));
  MapDataset random(5, [](std::int64_t, at::Generator& generator) {
    return at::randint(1 << 30, {1}, generator, at::kLong);
  });
  torch::manual_seed(3);
  const auto drawn = random.get(0);  // from the default generator if none is given
  torch::manual_seed(3);
  EXPECT_SAME(drawn, at::randint(1 << 30, {1}, at::kLong));
}

TEST(Subset, is_samples_of_another_by_index) {
  TensorDataset dataset(at::arange(10) * 10);
  Subset some(dataset, {7, 2, 2});
  EXPECT_EQ(some.size(), 3);
  EXPECT_EQ(some.get(0)[0].item<int>(), 70);
  EXPECT_SAME(some.get_batch(Numbers{2, 0})[0], at::tensor({20, 70}, at::kLong));
  Subset of_subset(some, {1, 0});
  EXPECT_SAME(of_subset.get_batch(Numbers{0, 1})[0], at::tensor({20, 70}, at::kLong));
  EXPECT_THAT(error_of<ConfigError>([&] { Subset(dataset, {3, 10}); }),
              HasSubstr("index 10 is out of range for a dataset of 10"));
  EXPECT_THAT(error_of<ConfigError>([&] { some.get(3); }),
              HasSubstr("index 3 is out of range for a dataset of 3"));
}

// A user-defined dataset that can be neither copied nor moved.
struct Pinned {
  Pinned() = default;
  Pinned(const Pinned&) = delete;
  std::int64_t size() const { return 4; }
  std::int64_t get(std::int64_t i) const { return i + add; }
  std::int64_t add = 100;
};

TEST(ConcatDataset, is_one_after_another) {
  Pinned own;
  MapDataset mapped(3, [](std::int64_t i) { return i; });
  ConcatDataset both(mapped, own, MapDataset(0, [](std::int64_t i) { return i; }), mapped);
  Numbers all;
  for (std::int64_t i = 0; i < both.size(); ++i) all.push_back(both.get(i));
  EXPECT_EQ(all, (Numbers{0, 1, 2, 100, 101, 102, 103, 0, 1, 2}));
  own.add = 200;  // a variable is held by reference
  EXPECT_EQ(both.get(3), 200);
  EXPECT_THAT(error_of<ConfigError>([&] { both.get(10); }),
              HasSubstr("index 10 is out of range for a dataset of 10"));
  ConcatDataset list(std::vector<decltype(mapped)>{mapped, mapped});
  EXPECT_EQ(list.size(), 6);
  EXPECT_EQ(list.get(5), 2);
}

TEST(RandomSplit, parts_are_disjoint_and_complete) {
  TensorDataset dataset(at::arange(103));
  torch::manual_seed(1);
  const auto [train, valid, test] = random_split(dataset, {0.7, 0.2, 0.1});
  EXPECT_EQ(train.size(), 73);
  EXPECT_EQ(valid.size(), 20);
  EXPECT_EQ(test.size(), 10);
  std::vector<bool> seen(103);
  for (const auto* part : {&train, &valid, &test})
    for (const auto each : part->indices()) {
      EXPECT_FALSE(seen[static_cast<std::size_t>(each)]);
      seen[static_cast<std::size_t>(each)] = true;
    }
  const auto by_length = random_split(dataset, {100, 3});
  EXPECT_EQ(by_length[1].size(), 3);
  EXPECT_THAT(error_of<ConfigError>([&] { random_split(dataset, {100, 4}); }),
              HasSubstr("add up to 103 samples, got 104"));
  EXPECT_THAT(error_of<ConfigError>([&] { random_split(dataset, {0.5, 0.4}); }), HasSubstr("got 0.5"));
  EXPECT_THAT(error_of<ConfigError>([&] { random_split(dataset, {1.5, -0.5}); }), HasSubstr("got -0.5"));
}

// A temporary folder of files.
class Files : public ::testing::Test {
 protected:
  Files() : folder(::testing::TempDir() + "lockstep_data_" + std::to_string(::getpid())) {
    fs::create_directories(folder);
  }
  ~Files() override { fs::remove_all(folder); }
  std::string write(const std::string& name, const std::string& bytes) const {
    std::ofstream(folder + "/" + name, std::ios::binary) << bytes;
    return folder + "/" + name;
  }
  static std::string idx(char type, const std::vector<int>& shape, const std::string& data) {
    std::string file = {0, 0, type, static_cast<char>(shape.size())};
    for (const int each : shape) file += {0, 0, static_cast<char>(each >> 8), static_cast<char>(each)};
    return file + data;
  }
  std::string folder;
};

TEST_F(Files, npy_lies_in_the_file_and_changes_do_not_reach_it) {
  std::string header = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 2), }";
  header.resize(118, ' ');
  const float values[] = {1, 2, 3, 4};
  const auto path = write("a.npy", std::string("\x93NUMPY\x01\0\x76\0", 10) + header +
                                       std::string(reinterpret_cast<const char*>(values), 16));
  auto tensor = read_npy(path);
  EXPECT_SAME(tensor, at::tensor({1, 2, 3, 4}, at::kFloat).view({2, 2}));
  tensor.mul_(2);
  EXPECT_SAME(tensor[1], at::tensor({6, 8}, at::kFloat));
  EXPECT_SAME(read_npy(path)[1], at::tensor({3, 4}, at::kFloat));
  fs::remove(path);
  EXPECT_SAME(tensor[0], at::tensor({2, 4}, at::kFloat));  // the mapping stays valid
  EXPECT_THAT(error_of<ConfigError>([&] { read_npy(path); }),
              AllOf(HasSubstr(path), HasSubstr("No such file")));
}

TEST_F(Files, npy_numbers_that_begin_at_an_odd_byte_are_read_too) {
  const std::string header = "{'descr': '<i8', 'fortran_order': False, 'shape': (2,)}";
  const std::int64_t values[] = {5, -6};
  const auto path =
      write("odd.npy", std::string("\x93NUMPY\x01\0", 8) + static_cast<char>(header.size()) + '\0' + header +
                           std::string(reinterpret_cast<const char*>(values), 16));
  EXPECT_SAME(read_npy(path), at::tensor({5, -6}, at::kLong));
  const std::string truth = "{'descr': '|b1', 'fortran_order': False, 'shape': (2,)}";
  const auto bad = write("bool.npy", std::string("\x93NUMPY\x01\0", 8) + static_cast<char>(truth.size()) +
                                         '\0' + truth + "\x01\x02");
  EXPECT_THAT(error_of<ConfigError>([&] { read_npy(bad); }),
              HasSubstr("expected each boolean to be 0 or 1, got "));
}

TEST_F(Files, mnist_is_read_as_libtorch_reads_it) {
  std::string pixels;
  for (int i = 0; i < 3 * 784; ++i) pixels += static_cast<char>(i * 7);
  for (const std::string part : {"train", "t10k"}) {
    write(part + "-images-idx3-ubyte", idx(8, {3, 28, 28}, pixels));
    write(part + "-labels-idx1-ubyte", idx(8, {3}, {7, 0, 9}));
  }
  for (const bool train : {true, false}) {
    const auto dataset = read_mnist(folder, train);
    const auto& [images, labels] = dataset.tensors();
    EXPECT_EQ(images.sizes(), at::IntArrayRef({3, 1, 28, 28}));
    EXPECT_SAME(labels, at::tensor({7, 0, 9}, at::kLong));
    const auto bytes = at::from_blob(pixels.data(), {3, 1, 28, 28}, at::kByte);
    EXPECT_SAME(images, bytes.to(at::kFloat) / 255);
  }
  write("t10k-labels-idx1-ubyte", idx(8, {2}, {7, 0}));
  EXPECT_THAT(error_of<ConfigError>([&] { read_mnist(folder, false); }),
              AllOf(HasSubstr("t10k-labels"), HasSubstr("expected 3 labels, one per image, got 2")));
  write("t10k-labels-idx1-ubyte", idx(8, {3}, {7, 0, 10}));
  EXPECT_THAT(error_of<ConfigError>([&] { read_mnist(folder, false); }),
              HasSubstr("expected labels from 0 to 9, got "));
  write("t10k-images-idx3-ubyte", idx(8, {3, 2, 2}, "123412341234"));
  EXPECT_THAT(error_of<ConfigError>([&] { read_mnist(folder, false); }), HasSubstr("not MNIST images"));
  EXPECT_THAT(error_of<ConfigError>([&] { read_mnist(folder + "/none"); }),
              HasSubstr("none/train-images-idx3-ubyte"));
}

TEST_F(Files, idx_numbers_are_put_into_the_order_of_this_machine) {
  EXPECT_SAME(read_idx(write("i", idx(12, {2}, std::string("\0\0\1\2\xff\xff\xff\xfe", 8)))),
              at::tensor({258, -2}, at::kInt));
}

TEST_F(Files, cifar10_is_its_five_files_or_the_one_of_tests) {
  const auto records = [](int count, int first) {
    std::string file;
    for (int r = 0; r < count; ++r) {
      file += static_cast<char>((first + r) % 10);
      for (int i = 0; i < 3072; ++i) file += static_cast<char>(first + r + i);
    }
    return file;
  };
  for (int i = 1; i <= 5; ++i) write("data_batch_" + std::to_string(i) + ".bin", records(2, 2 * i));
  write("test_batch.bin", records(1, 99));
  const auto dataset = read_cifar10(folder);
  const auto& [images, labels] = dataset.tensors();
  EXPECT_SAME(labels, at::tensor({2, 3, 4, 5, 6, 7, 8, 9, 0, 1}, at::kLong));
  EXPECT_EQ(images.sizes(), at::IntArrayRef({10, 3, 32, 32}));
  EXPECT_EQ(images[4][2][31][31].item<float>(), static_cast<float>((6 + 3071) % 256) / 255);
  EXPECT_EQ(read_cifar10(folder, false).size(), 1);
  write("data_batch_3.bin", records(2, 6) + "x");
  EXPECT_THAT(error_of<ConfigError>([&] { read_cifar10(folder); }),
              HasSubstr("data_batch_3.bin: not a CIFAR-10"));
}

template <typename T>
std::string token_bytes(std::int64_t count, T add = 0) {
  std::string bytes;
  for (std::int64_t i = 0; i < count; ++i) {
    const auto token = static_cast<T>(i + add);
    bytes.append(reinterpret_cast<const char*>(&token), sizeof token);
  }
  return bytes;
}

TEST_F(Files, tokens_come_in_windows_with_their_successors) {
  const auto path = write("t.bin", token_bytes<std::uint16_t>(21, 60000));
  TokenFile tokens(path, {.block_size = 5});
  EXPECT_EQ(tokens.num_tokens(), 21);
  EXPECT_EQ(tokens.size(), 4);
  const auto [x, y] = tokens.get(3);
  EXPECT_SAME(x, at::arange(60015, 60020));
  EXPECT_SAME(y, at::arange(60016, 60021));
  const auto [bx, by] = tokens.get_batch(Numbers{2, 0});
  EXPECT_SAME(bx, at::stack({at::arange(60010, 60015), at::arange(60000, 60005)}));
  EXPECT_SAME(by, bx + 1);
  EXPECT_EQ(TokenFile(path, {.block_size = 20}).size(), 1);
  EXPECT_EQ(TokenFile(path, {.block_size = 21}).size(), 0);
  TokenFile every(path, {.block_size = 4, .stride = 1});  // as nanoGPT draws them
  EXPECT_EQ(every.size(), 17);
  EXPECT_SAME(every.get(16)[1], at::arange(60017, 60021));
  EXPECT_THAT(error_of<ConfigError>([&] { every.get(17); }), HasSubstr("index 17"));
  TokenFile wide(write("w.bin", std::string(1024, 'h') + token_bytes<std::uint32_t>(11, 4000000000u)),
                 {.block_size = 10, .dtype = at::kUInt32, .skip_bytes = 1024});
  EXPECT_EQ(wide.get(0)[1][9].item<std::int64_t>(), 4000000010);
}

TEST_F(Files, tokens_that_cannot_be_are_refused) {
  const auto path = write("t.bin", std::string(7, 'x'));
  EXPECT_THAT(error_of<ConfigError>([&] { TokenFile(path, {.block_size = 2}); }),
              AllOf(HasSubstr(path), HasSubstr("7 bytes")));
  EXPECT_THAT(error_of<ConfigError>([&] { TokenFile(path, {.block_size = 2, .skip_bytes = 8}); }),
              HasSubstr("7 bytes"));
  EXPECT_THAT(error_of<ConfigError>([&] { TokenFile(path, {.block_size = 0}); }), HasSubstr("block_size 0"));
  EXPECT_THAT(error_of<ConfigError>([&] { TokenFile(path, {.block_size = 2, .dtype = at::kLong}); }),
              HasSubstr("got Long"));
  EXPECT_EQ(TokenFile(write("none.bin", ""), {.block_size = 1}).size(), 0);
}

}  // namespace
}  // namespace lockstep::testing
