// Memory for tensors that may travel over RDMA.
#ifndef STARWIRE_CC_TENSOR_ARENA_ALLOCATOR_H_
#define STARWIRE_CC_TENSOR_ARENA_ALLOCATOR_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "cc/base/compat.h"
#include "include/starwire.h"
#include "tensorflow/core/common_runtime/bfc_allocator.h"
#include "tensorflow/core/framework/allocator.h"

namespace starwire {

// Large tensors lie in the arena (sw_arena), whose pages an RDMA device may keep registered; small ones, and those that
// find no room, come from another allocator.
class ArenaAllocator : public tensorflow::Allocator {
 public:
  // The one of this process, never destroyed. Null: servers of this protocol have no arena. `base` is used the first
  // time.
  static ArenaAllocator* ForProtocol(const std::string& protocol, tensorflow::Allocator* base);
  // The one of this process, if it has one by now.
  static ArenaAllocator* OfProcess();
  // Null: it is another one.
  static ArenaAllocator* Of(tensorflow::Allocator* allocator);

  // Neither the arena nor `base` is owned.
  ArenaAllocator(const sw_arena& arena, tensorflow::Allocator* base);
  ~ArenaAllocator() override = default;

  std::string Name() override { return "starwire_arena"; }
  void* AllocateRaw(size_t alignment, size_t bytes) override;
  void* AllocateRaw(size_t alignment, size_t bytes, const tensorflow::AllocationAttributes& attributes) override;
  void DeallocateRaw(void* memory) override;
  tensorflow::AllocatorMemoryType GetMemoryType() const override { return base_->GetMemoryType(); }

  // Null: they are too few to gain anything by it, or there is no room. Never waits; given back by DeallocateRaw().
  void* AllocateInArena(size_t alignment, size_t bytes);
  // Where as many bytes come from without waiting: itself, or its base.
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
