#include <lockstep/parallel/pipeline_wire.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include <ATen/ATen.h>
#include <lockstep/base/error.h>

namespace lockstep::detail {
namespace {

// A message begins with a header of fixed length: kind, length of what follows, and what follows, as far as
// it fits. A description has, for each value: its type (-1: undefined), whether it needs a gradient, whether
// it comes from the device's own memory, the number of dimensions, sizes.
constexpr std::int64_t kWords = 32, kValues = 1, kFailure = 2;

at::Tensor words_for(Group& group, std::int64_t count, at::Device device) {
  return at::empty({count},
                   at::TensorOptions(at::kLong).device(group.backend(at::kCPU).empty() ? device : at::kCPU));
}

}  // namespace

void PipelineWire::post(at::Tensor tensor, int peer, int tag) {
  sent_.push_back(group_.send(std::move(tensor), {.peer = peer, .tag = tag}));
}

void PipelineWire::send(const StageValues& values, int peer, int tag) {
  std::vector<std::int64_t> words;
  std::vector<at::Tensor> payload;
  for (const auto& value : values) {
    if (!value.defined()) {
      words.push_back(-1);
      continue;
    }
    auto plain = value.detach().contiguous();
    const bool direct = !group_.backend(plain.device().type()).empty();
    words.insert(words.end(), {static_cast<std::int64_t>(plain.scalar_type()), value.requires_grad(), direct,
                               plain.dim()});
    words.insert(words.end(), plain.sizes().begin(), plain.sizes().end());
    if (plain.numel() > 0) payload.push_back(direct ? std::move(plain) : plain.cpu());
  }
  const auto length = static_cast<std::int64_t>(words.size());
  const auto device = values.empty() || !values[0].defined() ? at::Device(at::kCPU) : values[0].device();
  const auto kept = std::min(length, kWords - 2);
  auto header = at::zeros({kWords}, at::kLong);
  auto* at = header.mutable_data_ptr<std::int64_t>();
  at[0] = kValues;
  at[1] = length;
  std::copy_n(words.begin(), kept, at + 2);
  const auto wire = words_for(group_, 0, device).device();
  post(header.to(wire), peer, tag);
  if (length > kept) post(at::tensor(words, at::kLong).slice(0, kept).to(wire), peer, tag);
  for (auto& tensor : payload) post(std::move(tensor), peer, tag);
}

void PipelineWire::send_failure(const std::string& text, int peer, int tag) {
  auto header = at::zeros({kWords}, at::kLong);
  auto* at = header.mutable_data_ptr<std::int64_t>();
  at[0] = kFailure;
  at[1] = static_cast<std::int64_t>(text.size());
  const auto kept = std::min<std::size_t>(text.size(), (kWords - 2) * sizeof(std::int64_t));
  std::memcpy(at + 2, text.data(), kept);
  post(header, peer, tag);
  if (kept == text.size()) return;
  auto rest = at::empty({static_cast<std::int64_t>(text.size() - kept)}, at::kByte);
  std::memcpy(rest.mutable_data_ptr(), text.data() + kept, text.size() - kept);
  post(rest, peer, tag);
}

PipelineWire::Message PipelineWire::receive(int peer, int tag, at::Device device) {
  const auto take = [&](at::Tensor tensor) {
    group_.recv(tensor, {.peer = peer, .tag = tag}).wait();
    return tensor;
  };
  const auto header = take(words_for(group_, kWords, device)).cpu();
  const auto* at = header.const_data_ptr<std::int64_t>();
  const auto length = at[1];
  if (at[0] == kFailure) {
    std::string text(static_cast<std::size_t>(length), '\0');
    const auto kept = std::min<std::size_t>(text.size(), (kWords - 2) * sizeof(std::int64_t));
    std::memcpy(text.data(), at + 2, kept);
    if (kept < text.size()) {
      const auto rest = take(at::empty({static_cast<std::int64_t>(text.size() - kept)}, at::kByte));
      std::memcpy(text.data() + kept, rest.const_data_ptr(), text.size() - kept);
    }
    return {.failure = std::move(text)};
  }
  LOCKSTEP_ASSERT(at[0] == kValues, "something else than a pipeline sends with its tags in its group");
  const auto kept = std::min(length, kWords - 2);
  std::vector<std::int64_t> words(at + 2, at + 2 + kept);
  if (length > kept) {
    const auto rest = take(words_for(group_, length - kept, device)).cpu();
    words.insert(words.end(), rest.const_data_ptr<std::int64_t>(),
                 rest.const_data_ptr<std::int64_t>() + rest.numel());
  }
  Message message;
  std::vector<bool> needs;
  for (auto word = words.begin(); word != words.end();) {
    if (*word < 0) {
      message.values.emplace_back();
      needs.push_back(false);
      ++word;
      continue;
    }
    const auto type = static_cast<at::ScalarType>(word[0]);
    const bool direct = word[2] != 0;
    const std::vector<std::int64_t> sizes(word + 4, word + 4 + word[3]);
    needs.push_back(word[1] != 0);
    auto value = at::empty(sizes, at::TensorOptions(type).device(direct ? device : at::kCPU));
    if (value.numel() > 0) take(value);
    message.values.push_back(value.to(device));
    word += 4 + word[3];
  }
  for (std::size_t i = 0; i < needs.size(); ++i)
    if (needs[i]) message.values[i].requires_grad_();
  return message;
}

void PipelineWire::finish() {
  for (auto& work : sent_) work.wait();
  sent_.clear();
}

}  // namespace lockstep::detail
