// The arena for tensors that may travel over RDMA: large ones lie in it, others come from the fallback allocator.
#include "cc/tensor/arena_allocator.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <vector>

#include "tensorflow/core/framework/tensor.h"

namespace starwire {
namespace {

using tensorflow::Tensor;
using tensorflow::TensorShape;

constexpr size_t kMiB = 1 << 20;
constexpr size_t kMin = 64 << 10;

class ArenaAllocatorTest : public ::testing::Test {
 protected:
  bool IsInside(const void* at) const {
    const auto* byte = static_cast<const char*>(at);
    return byte >= begin_ && byte < begin_ + 64 * kMiB;
  }
  bool IsInside(const Tensor& tensor) const { return IsInside(tensor.tensor_data().data()); }

  static Tensor Bytes(tensorflow::Allocator* allocator, size_t bytes) {
    return Tensor(allocator, tensorflow::DT_UINT8, TensorShape({static_cast<int64_t>(bytes)}));
  }

  std::vector<char> memory_ = std::vector<char>(64 * kMiB + 4096);
  char* const begin_ = memory_.data() + 4096 - reinterpret_cast<uintptr_t>(memory_.data()) % 4096;
  ArenaAllocator arena_{{begin_, 64 * kMiB, kMin}, tensorflow::cpu_allocator()};
};

TEST_F(ArenaAllocatorTest, LargeTensorsLieInTheArenaAndSmallOnesDoNot) {
  const Tensor small = Bytes(&arena_, kMin - 1);
  const Tensor large = Bytes(&arena_, kMin);
  EXPECT_FALSE(IsInside(small));
  EXPECT_TRUE(IsInside(large));
  EXPECT_EQ(reinterpret_cast<uintptr_t>(large.tensor_data().data()) % 64, 0);
}

TEST_F(ArenaAllocatorTest, FreedMemoryIsReused) {
  const void* first = Bytes(&arena_, 8 * kMiB).tensor_data().data();
  for (int i = 0; i < 100; ++i) {
    const Tensor next = Bytes(&arena_, 8 * kMiB);
    EXPECT_EQ(next.tensor_data().data(), first);
  }
}

TEST_F(ArenaAllocatorTest, AFullArenaFallsBackToTheOtherAllocator) {
  std::vector<Tensor> tensors;
  size_t inside = 0;
  for (int i = 0; i < 20; ++i) {
    tensors.push_back(Bytes(&arena_, 8 * kMiB));
    ASSERT_TRUE(tensors.back().IsInitialized());
    std::memset(const_cast<char*>(tensors.back().tensor_data().data()), i, 8 * kMiB);
    inside += IsInside(tensors.back()) ? 1 : 0;
  }
  EXPECT_GE(inside, 4u);
  EXPECT_LE(inside, 8u);
  for (int i = 0; i < 20; ++i) EXPECT_EQ(tensors[i].tensor_data()[8 * kMiB - 1], i);
}

TEST_F(ArenaAllocatorTest, WhoMustNotWaitIsSentWhereRoomIsCertain) {
  EXPECT_EQ(arena_.WithRoomFor(1), &arena_);
  EXPECT_EQ(arena_.WithRoomFor(30 * kMiB), &arena_);
  EXPECT_EQ(arena_.WithRoomFor(33 * kMiB), tensorflow::cpu_allocator());
  EXPECT_EQ(arena_.WithRoomFor(~uint64_t{0}), tensorflow::cpu_allocator());
  const Tensor most = Bytes(&arena_, 20 * kMiB);
  EXPECT_EQ(arena_.WithRoomFor(20 * kMiB), tensorflow::cpu_allocator());
}

TEST_F(ArenaAllocatorTest, OnlyTheOneOfThisProcessIsKnownAsOne) {
  EXPECT_EQ(ArenaAllocator::Of(&arena_), nullptr);
  EXPECT_EQ(ArenaAllocator::Of(tensorflow::cpu_allocator()), nullptr);
}

}  // namespace
}  // namespace starwire
