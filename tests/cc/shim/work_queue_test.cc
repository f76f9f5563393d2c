// Queues of work items.
#include "cc/work_queue/work_queue.h"

#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace starwire {
namespace {

using std::chrono::milliseconds;

class WorkQueueTest : public ::testing::Test {
 protected:
  ~WorkQueueTest() override { queue_->Unref(); }

  void Create(int items, int64_t epochs = 1, bool shuffle = false, uint64_t seed = 0) {
    ASSERT_TRUE(queue_->Create(Items(items), {epochs, shuffle, seed}).ok());
  }

  static std::vector<std::string> Items(int n) {
    std::vector<std::string> items;
    for (int i = 0; i < n; ++i) items.push_back(std::to_string(i));
    return items;
  }

  static WorkQueue::Worker Named(const std::string& name, int64_t incarnation = 1, int64_t in_progress = 1) {
    return {name, incarnation, in_progress, milliseconds(1000), true, ""};
  }

  // The item, "end", "waits" or another error.
  std::string Take(const WorkQueue::Worker& worker) {
    auto answer = std::make_shared<std::string>("waits");
    answers_.push_back(answer);
    last_ = queue_->Take(worker, now_, [answer](const Status& status, const std::string& item) {
      const int code = StatusNumber(status);
      *answer = code == 0 ? item : code == 11 ? "end" : "error " + std::to_string(code);
    });
    return *answer;
  }

  std::string State() {
    std::string state;
    EXPECT_TRUE(queue_->State(&state).ok());
    return state;
  }

  Status Restore(int items, const std::string& state, bool* is_other, int64_t epochs = 1) {
    return queue_->Restore(Items(items), {epochs, false, 0}, state, is_other);
  }

