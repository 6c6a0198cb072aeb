#include <lockstep/parallel/pipeline_wire.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <lockstep/base/error.h>

namespace lockstep::detail {
namespace {

// A message begins with a header of fixed length: kind, length of what follows, and what follows, as far as
// it fits. A description has, for each value: its type (-1: undefined), whether it needs a gradient, whether
// it comes from the device's own memory, the number of dimensions, sizes.
constexpr std::int64_t kWords = 32, kBegin = 2, kValues = 1, kFailure = 2;
constexpr std::size_t kText = (kWords - kBegin) * sizeof(std::int64_t);

at::Tensor header_of(std::int64_t kind, std::int64_t length) {
  auto header = at::zeros({kWords}, at::kLong);
  header.mutable_data_ptr<std::int64_t>()[0] = kind;
  header.mutable_data_ptr<std::int64_t>()[1] = length;
  return header;
}

}  // namespace

PipelineWire::PipelineWire(Group group, at::Device device, Site site)
    : group_(std::move(group)),
      device_(device),
      words_(group_.backend(at::kCPU).empty() ? device : at::kCPU),
      site_(site) {}

void PipelineWire::post(at::Tensor tensor, int peer, int tag) {
  // What has been taken need not be held any longer.
  while (!sent_.empty() && sent_.front().done()) {
    sent_.front().wait();
    sent_.pop_front();
  }
  sent_.push_back(group_.send(std::move(tensor), {.peer = peer, .tag = tag}, site_));
}

at::Tensor PipelineWire::take(at::Tensor tensor, int peer, int tag) {
  group_.recv(tensor, {.peer = peer, .tag = tag}, site_).wait();
  return tensor;
}

void PipelineWire::send(const StageValues& values, int peer, int tag) {
  std::vector<std::int64_t> words;
  std::vector<at::Tensor> message;
  for (const auto& value : values) {
    if (!value.defined()) {
      words.push_back(-1);
      continue;
    }
    if (value.layout() != at::kStrided)
      throw ConfigError(fmt::format("a stage gave a tensor of layout {} to the next: dense ones are allowed",
                                    c10::str(value.layout())));
    auto plain = value.detach().contiguous();
    const bool direct = !group_.backend(plain.device().type()).empty();
    words.insert(words.end(), {static_cast<std::int64_t>(plain.scalar_type()), value.requires_grad(), direct,
                               plain.dim()});
    words.insert(words.end(), plain.sizes().begin(), plain.sizes().end());
    if (plain.numel() > 0) message.push_back(direct ? std::move(plain) : plain.cpu());
  }
  const auto length = static_cast<std::int64_t>(words.size());
  const auto kept = std::min(length, kWords - kBegin);
  auto header = header_of(kValues, length);
  std::copy_n(words.begin(), kept, header.mutable_data_ptr<std::int64_t>() + kBegin);
  if (length > kept) message.insert(message.begin(), at::tensor(words, at::kLong).slice(0, kept).to(words_));
  message.insert(message.begin(), header.to(words_));
  for (auto& tensor : message) post(std::move(tensor), peer, tag);
}

void PipelineWire::send_failure(const std::string& text, int peer, int tag) {
  auto header = header_of(kFailure, static_cast<std::int64_t>(text.size()));
  const auto kept = std::min(text.size(), kText);
  std::memcpy(header.mutable_data_ptr<std::int64_t>() + kBegin, text.data(), kept);
  post(header.to(words_), peer, tag);
  if (kept == text.size()) return;
  auto rest = at::empty({static_cast<std::int64_t>(text.size() - kept)}, at::kByte);
  std::memcpy(rest.mutable_data_ptr(), text.data() + kept, text.size() - kept);
  post(rest.to(words_), peer, tag);
}

PipelineWire::Message PipelineWire::receive(int peer, int tag) {
  const auto on_words = [&](std::int64_t count, at::ScalarType type) {
    return at::empty({count}, at::TensorOptions(type).device(words_));
  };
  const auto header = take(on_words(kWords, at::kLong), peer, tag).cpu();
  const auto* at = header.const_data_ptr<std::int64_t>();
  const auto length = at[1];
  if (at[0] == kFailure) {
    std::string text(static_cast<std::size_t>(length), '\0');
    const auto kept = std::min(text.size(), kText);
    std::memcpy(text.data(), at + kBegin, kept);
    if (kept < text.size()) {
      const auto rest =
          take(on_words(static_cast<std::int64_t>(text.size() - kept), at::kByte), peer, tag).cpu();
      std::memcpy(text.data() + kept, rest.const_data_ptr(), text.size() - kept);
    }
    return {.failure = std::move(text)};
  }
  LOCKSTEP_ASSERT(at[0] == kValues, "something else than a pipeline sends with its tags in its group");
  const auto kept = std::min(length, kWords - kBegin);
  std::vector<std::int64_t> words(at + kBegin, at + kBegin + kept);
  if (length > kept) {
    const auto rest = take(on_words(length - kept, at::kLong), peer, tag).cpu();
    words.insert(words.end(), rest.const_data_ptr<std::int64_t>(),
                 rest.const_data_ptr<std::int64_t>() + rest.numel());
  }
  Message message;
  for (auto word = words.begin(); word != words.end();) {
    if (*word < 0) {
      message.values.emplace_back();
      ++word;
      continue;
    }
    const auto type = static_cast<at::ScalarType>(word[0]);
    const bool direct = word[2] != 0;
    const std::vector<std::int64_t> sizes(word + 4, word + 4 + word[3]);
    auto value = at::empty(sizes, at::TensorOptions(type).device(direct ? device_ : at::kCPU));
    if (value.numel() > 0) take(value, peer, tag);
    value = value.to(device_);
    if (word[1] != 0) value.requires_grad_();
    message.values.push_back(std::move(value));
    word += 4 + word[3];
  }
  return message;
}

void PipelineWire::finish() {
  for (auto& work : sent_) work.wait();
  sent_.clear();
}

}  // namespace lockstep::detail
