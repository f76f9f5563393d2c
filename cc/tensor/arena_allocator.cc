#include "cc/tensor/arena_allocator.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <utility>
#include <vector>

#include "cc/base/handles.h"
#include "cc/base/status_codec.h"
#include "tensorflow/core/platform/logging.h"

namespace starwire {
namespace {

using tensorflow::AllocationAttributes;
using tensorflow::Allocator;
using tensorflow::BFCAllocator;

// Hands out the arena piece by piece, from its beginning to its end. Nothing is freed: its pages must stay.
class Supply : public tensorflow::SubAllocator {
 public:
  explicit Supply(const sw_arena& arena)
      : SubAllocator({}, {}), next_(reinterpret_cast<uintptr_t>(arena.data)), end_(next_ + arena.len) {}

  // The caller holds a lock. Without `override`: 1.15 has the first and third only, 2.x the others.
  void* Alloc(size_t alignment, size_t bytes) {
    size_t received = 0;
    return Alloc(alignment, bytes, &received);
  }
  void* Alloc(size_t alignment, size_t bytes, size_t* received) {
    const uintptr_t mask = std::max<uintptr_t>(alignment, 1) - 1;
    const uintptr_t begin = (next_ + mask) & ~mask;
    *received = 0;
    if (bytes == 0 || begin < next_ || begin > end_ || bytes > end_ - begin) return nullptr;
    next_ = begin + bytes;
    *received = bytes;
    return reinterpret_cast<void*>(begin);
  }
  void Free(void*, size_t) override {}
  bool SupportsCoalescing() const { return true; }

 private:
  uintptr_t next_;
  const uintptr_t end_;
};

std::atomic<ArenaAllocator*> the_allocator{nullptr};

}  // namespace

ArenaAllocator::ArenaAllocator(const sw_arena& arena, Allocator* base)
    : HostAllocator(base),
      begin_(reinterpret_cast<uintptr_t>(arena.data)),
      end_(begin_ + arena.len),
      min_bytes_(arena.min_bytes),
      base_(base),
      pieces_(NewPieces<BFCAllocator>(std::make_unique<Supply>(arena), arena.len, "starwire_arena_pieces")) {}

ArenaAllocator* ArenaAllocator::ForProtocol(const std::string& protocol, Allocator* base) {
  sw_arena arena;
  ErrorHandle error;
  if (sw_arena_reserve(AsBytes(protocol), &arena, Into(&error)) != 0) {
    LOG(WARNING) << AsString(sw_error_message(error.get())) << "; memory is registered for each transfer";
  }
  if (arena.data == nullptr) return nullptr;
  static std::mutex mu;
  std::lock_guard<std::mutex> lock(mu);
  if (the_allocator.load(std::memory_order_acquire) == nullptr) {
    the_allocator.store(new ArenaAllocator(arena, base), std::memory_order_release);
  }
  return the_allocator.load(std::memory_order_acquire);
}

ArenaAllocator* ArenaAllocator::OfProcess() { return the_allocator.load(std::memory_order_acquire); }

ArenaAllocator* ArenaAllocator::Of(Allocator* allocator) {
  ArenaAllocator* arena = OfProcess();
  return arena == allocator ? arena : nullptr;
}

void* ArenaAllocator::AllocateRaw(size_t alignment, size_t bytes) {
  return AllocateRaw(alignment, bytes, AllocationAttributes());
}

void* ArenaAllocator::AllocateRaw(size_t alignment, size_t bytes, const AllocationAttributes& attributes) {
  if (void* memory = AllocateInArena(alignment, bytes)) return memory;
  return base_->AllocateRaw(alignment, bytes, attributes);
}

void* ArenaAllocator::AllocateInArena(size_t alignment, size_t bytes) {
  if (bytes < min_bytes_) return nullptr;
  // Otherwise TensorFlow would log up to ten times that the arena is full.
  return pieces_.AllocateRaw(alignment, bytes, PromptAllocation());
}

void ArenaAllocator::DeallocateRaw(void* memory) {
  const auto at = reinterpret_cast<uintptr_t>(memory);
  if (at >= begin_ && at < end_) {
    pieces_.DeallocateRaw(memory);
  } else {
    base_->DeallocateRaw(memory);
  }
}

Allocator* ArenaAllocator::WithRoomFor(uint64_t bytes) {
  if (bytes < min_bytes_) return this;
  const auto stats = pieces_.GetStats();
  const uint64_t limit = end_ - begin_;
  // It grows by doubling: there is room if twice the peak use, with this tensor added, fits.
  const auto peak = stats.has_value() ? static_cast<uint64_t>(std::max<int64_t>(stats->peak_bytes_in_use, 0)) : limit;
  return peak <= limit / 2 && bytes <= limit / 2 - peak ? this : base_;
}

}  // namespace starwire
