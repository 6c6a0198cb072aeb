#include <lockstep/profile/profiler.h>

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <optional>

#include <ATen/record_function.h>
#include <fmt/format.h>
#include <lockstep/base/environment.h>
#include <lockstep/base/error.h>
#include <lockstep/base/log.h>
#include <lockstep/comm/cpu_memory.h>
#include <lockstep/comm/job/world_state.h>
#include <lockstep/os/host.h>
#include <lockstep/profile/libtorch/flops.h>
#include <lockstep/profile/libtorch/kineto.h>
#include <lockstep/profile/record/recorder.h>
#include <lockstep/profile/report/merge.h>

namespace lockstep {
namespace profile {

namespace {

struct OperatorContext final : at::ObserverContext {
  std::shared_ptr<detail::SpanSink> sink;
  Flops flops;
  bool counts = false;  // True if this operator counts; operators inside it then do not
};

// An operator may call itself again one level down (autocast does); count it once.
thread_local int counting = 0;

std::unique_ptr<at::ObserverContext> operator_began(const at::RecordFunction& function) {
  auto context = std::make_unique<OperatorContext>();
  context->sink = detail::span_sink();
  if (!context->sink) return context;
  if (function.needsInputs()) {
    try {
      context->flops = flops_of(function);
    } catch (const std::exception&) {  // tensors whose sizes cannot be read
    }
    context->counts = context->flops.whole > 0 || context->flops.per_output > 0;
    if (context->counts && counting++ > 0) context->flops = {};
  }
  context->sink->begin(SpanKind::operation, function.name(), 0, {});
  return context;
}

void sample_memory(detail::SpanSink* sink) {
  auto* recorder = dynamic_cast<Recorder*>(sink);
  if (recorder != nullptr && recorder->wants_memory()) recorder->memory(cpu_memory_stats().allocated);
}

void operator_ended(const at::RecordFunction& function, at::ObserverContext* context) {
  if (context == nullptr) return;  // beginning threw, which LibTorch has reported
  const auto& began = *static_cast<OperatorContext*>(context);
  if (!began.sink) return;
  if (began.counts) --counting;
  std::int64_t flops = began.flops.whole;
  if (began.flops.per_output > 0) {
    try {
      flops = began.flops.per_output * elements_of_output(function);
    } catch (const std::exception&) {
    }
  }
  if (flops > 0) began.sink->flops(flops);
  began.sink->end();
  sample_memory(began.sink.get());
}

// Used if Kineto records the operators.
void operator_ended_elsewhere(const at::RecordFunction&, at::ObserverContext*) {
  sample_memory(detail::span_sink().get());
}

std::string first_line(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::string program_name() {
  char path[4096] = {};
  const auto length = ::readlink("/proc/self/exe", path, sizeof path - 1);
  return length > 0 ? std::filesystem::path(path).filename().string() : "";
}

void check(const ProfilerOptions& options, bool in_threads) {
  if (in_threads && options.operators == OperatorSource::kineto)
    throw ConfigError(
        "ProfilerOptions::operators: kineto needs ranks that are processes, because a process has only one "
        "Kineto; use callbacks or none");
  if (options.first < 1 || options.last < options.first)
    throw ConfigError(fmt::format("ProfilerOptions: expected 1 <= first <= last, got first {} and last {}",
                                  options.first, options.last));
  if (options.directory.empty())
    throw ConfigError("ProfilerOptions::directory: expected the name of a directory, got ''");
  if (options.samples_per_step < 0 || options.tokens_per_step < 0 || options.peak_flops < 0)
    throw ConfigError(
        "ProfilerOptions: samples_per_step, tokens_per_step and peak_flops must not be negative");
}

}  // namespace

// Profile of one rank, from the creation of the World or Profiler to the end of the window.
class Session final : public Observer {
 public:
  Session(const detail::WorldState& world, ProfilerOptions options)
      : rank_(world.identity().rank),
        size_(world.identity().size),
        on_cuda_(world.device().is_cuda()),
        scope_(world.in_threads() ? detail::SpanScope::thread : detail::SpanScope::process),
        options_(std::move(options)),
        recorder_(std::make_shared<Recorder>(options_.memory)) {
    recorder_->note("backend", Group(world.default_group()).backend());
  }
  ~Session() override {
    std::lock_guard lock(mutex_);
    stop();
  }
  // Starts recording at once if the window begins with the first step.
  void begin() {
    std::lock_guard lock(mutex_);
    if (options_.first == 1) listen();
  }

  void started(const Call& call) noexcept override { recorder_->started(call); }
  void finished(const Call& call, std::chrono::nanoseconds) noexcept override {
    recorder_->ended(call, false);
  }
  // The rest of the run may never happen, so write what was recorded.
  void failed(const Call& call, std::chrono::nanoseconds, std::string_view) noexcept override {
    recorder_->ended(call, true);
    if (scope_ == detail::SpanScope::process) finish();
  }
  void stepped(std::int64_t step) noexcept override {
    if (!own_steps_) advance(step);
  }
  void leaving() noexcept override {
    world_left_ = true;
    finish();
  }

