#include <algorithm>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <lockstep/base/error.h>
#include <lockstep/checkpoint/checkpoint.h>
#include <lockstep/checkpoint/detail/contents.h>
#include <lockstep/checkpoint/format/manifest.h>
#include <lockstep/checkpoint/format/safetensors.h>
#include <lockstep/comm/job/stop.h>
#include <lockstep/control/wire/frame.h>
#include <lockstep/optim/distributed_optimizer.h>
#include <lockstep/os/file.h>

namespace lockstep {
namespace {

using namespace detail;

// State that differs between ranks.
struct RankShare {
  std::optional<CheckpointValues> sampler;
  std::vector<at::Tensor> generators;

  std::string encode() const {
    control::Writer writer;
    writer.number(sampler ? 1 : 0);
    if (sampler) writer.text(Manifest::encode_state(*sampler));
    writer.number(static_cast<std::int64_t>(generators.size()));
    for (const auto& state : generators)
      writer.text({static_cast<const char*>(state.const_data_ptr()), state.nbytes()});
    return writer.take();
  }
  static RankShare decode(std::string_view bytes) {
    control::Reader reader(bytes);
    RankShare share;
    if (reader.number(0, 1) == 1) share.sampler = Manifest::decode_state(reader.text());
    for (auto left = reader.number(0, 1024); left > 0; --left) {
      const auto text = reader.text();
      auto& state =
          share.generators.emplace_back(at::empty({static_cast<std::int64_t>(text.size())}, at::kByte));
      text.copy(static_cast<char*>(state.mutable_data_ptr()), text.size());
    }
    reader.end();
    return share;
  }
};

void write_file(const std::string& path, Header& header, const std::vector<NamedTensor>& tensors) {
  header.metadata[std::string(kChecksumKey)] = std::string(Checksum::kDigits, '0');
  const auto head = encode(header);
  Checksum checksum;
  PartialFile file(path);
  auto write = [&](std::span<const std::byte> bytes) {
    checksum.add(bytes);
    file.write(bytes);
  };
  write(bytes_of(head));
  for (const auto& named : tensors) {
    const auto dense = named.tensor.detach().to(at::kCPU).resolve_conj().resolve_neg().contiguous();
    write(bytes_of(dense));
  }
  const auto place = head.find(kChecksumBegins);
  LOCKSTEP_ASSERT(place != std::string::npos, "the header has no checksum entry");
  file.write_at(place + kChecksumBegins.size(), checksum.digits());
  file.commit();
}

void write_checkpoint(const std::string& path, const SaveOptions& options,
                      const std::vector<RankShare>& shares) {
  at::NoGradGuard no_grad;
  auto tensors = tensors_of(options.model);
  Manifest manifest;
  manifest.ranks = static_cast<std::int64_t>(shares.size());
  manifest.values = options.values;
  if (auto* optimizer = options.optimizer.get())
    manifest.optimizer = describe(*optimizer, parameter_names(*optimizer, tensors), tensors);
  if (options.scheduler.save) manifest.states["scheduler"] = {options.scheduler.save()};
  if (options.scaler.save) manifest.states["scaler"] = {options.scaler.save()};
  if (options.sampler.save) {
    auto& states = manifest.states["sampler"];
    for (const auto& share : shares) states.push_back(share.sampler.value());
    if (std::all_of(states.begin(), states.end(), [&](const auto& each) { return each == states[0]; }))
      states.resize(1);
  }
  for (std::size_t r = 0; r < shares.size(); ++r)
    for (std::size_t g = 0; g < shares[r].generators.size(); ++g)
      tensors.push_back({rng_name(static_cast<std::int64_t>(r), g), shares[r].generators[g]});

  Header header;
  header.metadata[std::string(kManifestKey)] = manifest.encode();
  header.metadata["format"] = "pt";  // transformers rejects files without it
  for (const auto& named : tensors)
    header.tensors.push_back({named.name, dtype_name(named), named.tensor.sizes().vec(), 0, 0});
  try {
    write_file(path, header, tensors);
  } catch (const FileInUse& error) {
    if (options.group) throw;
    throw ConfigError(
        fmt::format("{}. If every rank saves it, set {{.group}} or save on rank 0 only", error.what()));
  }
}

}  // namespace

void save(const std::string& path, const SaveOptions& options, Site site) {
  const auto group = called_at(options.group, site);
  std::string own;
  auto* sharded = dynamic_cast<detail::ShardedOptimizer*>(options.optimizer.get());
  const auto problem = problem_of("save", path, [&] {
    if (sharded != nullptr && (!options.group || options.group->ranks() != sharded->group().ranks()))
      throw ConfigError(
          "a DistributedOptimizer's state is distributed over the ranks: call save on every rank, with "
          "its {.group}");
    RankShare share;
    if (options.sampler.save) share.sampler = options.sampler.save();
    if (options.rng)
      share.generators = generator_states(default_generators(options.model, options.optimizer));
    own = share.encode();
  });
  agree(group, problem);
  std::vector<std::string> encoded = {own};
  if (group) encoded = Group(*group).all_gather_values(own, {.tag = "checkpoint"});
  SaveOptions whole = options;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  if (sharded != nullptr) {
    optimizer = sharded->whole();
    whole.optimizer = *optimizer;
  }
  std::string written;
  if (!group || group->rank() == 0)
    written = problem_of("save", path, [&] {
      std::vector<RankShare> shares;
      for (const auto& bytes : encoded) shares.push_back(RankShare::decode(bytes));
      write_checkpoint(path, whole, shares);
    });
  agree(group, written);
  detail::tell_of_checkpoint();
}

}  // namespace lockstep
