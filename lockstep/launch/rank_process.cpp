#include <lockstep/launch/rank_process.h>

#include <elf.h>
#include <fcntl.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <sstream>
#include <system_error>

#include <fmt/format.h>
#include <lockstep/base/error.h>
#include <lockstep/base/start_thread.h>

namespace lockstep::detail {
namespace {

// Variables of an enclosing launcher, and secrets that ranks do not need.
constexpr const char* kRemoved[] = {"LOCKSTEP_KEY", "LOCKSTEP_KEY_FILE", "TORCHELASTIC_RUN_ID",
                                    "TORCHELASTIC_USE_AGENT_STORE"};

std::map<std::string, std::string> current_environment() {
  std::map<std::string, std::string> variables;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    const auto equals = text.find('=');
    if (equals != std::string::npos) variables.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  return variables;
}

std::vector<char*> pointers(const std::vector<std::string>& texts) {
  std::vector<char*> list;
  for (const auto& text : texts) list.push_back(const_cast<char*>(text.c_str()));
  list.push_back(nullptr);
  return list;
}

std::string in_plans_directory(const LaunchOptions& options, const std::string& file) {
  return file.starts_with('/') || options.directory.empty() ? file : options.directory + "/" + file;
}

// Reads the first bytes of a file.
std::string beginning_of(const std::string& file) {
  std::string bytes(128, '\0');
  const int fd = ::open(file.c_str(), O_RDONLY | O_CLOEXEC);
  const auto got = fd < 0 ? 0 : ::read(fd, bytes.data(), bytes.size());
  if (fd >= 0) ::close(fd);
  bytes.resize(static_cast<std::size_t>(std::max<ssize_t>(got, 0)));
  return bytes;
}

// Describes the machine an ELF file is built for, from its header; empty if it is not ELF.
std::string machine_of(const std::string& bytes) {
  constexpr std::size_t kClass = 4, kOrder = 5, kMachine = 18;
  if (!bytes.starts_with(ELFMAG) || bytes.size() < kMachine + 2) return {};
  const auto byte = [&](std::size_t at) { return static_cast<unsigned char>(bytes[at]); };
  const bool big = byte(kOrder) == ELFDATA2MSB;
  const int number =
      big ? byte(kMachine) * 256 + byte(kMachine + 1) : byte(kMachine + 1) * 256 + byte(kMachine);
  const std::map<int, const char*> names = {
      {EM_386, "i386"},    {EM_ARM, "arm"},     {EM_X86_64, "x86_64"}, {EM_AARCH64, "aarch64"},
      {EM_RISCV, "riscv"}, {EM_PPC64, "ppc64"}, {EM_S390, "s390"}};
  const auto name = names.find(number);
  return fmt::format("{}, {} bits{}", name == names.end() ? fmt::format("machine {}", number) : name->second,
                     byte(kClass) == ELFCLASS64 ? 64 : 32, big ? ", big-endian" : "");
}

// Returns 0 if this file can be executed, else errno.
int problem_with(const std::string& file) {
  struct stat status {};
  if (::stat(file.c_str(), &status) != 0) return errno;
  if (!S_ISREG(status.st_mode)) return EACCES;
  return ::access(file.c_str(), X_OK) == 0 ? 0 : errno;
}

}  // namespace

std::vector<std::string> rank_environment(const LaunchOptions& options, const RankPlace& place) {
  auto variables = current_environment();
  for (const char* name : kRemoved) variables.erase(name);
  const std::string threads = std::to_string(place.threads);
  variables["RANK"] = std::to_string(place.rank);
  variables["WORLD_SIZE"] = std::to_string(place.world_size);
  variables["LOCAL_RANK"] = std::to_string(place.local_rank);
  variables["LOCAL_WORLD_SIZE"] = std::to_string(options.num_ranks);
  variables["GROUP_RANK"] = std::to_string(options.node);
  variables["MASTER_ADDR"] = place.master_address;
  variables["MASTER_PORT"] = std::to_string(place.master_port);
  // A list for nested levels is passed on unchanged.
  const bool from_openmp = options.threads == 0 && variables["LOCKSTEP_THREADS"].empty();
  if (!from_openmp || variables["OMP_NUM_THREADS"].empty()) variables["OMP_NUM_THREADS"] = threads;
  variables["LOCKSTEP_THREADS"] = threads;
  variables["LOCKSTEP_AGENT"] = place.agent;
  variables["LOCKSTEP_RESTART_COUNT"] = std::to_string(place.attempt);
  variables["TORCHELASTIC_RESTART_COUNT"] = std::to_string(place.attempt);
  if (!options.timeout.empty()) variables["LOCKSTEP_TIMEOUT"] = options.timeout;
  if (options.join_timeout)
    variables["LOCKSTEP_JOIN_TIMEOUT"] = fmt::format("{}ms", options.join_timeout->count());
  if (!options.metrics.empty()) variables["LOCKSTEP_METRICS"] = options.metrics;
  if (!options.metrics_format.empty()) variables["LOCKSTEP_METRICS_FORMAT"] = options.metrics_format;
  if (!options.interface.empty()) variables["GLOO_SOCKET_IFNAME"] = options.interface;
  for (const auto& name : options.unset_environment) variables.erase(name);
  for (const auto& [name, value] : options.set_environment) variables[name] = value;
  std::vector<std::string> list;
  for (const auto& [name, value] : variables) list.push_back(name + "=" + value);
  return list;
}

bool is_launchers_variable(const std::string& name) {
  static const char* const kOurs[] = {"RANK",
                                      "WORLD_SIZE",
                                      "LOCAL_RANK",
                                      "LOCAL_WORLD_SIZE",
                                      "GROUP_RANK",
                                      "MASTER_ADDR",
                                      "MASTER_PORT",
                                      "LOCKSTEP_AGENT",
                                      "LOCKSTEP_RESTART_COUNT",
                                      "TORCHELASTIC_RESTART_COUNT",
                                      "LOCKSTEP_THREADS",
                                      "OMP_NUM_THREADS"};
  return std::find(std::begin(kOurs), std::end(kOurs), name) != std::end(kOurs);
}

std::string find_program(const LaunchOptions& options) {
  const std::string& name = options.command.at(0);
  auto in_directory = [&](const std::string& file) { return in_plans_directory(options, file); };
  int problem = ENOENT;
  if (name.find('/') != std::string::npos) {
    problem = problem_with(in_directory(name));
    if (problem == 0) return name;
  } else if (!name.empty()) {
    auto variables = current_environment();
    for (const auto& [variable, value] : options.set_environment) variables[variable] = value;
    std::istringstream path(variables.contains("PATH") ? variables["PATH"] : "/usr/local/bin:/bin:/usr/bin");
    for (std::string folder; std::getline(path, folder, ':');) {
      const std::string file = (folder.empty() ? "." : folder) + "/" + name;
      const int error = problem_with(in_directory(file));
      if (error == 0) return file;
      if (error == EACCES) problem = error;
    }
  }
  throw ConfigError(fmt::format("cannot start '{}': {}{}", name, std::strerror(problem),
                                name.find('/') == std::string::npos ? " in any directory of PATH" : ""));
}

bool is_binary(const LaunchOptions& options, const std::string& file) {
  return beginning_of(in_plans_directory(options, file)).find('\0') != std::string::npos;
}

std::string why_not_started(const LaunchOptions& options, const std::string& file, int error) {
  if (error != ENOEXEC) return std::strerror(error);
  const auto built_for = machine_of(beginning_of(in_plans_directory(options, file)));
  const auto here = machine_of(beginning_of("/proc/self/exe"));
  if (built_for.empty()) return "it is neither a program nor a script";
  if (built_for == here) return "it is damaged, or built for another system";
  return fmt::format("it is built for {}, and this host is {}", built_for, here);
}

pid_t start_rank(const RankProcess& process) {
  const auto arguments = pointers(process.arguments), environment = pointers(process.environment);
  // Runs a file without "#!" with the shell, as execvp does.
  std::vector<std::string> script = {"sh", process.file};
  script.insert(script.end(), process.arguments.begin() + 1, process.arguments.end());
  const auto script_arguments = pointers(script);
  rlimit files{};
  ::getrlimit(RLIMIT_NOFILE, &files);
  if (process.open_files != 0) files.rlim_cur = process.open_files;
  const pid_t parent = ::getpid();

  const pid_t pid = ::fork();
  if (pid < 0) throw not_created("a process for a rank", errno);
  if (pid > 0) return pid;
  // In its own session, and so its own group: the terminal's Ctrl-C reaches it once, through the launcher,
  // and opening /dev/tty fails instead of stopping the process. A session leader cannot leave its group
  // either.
  ::setsid();
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(1);  // The parent ended before PDEATHSIG was set.
  bool good = process.directory.empty() || ::chdir(process.directory.c_str()) == 0;
  good = good && ::dup2(process.in, STDIN_FILENO) >= 0 && ::dup2(process.out, STDOUT_FILENO) >= 0 &&
         ::dup2(process.err, STDERR_FILENO) >= 0;
  if (good) {
    ::setrlimit(RLIMIT_NOFILE, &files);
    if (!process.mask.empty())  // The cores may be gone by now; running unbound is better than not running.
      ::sched_setaffinity(0, process.mask.size() * sizeof process.mask[0],
                          reinterpret_cast<const cpu_set_t*>(process.mask.data()));
    ::sigprocmask(SIG_SETMASK, &process.signals, nullptr);
    ::execve(process.file.c_str(), arguments.data(), environment.data());
    if (errno == ENOEXEC && !process.is_binary)
      ::execve("/bin/sh", script_arguments.data(), environment.data());
  }
  const int error = errno;
  [[maybe_unused]] auto written = ::write(process.report, &error, sizeof error);
  ::_exit(127);
}

}  // namespace lockstep::detail
