// How steps and receives end: aborts, cancellations, stopped peers and clean-ups.
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "cc/rendezvous/rendezvous.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tests/cc/shim/rendezvous_rig.h"

namespace starwire {
namespace {

using tensorflow::Rendezvous;
using tensorflow::Tensor;

class RendezvousEndTest : public RendezvousRig {};

TEST_F(RendezvousEndTest, AbortEndsPendingReceivesWithItsReason) {
  auto* from = ps_->Step(9);
  auto* to = worker_->Step(9);
  const int64_t references = ReferencesWhenAborted();
  constexpr int kCalls = 300;
  std::vector<Received> received(kCalls);
  for (int i = 0; i < kCalls; ++i) {
    to->RecvAsync(Key("never" + std::to_string(i)), Rendezvous::Args(), received[i].Callback());
  }
  // Requests are served in order: once this one is answered, all earlier ones have arrived.
  Received last;
  to->RecvAsync(Key("last"), Rendezvous::Args(), last.Callback());
  ASSERT_TRUE(from->Send(Key("last"), Rendezvous::Args(), Floats(1, 0), false).ok());
  ASSERT_TRUE(last.Wait());
  const auto begin = std::chrono::steady_clock::now();
  to->StartAbort(MakeStatus(kInternal, "because"));
  for (auto& each : received) {
    ASSERT_TRUE(each.Wait());
    EXPECT_EQ(StatusNumber(each.status), 13);
    EXPECT_NE(StatusMessage(each.status).find("because"), std::string::npos) << StatusMessage(each.status);
  }
  Received after;
  to->RecvAsync(Key("after"), Rendezvous::Args(), after.Callback());
  ASSERT_TRUE(after.Wait());
  EXPECT_EQ(StatusNumber(after.status), 13);
  for (auto& each : received) EXPECT_EQ(each.times, 1);
  EXPECT_TRUE(AllGone(to, references));
  to->Unref();
  // The producer's step is aborted a second later: the error that led here gets there first.
  bool aborted = false;
  for (int i = 0; i < 1000 && !aborted; ++i) {
    aborted = !from->Send(Key("probe" + std::to_string(i)), Rendezvous::Args(), Floats(1, 0), false).ok();
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_TRUE(aborted);
  EXPECT_GE(std::chrono::steady_clock::now() - begin, std::chrono::seconds(1));
  from->Unref();
}

TEST_F(RendezvousEndTest, CancellationReachesItsCallsOnly) {
  auto* from = ps_->Step(10);
  auto* to = worker_->Step(10);
  tensorflow::CancellationManager cancelled, alive;
  Rendezvous::Args first, second;
  first.cancellation_manager = &cancelled;
  second.cancellation_manager = &alive;
  Received a, b;
  to->RecvAsync(Key("a"), first, a.Callback());
  to->RecvAsync(Key("b"), second, b.Callback());
  cancelled.StartCancel();
  ASSERT_TRUE(a.Wait());
  EXPECT_EQ(StatusNumber(a.status), 1) << StatusMessage(a.status);
  // What led to the cancellation is the step's error, not this.
  EXPECT_TRUE(tensorflow::StatusGroup::IsDerived(a.status)) << a.status;
  ASSERT_TRUE(from->Send(Key("b"), Rendezvous::Args(), Floats(2, 2), false).ok());
  ASSERT_TRUE(b.Wait());
  EXPECT_TRUE(b.status.ok()) << StatusMessage(b.status);
  Received late;
  to->RecvAsync(Key("late"), first, late.Callback());
  ASSERT_TRUE(late.Wait());
  EXPECT_EQ(StatusNumber(late.status), 1);
  EXPECT_TRUE(tensorflow::StatusGroup::IsDerived(late.status)) << late.status;
  from->Unref();
  to->Unref();
}

TEST_F(RendezvousEndTest, AbortRacesWithRequestsAndAnswers) {
  const int64_t references = ReferencesWhenAborted();
  for (int round = 0; round < 60; ++round) {
    const int64_t step = 1000 + round;
    auto* from = ps_->Step(step);
    auto* to = worker_->Step(step);
    constexpr int kCalls = 100;
    std::vector<Received> received(kCalls);
    std::thread sender([&] {
      for (int i = 0; i < kCalls; ++i) {
        // Fails once the abort has arrived.
        (void)from->Send(Key("e" + std::to_string(i)), Rendezvous::Args(), Floats(i % 7 == 0 ? 5000 : 10, i), false);
      }
    });
    std::thread aborter([&] {
      std::this_thread::sleep_for(std::chrono::microseconds(round * 40));
      to->StartAbort(MakeStatus(kInternal, "race"));
    });
    for (int i = 0; i < kCalls; ++i)
      to->RecvAsync(Key("e" + std::to_string(i)), Rendezvous::Args(), received[i].Callback());
    sender.join();
    aborter.join();
    for (int i = 0; i < kCalls; ++i) {
      ASSERT_TRUE(received[i].Wait());
      if (received[i].status.ok()) {
        ExpectFloats(received[i].tensor, i % 7 == 0 ? 5000 : 10, i);
      } else {
        EXPECT_EQ(StatusNumber(received[i].status), 13) << StatusMessage(received[i].status);
      }
    }
    EXPECT_TRUE(AllGone(to, references));
    from->Unref();
    to->Unref();
    for (auto& each : received) ASSERT_EQ(each.times, 1);
  }
}

TEST_F(RendezvousEndTest, SenderThatStopsEndsItsReceivers) {
  auto* to = worker_->Step(11);
  const int64_t references = to->RefCount();
  std::vector<Received> received(100);
  for (int i = 0; i < 100; ++i) to->RecvAsync(Key("n" + std::to_string(i)), Rendezvous::Args(), received[i].Callback());
  ASSERT_TRUE(Eventually([&] { return ps_->EngineMetric("requests_unanswered") == 100; }));
  ps_->engine->Stop();
  for (auto& each : received) {
    ASSERT_TRUE(each.Wait());
    const int code = StatusNumber(each.status);
    EXPECT_TRUE(code == 14 || code == 10) << StatusMessage(each.status);
  }
  EXPECT_TRUE(AllGone(to, references));
  to->Unref();
}

TEST_F(RendezvousEndTest, ReceiverThatStopsEndsItsOwnCalls) {
  auto* to = worker_->Step(12);
  std::vector<Received> received(100);
  for (int i = 0; i < 100; ++i) to->RecvAsync(Key("n" + std::to_string(i)), Rendezvous::Args(), received[i].Callback());
  worker_->engine->Stop();
  for (auto& each : received) {
    ASSERT_TRUE(each.Wait());
    EXPECT_FALSE(each.status.ok());
  }
  Received after;
  to->RecvAsync(Key("after"), Rendezvous::Args(), after.Callback());
  ASSERT_TRUE(after.Wait());
  EXPECT_FALSE(after.status.ok());
  to->Unref();
}

TEST_F(RendezvousEndTest, CleanedUpStepIsFreed) {
  for (int64_t step = 200; step < 205; ++step) {
    auto* from = ps_->Step(step);
    auto* to = worker_->Step(step);
    const auto here = KeyFrom(std::string(kWorker) + kCpu, worker_->incarnation(), "here");
    Received remote, local;
    to->RecvAsync(Key("x"), Rendezvous::Args(), remote.Callback());
    ASSERT_TRUE(from->Send(Key("x"), Rendezvous::Args(), Floats(2, 1), false).ok());
    ASSERT_TRUE(to->Send(here, Rendezvous::Args(), Floats(2, 1), false).ok());
    to->RecvAsync(here, Rendezvous::Args(), local.Callback());
    ASSERT_TRUE(remote.Wait());
    ASSERT_TRUE(local.Wait());
    ASSERT_TRUE(remote.status.ok()) << StatusMessage(remote.status);
    // The usual order: the master's clean-up arrives before the last user releases the step.
    worker_->manager->Cleanup(step);
    ps_->manager->Cleanup(step);
    EXPECT_TRUE(AllGone(to, 1)) << "something else still holds the step";
    EXPECT_TRUE(AllGone(from, 1)) << "something else still holds the step";
    from->Unref();
    to->Unref();
  }
}

TEST_F(RendezvousEndTest, CleanUpEndsPendingReceives) {
  auto* from = ps_->Step(230);
  auto* to = worker_->Step(230);
  const auto here = KeyFrom(std::string(kWorker) + kCpu, worker_->incarnation(), "here");
  Received remote, local, served;
  to->RecvAsync(Key("never"), Rendezvous::Args(), remote.Callback());
  worker_->manager->Cleanup(230);
  ASSERT_TRUE(remote.Wait());
  EXPECT_EQ(StatusNumber(remote.status), kAborted) << StatusMessage(remote.status);
  EXPECT_NE(StatusMessage(remote.status).find("Cleanup 230"), std::string::npos) << StatusMessage(remote.status);
  to->Unref();

  to = worker_->Step(231);
  to->RecvAsync(here, Rendezvous::Args(), local.Callback());
  worker_->manager->Cleanup(231);
  ASSERT_TRUE(local.Wait());
  EXPECT_EQ(StatusNumber(local.status), kAborted) << StatusMessage(local.status);
  to->Unref();
  from->Unref();

  from = ps_->Step(232);
  ps_->manager->RecvLocalAsync(232, Key("never"), served.Callback());
  ps_->manager->Cleanup(232);
  ASSERT_TRUE(served.Wait());
  EXPECT_EQ(StatusNumber(served.status), kAborted) << StatusMessage(served.status);
  from->Unref();
}

TEST_F(RendezvousEndTest, CleanUpFreesUnreceivedValues) {
  auto* from = ps_->Step(240);
  Tensor value = Floats(100, 1);
  ASSERT_TRUE(from->Send(Key("unwanted"), Rendezvous::Args(), value, false).ok());
  EXPECT_FALSE(value.RefCountIsOne());
  ps_->manager->Cleanup(240);
  EXPECT_TRUE(value.RefCountIsOne());
  from->Unref();
}

// Two features may each keep something for a step.
template <int kFeature>
struct Kept : StepState {
  explicit Kept(int64_t step_id) : step(step_id) { ++alive; }
  ~Kept() override { --alive; }
  void Aborted() override { ++aborted; }
  const int64_t step;
  int aborted = 0;
  static inline int alive = 0;
};

TEST_F(RendezvousEndTest, StatesOfAStepGoWithIt) {
  auto* step = worker_->Step(245);
  auto* rendezvous = dynamic_cast<RemoteRendezvous*>(step);
  ASSERT_NE(rendezvous, nullptr);
  auto* one = rendezvous->State<Kept<1>>();
  auto* two = rendezvous->State<Kept<2>>();
  EXPECT_EQ(one->step, 245);
  EXPECT_EQ(two->step, 245);
  EXPECT_EQ(rendezvous->State<Kept<1>>(), one);
  EXPECT_EQ(rendezvous->State<Kept<2>>(), two);
  EXPECT_EQ(Kept<1>::alive + Kept<2>::alive, 2);
  worker_->manager->Cleanup(245);
  step->Unref();
  EXPECT_EQ(Kept<1>::alive + Kept<2>::alive, 0);
}

TEST_F(RendezvousEndTest, StatesOfAFailedStepKnowThatItFailed) {
  auto* step = worker_->Step(246);
  auto* rendezvous = dynamic_cast<RemoteRendezvous*>(step);
  ASSERT_NE(rendezvous, nullptr);
  EXPECT_EQ(rendezvous->State<Kept<3>>()->aborted, 0);
  step->StartAbort(MakeStatus(kInternal, "because"));
  EXPECT_EQ(rendezvous->State<Kept<3>>()->aborted, 1);
  EXPECT_EQ(rendezvous->State<Kept<4>>()->aborted, 1) << "made after the abort";
  step->Unref();
}

TEST_F(RendezvousEndTest, ReceivesAfterTheCleanUpFail) {
  const auto here = KeyFrom(std::string(kWorker) + kCpu, worker_->incarnation(), "here");
  enum { kRemote, kLocal, kSend, kServe, kWays };
  for (int way = 0; way < kWays; ++way) {
    const int64_t step = 250 + way;
    auto* to = worker_->Step(step);
    worker_->manager->Cleanup(step);
    for (int again = 0; again < 2; ++again) {
      Received received;
      switch (way) {
        case kRemote:
          to->RecvAsync(Key("late"), Rendezvous::Args(), received.Callback());
          break;
        case kLocal:
          to->RecvAsync(here, Rendezvous::Args(), received.Callback());
          break;
        case kSend:
          received.status = to->Send(here, Rendezvous::Args(), Floats(1, 1), false);
          received.times = 1;
          break;
        case kServe:
          static_cast<RemoteRendezvous*>(to)->ServeAsync(here, received.Callback());
          break;
      }
      ASSERT_TRUE(received.Wait()) << "way " << way;
      EXPECT_EQ(StatusNumber(received.status), kAborted) << "way " << way << ": " << StatusMessage(received.status);
    }
    to->Unref();
  }
}

TEST_F(RendezvousEndTest, CleanUpRacesWithReceives) {
  constexpr int kRounds = 300;
  int freed = 0;
  for (int round = 0; round < kRounds; ++round) {
    const int64_t step = 2000 + round;
    auto* from = ps_->Step(step);
    auto* to = worker_->Step(step);
    constexpr int kCalls = 4;
    std::vector<Received> received(kCalls);
    const bool is_first = round == 0, is_last = round == kRounds - 1;
    // Both ends of the race are there, whatever the machine does in between.
    if (is_first) worker_->manager->Cleanup(step);
    std::thread receiver([&] {
      for (int i = 0; i < kCalls; ++i) {
        to->RecvAsync(Key("e" + std::to_string(i)), Rendezvous::Args(), received[i].Callback());
        (void)from->Send(Key("e" + std::to_string(i)), Rendezvous::Args(), Floats(3, i), false);
        if (!received[i].Wait()) return;
      }
    });
    if (is_last) receiver.join();
    std::this_thread::sleep_for(std::chrono::microseconds(round * 10));
    if (!is_first) worker_->manager->Cleanup(step);
    if (!is_last) receiver.join();
    for (int i = 0; i < kCalls; ++i) {
      ASSERT_EQ(received[i].times, 1) << "round " << round << ", call " << i;
      if (received[i].status.ok()) {
        ExpectFloats(received[i].tensor, 3, i);
      } else {
        EXPECT_EQ(StatusNumber(received[i].status), kAborted) << StatusMessage(received[i].status);
      }
    }
    freed += received.back().status.ok();
    from->Unref();
    to->Unref();
  }
  EXPECT_GT(freed, 0);
  EXPECT_LT(freed, kRounds);
}

}  // namespace
}  // namespace starwire