  void step() {
    own_steps_ = true;
    advance(++own_count_);
  }

  // Called at the end of the window or of the run: writes this rank's file.
  void finish() noexcept {
    std::lock_guard lock(mutex_);
    finish_locked();
  }
  // Called if another session takes over.
  void give_up() noexcept {
    std::lock_guard lock(mutex_);
    stop();
  }
  bool written() const { return written_; }
  bool over() const { return over_; }
  bool world_left() const { return world_left_; }
  const ProfilerOptions& options() const { return options_; }

 private:
  // Maximum number of events: more would exhaust memory, and nothing could display them.
  static constexpr std::int64_t kMostEvents = 4'000'000;

  void advance(std::int64_t step) noexcept {
    std::lock_guard lock(mutex_);
    last_seen_ = step;
    if (over_) return;
    if (!listening_) {
      if (step + 1 >= options_.first && step < options_.last) listen();
      return;
    }
    if (step < options_.first) {  // drop what was recorded before the window
      recorder_->start();
      return;
    }
    recorder_->memory(cpu_memory_stats().allocated);
    recorder_->step(step);
    const bool full = recorder_->events() > kMostEvents;
    if (full)
      detail::log(LogLevel::warn, "the profile stops at step {} with {} events, the maximum", step,
                  recorder_->events());
    // Step numbers may restart with each epoch, so also stop after the requested number of steps.
    if (full || step >= options_.last || ++recorded_ > options_.last - options_.first) finish_locked();
  }

  void finish_locked() noexcept {
    if (over_) return;
    if (!listening_ || recorder_->steps() == 0) {
      stop();
      if (last_seen_ < 0)
        detail::log(LogLevel::warn,
                    "nothing was profiled: the program called neither World::step nor Profiler::step");
      else
        detail::log(LogLevel::warn, "nothing was profiled: expected steps {} to {}, but the last step was {}",
                    options_.first, options_.last, last_seen_);
      return;
    }
    auto profile = stop();
    profile.rank = rank_;
    profile.size = size_;
    profile.host = host::name();
    profile.boot = first_line("/proc/sys/kernel/random/boot_id");
    profile.program = program_name();
    const auto note = [&](const char* what, auto value) {
      if (value > 0) profile.notes[what] = fmt::format("{}", value);
    };
    note("samples_per_step", options_.samples_per_step);
    note("tokens_per_step", options_.tokens_per_step);
    note("peak_flops", options_.peak_flops);
    try {
      write(profile, options_.directory);
      written_ = true;
    } catch (const std::exception& error) {
      detail::log(LogLevel::error, "cannot write the profile: {}", error.what());
    }
  }

  void listen() {
    start_kineto();
    listening_.emplace(recorder_, scope_);
    using Scope = at::RecordScope;
    std::optional<at::RecordFunctionCallback> callback;
    if (operators_by_callbacks_)
      callback = at::RecordFunctionCallback(operator_began, operator_ended)
                     .needsInputs(options_.flops)
                     .needsOutputs(options_.flops);
    else if (options_.operators == OperatorSource::kineto && options_.memory)
      callback = at::RecordFunctionCallback(nullptr, operator_ended_elsewhere);
    if (callback) {
      callback->scopes({Scope::FUNCTION, Scope::BACKWARD_FUNCTION});
      operators_ = scope_ == detail::SpanScope::thread ? at::addThreadLocalCallback(*callback)
                                                       : at::addGlobalCallback(*callback);
    }
    recorder_->start();
  }

  // Kineto is per process, so it is not used if ranks are threads.
  void start_kineto() {
    const bool of_operators = options_.operators == OperatorSource::kineto;
    const bool of_device =
        options_.device && scope_ == detail::SpanScope::process && (on_cuda_ || uses_cuda());
    operators_by_callbacks_ = options_.operators == OperatorSource::callbacks;
    if (!of_operators && !of_device) return;
    const auto trouble = kineto_.start(of_device ? Kineto::Of::operators_and_cuda : Kineto::Of::operators);
    if (!trouble) return;
    operators_by_callbacks_ = options_.operators != OperatorSource::none;
    detail::log(
        LogLevel::warn, "{}; {}", *trouble,
        of_operators ? "operators are recorded by callbacks instead" : "device kernels are not recorded");
  }

  RankProfile stop() noexcept {
    if (operators_) at::removeCallback(*operators_);
    operators_.reset();
    listening_.reset();
    over_ = true;
    recorder_->retire();
    auto profile = recorder_->stop();
    if (const auto activities = kineto_.stop()) {
      if (options_.operators == OperatorSource::kineto) add_operators(profile, *activities, kineto_.clock());
      add_device(profile, *activities, kineto_.clock());
    }
    return profile;
  }

