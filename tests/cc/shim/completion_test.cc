// Placement of completions: on the reactor or in the pool.
#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "cc/base/completion_batch.h"
#include "tensorflow/core/lib/core/threadpool.h"
#include "tensorflow/core/platform/env.h"

namespace starwire {
namespace {

using Kind = CompletionBatch::Kind;

// Adds completions of these kinds in one round on a reactor thread; returns for each whether it ran in place.
std::vector<bool> InPlace(const std::vector<Kind>& kinds) {
  tensorflow::thread::ThreadPool pool(tensorflow::Env::Default(), "completions", 2);
  std::vector<bool> in_place(kinds.size());
  std::mutex mu;
  std::condition_variable ran;
  size_t count = 0;
  std::thread reactor([&] {
    CompletionBatch::Flush(&pool);  // round_end at the thread's start
    const auto self = std::this_thread::get_id();
    for (size_t i = 0; i < kinds.size(); ++i) {
      CompletionBatch::Add(
          [&, i, self] {
            std::lock_guard<std::mutex> lock(mu);
            in_place[i] = std::this_thread::get_id() == self;
            ++count;
            ran.notify_all();
          },
          kinds[i]);
    }
    {
      std::lock_guard<std::mutex> lock(mu);
      EXPECT_EQ(count, 0u) << "not before the round's end";
    }
    CompletionBatch::Flush(&pool);
  });
  reactor.join();
  std::unique_lock<std::mutex> lock(mu);
  EXPECT_TRUE(ran.wait_for(lock, std::chrono::seconds(20), [&] { return count == kinds.size(); }));
  return in_place;
}

TEST(CompletionBatch, FewBriefCompletionsRunOnTheReactor) {
  EXPECT_EQ(InPlace({Kind::kBrief}), std::vector<bool>({true}));
  EXPECT_EQ(InPlace({Kind::kBrief, Kind::kBrief}), std::vector<bool>({true, true}));
}

TEST(CompletionBatch, OneSlowCompletionSendsAllToThePool) {
  EXPECT_EQ(InPlace({Kind::kAny}), std::vector<bool>({false}));
  EXPECT_EQ(InPlace({Kind::kBrief, Kind::kAny}), std::vector<bool>({false, false}));
  EXPECT_EQ(InPlace({Kind::kAny, Kind::kBrief}), std::vector<bool>({false, false}));
}

TEST(CompletionBatch, ManyGoToThePoolTogether) {
  EXPECT_EQ(InPlace(std::vector<Kind>(100, Kind::kBrief)), std::vector<bool>(100, false));
}

TEST(CompletionBatch, NestedCompletionsGoToThePool) {
  tensorflow::thread::ThreadPool pool(tensorflow::Env::Default(), "completions", 1);
  std::atomic<int> order{0};
  std::atomic<bool> second_in_place{true};
  std::mutex mu;
  std::condition_variable ran;
  std::thread([&] {
    CompletionBatch::Flush(&pool);
    const auto self = std::this_thread::get_id();
    CompletionBatch::Add(
        [&, self] {
          CompletionBatch::Add(
              [&, self] {
                second_in_place = std::this_thread::get_id() == self;
                std::lock_guard<std::mutex> lock(mu);
                order = 1;
                ran.notify_all();
              },
              Kind::kBrief);
        },
        Kind::kBrief);
    CompletionBatch::Flush(&pool);
  }).join();
  std::unique_lock<std::mutex> lock(mu);
  EXPECT_TRUE(ran.wait_for(lock, std::chrono::seconds(20), [&] { return order == 1; }));
  EXPECT_FALSE(second_in_place);
}

}  // namespace
}  // namespace starwire
