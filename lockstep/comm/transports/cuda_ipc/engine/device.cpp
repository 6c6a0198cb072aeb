#include <lockstep/comm/transports/cuda_ipc/engine/device.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <unordered_map>
#include <vector>

#include <fmt/format.h>
#include <lockstep/base/error.h>
#include <lockstep/memory/align.h>

namespace lockstep::cuda_ipc {
namespace {

constexpr std::size_t kUnit = 512;                   // block sizes are multiples of it
constexpr std::size_t kPage = std::size_t{2} << 20;  // CUDA's allocation unit
// smallest piece: each is a handle that every peer opens
constexpr std::size_t kLeastPiece = std::size_t{32} << 20;

// A pool of events that are private to this process.
class LocalEvents {
 public:
  static LocalEvents& of(int device) {
    static std::mutex mutex;
    static auto& all = *new std::map<int, LocalEvents>;
    std::lock_guard lock(mutex);
    return all[device];
  }
  cudaEvent_t take() {
    {
      // Skips an event that its stream has not reached: another stream may wait for it. A stream that hangs
      // must not block reuse of the others.
      std::lock_guard lock(mutex_);
      if (!free_.empty()) {
        auto* event = free_.front();
        free_.pop_front();
        if (is_done(cudaEventQuery(event))) return event;
        free_.push_back(event);
      }
    }
    cudaEvent_t event = nullptr;
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cannot create an event");
    return event;
  }
  void put(cudaEvent_t event) {
    std::lock_guard lock(mutex_);
    free_.push_back(event);
  }

 private:
  std::mutex mutex_;
  std::deque<cudaEvent_t> free_;
};

// Memory and events that this process has opened, by the bytes of their handles.
template <typename Opened, typename Open>
Opened opened(const Handle& handle, Open open) {
  static std::mutex mutex;
  static auto& all = *new std::unordered_map<std::string, Opened>;
  std::lock_guard lock(mutex);
  std::string key(handle.data(), handle.size());
  if (auto known = all.find(key); known != all.end()) return known->second;
  return all.emplace(std::move(key), open()).first->second;
}

template <typename CudaHandle>
CudaHandle as(const Handle& handle) {
  static_assert(sizeof(CudaHandle) == sizeof(Handle));
  CudaHandle result;
  std::memcpy(&result, handle.data(), handle.size());
  return result;
}
template <typename CudaHandle>
Handle as_bytes(const CudaHandle& handle) {
  static_assert(sizeof(CudaHandle) == sizeof(Handle));
  Handle result;
  std::memcpy(result.data(), &handle, result.size());
  return result;
}

}  // namespace

bool is_done(cudaError_t asked) {
  // The runtime keeps the error and would report it to the next caller.
  if (asked != cudaSuccess) cudaGetLastError();
  return asked != cudaErrorNotReady;
}

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();
  throw Error(fmt::format("{}: {} ({})", what, cudaGetErrorString(status), cudaGetErrorName(status)));
}

bool is_capturing(cudaStream_t stream) {
  auto status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream, &status), "cannot query the stream");
  return status != cudaStreamCaptureStatusNone;
}

char* open_memory(const Handle& handle) {
  return opened<char*>(handle, [&] {
    void* memory = nullptr;
    check(cudaIpcOpenMemHandle(&memory, as<cudaIpcMemHandle_t>(handle), cudaIpcMemLazyEnablePeerAccess),
          "cannot open the CUDA memory of another rank");
    return static_cast<char*>(memory);
  });
}

cudaEvent_t open_event(const Handle& handle) {
  return opened<cudaEvent_t>(handle, [&] {
    cudaEvent_t event = nullptr;
    check(cudaIpcOpenEventHandle(&event, as<cudaIpcEventHandle_t>(handle)),
          "cannot open a CUDA event of another rank");
    return event;
  });
}

DeviceId device_id(int device) {
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, device), "cannot query the device");
  DeviceId id;
  static_assert(sizeof properties.uuid == sizeof(DeviceId));
  std::memcpy(id.data(), &properties.uuid, id.size());
  return id;
}

bool is_visible(const DeviceId& id) {
  int devices = 0;
  check(cudaGetDeviceCount(&devices), "cannot count the devices");
  for (int device = 0; device < devices; ++device)
    if (device_id(device) == id) return true;
  return false;
}

std::string text(const DeviceId& id) {
  std::string text = "GPU";
  for (std::size_t i = 0; i < id.size(); ++i)
    text += fmt::format("{}{:02x}", i == 0 || i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "",
                        static_cast<unsigned char>(id[i]));
  return text;
}

Order::Order(int its_device) : device(its_device) {
  const OnDevice here(device);
  ready = LocalEvents::of(device).take();
  done = LocalEvents::of(device).take();
}

Order::~Order() {
  for (auto* event : {ready, done})
    if (event != nullptr) LocalEvents::of(device).put(event);
}

// ---- tracks -----------------------------------------------------------------------------------------------

