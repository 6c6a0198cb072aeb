#include <lockstep/parallel/pipeline/wire.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <set>
#include <utility>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <lockstep/base/error.h>

namespace lockstep::detail {
namespace {

// A message begins with a header of fixed length: kind, length of the payload, and as much of the payload as
// fits. The payload describes each value by its type (-1: undefined), whether it needs a gradient, the type
// of device it is sent from, whether the receiver must move it to its stages' device (otherwise to the CPU),
// the number of dimensions, and the sizes.
constexpr std::int64_t kWords = 32, kBegin = 2, kValues = 1, kFailure = 2;
constexpr std::ptrdiff_t kSizes = 5;
constexpr std::size_t kText = (kWords - kBegin) * sizeof(std::int64_t);

at::Tensor header_of(std::int64_t kind, std::int64_t length) {
  auto header = at::zeros({kWords}, at::kLong);
  header.mutable_data_ptr<std::int64_t>()[0] = kind;
  header.mutable_data_ptr<std::int64_t>()[1] = length;
  return header;
}

}  // namespace

PipelineRoutes::PipelineRoutes(Group its_group, std::optional<at::Device> own, at::Device like,
                               const PipelineSchedule& schedule)
    : group(std::move(its_group)), device(own.value_or(like)) {
  constexpr int kNone = -1;
  const auto gather = [&](int kind) {
    const auto kinds = group.all_gather_values(kind, {.tag = "pipeline devices"});
    return std::set<int>(kinds.begin(), kinds.end());
  };
  auto kinds = gather(own ? static_cast<int>(own->type()) : kNone);
  if (kinds.erase(kNone) > 0) {
    const auto of_world = group.allocate({0}).device();
    if (!own && !kinds.contains(static_cast<int>(like.type())) &&
        kinds.contains(static_cast<int>(of_world.type())))
      device = of_world;
    kinds = gather(static_cast<int>(device.type()));
  }
  alike = kinds.size() == 1;
  if (!alike && group.backend(at::kCPU).empty())
    throw ConfigError(
        fmt::format("Pipeline: stages are on different types of device, but group '{}' has no CPU "
                    "transport to pass values between them; use a backend such as cpu:auto,cuda:auto",
                    group.name()));
  std::set<std::pair<int, int>> pairs;
  for (std::size_t s = 1; s < schedule.rank_of_stage.size(); ++s) {
    const auto [a, b] = std::minmax(schedule.rank_of_stage[s - 1], schedule.rank_of_stage[s]);
    if (a != b) pairs.emplace(a, b);
  }
  for (const auto& [a, b] : pairs) open(a, b), open(b, a);
}

// All ranks have the same engines. Values are sent by the device's engine if all devices are of one type,
// otherwise by the CPU's.
void PipelineRoutes::open(int sender, int receiver) {
  if (group.rank() != sender && group.rank() != receiver) return;
  std::vector<at::Device> without_tags;
  const auto look = [&](at::Device at) {
    if (!group.backend(at.type()).empty() && !group.has_tags(at.type())) without_tags.push_back(at);
  };
  look(at::kCPU);
  if (alike && !device.is_cpu()) look(device);
  if (without_tags.empty()) return;
  auto channel = group.subgroup(
      {sender, receiver},
      {.name = fmt::format("{}.{}to{}", group.name(), sender, receiver), .timeout = group.timeout()});
  const bool sends = group.rank() == sender;
  for (const auto& at : without_tags) {
    auto word = at::zeros({1}, at::TensorOptions(at::kFloat).device(at));
    (sends ? channel.send(word, {.peer = 1}) : channel.recv(word, {.peer = 0})).wait();
  }
  channels_.push_back({sends ? receiver : sender, sends, std::move(channel)});
}

const Group* PipelineRoutes::channel(int peer, bool sends) const {
  for (const auto& each : channels_)
    if (each.peer == peer && each.sends == sends) return &each.group;
  return nullptr;
}

PipelineWire::PipelineWire(const PipelineRoutes& routes, Site site)
    : routes_(routes),
      group_(routes.group),
      has_cpu_(!group_.backend(at::kCPU).empty()),
      words_(has_cpu_ ? at::Device(at::kCPU) : routes.device),
      site_(site) {}

Work PipelineWire::message(bool sends, at::Tensor tensor, int peer, int tag) {
  const auto* channel = routes_.channel(peer, sends);
  const bool by_tag = channel == nullptr || group_.has_tags(tensor.device().type());
  auto group = by_tag ? group_ : *channel;
  const PeerOptions options =
      by_tag ? PeerOptions{.peer = peer, .tag = tag} : PeerOptions{.peer = sends ? 1 : 0};
  return sends ? group.send(std::move(tensor), options, site_)
               : group.recv(std::move(tensor), options, site_);
}

void PipelineWire::post(at::Tensor tensor, int peer, int tag) {
  // Release sends that the receiver has taken.
  while (!sent_.empty() && sent_.front().done()) {
    sent_.front().wait();
    sent_.pop_front();
  }
  sent_.push_back(message(/*sends=*/true, std::move(tensor), peer, tag));
}

at::Tensor PipelineWire::take(at::Tensor tensor, int peer, int tag) {
  message(/*sends=*/false, tensor, peer, tag).wait();
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
      throw ConfigError(
          fmt::format("Pipeline: a stage passed on a tensor of layout {}; only dense ones are supported",
                      c10::str(value.layout())));
    auto plain = value.detach().contiguous();
    const auto own = routes_.device.type();
    const bool home = plain.device().type() == own;
    const bool direct = home && routes_.alike && !group_.backend(own).empty();
    const auto by = direct || !has_cpu_ ? routes_.device : at::Device(at::kCPU);
    words.insert(words.end(), {static_cast<std::int64_t>(plain.scalar_type()), value.requires_grad(),
                               static_cast<std::int64_t>(by.type()), home, plain.dim()});
    words.insert(words.end(), plain.sizes().begin(), plain.sizes().end());
    if (plain.numel() > 0) message.push_back(plain.to(by));
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

// Without tags, messages arrive in the order in which they were sent, which may differ from the order of use
// here.
PipelineWire::Message PipelineWire::receive(int peer, int tag) {
  if (routes_.channel(peer, /*sends=*/false) == nullptr) return take_message(peer, tag);
  for (auto& coming = coming_[peer]; !coming.empty() && !early_.contains(tag); coming.pop_front())
    early_.emplace(coming.front(), take_message(peer, coming.front()));
  auto message = early_.extract(tag);
  LOCKSTEP_ASSERT(!message.empty(), "a pipeline expects a message that its schedule does not contain");
  return std::move(message.mapped());
}

PipelineWire::Message PipelineWire::take_message(int peer, int tag) {
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
  LOCKSTEP_ASSERT(at[0] == kValues, "another sender uses the pipeline's tags in its group");
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
    const auto by = static_cast<at::DeviceType>(word[2]);
    const bool home = word[3] != 0;
    const std::vector<std::int64_t> sizes(word + kSizes, word + kSizes + word[4]);
    auto value = at::empty(sizes, at::TensorOptions(type).device(by == at::kCPU ? at::kCPU : routes_.device));
    if (value.numel() > 0) take(value, peer, tag);
    value = value.to(home ? routes_.device : at::Device(at::kCPU));
    if (word[1] != 0) value.requires_grad_();
    message.values.push_back(std::move(value));
    word += kSizes + word[4];
  }
  return message;
}

void PipelineWire::finish() {
  for (auto& work : sent_) work.wait();
  sent_.clear();
}

}  // namespace lockstep::detail
