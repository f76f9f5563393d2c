// Exceptions stop at the ABI boundary, background work shares one thread, and tables are freed with their server.
#include "cc/base/guard.h"

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <new>
#include <set>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "cc/base/background_queue.h"
#include "cc/base/completion_batch.h"
#include "cc/tensor/codec.h"
#include "tests/cc/shim/rig.h"

namespace starwire {
namespace {

// 0: throws nothing.
int Throws(int what) {
  if (what == 1) throw std::bad_alloc();
  if (what == 2) throw std::system_error(std::make_error_code(std::errc::resource_unavailable_try_again));
  if (what == 3) throw std::runtime_error("a bug");
  if (what == 4) throw 7;  // NOLINT: anything can be thrown
  return 0;
}

Status told;
sw_code Fails(const Status& thrown, int) {
  told = thrown;
  return 77;
}
sw_code FailsToFail(const Status&, int what) { return Throws(what); }
void* Pointer(int what) {
  Throws(what);
  return &told;
}
void Nothing(int what) { Throws(what); }

TEST(Guard, EachExceptionIsAStatus) {
  const int codes[] = {0, kResourceExhausted, kResourceExhausted, kInternal, kInternal};
  for (int what = 0; what <= 4; ++what) {
    EXPECT_EQ(Guarded<&Throws>(what), codes[what]);
    EXPECT_EQ((Guarded<&Throws, &Fails>(what)), what == 0 ? 0 : 77);
    if (what != 0) {
      EXPECT_EQ(StatusNumber(told), codes[what]) << StatusMessage(told);
    }
    EXPECT_EQ((Guarded<&Throws, &FailsToFail>(what)), what == 0 ? 0 : kInternal);
    EXPECT_EQ(Guarded<&Pointer>(what) != nullptr, what == 0);
    Guarded<&Nothing>(what);
    const Status status = Guard(
        "a test",
        [what] {
          Throws(what);
          return OkStatus();
        },
        [](const Status& thrown) { return thrown; });
    EXPECT_EQ(StatusNumber(status), codes[what]);
  }
  EXPECT_NE(StatusMessage(told).find("unknown exception"), std::string::npos);
}

TEST(Guard, AThrowingCompletionDoesNotAffectOthers) {
  bool ran = false;
  CompletionBatch::Add([] { throw std::bad_alloc(); });
  CompletionBatch::Add([&ran] { ran = true; });
  EXPECT_TRUE(ran);
}

TEST(BackgroundQueue, OneThreadForAll) {
  constexpr int kMany = 3000;
  std::atomic<int> done{0};
  std::set<std::thread::id> threads;
  std::vector<int> order;
  BackgroundQueue queue("test");
  for (int i = 0; i < kMany; ++i) {
    queue.Run([&, i] {
      threads.insert(std::this_thread::get_id());
      order.push_back(i);
      ++done;
      if (i == 5) throw std::runtime_error("goes to the log");
    });
  }
  EXPECT_TRUE(queue.Stop(kPatience));
  EXPECT_EQ(done.load(), kMany);
  EXPECT_EQ(threads.size(), 1u);
  EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
  EXPECT_EQ(threads.count(std::this_thread::get_id()), 0u);
  // After Stop, work runs in the caller's thread.
  queue.Run([&] { threads.insert(std::this_thread::get_id()); });
  EXPECT_EQ(threads.count(std::this_thread::get_id()), 1u);
}

TEST(BackgroundQueue, DelayedWorkWaits) {
  BackgroundQueue queue("test");
  std::mutex mu;
  std::condition_variable changed;
  std::vector<int> order;
  const auto note = [&](int what) {
    std::lock_guard<std::mutex> lock(mu);
    order.push_back(what);
    changed.notify_all();
  };
  const auto noted = [&](size_t count) {
    std::unique_lock<std::mutex> lock(mu);
    return changed.wait_for(lock, kPatience, [&] { return order.size() == count; });
  };
  queue.RunAfter(std::chrono::hours(1), [&] { note(3); });
  queue.Run([&] { note(1); });
  ASSERT_TRUE(noted(1)) << "it does not wait for what is due later";
  const auto begun = std::chrono::steady_clock::now();
  queue.RunAfter(std::chrono::milliseconds(200), [&] { note(2); });
  ASSERT_TRUE(noted(2));
  EXPECT_GE(std::chrono::steady_clock::now() - begun, std::chrono::milliseconds(200));
  EXPECT_TRUE(queue.Stop(kPatience)) << "what is not due yet runs now";
  EXPECT_EQ(order, (std::vector<int>{1, 2, 3}));
}

TEST(BackgroundQueue, StopTimesOut) {
  std::mutex mu;
  std::unique_lock<std::mutex> held(mu);
  std::atomic<bool> over{false};
  {
    BackgroundQueue queue("test");
    queue.Run([&] {
      std::lock_guard<std::mutex> lock(mu);
      over = true;
    });
    EXPECT_FALSE(queue.Stop(std::chrono::milliseconds(50)));
  }
  held.unlock();
  for (int i = 0; i < 3000 && !over; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_TRUE(over);
}

// Aborting a step for each request of a lost peer must not start a thread each.
TEST(BackgroundQueue, ManyAbortsDoNotMakeManyThreads) {
  constexpr int kMany = 2000;
  std::mutex mu;
  std::condition_variable changed;
  std::set<long> threads;  // by the kernel's number, which a thread that comes after another one does not share
  int done = 0;
  for (int i = 0; i < kMany; ++i) {
    CompletionBatch::DeferScope defer;
    CompletionBatch::Add([&] {
      std::lock_guard<std::mutex> lock(mu);
      threads.insert(syscall(SYS_gettid));
      if (++done == kMany) changed.notify_all();
    });
  }
  std::unique_lock<std::mutex> lock(mu);
  ASSERT_TRUE(changed.wait_for(lock, kPatience, [&] { return done == kMany; }));
  EXPECT_EQ(threads.size(), 1u);
  EXPECT_EQ(threads.count(syscall(SYS_gettid)), 0u);
}

}  // namespace
}  // namespace starwire
