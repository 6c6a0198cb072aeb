#include <lockstep/base/text.h>
#include <lockstep/modules/replicas.h>

#include <algorithm>
#include <map>
#include <utility>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <lockstep/base/error.h>
#include <lockstep/modules/detail/flat_views.h>

#define XXH_INLINE_ALL  // Header-only: nothing to link.
#include <xxhash.h>

namespace lockstep {
namespace {

std::uint64_t hash_of(const at::Tensor& tensor) {
  const auto bytes = tensor.detach().cpu().contiguous();
  return XXH3_64bits(bytes.const_data_ptr(), bytes.nbytes());
}

// Text such as "'fc.weight' on rank 1 differs from ranks 0, 2, 3". Names the ranks that differ from the
// majority; on a tie, those that differ from the first rank.
std::string difference(const std::string& name, const std::vector<std::uint64_t>& hashes) {
  std::map<std::uint64_t, std::vector<int>> by_hash;
  for (std::size_t rank = 0; rank < hashes.size(); ++rank)
    by_hash[hashes[rank]].push_back(static_cast<int>(rank));
  const auto most = std::max_element(by_hash.begin(), by_hash.end(), [](const auto& a, const auto& b) {
    return std::pair(a.second.size(), -a.second[0]) < std::pair(b.second.size(), -b.second[0]);
  });
  std::vector<int> others;
  for (const auto& [hash, ranks] : by_hash)
    if (hash != most->first) others.insert(others.end(), ranks.begin(), ranks.end());
  std::sort(others.begin(), others.end());
  return fmt::format("'{}' on {} differs from {}", name, detail::ranks_text(others),
                     detail::ranks_text(most->second));
}

// Tensors of one dtype and device, in large pieces: few operations and bounded memory.
void broadcast_alike(Group& group, const std::vector<at::Tensor>& tensors, int root) {
  constexpr std::int64_t kPiece = 64 << 20;
  for (std::size_t begin = 0; begin < tensors.size();) {
    std::int64_t count = 0;
    std::size_t end = begin;
    const auto& model = tensors[begin];
    while (end < tensors.size() &&
           (end == begin ||
            (count + tensors[end].numel()) * static_cast<std::int64_t>(model.element_size()) <= kPiece))
      count += tensors[end++].numel();
    if (end == begin + 1 && model.is_contiguous()) {
      group.broadcast(model, {.root = root, .tag = "replicas"}).wait();
    } else if (count > 0) {
      auto flat = detail::flat_memory(group, count, model.scalar_type(), model);
      std::int64_t offset = 0;
      const auto place = [&](const at::Tensor& tensor) {
        auto part = flat.narrow(0, offset, tensor.numel()).view(tensor.sizes());
        offset += tensor.numel();
        return part;
      };
      if (group.rank() == root)
        for (auto i = begin; i < end; ++i) place(tensors[i]).copy_(tensors[i]);
      group.broadcast(flat, {.root = root, .tag = "replicas"}).wait();
      if (group.rank() != root)
        for (auto i = begin; i < end; ++i) tensors[i].copy_(place(tensors[i]));
    }
    begin = end;
  }
}

}  // namespace

void check_replicas(const torch::nn::Module& module, Group group, CheckReplicasOptions options, Site site) {
  group = group.called_at(site);
  std::vector<std::string> names;
  std::vector<std::uint64_t> hashes;
  const auto add = [&](const std::string& name, const at::Tensor& tensor) {
    if (!tensor.defined() || detail::listed(options.ignore, name)) return;
    names.push_back(name);
    hashes.push_back(hash_of(tensor));
  };
  for (const auto& item : module.named_parameters()) add(item.key(), item.value());
  if (options.buffers)
    for (const auto& item : module.named_buffers()) add(item.key(), item.value());

  const std::string bytes(reinterpret_cast<const char*>(hashes.data()), hashes.size() * sizeof(hashes[0]));
  const auto sums =
      group.all_gather_values(XXH3_64bits(bytes.data(), bytes.size()), {.tag = "check_replicas"});
  if (std::all_of(sums.begin(), sums.end(), [&](auto sum) { return sum == sums[0]; })) return;

  const auto all = group.all_gather_values(std::string_view(bytes), {.tag = "check_replicas"});
  if (std::any_of(all.begin(), all.end(), [&](const auto& each) { return each.size() != bytes.size(); }))
    throw DriftError("replicas differ: the ranks' models have different numbers of tensors");
  std::vector<std::uint64_t> at_tensor(all.size());
  std::string first;
  std::size_t more = 0;
  for (std::size_t i = 0; i < names.size(); ++i) {
    for (std::size_t rank = 0; rank < all.size(); ++rank)
      all[rank].copy(reinterpret_cast<char*>(&at_tensor[rank]), sizeof(std::uint64_t),
                     i * sizeof(std::uint64_t));
    if (std::all_of(at_tensor.begin(), at_tensor.end(), [&](auto hash) { return hash == at_tensor[0]; }))
      continue;
    if (first.empty())
      first = difference(names[i], at_tensor);
    else
      ++more;
  }
  throw DriftError(fmt::format(
      "replicas differ: {}{}. Possible causes: gradients that were not averaged, a seed or data that "
      "changed weights on one rank only, or different optimizer settings",
      first,
      more == 0 ? "" : fmt::format(", and {} more tensor{}", more, more == 1 ? " differs" : "s differ")));
}

namespace detail {

std::optional<std::string> listed(const std::vector<std::string>& list, const std::string& name) {
  for (const auto& entry : list)
    if (name == entry || (name.starts_with(entry) && name[entry.size()] == '.')) return entry;
  return std::nullopt;
}

void broadcast_tensors(Group& group, const std::vector<at::Tensor>& tensors, int root) {
  at::NoGradGuard no_grad;
  // Grouped by dtype and device, ordered by first appearance, because device indices differ between ranks.
  std::vector<std::pair<std::pair<at::ScalarType, at::Device>, std::vector<at::Tensor>>> kinds;
  for (const auto& tensor : tensors) {
    const std::pair key(tensor.scalar_type(), tensor.device());
    auto kind = std::find_if(kinds.begin(), kinds.end(), [&](const auto& each) { return each.first == key; });
    if (kind == kinds.end()) kind = kinds.insert(kinds.end(), {key, {}});
    kind->second.push_back(tensor.variable_data());
  }
  for (const auto& [key, members] : kinds) broadcast_alike(group, members, root);
}

void require_same_lines(Group group, const std::vector<std::string>& lines, const std::string& what) {
  const auto mine = fmt::format("{}", fmt::join(lines, "\n"));
  const auto first = group.broadcast_value(std::string_view(mine), {.tag = "verify"});
  std::string problem;
  if (first != mine) {
    std::size_t at = 0, start = 0;
    std::string theirs;
    for (;; ++at) {
      const auto end = std::min(first.find('\n', start), first.size());
      theirs = start > first.size() ? "" : first.substr(start, end - start);
      if (at >= lines.size() || theirs != lines[at] || end == first.size()) break;
      start = end + 1;
    }
    if (at < lines.size() && theirs == lines[at]) ++at, theirs.clear();  // Rank 0's lines end here.
    const auto shown = [](const std::string& line) {
      return line.empty() ? std::string("nothing more") : line;
    };
    problem = fmt::format("rank {} has {}, rank 0 has {}", group.rank(),
                          shown(at < lines.size() ? lines[at] : ""), shown(theirs));
  }
  for (const auto& each : group.all_gather_values(std::string_view(problem), {.tag = "verify"}))
    if (!each.empty()) throw ConfigError(fmt::format("{}: {}", what, each));
}

}  // namespace detail
}  // namespace lockstep
