// Parts for tests of the rendezvous: two tasks that exchange tensors over real connections.
#ifndef STARWIRE_TESTS_CC_SHIM_RENDEZVOUS_RIG_H_
#define STARWIRE_TESTS_CC_SHIM_RENDEZVOUS_RIG_H_

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cc/rendezvous/rendezvous.h"
#include "cc/worker/remote_worker.h"
#include "tensorflow/core/distributed_runtime/graph_mgr.h"
#include "tensorflow/core/distributed_runtime/worker_cache_logger.h"
#include "tensorflow/core/distributed_runtime/worker_cache_wrapper.h"
#include "tensorflow/core/distributed_runtime/worker_session.h"
#include "tensorflow/core/framework/control_flow.h"
#include "tests/cc/shim/rig.h"

namespace starwire {

constexpr char kCpu[] = "/device:CPU:0";

// A worker cache with a channel to each task of the cluster.
class RendezvousCache : public tensorflow::WorkerCacheWrapper {
 public:
  RendezvousCache(std::shared_ptr<Engine> engine, std::vector<std::pair<std::string, std::string>> cluster)
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

class RendezvousTask : public EngineTask {
 public:
  RendezvousTask(const std::string& job, const Cluster& cluster) : EngineTask(job) {
    manager = std::make_unique<RendezvousMgr>(&env);
    env.rendezvous_mgr = manager.get();
    Start("grpc++", cluster);

    auto owned = std::make_unique<RendezvousCache>(engine, cluster.addresses);
    cache = owned.get();
    session = tensorflow::WorkerSession::CreateWithBorrowedDeviceMgr(
        "session", name, std::move(owned), devices.get(), nullptr, nullptr,
        [](tensorflow::WorkerSession*, bool, tensorflow::DeviceMgr*) {
          return std::unique_ptr<tensorflow::DistributedFunctionLibraryRuntime>();
        });
  }
  ~RendezvousTask() { engine->Stop(); }

  // The caller owns the returned reference.
  tensorflow::RemoteRendezvous* Step(int64_t step) {
    tensorflow::RemoteRendezvous* rendezvous = TakeReference(manager->Find(step));
    EXPECT_TRUE(rendezvous->Initialize(session.get()).ok());
    return rendezvous;
  }

  std::unique_ptr<RendezvousMgr> manager;
  RendezvousCache* cache = nullptr;
  std::shared_ptr<tensorflow::WorkerSession> session;
};

// The result of one receive.
struct Received {
  bool Wait() {
    std::unique_lock<std::mutex> lock(mu);
    return cv.wait_for(lock, kPatience, [this] { return times > 0; });
  }
  tensorflow::Rendezvous::DoneCallback Callback() {
    return [this](const Status& s, const tensorflow::Rendezvous::Args&, const tensorflow::Rendezvous::Args&,
                  const tensorflow::Tensor& t, bool dead) {
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
  tensorflow::Tensor tensor;
  bool is_dead = false;
  int times = 0;
};

class RendezvousRig : public testing::Test {
 protected:
  void SetUp() override {
    const Cluster cluster;
    ps_ = std::make_unique<RendezvousTask>("ps", cluster);
    worker_ = std::make_unique<RendezvousTask>("worker", cluster);
  }

  // A key from the PS to the worker.
  tensorflow::Rendezvous::ParsedKey Key(const std::string& edge, uint64_t frame = 0, int64_t iteration = 0) {
    return KeyFrom(std::string(kPs) + kCpu, ps_->incarnation(), edge, frame, iteration);
  }
  tensorflow::Rendezvous::ParsedKey KeyFrom(const std::string& device, uint64_t incarnation, const std::string& edge,
                                            uint64_t frame = 0, int64_t iteration = 0) {
    tensorflow::Rendezvous::ParsedKey key;
    const std::string text = tensorflow::Rendezvous::CreateKey(device, incarnation, std::string(kWorker) + kCpu, edge,
                                                               tensorflow::FrameAndIter(frame, iteration));
    EXPECT_TRUE(tensorflow::Rendezvous::ParseKey(text, &key).ok()) << text;
    return key;
  }
  static tensorflow::Tensor Floats(int64_t n, float first) {
    tensorflow::Tensor tensor(tensorflow::DT_FLOAT, tensorflow::TensorShape({n}));
    for (int64_t i = 0; i < n; ++i) tensor.flat<float>()(i) = first + static_cast<float>(i);
    return tensor;
  }
  static void ExpectFloats(const tensorflow::Tensor& tensor, int64_t n, float first) {
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

  std::unique_ptr<RendezvousTask> ps_;
  std::unique_ptr<RendezvousTask> worker_;
};

}  // namespace starwire

#endif  // STARWIRE_TESTS_CC_SHIM_RENDEZVOUS_RIG_H_
