// Two tasks in one process, each with TensorFlow's devices and sessions, exchange tensors over real connections.
#include "cc/rendezvous/rendezvous.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "cc/worker/remote_worker.h"
#include "tensorflow/core/distributed_runtime/graph_mgr.h"
#include "tensorflow/core/distributed_runtime/worker_cache_logger.h"
#include "tensorflow/core/distributed_runtime/worker_cache_wrapper.h"
#include "tensorflow/core/distributed_runtime/worker_session.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/control_flow.h"
#include "tensorflow/core/platform/tstring.h"
#include "tests/cc/shim/rig.h"

namespace starwire {
namespace {

using tensorflow::Rendezvous;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::tstring;

constexpr char kCpu[] = "/device:CPU:0";

// An allocator that always fails.
class NoMemory : public tensorflow::Allocator {
 public:
  std::string Name() override { return "none"; }
  void* AllocateRaw(size_t, size_t) override { return nullptr; }
  void DeallocateRaw(void*) override {}
};

// A worker cache with a channel to each task of the cluster.
class Cache : public tensorflow::WorkerCacheWrapper {
 public:
  Cache(std::shared_ptr<Engine> engine, std::vector<std::pair<std::string, std::string>> cluster)
      : WorkerCacheWrapper(nullptr), engine_(std::move(engine)), cluster_(std::move(cluster)) {}
  tensorflow::WorkerInterface* GetOrCreateWorker(const std::string& target) override {
    for (const auto& entry : cluster_) {
      if (entry.first != target) continue;
      std::shared_ptr<Channel> channel;
      EXPECT_TRUE(engine_->OpenChannel(target, entry.second, &channel).ok());
      ++workers;
      return new RemoteWorker(target, channel, &logger);
    }
    return nullptr;
  }
  void ReleaseWorker(const std::string&, tensorflow::WorkerInterface* worker) override {
    --workers;
    delete static_cast<RemoteWorker*>(worker);
  }
  std::atomic<int> workers{0};
  tensorflow::WorkerCacheLogger logger;

 private:
  const std::shared_ptr<Engine> engine_;
  const std::vector<std::pair<std::string, std::string>> cluster_;
};

class Task : public EngineTask {
 public:
  Task(const std::string& job, const Cluster& cluster) : EngineTask(job) {
    manager = std::make_unique<RendezvousMgr>(&env);
    env.rendezvous_mgr = manager.get();
    Start("grpc++", cluster);

    auto owned = std::make_unique<Cache>(engine, cluster.addresses);
    cache = owned.get();
    session = tensorflow::WorkerSession::CreateWithBorrowedDeviceMgr(
        "session", name, std::move(owned), devices.get(), nullptr, nullptr,
        [](tensorflow::WorkerSession*, bool, tensorflow::DeviceMgr*) {
          return std::unique_ptr<tensorflow::DistributedFunctionLibraryRuntime>();
        });
  }
  ~Task() { engine->Stop(); }

  // The caller owns the returned reference.
  tensorflow::RemoteRendezvous* Step(int64_t step) {
    tensorflow::RemoteRendezvous* rendezvous = TakeReference(manager->Find(step));
    EXPECT_TRUE(rendezvous->Initialize(session.get()).ok());
    return rendezvous;
  }

  std::unique_ptr<RendezvousMgr> manager;
  Cache* cache = nullptr;
  std::shared_ptr<tensorflow::WorkerSession> session;
};

// The result of one receive.
struct Received {
  bool Wait() {
    std::unique_lock<std::mutex> lock(mu);
    return cv.wait_for(lock, kPatience, [this] { return times > 0; });
  }
  Rendezvous::DoneCallback Callback() {
    return [this](const Status& s, const Rendezvous::Args&, const Rendezvous::Args&, const Tensor& t, bool dead) {
      std::lock_guard<std::mutex> lock(mu);
      status = s;
      tensor = t;
      is_dead = dead;
      ++times;
      cv.notify_all();
    };
  }
  std::mutex mu;
  std::condition_variable cv;
  Status status;
  Tensor tensor;
  bool is_dead = false;
  int times = 0;
};

class RendezvousTest : public testing::Test {
 protected:
  void SetUp() override {
    const Cluster cluster;
    ps_ = std::make_unique<Task>("ps", cluster);
    worker_ = std::make_unique<Task>("worker", cluster);
  }

