// Finds and loads the module with the MPI transport. The library itself does not link MPI: Open MPI and MPICH
// are not compatible at run time, so each has its own module, and the launcher decides which is used.
#include <dlfcn.h>

#include <array>
#include <filesystem>
#include <mutex>
#include <optional>

#include <fmt/format.h>
#include <lockstep/base/environment.h>
#include <lockstep/base/error.h>
#include <lockstep/comm/c10d/transport.h>

namespace lockstep::detail {
namespace {

using Factory = Transport* (*)(const TransportContext&);

constexpr std::array kFlavours = {"openmpi", "mpich"};
constexpr const char* kRemedy =
    "install the development files of Open MPI or MPICH (Debian: libopenmpi-dev, libmpich-dev) and rebuild "
    "Lockstep";

std::filesystem::path module_path(const std::string& flavour) {
  Dl_info info{};
  LOCKSTEP_ASSERT(
      dladdr(reinterpret_cast<const void*>(&make_mpi_transport), &info) != 0 && info.dli_fname != nullptr,
      "the library cannot find its own file");
  return std::filesystem::path(info.dli_fname).parent_path() / "lockstep" /
         fmt::format("liblockstep_mpi_{}.so", flavour);
}

struct Choice {
  std::string flavour;
  std::string reason;
};

// The MPI that the program itself has loaded, if any: a second one would bind to its symbols.
std::optional<std::string> loaded_flavour() {
  using Version = int (*)(char*, int*);
  auto version = reinterpret_cast<Version>(dlsym(RTLD_DEFAULT, "MPI_Get_library_version"));
  if (version == nullptr) return std::nullopt;
  std::array<char, 16384> text{};  // larger than any MPI's MPI_MAX_LIBRARY_VERSION_STRING
  int length = 0;
  if (version(text.data(), &length) != 0) return std::nullopt;
  return std::string(text.data()).find("Open MPI") != std::string::npos ? "openmpi" : "mpich";
}

Choice choose() {
  if (auto loaded = loaded_flavour()) {
    auto wish = env::text("LOCKSTEP_MPI");
    if (wish && *wish != *loaded)
      throw ConfigError(fmt::format(
          "LOCKSTEP_MPI='{}' conflicts with the MPI that the program itself uses, {}", *wish, *loaded));
    return {*loaded, "the program itself uses it"};
  }
  if (auto wish = env::text("LOCKSTEP_MPI")) {
    for (const char* flavour : kFlavours)
      if (*wish == flavour) return {flavour, fmt::format("LOCKSTEP_MPI={}", *wish)};
    throw ConfigError(fmt::format("invalid LOCKSTEP_MPI='{}'; expected openmpi or mpich", *wish));
  }
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMIX_RANK"})
    if (env::text(name)) return {"openmpi", fmt::format("the launcher set {}", name)};
  for (const char* name : {"PMI_RANK", "PMI_SIZE"})
    if (env::text(name)) return {"mpich", fmt::format("the launcher set {}", name)};
  for (const char* flavour : kFlavours)
    if (std::filesystem::exists(module_path(flavour)))
      return {flavour, "no launcher set a variable, and its module exists"};
  throw ConfigError(fmt::format("the MPI transport was not built: neither {} nor {} exists; {}",
                                module_path(kFlavours[0]).string(), module_path(kFlavours[1]).string(),
                                kRemedy));
}

Factory load() {
  const Choice choice = choose();
  const auto path = module_path(choice.flavour);
  if (!std::filesystem::exists(path))
    throw ConfigError(fmt::format("the MPI transport for {} ({}) was not built: {} does not exist; {}",
                                  choice.flavour, choice.reason, path.string(), kRemedy));
  // Open MPI's plug-ins look up its symbols in the global scope.
  void* module = dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);
  void* factory = module != nullptr ? dlsym(module, "lockstep_make_mpi_transport") : nullptr;
  if (factory == nullptr) {
    const char* why = dlerror();
    throw ConfigError(fmt::format("the MPI transport for {} ({}) cannot be loaded from {}: {}; {}",
                                  choice.flavour, choice.reason, path.string(),
                                  why != nullptr ? why : "no reason given", kRemedy));
  }
  return reinterpret_cast<Factory>(factory);
}

}  // namespace

std::unique_ptr<Transport> make_mpi_transport(const TransportContext& context) {
  // One module for the life of the process: two MPI libraries in one process break each other.
  static std::mutex mutex;
  static Factory factory = nullptr;
  {
    std::lock_guard lock(mutex);
    if (factory == nullptr) factory = load();
  }
  return std::unique_ptr<Transport>(factory(context));
}

}  // namespace lockstep::detail
