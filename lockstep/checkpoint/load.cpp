#include <algorithm>
#include <set>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <lockstep/base/error.h>
#include <lockstep/checkpoint/checkpoint.h>
#include <lockstep/checkpoint/detail/contents.h>
#include <lockstep/checkpoint/format/format_error.h>
#include <lockstep/checkpoint/format/manifest.h>
#include <lockstep/checkpoint/format/safetensors.h>
#include <lockstep/optim/distributed_optimizer.h>
#include <lockstep/os/file.h>

namespace lockstep {
namespace {

using namespace detail;

std::string shown(const std::string& dtype, at::IntArrayRef shape) {
  return fmt::format("{} [{}]", dtype, fmt::join(shape, ", "));
}

class Loader {
 public:
  Loader(const std::string& path, const LoadOptions& options) : options_(options), file_(path) {
    rank_ = options.group ? options.group->rank() : 0;
    optimizer_ = options.optimizer.get();
    if ((sharded_ = dynamic_cast<ShardedOptimizer*>(optimizer_)) != nullptr) {
      whole_ = sharded_->make_whole();
      optimizer_ = whole_.get();
    }
  }

  // Reads and checks everything without changing anything.
  void prepare() {
    read_header();
    want_model();
    want_optimizer();
    want_generators();
    read_tensors();
    if (optimizer_ != nullptr && manifest_ && manifest_->optimizer)
      put_optimizer_ = prepare_state(*optimizer_, names_, *manifest_->optimizer, wanted_);
    find_states();
  }

  // Loads the parts with load_state() functions, which may throw. undo() restores their previous state.
  void load_states() {
    for (auto& [part, state] : states_) {
      auto before = part->save();
      part->load(state);
      loaded_states_.emplace_back(part, std::move(before));
    }
  }
  void undo() {
    for (auto& [part, before] : loaded_states_) part->load(before);
  }

  Loaded commit() {
    at::NoGradGuard no_grad;
    for (const auto& named : model_)
      if (const auto found = wanted_.find(named.name); found != wanted_.end())
        named.tensor.detach().copy_(found->second);
    if (put_optimizer_) {
      put_optimizer_();
      if (sharded_ != nullptr) sharded_->take(*whole_);
    }
    if (!generator_states_.empty()) set_generators(generators_, generator_states_);
    return std::move(result_);
  }

  const std::string& id() const { return id_; }

 private:
  void read_header() {
    std::string first(std::min<std::uint64_t>(file_.size(), kLengthBytes), '\0');
    file_.read(0, std::as_writable_bytes(std::span(first)));
    const auto length = header_length(first, file_.size());
    std::string text(length, '\0');
    file_.read(kLengthBytes, std::as_writable_bytes(std::span(text)));
    data_begin_ = kLengthBytes + length;
    header_ = parse_header(text, file_.size() - data_begin_);
    for (const auto& entry : header_.tensors) entries_.emplace(entry.name, &entry);

    const auto& metadata = header_.metadata;
    if (const auto found = metadata.find(std::string(kManifestKey)); found != metadata.end()) {
      manifest_ = Manifest::decode(found->second);
      result_.values = manifest_->values;
      result_.ranks = manifest_->ranks;
      const auto sum = metadata.find(std::string(kChecksumKey));
      if (sum == metadata.end()) throw FormatError("missing checksum: the file was modified or damaged");
      expected_sum_ = sum->second;
      const auto place = text.find(fmt::format("{}{}\"", kChecksumBegins, expected_sum_));
      if (expected_sum_.size() != Checksum::kDigits || place == std::string::npos)
        throw FormatError("malformed checksum: the file was modified or damaged");
      text.replace(place + kChecksumBegins.size(), Checksum::kDigits, Checksum::kDigits, '0');
    }
    checksum_.add(bytes_of(first));
    checksum_.add(bytes_of(text));
  }

  void lacks(const std::string& what) {
    if (options_.strict)
      throw FormatError(
          fmt::format("the file has no {}{}", what, manifest_ ? "" : " (it was not written by Lockstep)"));
    result_.missing.push_back(what);
  }

