// Memory for tensors that may travel over RDMA.
#ifndef STARWIRE_CC_TENSOR_ARENA_ALLOCATOR_H_
#define STARWIRE_CC_TENSOR_ARENA_ALLOCATOR_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "cc/base/compat.h"
#include "cc/base/compat_tensor.h"
#include "include/starwire.h"
#include "tensorflow/core/common_runtime/bfc_allocator.h"
#include "tensorflow/core/framework/allocator.h"

namespace starwire {

// Places large tensors in the arena (sw_arena), whose pages an RDMA device may keep registered. Small ones, and those
// that do not fit, come from another allocator.
class ArenaAllocator : public HostAllocator {
 public:
  // The allocator of this process, never destroyed. Null if servers of this protocol have no arena. Only the first call
  // uses `base`.
  static ArenaAllocator* ForProtocol(const std::string& protocol, tensorflow::Allocator* base);
  // The allocator of this process; null if it has none yet.
  static ArenaAllocator* OfProcess();
  // Null if `allocator` is another one.
  static ArenaAllocator* Of(tensorflow::Allocator* allocator);

  // Neither the arena nor `base` is owned.
  ArenaAllocator(const sw_arena& arena, tensorflow::Allocator* base);
  ~ArenaAllocator() override = default;

  std::string Name() override { return "starwire_arena"; }
  void* AllocateRaw(size_t alignment, size_t bytes) override;
  void* AllocateRaw(size_t alignment, size_t bytes, const tensorflow::AllocationAttributes& attributes) override;
  void DeallocateRaw(void* memory) override;

  // Null if `bytes` is too small to benefit, or if there is no room. Never waits. Freed by DeallocateRaw().
  void* AllocateInArena(size_t alignment, size_t bytes);
  // The allocator that has this much memory without waiting: this one, or its base.
  tensorflow::Allocator* WithRoomFor(uint64_t bytes);

 private:
  const uintptr_t begin_;
  const uintptr_t end_;
  const size_t min_bytes_;
  tensorflow::Allocator* const base_;
  tensorflow::BFCAllocator pieces_;
};

}  // namespace starwire

#endif  // STARWIRE_CC_TENSOR_ARENA_ALLOCATOR_H_