  const int rank_, size_;
  const bool on_cuda_;
  const detail::SpanScope scope_;
  const ProfilerOptions options_;
  const std::shared_ptr<Recorder> recorder_;
  std::optional<detail::SpanListening> listening_;
  std::optional<at::CallbackHandle> operators_;
  bool operators_by_callbacks_ = false;
  Kineto kineto_;
  std::int64_t last_seen_ = -1, own_count_ = 0, recorded_ = 0;
  std::atomic<bool> own_steps_ = false, over_ = false, written_ = false, world_left_ = false;
  std::mutex mutex_;  // protects the window; operations are reported without it
};

namespace {

OperatorSource operators_by_name(const std::string& name) {
  if (name == "none") return OperatorSource::none;
  if (name == "callbacks") return OperatorSource::callbacks;
  if (name == "kineto") return OperatorSource::kineto;
  throw ConfigError(
      fmt::format("LOCKSTEP_PROFILE_OPERATORS: expected none, callbacks or kineto, got '{}'", name));
}

// Options from `lockstep run --profile`: LOCKSTEP_PROFILE=10:20, LOCKSTEP_PROFILE_DIR and others; nullopt
// without it.
std::optional<ProfilerOptions> asked_for(ProfilerOptions options) {
  const auto window = env::text("LOCKSTEP_PROFILE");
  if (!window || window->empty()) return std::nullopt;
  const auto colon = window->find(':');
  const auto number = [](std::string_view text, std::int64_t& value) {
    const auto end = std::from_chars(text.data(), text.data() + text.size(), value);
    return end.ec == std::errc() && end.ptr == text.data() + text.size();
  };
  if (colon == std::string::npos || !number(std::string_view(*window).substr(0, colon), options.first) ||
      !number(std::string_view(*window).substr(colon + 1), options.last))
    throw ConfigError(fmt::format("LOCKSTEP_PROFILE: expected FIRST:LAST such as 10:20, got '{}'", *window));
  options.directory = env::text("LOCKSTEP_PROFILE_DIR").value_or(options.directory);
  if (const auto source = env::text("LOCKSTEP_PROFILE_OPERATORS"))
    options.operators = operators_by_name(*source);
  check(options, /*in_threads=*/false);
  return options;
}

// automatic: the session requested by the launcher, until the program creates a Profiler. of_process: the
// program's.
std::mutex mutex;
std::weak_ptr<Session> automatic, of_process;
thread_local std::weak_ptr<Session> of_thread;  // if ranks are threads

// Called when a World has been joined.
void profile_if_asked(const std::shared_ptr<detail::WorldState>& world) {
  auto options = asked_for({});
  if (!options) return;
  auto session = std::make_shared<Session>(*world, std::move(*options));
  world->add_observer(session);
  session->begin();
  std::lock_guard lock(mutex);
  automatic = session;
}

// Removes files of an earlier run: those of other ranks, and of ranks that could not write now.
void drop_others(const std::filesystem::path& directory, const std::vector<int>& written) {
  std::error_code trouble;
  for (const auto& entry : std::filesystem::directory_iterator(directory, trouble)) {
    if (!is_rank_file(entry.path())) continue;
    const auto name = entry.path().filename().string();
    bool ours = false;
    for (std::size_t rank = 0; rank < written.size(); ++rank)
      ours = ours || (written[rank] != 0 && name == fmt::format("rank-{}.json", rank));
    if (!ours) std::filesystem::remove(entry.path(), trouble);
  }
}

[[maybe_unused]] const bool registered = (detail::when_joined(profile_if_asked), true);

}  // namespace
}  // namespace profile

Profiler::Profiler(World& world, ProfilerOptions options) : world_(world.state_) {
  const bool in_threads = world.in_threads();
  profile::check(options, in_threads);
  std::lock_guard lock(profile::mutex);
  auto& current = in_threads ? profile::of_thread : profile::of_process;
  if (const auto other = current.lock(); other && !other->over())
    throw ConfigError("Profiler: another Profiler has not recorded its last step yet; use one at a time");
  if (!in_threads) {
    // The launcher's window and directory take precedence over the program's; other options are kept.
    if (auto asked = profile::asked_for(options)) options = std::move(*asked);
    if (auto other = profile::automatic.lock()) other->give_up();
    profile::automatic.reset();
  }
  session_ = std::make_shared<profile::Session>(*world.state_, std::move(options));
  world.add_observer(session_);
  session_->begin();
  current = session_;
}

Profiler::~Profiler() {
  session_->finish();
  if (const auto world = world_.lock()) world->remove_observer(session_);
}

void Profiler::step() { session_->step(); }

void Profiler::finish() {
  session_->finish();
  const auto world = world_.lock();
  if (!world || session_->world_left())
    throw ConfigError(
        "Profiler::finish: the World has already left the job; call finish() on every rank before that");
  const auto written = Group(world->default_group()).all_gather_values(static_cast<int>(session_->written()));
  if (world->identity().rank != 0) return;
  if (std::none_of(written.begin(), written.end(), [](int each) { return each != 0; }))
    throw ConfigError(
        "Profiler::finish: no rank recorded a step; call step() or World::step() within the window");
  profile::drop_others(session_->options().directory, written);
  profile::put_together(session_->options().directory);
}

ProfileRange::ProfileRange(std::string_view name)
    : span_(name == "optimizer" ? detail::SpanKind::optimizer
            : name == "data"    ? detail::SpanKind::data
                                : detail::SpanKind::range,
            name) {}

}  // namespace lockstep