Track::Track(int device) : device_(device) {
  const OnDevice here(device);
  int least = 0, greatest = 0;
  check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cannot query the device");
  // High priority, because peers wait for this stream.
  check(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest), "cannot create a stream");
  for (std::size_t i = 0; i < events_.size(); ++i) {
    check(cudaEventCreateWithFlags(&events_[i], cudaEventDisableTiming | cudaEventInterprocess),
          "cannot create an event for other processes");
    cudaIpcEventHandle_t handle;
    check(cudaIpcGetEventHandle(&handle, events_[i]), "cannot export an event to other processes");
    handles_[i] = as_bytes(handle);
  }
}

std::shared_ptr<Track> Track::take(int device) {
  static auto& mutex = *new std::mutex;
  static auto& free = *new std::map<int, std::vector<Track*>>;
  // Makes no CUDA call, because CUDA may already be unloaded: the process may be exiting.
  auto put_back = [](Track* track) {
    if (track->lost_) return;
    std::lock_guard lock(mutex);
    free[track->device_].push_back(track);
  };
  {
    std::lock_guard lock(mutex);
    auto& of_device = free[device];
    // Not one with pending work: its next user would wait for that.
    auto idle = std::find_if(of_device.begin(), of_device.end(), [](Track* each) { return each->is_idle(); });
    if (idle != of_device.end()) {
      auto* track = *idle;
      of_device.erase(idle);
      return {track, put_back};
    }
  }
  return {new Track(device), put_back};
}

void Track::record(int event) {
  check(cudaEventRecord(events_[static_cast<std::size_t>(event)], stream_), "cannot record an event");
}

void Track::wait(cudaEvent_t event) {
  check(cudaStreamWaitEvent(stream_, event, 0), "cannot wait for an event");
}

bool Track::is_idle() const {
  try {
    const OnDevice here(device_);
    return is_done(cudaStreamQuery(stream_));
  } catch (const std::exception&) {  // the process is exiting and CUDA is already unloaded
    return true;
  }
}

// ---- memory -----------------------------------------------------------------------------------------------

Arena& Arena::of(int device) {
  static std::mutex mutex;
  static auto& all = *new std::map<int, Arena*>;
  std::lock_guard lock(mutex);
  auto& arena = all[device];
  if (arena == nullptr) arena = new Arena(device);
  return *arena;
}

void Arena::grow(std::size_t bytes) {
  const auto size = std::max(memory::round_up(bytes, kPage), kLeastPiece);
  void* memory = nullptr;
  const auto what =
      fmt::format("cannot allocate {} MiB of CUDA memory that other ranks can open", size >> 20);
  auto status = cudaMalloc(&memory, size);
  if (status == cudaErrorMemoryAllocation && make_room) {
    cudaGetLastError();  // clears the error
    make_room();
    status = cudaMalloc(&memory, size);
  }
  check(status, what.c_str());
  cudaIpcMemHandle_t handle;
  if (const auto shown = cudaIpcGetMemHandle(&handle, memory); shown != cudaSuccess) {
    cudaFree(memory);
    check(shown, "cannot export CUDA memory to other processes");
  }
  pieces_[static_cast<char*>(memory)] = {size, as_bytes(handle)};
  heap_.add({static_cast<char*>(memory), size});
}

char* Arena::allocate(std::size_t bytes, cudaStream_t stream) {
  const OnDevice here(device_);
  bytes = memory::round_up(std::max<std::size_t>(bytes, 1), kUnit);
  std::lock_guard lock(mutex_);
  collect();
  auto* memory = heap_.take(bytes, kUnit);
  if (memory == nullptr) {
    grow(bytes);
    memory = heap_.take(bytes, kUnit);
  }
  taken_[memory] = stream;
  return memory;
}

// On failure the memory stays allocated: while the process exits, CUDA may be unloaded before its tensors are
// destroyed.
void Arena::free(char* memory, std::optional<cudaStream_t> used_on) noexcept {
  try {
    std::lock_guard lock(mutex_);
    auto taken = taken_.find(memory);
    if (taken == taken_.end()) return;
    const OnDevice here(device_);
    std::vector<cudaStream_t> streams{taken->second};
    if (used_on && *used_on != taken->second) streams.push_back(*used_on);
    Freed freed{memory, {}};
    for (auto* stream : streams) {
      if (is_capturing(stream)) return;  // the graph may use it at every replay
      freed.events.push_back(LocalEvents::of(device_).take());
      check(cudaEventRecord(freed.events.back(), stream), "cannot record an event");
    }
    freed_.push_back(std::move(freed));
    taken_.erase(taken);
  } catch (...) {
  }
}

void Arena::collect() {
  freed_.remove_if([&](const Freed& each) {
    for (auto* event : each.events)
      if (!is_done(cudaEventQuery(event))) return false;
    heap_.put(each.memory);
    for (auto* event : each.events) LocalEvents::of(device_).put(event);
    return true;
  });
}

Arena::Place Arena::find(const void* pointer, std::size_t bytes) {
  const auto* wanted = static_cast<const char*>(pointer);
  std::lock_guard lock(mutex_);
  auto piece = pieces_.upper_bound(wanted);
  if (piece == pieces_.begin()) return {};
  --piece;
  const auto offset = static_cast<std::size_t>(wanted - piece->first);
  if (offset + bytes > piece->second.size) return {};
  return {&piece->second.handle, offset};
}

}  // namespace lockstep::cuda_ipc
