// TensorFlow's C interface of devices (SE_InitPlugin), and what tests read and control through ctypes.
#include "device.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <set>

namespace {

constexpr uint64_t kMemory = uint64_t{320} << 20;  // of which TensorFlow gives tensors 65 MiB
enum Direction { kToDevice, kToHost };

struct Memory {
  char* addresses;
  char* real;
};

void Die(const char* why) {
  std::fprintf(stderr, "Check failed: the test device: %s\n", why);
  std::abort();
}

const Memory& TheMemory() {
  static const Memory memory = [] {
    const int file = memfd_create("testdev", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, kMemory) != 0) Die("no memory");
    void* real = mmap(nullptr, kMemory, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    void* addresses = mmap(nullptr, kMemory, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (real == MAP_FAILED || addresses == MAP_FAILED) Die("no address space");
    close(file);
    return Memory{static_cast<char*>(addresses), static_cast<char*>(real)};
  }();
  return memory;
}

// The copies between host and device so far, and a gate at which those of one direction wait while a test holds them.
class Copies {
 public:
  void Count(Direction direction, uint64_t size) {
    std::lock_guard<std::mutex> lock(mu_);
    ++counts_[2 * direction];
    counts_[2 * direction + 1] += size;
  }
  void Pass(Direction direction) {
    std::unique_lock<std::mutex> lock(mu_);
    if (!held_[direction]) return;
    ++waiting_[direction];
    changed_.notify_all();
    changed_.wait(lock, [&] { return !held_[direction]; });
    --waiting_[direction];
  }
  void Hold(int direction, bool held) {
    std::lock_guard<std::mutex> lock(mu_);
    held_[direction] = held;
    changed_.notify_all();
  }
  void AwaitHeld(int direction) {
    std::unique_lock<std::mutex> lock(mu_);
    changed_.wait(lock, [&] { return waiting_[direction] != 0; });
  }
  void Read(uint64_t* out) {
    std::lock_guard<std::mutex> lock(mu_);
    std::memcpy(out, counts_, sizeof counts_);
  }

 private:
  std::mutex mu_;
  std::condition_variable changed_;
  bool held_[2] = {};
  int waiting_[2] = {};
  uint64_t counts_[4] = {};
};

Copies& TheCopies() {
  static Copies* copies = new Copies;  // threads of streams outlive the destructors of this library
  return *copies;
}

// Streams that exist.
class Streams {
 public:
  SP_Stream New() {
    auto* stream = new SP_Stream_st;
    std::lock_guard<std::mutex> lock(mu_);
    streams_.insert(stream);
    return stream;
  }
  void Delete(SP_Stream stream) {
    {
      std::lock_guard<std::mutex> lock(mu_);
      streams_.erase(stream);
    }
    delete stream;
  }
  void WaitForAll() {
    std::lock_guard<std::mutex> lock(mu_);
    for (SP_Stream stream : streams_) stream->Wait();
  }

 private:
  std::mutex mu_;
  std::set<SP_Stream> streams_;
};

Streams& TheStreams() {
  static Streams* streams = new Streams;
  return *streams;
}

// Set once its place in the stream is reached; recording it again makes a new state.
struct State {
  std::mutex mu;
  std::condition_variable changed;
  bool reached = false;

  void Reach() {
    std::lock_guard<std::mutex> lock(mu);
    reached = true;
    changed.notify_all();
  }
  void Wait() {
    std::unique_lock<std::mutex> lock(mu);
    changed.wait(lock, [this] { return reached; });
  }
};

std::shared_ptr<State> Record(SP_Stream stream) {
  auto state = std::make_shared<State>();
  stream->Enqueue([state] { state->Reach(); });
  return state;
}

}  // namespace

struct SP_Event_st {
  std::shared_ptr<State> state;
};

namespace {

void CopyToHost(void* to, const SP_DeviceMemoryBase* from, uint64_t size) {
  TheCopies().Pass(kToHost);
  std::memcpy(to, Real(from->opaque, size), size);
}

void CopyToDevice(const SP_DeviceMemoryBase* to, const void* from, uint64_t size) {
  TheCopies().Pass(kToDevice);
  std::memcpy(Real(to->opaque, size), from, size);
}

void Fill(SP_Stream stream, const SP_DeviceMemoryBase* location, uint32_t pattern, uint64_t size) {
  stream->Enqueue([at = Real(location->opaque, size), pattern, size] {
    for (uint64_t i = 0; i < size; ++i) static_cast<uint8_t*>(at)[i] = static_cast<uint8_t>(pattern >> (8 * (i % 4)));
  });
}

void FillMemoryFunctions(SP_StreamExecutor* fns) {
  // TensorFlow's allocator takes everything at once.
  fns->allocate = [](const SP_Device*, uint64_t size, int64_t, SP_DeviceMemoryBase* memory) {
    static uint64_t taken = 0;
    static std::mutex mu;
    std::lock_guard<std::mutex> lock(mu);
    memory->struct_size = SP_DEVICE_MEMORY_BASE_STRUCT_SIZE;
    memory->size = size;
    memory->opaque = size > kMemory - taken ? nullptr : TheMemory().addresses + taken;
    if (memory->opaque != nullptr) taken += (size + 255) / 256 * 256;
  };
  fns->deallocate = [](const SP_Device*, SP_DeviceMemoryBase*) {};
  fns->host_memory_allocate = [](const SP_Device*, uint64_t size) -> void* {
    return std::aligned_alloc(64, (size + 63) / 64 * 64);
  };
  fns->host_memory_deallocate = [](const SP_Device*, void* memory) { std::free(memory); };
  fns->get_allocator_stats = [](const SP_Device*, SP_AllocatorStats*) -> TF_Bool { return false; };
  fns->device_memory_usage = [](const SP_Device*, int64_t* free, int64_t* total) -> TF_Bool {
    *free = *total = kMemory;
    return true;
  };
  fns->mem_zero = [](const SP_Device*, SP_Stream stream, SP_DeviceMemoryBase* location, uint64_t size, TF_Status*) {
    Fill(stream, location, 0, size);
  };
  fns->memset = [](const SP_Device*, SP_Stream stream, SP_DeviceMemoryBase* location, uint8_t pattern, uint64_t size,
                   TF_Status*) { Fill(stream, location, 0x01010101u * pattern, size); };
  fns->memset32 = [](const SP_Device*, SP_Stream stream, SP_DeviceMemoryBase* location, uint32_t pattern, uint64_t size,
                     TF_Status*) { Fill(stream, location, pattern, size); };
}

void FillStreamFunctions(SP_StreamExecutor* fns) {
  fns->create_stream = [](const SP_Device*, SP_Stream* stream, TF_Status*) { *stream = TheStreams().New(); };
  fns->destroy_stream = [](const SP_Device*, SP_Stream stream) { TheStreams().Delete(stream); };
  fns->create_stream_dependency = [](const SP_Device*, SP_Stream dependent, SP_Stream other, TF_Status*) {
    dependent->Enqueue([state = Record(other)] { state->Wait(); });
  };
  fns->get_stream_status = [](const SP_Device*, SP_Stream, TF_Status*) {};
  fns->block_host_until_done = [](const SP_Device*, SP_Stream stream, TF_Status*) { stream->Wait(); };
  fns->synchronize_all_activity = [](const SP_Device*, TF_Status*) { TheStreams().WaitForAll(); };
  fns->host_callback = [](const SP_Device*, SP_Stream stream, SE_StatusCallbackFn callback, void* argument) -> TF_Bool {
    stream->Enqueue([callback, argument] {
      std::unique_ptr<TF_Status, void (*)(TF_Status*)> status(TF_NewStatus(), TF_DeleteStatus);
      callback(argument, status.get());
    });
    return true;
  };
  fns->create_event = [](const SP_Device*, SP_Event* event, TF_Status*) {
    *event = new SP_Event_st{std::make_shared<State>()};
  };
  fns->destroy_event = [](const SP_Device*, SP_Event event) { delete event; };
  fns->get_event_status = [](const SP_Device*, SP_Event event) {
    std::lock_guard<std::mutex> lock(event->state->mu);
    return event->state->reached ? SE_EVENT_COMPLETE : SE_EVENT_PENDING;
  };
  fns->record_event = [](const SP_Device*, SP_Stream stream, SP_Event event, TF_Status*) {
    event->state = Record(stream);
  };
  fns->wait_for_event = [](const SP_Device*, SP_Stream stream, SP_Event event, TF_Status*) {
    stream->Enqueue([state = event->state] { state->Wait(); });
  };
  fns->block_host_for_event = [](const SP_Device*, SP_Event event, TF_Status*) { event->state->Wait(); };
}

void FillCopyFunctions(SP_StreamExecutor* fns) {
  fns->memcpy_dtoh = [](const SP_Device*, SP_Stream stream, void* to, const SP_DeviceMemoryBase* from, uint64_t size,
                        TF_Status*) {
    TheCopies().Count(kToHost, size);
    std::memset(to, 0xA5, size);  // what those see who do not wait
    stream->Enqueue([to, from = *from, size] { CopyToHost(to, &from, size); });
  };
  fns->memcpy_htod = [](const SP_Device*, SP_Stream stream, SP_DeviceMemoryBase* to, const void* from, uint64_t size,
                        TF_Status*) {
    TheCopies().Count(kToDevice, size);
    stream->Enqueue([to = *to, from, size] { CopyToDevice(&to, from, size); });
  };
  fns->memcpy_dtod = [](const SP_Device*, SP_Stream stream, SP_DeviceMemoryBase* to, const SP_DeviceMemoryBase* from,
                        uint64_t size, TF_Status*) {
    stream->Enqueue(
        [to = Real(to->opaque, size), from = Real(from->opaque, size), size] { std::memmove(to, from, size); });
  };
  fns->sync_memcpy_dtoh = [](const SP_Device*, void* to, const SP_DeviceMemoryBase* from, uint64_t size, TF_Status*) {
    TheCopies().Count(kToHost, size);
    CopyToHost(to, from, size);
  };
  fns->sync_memcpy_htod = [](const SP_Device*, SP_DeviceMemoryBase* to, const void* from, uint64_t size, TF_Status*) {
    TheCopies().Count(kToDevice, size);
    CopyToDevice(to, from, size);
  };
  fns->sync_memcpy_dtod = [](const SP_Device*, SP_DeviceMemoryBase* to, const SP_DeviceMemoryBase* from, uint64_t size,
                             TF_Status*) { std::memmove(Real(to->opaque, size), Real(from->opaque, size), size); };
}

}  // namespace

void* Real(const void* address, uint64_t size) {
  const Memory& memory = TheMemory();
  const auto offset = static_cast<uint64_t>(static_cast<const char*>(address) - memory.addresses);
  if (offset > kMemory || size > kMemory - offset) Die("an address of the host was given for one of the device");
  return memory.real + offset;
}

SP_Stream_st::SP_Stream_st() : thread_([this] { Run(); }) {}

SP_Stream_st::~SP_Stream_st() {
  {
    std::lock_guard<std::mutex> lock(mu_);
    ends_ = true;
    changed_.notify_all();
  }
  thread_.join();
}

void SP_Stream_st::Enqueue(std::function<void()> work) {
  std::lock_guard<std::mutex> lock(mu_);
  queue_.push_back(std::move(work));
  ++enqueued_;
  changed_.notify_all();
}

void SP_Stream_st::Wait() {
  std::unique_lock<std::mutex> lock(mu_);
  changed_.wait(lock, [this, until = enqueued_] { return done_ >= until; });
}

void SP_Stream_st::Run() {
  std::unique_lock<std::mutex> lock(mu_);
  while (true) {
    changed_.wait(lock, [this] { return ends_ || !queue_.empty(); });
    if (queue_.empty()) return;
    std::function<void()> work = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    work();
    work = nullptr;  // may free tensors
    lock.lock();
    ++done_;
    changed_.notify_all();
  }
}

extern "C" {

// For tests: copies and bytes to the device, copies and bytes to the host.
void testdev_counts(uint64_t* out) { TheCopies().Read(out); }
// While held, copies of this direction (0: to the device, 1: to the host) wait on their stream.
void testdev_hold(int direction, int held) { TheCopies().Hold(direction, held != 0); }
// Where tensors are.
const void* testdev_memory() { return TheMemory().addresses; }
// Returns once a copy waits.
void testdev_await_held(int direction) { TheCopies().AwaitHeld(direction); }

void SE_InitPlugin(SE_PlatformRegistrationParams* params, TF_Status*) {
  params->platform->struct_size = SP_PLATFORM_STRUCT_SIZE;
  params->platform->name = "TEST_DEVICE";
  params->platform->type = kDeviceType;
  params->platform->supports_unified_memory = false;
  params->platform->use_bfc_allocator = true;
  params->destroy_platform = [](SP_Platform*) {};
  params->destroy_platform_fns = [](SP_PlatformFns*) {};
  SP_PlatformFns* fns = params->platform_fns;
  fns->struct_size = SP_PLATFORM_FNS_STRUCT_SIZE;
  fns->get_device_count = [](const SP_Platform*, int* count, TF_Status*) { *count = 1; };
  fns->create_device = [](const SP_Platform*, SE_CreateDeviceParams* params, TF_Status*) {
    params->device->struct_size = SP_DEVICE_STRUCT_SIZE;
    params->device->ordinal = params->ordinal;
  };
  fns->destroy_device = [](const SP_Platform*, SP_Device*) {};
  fns->create_device_fns = [](const SP_Platform*, SE_CreateDeviceFnsParams* params, TF_Status*) {
    *params->device_fns = {SP_DEVICE_FNS_STRUCT_SIZE};
  };
  fns->destroy_device_fns = [](const SP_Platform*, SP_DeviceFns*) {};
  fns->create_stream_executor = [](const SP_Platform*, SE_CreateStreamExecutorParams* params, TF_Status*) {
    params->stream_executor->struct_size = SP_STREAMEXECUTOR_STRUCT_SIZE;
    FillMemoryFunctions(params->stream_executor);
    FillStreamFunctions(params->stream_executor);
    FillCopyFunctions(params->stream_executor);
  };
  fns->destroy_stream_executor = [](const SP_Platform*, SP_StreamExecutor*) {};
  fns->create_timer_fns = [](const SP_Platform*, SP_TimerFns*, TF_Status*) {};
  fns->destroy_timer_fns = [](const SP_Platform*, SP_TimerFns*) {};
}

}  // extern "C"
