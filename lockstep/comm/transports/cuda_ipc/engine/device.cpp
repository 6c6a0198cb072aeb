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

constexpr std::size_t kUnit = 512;                          // what blocks are multiples of
constexpr std::size_t kPage = std::size_t{2} << 20;         // what CUDA takes of a device
constexpr std::size_t kLeastPiece = std::size_t{32} << 20;  // each is a handle that every peer opens

// Events that no other process sees.
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
      // Not one that a stream has yet to come to: somebody may wait for that. A stream that hangs must not
      // keep the others from being used.
      std::lock_guard lock(mutex_);
      if (!free_.empty()) {
        auto* event = free_.front();
        free_.pop_front();
        if (is_done(cudaEventQuery(event))) return event;
        free_.push_back(event);
      }
    }
    cudaEvent_t event = nullptr;
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "an event cannot be made");
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

// What this process has opened, by the handles' bytes.
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
  // The runtime keeps it, and would tell whoever asks next.
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
  check(cudaStreamIsCapturing(stream, &status), "the stream cannot be asked");
  return status != cudaStreamCaptureStatusNone;
}

char* open_memory(const Handle& handle) {
  return opened<char*>(handle, [&] {
    void* memory = nullptr;
    check(cudaIpcOpenMemHandle(&memory, as<cudaIpcMemHandle_t>(handle), cudaIpcMemLazyEnablePeerAccess),
          "the CUDA memory of another rank cannot be opened");
    return static_cast<char*>(memory);
  });
}

cudaEvent_t open_event(const Handle& handle) {
  return opened<cudaEvent_t>(handle, [&] {
    cudaEvent_t event = nullptr;
    check(cudaIpcOpenEventHandle(&event, as<cudaIpcEventHandle_t>(handle)),
          "a CUDA event of another rank cannot be opened");
    return event;
  });
}

DeviceId device_id(int device) {
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, device), "the device cannot be asked");
  DeviceId id;
  static_assert(sizeof properties.uuid == sizeof(DeviceId));
  std::memcpy(id.data(), &properties.uuid, id.size());
  return id;
}

bool is_visible(const DeviceId& id) {
  int devices = 0;
  check(cudaGetDeviceCount(&devices), "the devices cannot be counted");
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
  check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "the device cannot be asked");
  // Others wait for what lies here.
  check(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest), "a stream cannot be made");
  for (std::size_t i = 0; i < events_.size(); ++i) {
    check(cudaEventCreateWithFlags(&events_[i], cudaEventDisableTiming | cudaEventInterprocess),
          "an event for other processes cannot be made");
    cudaIpcEventHandle_t handle;
    check(cudaIpcGetEventHandle(&handle, events_[i]), "an event cannot be shown to other processes");
    handles_[i] = as_bytes(handle);
  }
}

std::shared_ptr<Track> Track::take(int device) {
  static auto& mutex = *new std::mutex;
  static auto& free = *new std::map<int, std::vector<Track*>>;
  // Without CUDA, which may have gone before: the process may be ending.
  auto put_back = [](Track* track) {
    if (track->lost_) return;
    std::lock_guard lock(mutex);
    free[track->device_].push_back(track);
  };
  {
    std::lock_guard lock(mutex);
    auto& of_device = free[device];
    // Not one where something still lies: whoever had it would wait for that.
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
  check(cudaEventRecord(events_[static_cast<std::size_t>(event)], stream_), "an event cannot be recorded");
}

void Track::wait(cudaEvent_t event) {
  check(cudaStreamWaitEvent(stream_, event, 0), "an event cannot be waited for");
}

bool Track::is_idle() const {
  try {
    const OnDevice here(device_);
    return is_done(cudaStreamQuery(stream_));
  } catch (const std::exception&) {  // the process ends, and CUDA has gone before it
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
  const auto what = fmt::format("{} MiB of CUDA memory for other ranks to open cannot be had", size >> 20);
  auto status = cudaMalloc(&memory, size);
  if (status == cudaErrorMemoryAllocation && make_room) {
    cudaGetLastError();  // it has been seen to
    make_room();
    status = cudaMalloc(&memory, size);
  }
  check(status, what.c_str());
  cudaIpcMemHandle_t handle;
  if (const auto shown = cudaIpcGetMemHandle(&handle, memory); shown != cudaSuccess) {
    cudaFree(memory);
    check(shown, "CUDA memory cannot be shown to other processes");
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

// What fails here leaves the memory taken: when the process ends, CUDA may be gone before its tensors are.
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
      if (is_capturing(stream)) return;  // the graph may use it whenever it is replayed
      freed.events.push_back(LocalEvents::of(device_).take());
      check(cudaEventRecord(freed.events.back(), stream), "an event cannot be recorded");
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