  WorkQueue* const queue_ = new WorkQueue;
  WorkQueue::Clock::time_point now_ = WorkQueue::Clock::now() + std::chrono::hours(1);
  std::vector<std::shared_ptr<std::string>> answers_;
  int64_t last_ = 0;
};

TEST_F(WorkQueueTest, EachItemIsHandedOutOncePerEpoch) {
  Create(3, 2);
  std::string all;
  for (int i = 0; i < 6; ++i) all += Take(Named(i % 2 == 0 ? "a" : "b"));
  EXPECT_EQ(all, "012012");
  EXPECT_EQ(queue_->Left(), 2) << "the last of both are in progress";
  EXPECT_EQ(Take(Named("a")), "waits") << "b may go";
  EXPECT_EQ(Take(Named("b")), "end");
  EXPECT_EQ(*answers_[6], "end");
  EXPECT_EQ(queue_->Left(), 0);
}

TEST_F(WorkQueueTest, AQueueWithoutItemsSaysSo) {
  EXPECT_EQ(Take(Named("a")), "error 9");
  EXPECT_FALSE(queue_->is_created());
  std::string state;
  EXPECT_EQ(StatusNumber(queue_->State(&state)), 9);
  EXPECT_EQ(StatusNumber(queue_->Create({}, {})), 3);
  EXPECT_EQ(StatusNumber(queue_->Create(Items(1), {0, false, 0})), 3);
  Create(2);
  ASSERT_EQ(Take(Named("a")), "0");
  Create(5);
  EXPECT_EQ(queue_->Left(), 2) << "a second creation has no effect";
}

TEST_F(WorkQueueTest, ARestartedWorkerGetsItsItemAgain) {
  Create(3);
  ASSERT_EQ(Take(Named("a", 1)), "0");
  ASSERT_EQ(Take(Named("b", 1)), "1");
  EXPECT_EQ(Take(Named("a", 2)), "0");
  EXPECT_EQ(Take(Named("a", 2)), "2");
  EXPECT_EQ(Take(Named("a", 2)), "waits");
  EXPECT_EQ(Take(Named("b", 9)), "waits");
  EXPECT_EQ(*answers_[4], "1") << "whoever waited first gets what b has lost";
}

TEST_F(WorkQueueTest, TheItemOfAWorkerThatHasGoneIsHandedOutToWhoeverWaits) {
  Create(2);
  ASSERT_EQ(Take(Named("gone")), "0");
  ASSERT_EQ(Take(Named("a")), "1");
  ASSERT_EQ(Take(Named("a")), "waits");
  queue_->Tick(now_ + milliseconds(999));
  EXPECT_EQ(*answers_.back(), "waits");
  queue_->Tick(now_ + milliseconds(1000));
  EXPECT_EQ(*answers_.back(), "0");
  EXPECT_EQ(Take(Named("a")), "end");
}

TEST_F(WorkQueueTest, AWorkerThatWaitsHasNotGone) {
  Create(3);
  WorkQueue::Worker slow = Named("slow");
  slow.lease = std::chrono::hours(1);
  ASSERT_EQ(Take(slow), "0");
  ASSERT_EQ(Take(Named("a", 1, 2)), "1");
  ASSERT_EQ(Take(Named("a", 1, 2)), "2");
  ASSERT_EQ(Take(Named("a", 1, 2)), "waits");
  queue_->Tick(now_ + std::chrono::minutes(5));
  EXPECT_EQ(*answers_.back(), "waits") << "its own second item is in progress";
}

TEST_F(WorkQueueTest, AWorkerThatIsLateIsDoneWithItsItem) {
  Create(3);
  ASSERT_EQ(Take(Named("a")), "0");
  now_ += milliseconds(1500);
  EXPECT_EQ(Take(Named("a")), "1") << "nobody else had it";
  EXPECT_EQ(queue_->Left(), 2);
  now_ += milliseconds(1500);
  EXPECT_EQ(Take(Named("b")), "1");
  EXPECT_EQ(Take(Named("a")), "2");
  EXPECT_EQ(queue_->Left(), 1) << "a was faster";
  EXPECT_EQ(Take(Named("b")), "waits");
  const auto answer = answers_.back();
  EXPECT_EQ(Take(Named("a")), "end");
  EXPECT_EQ(*answer, "end");
  EXPECT_EQ(queue_->Left(), 0) << "and what b has done as well counts once";
}

TEST_F(WorkQueueTest, ANewProcessOfALateWorkerIsDoneWithNothing) {
  Create(2);
  ASSERT_EQ(Take(Named("a", 1)), "0");
  now_ += milliseconds(1500);
  EXPECT_EQ(Take(Named("b")), "0");
  EXPECT_EQ(Take(Named("a", 2)), "1");
  EXPECT_EQ(queue_->Left(), 2);
}

TEST_F(WorkQueueTest, ALeaseBeginsWithTheItem) {
  Create(1);
  ASSERT_EQ(Take(Named("gone")), "0");
  now_ += milliseconds(100);
  ASSERT_EQ(Take(Named("a")), "waits");
  const auto item = answers_.back();
  ASSERT_EQ(Take(Named("b")), "waits");
  const auto later = answers_.back();
  queue_->Tick(now_ + milliseconds(950));
  ASSERT_EQ(*item, "0");
  queue_->Tick(now_ + milliseconds(1050));
  EXPECT_EQ(*later, "waits") << "a has had it for a tenth of a second";
}

TEST_F(WorkQueueTest, ClientsThatWaitWorkOnNothing) {
  Create(4);
  const WorkQueue::Worker a = Named("a", 1, 2), b = Named("b", 1, 2);
  ASSERT_EQ(Take(a), "0");
  ASSERT_EQ(Take(a), "1");
  ASSERT_EQ(Take(b), "2");
  ASSERT_EQ(Take(b), "3");
  // One of the two clients of each, then the others: all items are done.
  ASSERT_EQ(Take(a), "waits");
  ASSERT_EQ(Take(b), "waits");
  const auto first = answers_.back();
  ASSERT_EQ(Take(a), "waits");
  EXPECT_EQ(Take(b), "end");
  EXPECT_EQ(*first, "end");
  EXPECT_EQ(*answers_.back(), "end");
  EXPECT_EQ(queue_->Left(), 0);
}

TEST_F(WorkQueueTest, TwoOperationsOfAStepDoNotWaitForEachOther) {
  Create(3);
  WorkQueue::Worker a = Named("worker/take"), b = Named("worker/take_1"), other = Named("other/take");
  a.task = b.task = "worker";
  other.task = "other";
  ASSERT_EQ(Take(a), "0");
  ASSERT_EQ(Take(b), "1");
  ASSERT_EQ(Take(a), "2");
  EXPECT_EQ(Take(other), "waits");
  EXPECT_EQ(Take(b), "end");
  EXPECT_EQ(Take(a), "end");
  EXPECT_EQ(*answers_[3], "end");
  EXPECT_EQ(queue_->Left(), 0);
}

TEST_F(WorkQueueTest, AnOldProcessGetsNothingForTheNew) {
  Create(1);
  ASSERT_EQ(Take(Named("b")), "0");
  ASSERT_EQ(Take(Named("a", 1)), "waits");
  const auto old = answers_.back();
  ASSERT_EQ(Take(Named("a", 2)), "waits");
  const auto now = answers_.back();
  EXPECT_EQ(*old, "error 1");
  // The other one comes back as another process.
  WorkQueue::Worker again = Named("b", 2);
  again.waits = false;
  EXPECT_EQ(Take(again), "end");
  EXPECT_EQ(*now, "0");
}

TEST_F(WorkQueueTest, AWaitCanBeCancelled) {
  Create(1);
  ASSERT_EQ(Take(Named("a")), "0");
  ASSERT_EQ(Take(Named("b")), "waits");
  queue_->Cancel(last_);
  EXPECT_EQ(*answers_.back(), "error 1");
  queue_->Cancel(last_);
  WorkQueue::Worker hasty = Named("c");
  hasty.waits = false;
  EXPECT_EQ(Take(hasty), "end");
}

TEST_F(WorkQueueTest, SeveralItemsInProgress) {
  Create(5);
  for (const char* item : {"0", "1", "2"}) ASSERT_EQ(Take(Named("a", 1, 2)), item);
  EXPECT_EQ(queue_->Left(), 4) << "it is done with the first";
  EXPECT_EQ(Take(Named("a", 2, 2)), "1");
  EXPECT_EQ(Take(Named("a", 2, 2)), "2");
}

TEST_F(WorkQueueTest, EpochsAreShuffledBySeed) {
  const auto order = [](uint64_t seed) {
    WorkQueue* queue = new WorkQueue;
    EXPECT_TRUE(queue->Create(Items(20), {2, true, seed}).ok());
    std::vector<std::string> taken;
    for (int i = 0; i < 40; ++i) {
      queue->Take(Named("a"), WorkQueue::Clock::now(),
                  [&](const Status&, const std::string& item) { taken.push_back(item); });
    }
    queue->Unref();
    return taken;
  };
  const std::vector<std::string> one = order(1);
  EXPECT_EQ(one, order(1));
  EXPECT_NE(one, order(2));
  std::vector<std::string> first(one.begin(), one.begin() + 20), second(one.begin() + 20, one.end());
  EXPECT_NE(first, second);
  std::sort(first.begin(), first.end());
  std::sort(second.begin(), second.end());
  EXPECT_EQ(first, second);
}

TEST_F(WorkQueueTest, ACheckpointHasWhatIsNotDone) {
  Create(4);
  ASSERT_EQ(Take(Named("a")), "0");
  ASSERT_EQ(Take(Named("b")), "1");
  ASSERT_EQ(Take(Named("a")), "2");
  const std::string state = State();
  ASSERT_EQ(Take(Named("a")), "3");
  bool is_other = true;
  ASSERT_TRUE(Restore(4, state, &is_other).ok());
  EXPECT_FALSE(is_other);
  EXPECT_EQ(queue_->Left(), 3);
  for (const char* item : {"1", "2", "3", "end"}) EXPECT_EQ(Take(Named("c")), item);
  ASSERT_TRUE(Restore(5, state, &is_other).ok());
  EXPECT_TRUE(is_other);
  EXPECT_EQ(queue_->Left(), 5);
}

TEST_F(WorkQueueTest, ADamagedCheckpointIsRefused) {
  Create(4);
  ASSERT_EQ(Take(Named("a")), "0");
  const std::string state = State();
  const std::string head = state.substr(0, state.rfind(" 1 1 0"));
  ASSERT_LT(head.size(), state.size());
  bool is_other = false;
  for (const std::string& bad :
       {std::string(), state + " 0", state + "x", head + " 5 0", head + " -1 0", head + " 2 2 1 0", head + " 2 2 0 0",
        head + " 2 1 2", head + " 2 3 0 1", head + " 1 1", "starwire-work-queue-2" + state.substr(21)}) {
    const Status status = Restore(4, bad, &is_other);
    EXPECT_EQ(StatusNumber(status), 3) << bad;
  }
  EXPECT_EQ(Take(Named("b")), "1") << "nothing has changed";
}

// Whatever workers do, no item is done twice, unless a worker was late, and all are done in the end.
TEST_F(WorkQueueTest, RandomWorkers) {
  for (uint32_t seed = 0; seed < 50; ++seed) {
    std::mt19937 random(seed);
    WorkQueue* queue = new WorkQueue;
    ASSERT_TRUE(queue->Create(Items(10), {3, true, seed}).ok());
    std::map<std::string, int64_t> incarnations;
    std::map<std::string, std::string> held;
    std::map<std::string, int> done;
    bool is_over = false;
    const bool is_late = seed >= 25;
    const milliseconds lease(is_late ? 10 * (seed - 24) : 3600000);
    auto now = WorkQueue::Clock::now();
    for (int step = 0; step < 2000 && !is_over; ++step) {
      now += milliseconds(random() % 100);
      const std::string name = "worker" + std::to_string(random() % 4);
      if (random() % 8 == 0) {
        ++incarnations[name];
        held.erase(name);
        continue;
      }
      WorkQueue::Worker worker = Named(name, incarnations[name]);
      // Only the last one's end is the end of all.
      worker.waits = false;
      worker.lease = lease;
      const auto before = held.find(name);
      queue->Take(worker, now, [&](const Status& status, const std::string& item) {
        if (before != held.end()) ++done[before->second];
        held.erase(name);
        if (status.ok()) held[name] = item;
      });
      is_over = queue->Left() == 0;
    }
    EXPECT_TRUE(is_over) << seed;
    ASSERT_EQ(done.size(), 10u) << seed;
    for (const auto& item : done) {
      EXPECT_GE(item.second, 3) << seed << " " << item.first;
      EXPECT_TRUE(item.second == 3 || is_late) << seed << " " << item.first;
    }
    queue->Unref();
  }
}

}  // namespace
}  // namespace starwire