  // Requests a tensor from the file, if its dtype and shape match.
  void want(const TensorEntry& entry, const NamedTensor& like) {
    const auto dtype = dtype_name(like);
    if (entry.dtype != dtype || at::IntArrayRef(entry.shape) != like.tensor.sizes())
      different_.push_back(fmt::format("'{}' is {} in the file and {} here", entry.name,
                                       shown(entry.dtype, entry.shape), shown(dtype, like.tensor.sizes())));
    else
      wanted_[entry.name] = at::empty(entry.shape, dtype_of(entry.dtype));
  }

  void want_model() {
    model_ = tensors_of(options_.model);
    if (options_.model.get() == nullptr) return;
    std::set<std::string> here;
    for (const auto& named : model_) {
      here.insert(named.name);
      const auto found = entries_.find(named.name);
      if (found == entries_.end())
        result_.missing.push_back(named.name);
      else
        want(*found->second, named);
    }
    for (const auto& entry : header_.tensors)
      if (!reserved(entry.name) && !here.contains(entry.name)) result_.unexpected.push_back(entry.name);
    check_fit();
  }

  void check_fit() {
    auto list = [](const char* title, std::vector<std::string> names) {
      const auto count = names.size();
      if (count == 0) return std::string();
      names.resize(std::min<std::size_t>(count, 8));
      return fmt::format("; {}: {}{}", title, fmt::join(names, ", "),
                         count > 8 ? fmt::format(" and {} more", count - 8) : "");
    };
    std::string problem = list("different", different_);
    if (options_.strict)
      problem = list("missing", result_.missing) + list("unexpected", result_.unexpected) + problem;
    if (!problem.empty()) throw FormatError(fmt::format("the checkpoint does not match{}", problem));
  }

  void want_optimizer() {
    if (optimizer_ == nullptr) return;
    if (!manifest_ || !manifest_->optimizer) return lacks("optimizer");
    names_ = parameter_names(*optimizer_, model_);
    want_state(
        *optimizer_, names_, *manifest_->optimizer,
        [&](const std::string& name) -> std::optional<at::ScalarType> {
          const auto found = entries_.find(name);
          if (found == entries_.end()) return {};
          return dtype_of(found->second->dtype);
        },
        [&](const std::string& name, const at::Tensor& like) { want(*entries_.at(name), {name, like}); });
    check_fit();
  }

  void want_generators() {
    if (!options_.rng) return;
    if (!entries_.contains(rng_name(0, 0))) return lacks("states of random number generators");
    generators_ = default_generators(options_.model, options_.optimizer);
    for (std::size_t g = 0; g < generators_.size(); ++g) {
      const auto found = entries_.find(rng_name(rank_, g));
      if (found == entries_.end()) return;  // saved with fewer ranks or devices: keep this one's own
      if (found->second->dtype != "U8")
        throw FormatError(
            fmt::format("random number generator states: expected dtype U8, got {}", found->second->dtype));
      wanted_[found->first] = at::empty(found->second->shape, at::kByte);
    }
    result_.rng = true;
  }

  // Reads all tensors in file order, because the checksum covers every byte.
  void read_tensors() {
    std::vector<std::byte> passed_over;
    for (const auto& entry : header_.tensors) {
      const auto found = wanted_.find(entry.name);
      if (found != wanted_.end()) {
        const auto bytes = bytes_of(found->second);
        file_.read(data_begin_ + entry.begin, bytes);
        checksum_.add(bytes);
        continue;
      }
      if (expected_sum_.empty()) continue;
      passed_over.resize(std::min<std::uint64_t>(entry.end - entry.begin, 1 << 20));
      for (std::uint64_t at = entry.begin; at < entry.end;) {
        const auto now = std::min<std::uint64_t>(entry.end - at, passed_over.size());
        file_.read(data_begin_ + at, std::span(passed_over).first(now));
        checksum_.add(std::span(passed_over).first(now));
        at += now;
      }
    }
    id_ = checksum_.digits();
    if (!expected_sum_.empty() && id_ != expected_sum_)
      throw FormatError("checksum mismatch: the file was modified or damaged");
    if (result_.rng) {
      for (std::size_t g = 0; g < generators_.size(); ++g)
        generator_states_.push_back(wanted_.at(rng_name(rank_, g)));
      check_generators(generators_, generator_states_);
    }
  }

