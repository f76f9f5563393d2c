// Threads for work that blocks.
#include "cc/base/blocking_threads.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

namespace starwire {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

bool Give(BlockingThreads* threads, BlockingThreads::Work work) { return threads->Run(&work); }

bool Eventually(const std::function<bool()>& holds) {
  const auto give_up = std::chrono::steady_clock::now() + seconds(20);
  while (!holds()) {
    if (std::chrono::steady_clock::now() > give_up) return false;
    std::this_thread::sleep_for(milliseconds(1));
  }
  return true;
}

// Each waits for all others.
TEST(BlockingThreads, WorkThatWaitsForOtherWork) {
  constexpr int kAll = 20;
  BlockingThreads threads("test", kAll);
  std::atomic<int> arrived{0};
  std::vector<std::future<void>> ends;
  for (int i = 0; i < kAll; ++i) {
    auto end = std::make_shared<std::promise<void>>();
    ends.push_back(end->get_future());
    ASSERT_TRUE(Give(&threads, [&arrived, end] {
      ++arrived;
      while (arrived < kAll) std::this_thread::sleep_for(milliseconds(1));
      end->set_value();
    }));
  }
  for (auto& end : ends) ASSERT_EQ(end.wait_for(seconds(20)), std::future_status::ready);
  EXPECT_TRUE(threads.Stop(seconds(20)));
}

TEST(BlockingThreads, BeyondTheLimitWorkWaitsInItsOrder) {
  BlockingThreads threads("test", 1);
  std::promise<void> go;
  std::shared_future<void> gone = go.get_future().share();
  std::vector<int> order;
  ASSERT_TRUE(Give(&threads, [gone] { gone.wait(); }));
  for (int i = 0; i < 5; ++i) ASSERT_TRUE(Give(&threads, [&order, i] { order.push_back(i); }));
  EXPECT_EQ(threads.threads(), 1u);
  go.set_value();
  // Runs what is waiting.
  EXPECT_TRUE(threads.Stop(seconds(20)));
  EXPECT_EQ(order, std::vector<int>({0, 1, 2, 3, 4}));
}

TEST(BlockingThreads, AThreadServesWorkAfterWork) {
  BlockingThreads threads("test", 100, seconds(20));
  for (int i = 0; i < 50; ++i) {
    std::promise<void> ran;
    ASSERT_TRUE(Give(&threads, [&ran] { ran.set_value(); }));
    ran.get_future().wait();
  }
  // One that is about to be idle may need another in its place; on a busy machine, a few times.
  EXPECT_LE(threads.threads(), 10u);
  EXPECT_TRUE(threads.Stop(seconds(20)));
  EXPECT_EQ(threads.threads(), 0u);
}

TEST(BlockingThreads, ABurstOfQuickWorkNeedsFewThreads) {
  BlockingThreads threads("test", 1000, seconds(20));
  std::promise<void> go;
  std::shared_future<void> gone = go.get_future().share();
  std::atomic<int> ran{0};
  // The first thread is busy with the first piece until all others are waiting.
  ASSERT_TRUE(Give(&threads, [gone] { gone.wait(); }));
  ASSERT_TRUE(Eventually([&] { return threads.threads() == 1; }));
  for (int i = 0; i < 500; ++i) ASSERT_TRUE(Give(&threads, [&ran] { ++ran; }));
  EXPECT_TRUE(Eventually([&] { return ran == 500; }));
  EXPECT_LT(threads.threads(), 250u);
  go.set_value();
  EXPECT_TRUE(threads.Stop(seconds(20)));
}

TEST(BlockingThreads, AnIdleThreadEnds) {
  BlockingThreads threads("test", 8, milliseconds(10));
  std::promise<void> ran;
  ASSERT_TRUE(Give(&threads, [&ran] { ran.set_value(); }));
  ran.get_future().wait();
  EXPECT_TRUE(Eventually([&] { return threads.threads() == 0; }));
  std::promise<void> again;
  ASSERT_TRUE(Give(&threads, [&again] { again.set_value(); }));
  EXPECT_EQ(again.get_future().wait_for(seconds(20)), std::future_status::ready);
}

TEST(BlockingThreads, ExceptionsAreContained) {
  BlockingThreads threads("test", 1);
  std::promise<void> ran;
  ASSERT_TRUE(Give(&threads, [] { throw std::runtime_error("thrown by a test"); }));
  ASSERT_TRUE(Give(&threads, [&ran] { ran.set_value(); }));
  EXPECT_EQ(ran.get_future().wait_for(seconds(20)), std::future_status::ready);
}

TEST(BlockingThreads, AStoppedOneTakesNoWork) {
  BlockingThreads threads("test", 1);
  EXPECT_TRUE(threads.Stop(seconds(1)));
  bool ran = false;
  BlockingThreads::Work work = [&ran] { ran = true; };
  EXPECT_FALSE(threads.Run(&work));
  ASSERT_NE(work, nullptr) << "it is still the caller's";
  work();
  EXPECT_TRUE(ran);
}

TEST(BlockingThreads, StopIsBounded) {
  auto release = std::make_shared<std::promise<void>>();
  BlockingThreads threads("test", 1);
  ASSERT_TRUE(Give(&threads, [gone = release->get_future().share()] { gone.wait(); }));
  EXPECT_FALSE(threads.Stop(milliseconds(20)));
  release->set_value();
  EXPECT_TRUE(threads.Stop(seconds(20)));
}

}  // namespace
}  // namespace starwire
