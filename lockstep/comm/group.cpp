#include <lockstep/comm/group.h>

#include <algorithm>
#include <cstring>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <lockstep/base/error.h>
#include <lockstep/comm/group/group_state.h>
#include <lockstep/comm/job/world_state.h>

namespace lockstep {
namespace {

// A small value travels in one message of this size. A large one needs a second message.
constexpr std::int64_t kSlot = 256;
constexpr std::int64_t kInSlot = kSlot - static_cast<std::int64_t>(sizeof(std::int64_t));

at::Tensor to_tensor(std::string_view text) {
  auto tensor = at::empty({static_cast<std::int64_t>(text.size())}, at::kByte);
  std::memcpy(tensor.mutable_data_ptr(), text.data(), text.size());
  return tensor;
}

std::string text_of(const at::Tensor& bytes) {
  auto here = bytes.to(at::kCPU).contiguous();
  return {static_cast<const char*>(here.const_data_ptr()), static_cast<std::size_t>(here.numel())};
}

// The length, followed by as much of the text as fits.
at::Tensor slot_of(std::string_view text) {
  std::string slot(static_cast<std::size_t>(kSlot), '\0');
  const auto length = static_cast<std::int64_t>(text.size());
  std::memcpy(slot.data(), &length, sizeof length);
  text.copy(slot.data() + sizeof length, static_cast<std::size_t>(kInSlot));
  return to_tensor(slot);
}

std::int64_t length_in(std::string_view slot) {
  std::int64_t length = 0;
  std::memcpy(&length, slot.data(), sizeof length);
  return length;
}

std::string text_in(std::string_view slot) {
  return std::string(
      slot.substr(sizeof(std::int64_t), static_cast<std::size_t>(std::min(length_in(slot), kInSlot))));
}

}  // namespace

Group::Group(std::shared_ptr<detail::GroupState> state) : state_(std::move(state)) {}

int Group::rank() const { return state_->rank(); }
int Group::size() const { return state_->size(); }
const std::vector<int>& Group::ranks() const { return state_->ranks(); }
const std::string& Group::name() const { return state_->name(); }

std::string Group::backend(at::DeviceType device) const {
  auto engine = state_->transport(device);
  return engine ? engine->backend().getBackendName() : std::string();
}

std::chrono::milliseconds Group::timeout() const { return state_->timeout(); }

bool Group::has_tags(at::DeviceType device) const {
  const auto engine = state_->transport(device);
  return engine && engine->traits().tags;
}

std::string Group::broadcast_value(std::string_view value, RootOptions options, Site site) {
  state_->refuse_within_coalesce("broadcast_value");
  const auto device = state_->control_device();
  auto slot = slot_of(rank() == options.root ? value : std::string_view()).to(device);
  broadcast(slot, options, site).wait();
  const auto head = text_of(slot);
  const auto rest = length_in(head) - kInSlot;
  auto text = text_in(head);
  if (rest > 0) {
    auto tail = rank() == options.root ? to_tensor(value.substr(static_cast<std::size_t>(kInSlot))).to(device)
                                       : at::empty({rest}, at::TensorOptions(at::kByte).device(device));
    broadcast(tail, options, site).wait();
    text += text_of(tail);
  }
  return text;
}

std::vector<std::string> Group::all_gather_values(std::string_view value, CollectiveOptions options,
                                                  Site site) {
  state_->refuse_within_coalesce("all_gather_values");
  const auto device = state_->control_device();
  const auto bytes = at::TensorOptions(at::kByte).device(device);
  auto slots = at::empty({size() * kSlot}, bytes);
  all_gather(slots, slot_of(value).to(device), options, site).wait();
  const auto heads = text_of(slots);

  std::vector<std::string> values;
  std::vector<at::Tensor> tails;
  bool any = false;
  for (int r = 0; r < size(); ++r) {
    const auto slot =
        std::string_view(heads).substr(static_cast<std::size_t>(r * kSlot), static_cast<std::size_t>(kSlot));
    values.push_back(text_in(slot));
    tails.push_back(at::empty({std::max<std::int64_t>(0, length_in(slot) - kInSlot)}, bytes));
    any = any || tails.back().numel() > 0;
  }
  if (any) {
    const auto cut = std::min(value.size(), static_cast<std::size_t>(kInSlot));
    all_gather(tails, to_tensor(value.substr(cut)).to(device), options, site).wait();
    for (std::size_t r = 0; r < values.size(); ++r) values[r] += text_of(tails[r]);
  }
  return values;
}

at::Tensor Group::allocate(at::IntArrayRef sizes, at::ScalarType dtype, std::optional<at::Device> wanted) {
  std::int64_t bytes = static_cast<std::int64_t>(c10::elementSize(dtype));
  for (auto size : sizes)
    if (size < 0 || __builtin_mul_overflow(bytes, size, &bytes))
      throw ConfigError(
          fmt::format("Group::allocate: expected non-negative sizes whose bytes fit into 64 bits, got [{}]",
                      fmt::join(sizes, ", ")));
  const auto own = state_->world().device();
  const auto device = wanted.value_or(own);
  auto options = at::TensorOptions(dtype).device(device);
  auto engine = state_->transport(device.type());
  // The transport allocates only on this rank's own GPU.
  if (!engine || (device.is_cuda() && device.has_index() && device != own) ||
      !engine->backend().supportsTensorAlloc(device.has_index() ? device.index() : 0))
    return at::empty(sizes, options);
  return engine->backend().allocateTensor(c10::multiply_integers(sizes), options).view(sizes);
}

Group Group::subgroup(const std::vector<int>& members, GroupOptions options) {
  std::vector<int> world_ranks;
  for (int member : members) {
    if (member < 0 || member >= size())
      throw ConfigError(fmt::format("subgroup: expected ranks from 0 to {} of group '{}', got rank {}",
                                    size() - 1, name(), member));
    world_ranks.push_back(ranks()[static_cast<std::size_t>(member)]);
  }
  return Group(state_->world().make_group(std::move(world_ranks), std::move(options)));
}

Group Group::called_at(Site site) const {
  auto same = *this;
  if (!same.site_) same.site_ = site;
  return same;
}

Group Group::split(int color, int key, GroupOptions options, Site site) {
  if (color < 0)
    throw ConfigError(fmt::format(
        "split: expected a colour of 0 or more, got {}; to leave a rank alone, give it a colour of its own",
        color));
  struct Choice {
    int color, key;
  };
  auto choices = all_gather_values(Choice{color, key}, {}, site);
  std::vector<int> members;
  for (int r = 0; r < size(); ++r)
    if (choices[static_cast<std::size_t>(r)].color == color) members.push_back(r);
  auto key_of = [&](int member) { return choices[static_cast<std::size_t>(member)].key; };
  std::stable_sort(members.begin(), members.end(), [&](int a, int b) { return key_of(a) < key_of(b); });
  return subgroup(members, std::move(options));
}

}  // namespace lockstep