  // A key from the PS to the worker.
  Rendezvous::ParsedKey Key(const std::string& edge, uint64_t frame = 0, int64_t iteration = 0) {
    return KeyFrom(std::string(kPs) + kCpu, ps_->incarnation(), edge, frame, iteration);
  }
  Rendezvous::ParsedKey KeyFrom(const std::string& device, uint64_t incarnation, const std::string& edge,
                                uint64_t frame = 0, int64_t iteration = 0) {
    Rendezvous::ParsedKey key;
    const std::string text = Rendezvous::CreateKey(device, incarnation, std::string(kWorker) + kCpu, edge,
                                                   tensorflow::FrameAndIter(frame, iteration));
    EXPECT_TRUE(Rendezvous::ParseKey(text, &key).ok()) << text;
    return key;
  }
  static Tensor Floats(int64_t n, float first) {
    Tensor tensor(tensorflow::DT_FLOAT, TensorShape({n}));
    for (int64_t i = 0; i < n; ++i) tensor.flat<float>()(i) = first + static_cast<float>(i);
    return tensor;
  }
  static void ExpectFloats(const Tensor& tensor, int64_t n, float first) {
    ASSERT_EQ(tensor.dtype(), tensorflow::DT_FLOAT);
    ASSERT_EQ(tensor.NumElements(), n);
    for (int64_t i = 0; i < n; ++i) ASSERT_EQ(tensor.flat<float>()(i), first + static_cast<float>(i));
  }
  // TensorFlow itself keeps references to an aborted rendezvous.
  int64_t ReferencesWhenAborted() {
    auto* unused = worker_->Step(987654321);
    unused->StartAbort(MakeStatus(kInternal, "unused"));
    const int64_t references = unused->RefCount();
    unused->Unref();
    return references;
  }
  template <typename Condition>
  static bool Eventually(Condition condition) {
    for (int i = 0; i < 1000; ++i) {
      if (condition()) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return false;
  }
  // Waits until no call holds a reference to the rendezvous any more.
  static bool AllGone(const tensorflow::RemoteRendezvous* rendezvous, int64_t references) {
    return Eventually([&] { return rendezvous->RefCount() == references; });
  }

  std::unique_ptr<Task> ps_;
  std::unique_ptr<Task> worker_;
};

TEST_F(RendezvousTest, SentBeforeAndAfterTheRequest) {
  auto* from = ps_->Step(1);
  auto* to = worker_->Step(1);
  const int64_t references = to->RefCount();
  ASSERT_TRUE(from->Send(Key("early"), Rendezvous::Args(), Floats(1024, 3), false).ok());
  Received early, late;
  to->RecvAsync(Key("early"), Rendezvous::Args(), early.Callback());
  to->RecvAsync(Key("late"), Rendezvous::Args(), late.Callback());
  ASSERT_TRUE(early.Wait());
  ASSERT_TRUE(early.status.ok()) << StatusMessage(early.status);
  ExpectFloats(early.tensor, 1024, 3);
  EXPECT_EQ(late.times, 0);
  ASSERT_TRUE(from->Send(Key("late"), Rendezvous::Args(), Floats(1 << 20, 4), false).ok());
  ASSERT_TRUE(late.Wait());
  ASSERT_TRUE(late.status.ok()) << StatusMessage(late.status);
  ExpectFloats(late.tensor, 1 << 20, 4);
  EXPECT_TRUE(AllGone(to, references));
  from->Unref();
  to->Unref();
}

TEST_F(RendezvousTest, RequestBeforeTheStepIsKnownThere) {
  auto* to = worker_->Step(2);
  Received received;
  to->RecvAsync(Key("x"), Rendezvous::Args(), received.Callback());
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  auto* from = ps_->Step(2);
  ASSERT_TRUE(from->Send(Key("x"), Rendezvous::Args(), Floats(5, 1), false).ok());
  ASSERT_TRUE(received.Wait());
  ASSERT_TRUE(received.status.ok()) << StatusMessage(received.status);
  ExpectFloats(received.tensor, 5, 1);
  from->Unref();
  to->Unref();
}

TEST_F(RendezvousTest, DeadEmptyScalarAndStringTensors) {
  auto* from = ps_->Step(3);
  auto* to = worker_->Step(3);
  Tensor scalar(tensorflow::DT_BFLOAT16, TensorShape({}));
  scalar.scalar<Eigen::bfloat16>()() = Eigen::bfloat16(1.5f);
  Tensor strings(tensorflow::DT_STRING, TensorShape({2}));
  strings.flat<tstring>()(0) = std::string(100000, 's');
  Received dead, empty, one, text;
  to->RecvAsync(Key("dead"), Rendezvous::Args(), dead.Callback());
  to->RecvAsync(Key("empty"), Rendezvous::Args(), empty.Callback());
  to->RecvAsync(Key("one"), Rendezvous::Args(), one.Callback());
  to->RecvAsync(Key("text"), Rendezvous::Args(), text.Callback());
  ASSERT_TRUE(from->Send(Key("dead"), Rendezvous::Args(), Tensor(), true).ok());
  ASSERT_TRUE(
      from->Send(Key("empty"), Rendezvous::Args(), Tensor(tensorflow::DT_INT64, TensorShape({0, 3})), false).ok());
  ASSERT_TRUE(from->Send(Key("one"), Rendezvous::Args(), scalar, false).ok());
  ASSERT_TRUE(from->Send(Key("text"), Rendezvous::Args(), strings, false).ok());
  for (Received* each : {&dead, &empty, &one, &text}) {
    ASSERT_TRUE(each->Wait());
    ASSERT_TRUE(each->status.ok()) << StatusMessage(each->status);
  }
  EXPECT_TRUE(dead.is_dead);
  EXPECT_FALSE(empty.is_dead);
  EXPECT_TRUE(empty.tensor.shape() == TensorShape({0, 3}));
  EXPECT_EQ(static_cast<float>(one.tensor.scalar<Eigen::bfloat16>()()), 1.5f);
  EXPECT_EQ(text.tensor.flat<tstring>()(0), std::string(100000, 's'));
  from->Unref();
  to->Unref();
}

TEST_F(RendezvousTest, FramesAndIterationsAreDifferentTensors) {
  auto* from = ps_->Step(4);
  auto* to = worker_->Step(4);
  std::vector<std::unique_ptr<Received>> received;
  for (int frame = 0; frame < 3; ++frame) {
    for (int iteration = 0; iteration < 4; ++iteration) {
      received.push_back(std::make_unique<Received>());
      to->RecvAsync(Key("loop", frame * (uint64_t{1} << 61), iteration), Rendezvous::Args(),
                    received.back()->Callback());
    }
  }
  for (int i = 11; i >= 0; --i) {
    ASSERT_TRUE(
        from->Send(Key("loop", i / 4 * (uint64_t{1} << 61), i % 4), Rendezvous::Args(), Floats(2, i), false).ok());
  }
  for (int i = 0; i < 12; ++i) {
    ASSERT_TRUE(received[i]->Wait());
    ASSERT_TRUE(received[i]->status.ok()) << StatusMessage(received[i]->status);
    ExpectFloats(received[i]->tensor, 2, i);
  }
  from->Unref();
  to->Unref();
}

TEST_F(RendezvousTest, LocalTensorsStayLocal) {
  auto* to = worker_->Step(5);
  const auto key = KeyFrom(std::string(kWorker) + kCpu, worker_->incarnation(), "here");
  Received received;
  to->RecvAsync(key, Rendezvous::Args(), received.Callback());
  ASSERT_TRUE(to->Send(key, Rendezvous::Args(), Floats(3, 9), false).ok());
  ASSERT_TRUE(received.Wait());
  ASSERT_TRUE(received.status.ok());
  ExpectFloats(received.tensor, 3, 9);
  EXPECT_EQ(worker_->cache->workers, 0);
  to->Unref();
}

TEST_F(RendezvousTest, AnotherIncarnationOfTheSenderIsAborted) {
  auto* to = worker_->Step(6);
  Received received;
  to->RecvAsync(KeyFrom(std::string(kPs) + kCpu, ps_->incarnation() + 1, "x"), Rendezvous::Args(), received.Callback());
  ASSERT_TRUE(received.Wait());
  EXPECT_EQ(StatusNumber(received.status), 10) << StatusMessage(received.status);
  EXPECT_NE(StatusMessage(received.status).find("restarted"), std::string::npos);
  to->Unref();
}

TEST_F(RendezvousTest, UnknownDevicesAndTasks) {
  auto* to = worker_->Step(7);
  Received no_device, no_task, not_here;
  to->RecvAsync(KeyFrom(std::string(kPs) + "/device:CPU:7", 1, "x"), Rendezvous::Args(), no_device.Callback());
  to->RecvAsync(KeyFrom("/job:ps/replica:0/task:3/device:CPU:0", 1, "x"), Rendezvous::Args(), no_task.Callback());
  Rendezvous::ParsedKey elsewhere;
  ASSERT_TRUE(Rendezvous::ParseKey(Rendezvous::CreateKey(std::string(kPs) + kCpu, ps_->incarnation(),
                                                         "/job:worker/replica:0/task:5/device:CPU:0", "x",
                                                         tensorflow::FrameAndIter(0, 0)),
                                   &elsewhere)
                  .ok());
  to->RecvAsync(elsewhere, Rendezvous::Args(), not_here.Callback());
  ASSERT_TRUE(no_device.Wait());
  EXPECT_FALSE(no_device.status.ok());
  EXPECT_NE(StatusMessage(no_device.status).find("CPU:7"), std::string::npos) << StatusMessage(no_device.status);
  ASSERT_TRUE(no_task.Wait());
  EXPECT_NE(StatusMessage(no_task.status).find("task:3"), std::string::npos) << StatusMessage(no_task.status);
  ASSERT_TRUE(not_here.Wait());
  EXPECT_EQ(StatusNumber(not_here.status), 3) << StatusMessage(not_here.status);
  to->Unref();
}

TEST_F(RendezvousTest, UninitializedTensorIsAnErrorThatNamesIt) {
  auto* from = ps_->Step(8);
  auto* to = worker_->Step(8);
  NoMemory none;
  Tensor nothing(&none, tensorflow::DT_UINT8, TensorShape({100}));
  ASSERT_FALSE(nothing.IsInitialized());
  ASSERT_TRUE(from->Send(Key("nothing"), Rendezvous::Args(), nothing, false).ok());
  Received received;
  to->RecvAsync(Key("nothing"), Rendezvous::Args(), received.Callback());
  ASSERT_TRUE(received.Wait());
  EXPECT_EQ(StatusNumber(received.status), 3) << StatusMessage(received.status);
  from->Unref();
  to->Unref();
}

TEST_F(RendezvousTest, AbortEndsPendingReceivesWithItsReason) {
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
  // The abort reaches the producer a little later.
  bool aborted = false;
  for (int i = 0; i < 1000 && !aborted; ++i) {
    aborted = !from->Send(Key("probe" + std::to_string(i)), Rendezvous::Args(), Floats(1, 0), false).ok();
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_TRUE(aborted);
  from->Unref();
}

TEST_F(RendezvousTest, CancellationReachesItsCallsOnly) {
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
  ASSERT_TRUE(from->Send(Key("b"), Rendezvous::Args(), Floats(2, 2), false).ok());
  ASSERT_TRUE(b.Wait());
  EXPECT_TRUE(b.status.ok()) << StatusMessage(b.status);
  Received late;
  to->RecvAsync(Key("late"), first, late.Callback());
  ASSERT_TRUE(late.Wait());
  EXPECT_EQ(StatusNumber(late.status), 1);
  from->Unref();
  to->Unref();
}

TEST_F(RendezvousTest, AbortRacesWithRequestsAndAnswers) {
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

TEST_F(RendezvousTest, SenderThatStopsEndsItsReceivers) {
  auto* to = worker_->Step(11);
  const int64_t references = to->RefCount();
  std::vector<Received> received(100);
  for (int i = 0; i < 100; ++i) to->RecvAsync(Key("n" + std::to_string(i)), Rendezvous::Args(), received[i].Callback());
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  ps_->engine->Stop();
  for (auto& each : received) {
    ASSERT_TRUE(each.Wait());
    const int code = StatusNumber(each.status);
    EXPECT_TRUE(code == 14 || code == 10) << StatusMessage(each.status);
  }
  EXPECT_TRUE(AllGone(to, references));
  to->Unref();
}

TEST_F(RendezvousTest, ReceiverThatStopsEndsItsOwnCalls) {
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

TEST_F(RendezvousTest, TransfersAreRecordedForTimelines) {
  worker_->cache->logger.SetLogging(true);
  auto* from = ps_->Step(13);
  auto* to = worker_->Step(13);
  Received received;
  to->RecvAsync(Key("edge_7_weights"), Rendezvous::Args(), received.Callback());
  ASSERT_TRUE(from->Send(Key("edge_7_weights"), Rendezvous::Args(), Floats(100, 0), false).ok());
  ASSERT_TRUE(received.Wait());
  tensorflow::StepStats stats;
  ASSERT_TRUE(worker_->cache->logger.RetrieveLogs(13, &stats));
  ASSERT_EQ(stats.dev_stats_size(), 1);
  const auto& node = stats.dev_stats(0).node_stats(0);
  EXPECT_NE(node.timeline_label().find("edge_7_weights"), std::string::npos) << node.timeline_label();
  EXPECT_NE(node.timeline_label().find("400B"), std::string::npos) << node.timeline_label();
  worker_->cache->logger.SetLogging(false);
  from->Unref();
  to->Unref();
}

TEST_F(RendezvousTest, CleanedUpStepIsFreed) {
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
    EXPECT_TRUE(AllGone(to, 1)) << "somebody but this test keeps the step";
    EXPECT_TRUE(AllGone(from, 1)) << "somebody but this test keeps the step";
    from->Unref();
    to->Unref();
  }
}

TEST_F(RendezvousTest, CleanUpEndsPendingReceives) {
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

TEST_F(RendezvousTest, CleanUpFreesUnreceivedValues) {
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
  const int64_t step;
  static inline int alive = 0;
};

TEST_F(RendezvousTest, StatesOfAStepGoWithIt) {
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

TEST_F(RendezvousTest, ReceivesAfterTheCleanUpFail) {
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

TEST_F(RendezvousTest, CleanUpRacesWithReceives) {
  constexpr int kRounds = 300;
  int freed = 0;
  for (int round = 0; round < kRounds; ++round) {
    const int64_t step = 2000 + round;
    auto* from = ps_->Step(step);
    auto* to = worker_->Step(step);
    constexpr int kCalls = 4;
    std::vector<Received> received(kCalls);
    std::thread receiver([&] {
      for (int i = 0; i < kCalls; ++i) {
        to->RecvAsync(Key("e" + std::to_string(i)), Rendezvous::Args(), received[i].Callback());
        (void)from->Send(Key("e" + std::to_string(i)), Rendezvous::Args(), Floats(3, i), false);
        if (!received[i].Wait()) return;
      }
    });
    std::this_thread::sleep_for(std::chrono::microseconds(round * 10));
    worker_->manager->Cleanup(step);
    receiver.join();
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
  // The race must have gone both ways.
  EXPECT_GT(freed, 0);
  EXPECT_LT(freed, kRounds);
}

TEST_F(RendezvousTest, ManySteps) {
  for (int64_t step = 100; step < 130; ++step) {
    auto* from = ps_->Step(step);
    auto* to = worker_->Step(step);
    const int64_t references = to->RefCount();
    std::vector<Received> received(200);
    for (int i = 0; i < 200; ++i)
      to->RecvAsync(Key("v" + std::to_string(i)), Rendezvous::Args(), received[i].Callback());
    for (int i = 0; i < 200; ++i) {
      ASSERT_TRUE(from->Send(Key("v" + std::to_string(i)), Rendezvous::Args(), Floats(16, step + i), false).ok());
    }
    for (int i = 0; i < 200; ++i) {
      ASSERT_TRUE(received[i].Wait());
      ASSERT_TRUE(received[i].status.ok()) << StatusMessage(received[i].status);
      ExpectFloats(received[i].tensor, 16, step + i);
    }
    EXPECT_EQ(worker_->cache->workers, 1) << "one worker per step and source, not per tensor";
    EXPECT_TRUE(AllGone(to, references));
    from->Unref();
    to->Unref();
  }
}

}  // namespace
}  // namespace starwire
