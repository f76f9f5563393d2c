#include "cc/tensor/nonblocking_allocator.h"

#include <algorithm>
#include <cstdlib>
#include <string>

#include "cc/tensor/arena_allocator.h"

namespace starwire {
namespace {

using tensorflow::Allocator;

// TensorFlow's allocator takes smaller tensors from the system without waiting.
constexpr uint64_t kLarge = 256 << 10;

class SystemAllocator : public Allocator {
 public:
  std::string Name() override { return "starwire_system"; }
  void* AllocateRaw(size_t alignment, size_t bytes) override {
    void* memory = nullptr;
    return posix_memalign(&memory, std::max(alignment, sizeof(void*)), bytes) == 0 ? memory : nullptr;
  }
  void DeallocateRaw(void* memory) override { std::free(memory); }
};

// Never destroyed: tensors may outlive static objects.
Allocator* System() {
  static auto* system = new SystemAllocator;
  return system;
}

}  // namespace

Allocator* NonblockingAllocator(Allocator* wanted, uint64_t bytes) {
  if (ArenaAllocator* arena = ArenaAllocator::Of(wanted)) {
    wanted = arena->WithRoomFor(bytes);
    if (wanted == arena) return wanted;
  }
  if (bytes < kLarge || wanted->Name() != "mklcpu") return wanted;
  const auto stats = wanted->GetStats();
  if (!stats.has_value() || !stats->bytes_limit.has_value() || *stats->bytes_limit <= 0) return wanted;
  const auto limit = static_cast<uint64_t>(*stats->bytes_limit);
  const auto used = static_cast<uint64_t>(std::max<int64_t>(stats->bytes_in_use, 0));
  if (bytes > limit || used > limit - bytes) return nullptr;
  // It grows by regions, each as large as all before it together, and never frees one. There is room if twice the peak
  // use, with this tensor added, fits; beyond that the free memory may be fragmented.
  const auto peak = static_cast<uint64_t>(std::max<int64_t>(stats->peak_bytes_in_use, 0));
  return peak <= limit / 2 && bytes <= limit / 2 - peak ? wanted : System();
}

}  // namespace starwire