  void find_states() {
    for (const auto& [name, part] :
         {std::pair("scheduler", &options_.scheduler), std::pair("scaler", &options_.scaler),
          std::pair("sampler", &options_.sampler)}) {
      if (!part->load) continue;
      const auto* by_rank =
          manifest_ && manifest_->states.contains(name) ? &manifest_->states.at(name) : nullptr;
      if (by_rank == nullptr) {
        lacks(name);
      } else if (by_rank->size() > 1 && static_cast<std::size_t>(rank_) >= by_rank->size()) {
        lacks(fmt::format("{} of rank {}", name, rank_));
      } else {
        states_.emplace_back(part, (*by_rank)[by_rank->size() > 1 ? static_cast<std::size_t>(rank_) : 0]);
      }
    }
  }

  const LoadOptions& options_;
  WholeFile file_;
  int rank_ = 0;
  std::uint64_t data_begin_ = 0;
  Header header_;
  std::map<std::string, const TensorEntry*> entries_;
  std::optional<Manifest> manifest_;
  std::string expected_sum_, id_;
  Checksum checksum_;
  std::vector<NamedTensor> model_;
  ParameterNames names_;
  std::map<std::string, at::Tensor> wanted_;  // tensors to read from the file
  std::vector<std::string> different_;
  std::vector<at::Generator> generators_;
  std::vector<at::Tensor> generator_states_;
  torch::optim::Optimizer* optimizer_ = nullptr;
  ShardedOptimizer* sharded_ = nullptr;             // set if its state is distributed over the ranks
  std::unique_ptr<torch::optim::Optimizer> whole_;  // the whole optimizer; sharded_ takes its part of it
  std::function<void()> put_optimizer_;
  std::vector<std::pair<const StatePart*, CheckpointValues>> states_, loaded_states_;
  Loaded result_;
};

const CheckpointValue& value_of(const Loaded& loaded, const std::string& name) {
  const auto found = loaded.values.find(name);
  if (found == loaded.values.end())
    throw ConfigError(fmt::format("the checkpoint has no value named '{}'", name));
  return found->second;
}

}  // namespace

void StatePart::not_a_number(const std::string& name) {
  throw ConfigError(fmt::format("state value '{}' has the wrong type", name));
}

std::int64_t Loaded::integer(const std::string& name) const {
  if (const auto* whole = std::get_if<std::int64_t>(&value_of(*this, name))) return *whole;
  throw ConfigError(fmt::format("checkpoint value '{}': expected an integer", name));
}

double Loaded::number(const std::string& name) const {
  const auto& value = value_of(*this, name);
  if (const auto* real = std::get_if<double>(&value)) return *real;
  if (const auto* whole = std::get_if<std::int64_t>(&value)) return static_cast<double>(*whole);
  throw ConfigError(fmt::format("checkpoint value '{}': expected a number", name));
}

std::string Loaded::text(const std::string& name) const {
  if (const auto* text = std::get_if<std::string>(&value_of(*this, name))) return *text;
  throw ConfigError(fmt::format("checkpoint value '{}': expected a string", name));
}

Loaded load(const std::string& path, const LoadOptions& options, Site site) {
  const auto group = called_at(options.group, site);
  std::unique_ptr<Loader> loader;
  auto problem = problem_of("load", path, [&] {
    loader = std::make_unique<Loader>(path, options);
    loader->prepare();
  });
  agree(group, problem);
  if (group) {
    const auto ids = Group(*group).all_gather_values(loader->id(), {.tag = "checkpoint"});
    for (std::size_t r = 1; r < ids.size(); ++r)
      if (ids[r] != ids[0])
        throw ConfigError(fmt::format("cannot load '{}': ranks 0 and {} read different files", path, r));
  }

  problem = problem_of("load", path, [&] { loader->load_states(); });
  try {
    agree(group, problem);
  } catch (...) {
    loader->undo();
    throw;
  }
  return loader->commit();
}

}  // namespace lockstep
