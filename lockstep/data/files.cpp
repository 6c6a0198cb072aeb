#include <lockstep/data/files.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include <ATen/ATen.h>
#include <lockstep/base/error.h>
#include <lockstep/data/core/formats.h>
#include <lockstep/os/mapped_file.h>

namespace lockstep {
namespace {

using detail::MappedFile;

at::ScalarType type_of(detail::Element element) {
  using detail::Element;
  switch (element) {
    case Element::boolean: return at::kBool;
    case Element::u8: return at::kByte;
    case Element::i8: return at::kChar;
    case Element::u16: return at::kUInt16;
    case Element::i16: return at::kShort;
    case Element::u32: return at::kUInt32;
    case Element::i32: return at::kInt;
    case Element::u64: return at::kUInt64;
    case Element::i64: return at::kLong;
    case Element::f16: return at::kHalf;
    case Element::f32: return at::kFloat;
    case Element::f64: return at::kDouble;
    case Element::c64: return at::kComplexFloat;
    case Element::c128: return at::kComplexDouble;
  }
  throw Error("unknown element type");
}

// Reverses the byte order of numbers of `size` bytes each.
void swap_bytes(std::byte* begin, std::size_t bytes, std::size_t size) {
  for (auto* each = begin; each < begin + bytes; each += size) std::reverse(each, each + size);
}

// The array that the header describes: in the file's own pages, or in memory if the layout does not fit.
at::Tensor tensor_in(const std::shared_ptr<MappedFile>& file, const detail::ArrayHeader& header) {
  const at::TensorOptions type(type_of(header.element));
  const auto size = detail::bytes_of(header.element);
  std::vector<std::int64_t> strides(header.shape.size());
  for (std::size_t i = 0, stride = 1; i < strides.size(); ++i) {
    const auto dim = header.fortran ? i : strides.size() - 1 - i;
    strides[dim] = static_cast<std::int64_t>(stride);
    stride *= static_cast<std::size_t>(std::max<std::int64_t>(header.shape[dim], 1));
  }
  if (header.count == 0) return at::empty_strided(header.shape, strides, type);
  auto* begin = file->begin() + header.offset;
  const auto bytes = static_cast<std::size_t>(header.count) * size;
  if (header.element == detail::Element::boolean)
    for (const auto* each = begin; each < begin + bytes; ++each)
      if (const int value = std::to_integer<int>(*each); value > 1)
        throw ConfigError(file->path() + ": expected each boolean to be 0 or 1, got " +
                          std::to_string(value));
  const auto number = at::isComplexType(type.dtype().toScalarType()) ? size / 2 : size;
  if (header.swapped || reinterpret_cast<std::uintptr_t>(begin) % number != 0) {
    auto tensor = at::empty_strided(header.shape, strides, type);
    std::memcpy(tensor.mutable_data_ptr(), begin, bytes);
    if (header.swapped) swap_bytes(static_cast<std::byte*>(tensor.mutable_data_ptr()), bytes, number);
    return tensor;
  }
  return at::from_blob(begin, header.shape, strides, [file](void*) {}, type);
}

template <typename Parse>
at::Tensor read(const std::string& path, Parse parse) {
  const auto file = std::make_shared<MappedFile>(path, MappedFile::Access::writable);
  return tensor_in(file, parse(path, file->bytes()));
}

at::Tensor mnist_part(const std::string& path, std::int64_t dimensions) {
  auto tensor = read_idx(path);
  const bool fits = tensor.scalar_type() == at::kByte && tensor.dim() == dimensions &&
                    (dimensions == 1 || (tensor.size(1) == 28 && tensor.size(2) == 28));
  if (!fits)
    throw ConfigError(path + ": not MNIST " +
                      (dimensions == 1 ? "labels: expected one dimension"
                                       : "images: expected three dimensions, the last two 28") +
                      ", of unsigned bytes");
  return tensor;
}

// Converts bytes to numbers from 0 to 1, dividing as torchvision does.
at::Tensor unit_floats(const at::Tensor& bytes) { return bytes.to(at::kFloat).div_(255); }

template <typename T>
void copy_tokens(const std::byte* from, std::int64_t* x, std::int64_t* y, std::int64_t block) {
  std::int64_t next = 0;
  for (std::int64_t i = 0; i <= block; ++i) {
    T token;
    std::memcpy(&token, from + static_cast<std::size_t>(i) * sizeof(T), sizeof(T));
    next = token;
    if (i < block) x[i] = next;
    if (i > 0) y[i - 1] = next;
  }
}

}  // namespace

at::Tensor read_npy(const std::string& path) { return read(path, detail::parse_npy); }
at::Tensor read_idx(const std::string& path) { return read(path, detail::parse_idx); }

TensorDataset<2> read_mnist(const std::string& folder, bool train) {
  const auto prefix = folder + (train ? "/train" : "/t10k");
  const auto images = mnist_part(prefix + "-images-idx3-ubyte", 3);
  const auto labels = mnist_part(prefix + "-labels-idx1-ubyte", 1);
  if (images.size(0) != labels.size(0))
    throw ConfigError(prefix + "-labels-idx1-ubyte: expected " + std::to_string(images.size(0)) +
                      " labels, one per image, got " + std::to_string(labels.size(0)));
  if (const int highest = labels.numel() > 0 ? labels.max().item<int>() : 0; highest > 9)
    throw ConfigError(prefix + "-labels-idx1-ubyte: expected labels from 0 to 9, got " +
                      std::to_string(highest));
  return TensorDataset<2>(unit_floats(images).unsqueeze(1), labels.to(at::kLong));
}

TensorDataset<2> read_cifar10(const std::string& folder, bool train) {
  std::vector<std::string> names = {"test_batch.bin"};
  if (train)
    names = {"data_batch_1.bin", "data_batch_2.bin", "data_batch_3.bin", "data_batch_4.bin",
             "data_batch_5.bin"};
  std::vector<std::shared_ptr<MappedFile>> files;
  std::int64_t total = 0;
  for (const auto& name : names) {
    files.push_back(std::make_shared<MappedFile>(folder + "/" + name, MappedFile::Access::writable));
    total += static_cast<std::int64_t>(detail::check_cifar10(files.back()->path(), files.back()->bytes()));
  }
  auto images = at::empty({total, 3, 32, 32}, at::kFloat);
  auto labels = at::empty({total}, at::kLong);
  std::int64_t done = 0;
  for (const auto& file : files) {
    const auto count = static_cast<std::int64_t>(file->bytes().size() / detail::kCifarRecord);
    const auto records =
        at::from_blob(file->begin(), {count, static_cast<std::int64_t>(detail::kCifarRecord)}, at::kByte);
    labels.narrow(0, done, count).copy_(records.select(1, 0));
    images.narrow(0, done, count).copy_(records.narrow(1, 1, 3072).view({count, 3, 32, 32}));
    done += count;
  }
  return TensorDataset<2>(images.div_(255), labels);
}

TokenFile::TokenFile(const std::string& path, TokenFileOptions options) : options_(options) {
  const auto refuse = [&](const std::string& what) { throw ConfigError(path + ": " + what); };
  if (options.dtype != at::kUInt16 && options.dtype != at::kUInt32)
    refuse(std::string("dtype: expected kUInt16 or kUInt32, got ") + c10::toString(options.dtype));
  if (options_.stride == 0) options_.stride = options_.block_size;
  if (options_.block_size < 1 || options_.stride < 1 || options_.skip_bytes < 0)
    refuse("expected block_size and stride above 0 and skip_bytes of 0 or more, got block_size " +
           std::to_string(options.block_size) + ", stride " + std::to_string(options.stride) +
           ", skip_bytes " + std::to_string(options.skip_bytes));
  const auto file = std::make_shared<const MappedFile>(path);
  const auto bytes = file->bytes();
  const auto skip = static_cast<std::size_t>(options_.skip_bytes);
  const auto width = c10::elementSize(options.dtype);
  if (skip > bytes.size() || (bytes.size() - skip) % width != 0)
    refuse("expected a header of " + std::to_string(skip) + " bytes and tokens of " + std::to_string(width) +
           " bytes each, got " + std::to_string(bytes.size()) + " bytes");
  num_tokens_ = static_cast<std::int64_t>((bytes.size() - skip) / width);
  // The targets of a sample need one more token.
  size_ =
      num_tokens_ <= options_.block_size ? 0 : (num_tokens_ - 1 - options_.block_size) / options_.stride + 1;
  tokens_ = bytes.data() + skip;
  file_ = file;
}

std::array<at::Tensor, 2> TokenFile::get(std::int64_t index) const {
  auto [x, y] = get_batch(std::span(&index, 1));
  return {x.squeeze(0), y.squeeze(0)};
}

std::array<at::Tensor, 2> TokenFile::get_batch(std::span<const std::int64_t> indices) const {
  const auto block = options_.block_size, count = static_cast<std::int64_t>(indices.size());
  for (const auto index : indices) detail::check_index(index, size_);
  std::array<at::Tensor, 2> batch = {at::empty({count, block}, at::kLong),
                                     at::empty({count, block}, at::kLong)};
  auto* x = batch[0].mutable_data_ptr<std::int64_t>();
  auto* y = batch[1].mutable_data_ptr<std::int64_t>();
  const auto width = c10::elementSize(options_.dtype);
  for (const auto index : indices) {
    const auto* from = tokens_ + static_cast<std::size_t>(index * options_.stride) * width;
    if (options_.dtype == at::kUInt16)
      copy_tokens<std::uint16_t>(from, x, y, block);
    else
      copy_tokens<std::uint32_t>(from, x, y, block);
    x += block;
    y += block;
  }
  return batch;
}

}  // namespace lockstep
