// The choice of an allocator that answers without waiting.
#include "cc/tensor/nonblocking_allocator.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>

#include "tensorflow/core/framework/tensor.h"

namespace starwire {
namespace {

using tensorflow::AllocatorStats;

constexpr uint64_t kMiB = 1 << 20;

// Reports the given limit, use and peak, and allocates nothing.
class Claims : public tensorflow::Allocator {
 public:
  Claims(std::string name, uint64_t limit, uint64_t used, uint64_t peak) : name_(std::move(name)) {
    stats_.bytes_limit = static_cast<int64_t>(limit);
    stats_.bytes_in_use = static_cast<int64_t>(used);
    stats_.peak_bytes_in_use = static_cast<int64_t>(peak);
  }
  std::string Name() override { return name_; }
  void* AllocateRaw(size_t, size_t) override { return nullptr; }
  void DeallocateRaw(void*) override {}
  decltype(std::declval<tensorflow::Allocator&>().GetStats()) GetStats() override { return stats_; }

 private:
  const std::string name_;
  AllocatorStats stats_;
};

TEST(NonblockingAllocator, AnAllocatorWithCertainRoomIsUsed) {
  Claims roomy("mklcpu", 100 * kMiB, 10 * kMiB, 20 * kMiB);
  EXPECT_EQ(NonblockingAllocator(&roomy, 30 * kMiB), &roomy);
}

TEST(NonblockingAllocator, UnavailableMemoryIsRefusedAtOnce) {
  Claims full("mklcpu", 100 * kMiB, 90 * kMiB, 90 * kMiB);
  EXPECT_EQ(NonblockingAllocator(&full, 11 * kMiB), nullptr);
  EXPECT_EQ(NonblockingAllocator(&full, 101 * kMiB), nullptr);
  EXPECT_EQ(NonblockingAllocator(&full, ~uint64_t{0}), nullptr);
}

TEST(NonblockingAllocator, AnAllocatorThatMightSearchIsBypassed) {
  Claims pieces("mklcpu", 100 * kMiB, 10 * kMiB, 40 * kMiB);
  tensorflow::Allocator* other = NonblockingAllocator(&pieces, 30 * kMiB);
  ASSERT_NE(other, nullptr);
  ASSERT_NE(other, &pieces);
  tensorflow::Tensor tensor(other, tensorflow::DT_FLOAT, {1 << 20});
  ASSERT_TRUE(tensor.IsInitialized());
  const auto data = tensor.tensor_data();
  EXPECT_EQ(reinterpret_cast<uintptr_t>(data.data()) % 64, 0u);
  std::memset(const_cast<char*>(data.data()), 1, data.size());
}

TEST(NonblockingAllocator, SmallRequestsAndOtherAllocatorsAreUnchanged) {
  Claims full("mklcpu", 100 * kMiB, 100 * kMiB, 100 * kMiB);
  EXPECT_EQ(NonblockingAllocator(&full, 4096), &full);
  Claims gpu("GPU_0_bfc", 100 * kMiB, 100 * kMiB, 100 * kMiB);
  EXPECT_EQ(NonblockingAllocator(&gpu, 50 * kMiB), &gpu);
}

}  // namespace
}  // namespace starwire
