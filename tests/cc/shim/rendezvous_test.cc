// Two tasks in one process, each with TensorFlow's devices and sessions, exchange tensors over real connections.
#include "cc/rendezvous/rendezvous.h"

#include <memory>
#include <string>
#include <vector>

#include "tensorflow/core/framework/control_flow.h"
#include "tensorflow/core/platform/tstring.h"
#include "tests/cc/shim/rendezvous_rig.h"

namespace starwire {
namespace {

using tensorflow::Rendezvous;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::tstring;

// An allocator that always fails.
class NoMemory : public tensorflow::Allocator {
 public:
  std::string Name() override { return "none"; }
  void* AllocateRaw(size_t, size_t) override { return nullptr; }
  void DeallocateRaw(void*) override {}
};

class RendezvousTest : public RendezvousRig {};

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
  ASSERT_TRUE(Eventually([&] { return ps_->EngineMetric("requests_unanswered") == 1; }));
  auto* from = ps_->Step(2);
  ASSERT_TRUE(from->Send(Key("x"), Rendezvous::Args(), Floats(5, 1), false).ok());
  ASSERT_TRUE(received.Wait());
  ASSERT_TRUE(received.status.ok()) << StatusMessage(received.status);
  ExpectFloats(received.tensor, 5, 1);
  from->Unref();
  to->Unref();
}

// What DeepRec's FuseRecv asks for.
TEST_F(RendezvousTest, SeveralTensorsAtOnce) {
  auto* from = ps_->Step(22);
  auto* to = worker_->Step(22);
  const std::vector<Rendezvous::ParsedKey> keys = {Key("a"), Key("dead"), Key("b")};
  Received last;
  std::vector<Tensor> values;
  std::vector<bool> dead;
  const auto done = [&](const Status& status, const std::vector<Rendezvous::Args>& sent, const Rendezvous::Args& args,
                        const std::vector<Tensor>& tensors, const std::vector<bool>& are_dead) {
    EXPECT_EQ(sent.size(), keys.size());
    values = tensors;
    dead = are_dead;
    last.Callback()(status, Rendezvous::Args(), args, Tensor(), false);
  };
  static_cast<RemoteRendezvous*>(to)->FuseRecvFromRemoteAsync(keys, Rendezvous::Args(), done);
  ASSERT_TRUE(from->Send(keys[2], Rendezvous::Args(), Floats(1000, 2), false).ok());
  ASSERT_TRUE(from->Send(keys[1], Rendezvous::Args(), Tensor(), true).ok());
  ASSERT_TRUE(Eventually([&] { return worker_->EngineMetric("replies_received_total") == 2; }));
  EXPECT_EQ(last.times, 0);
  ASSERT_TRUE(from->Send(keys[0], Rendezvous::Args(), Floats(5, 1), false).ok());
  ASSERT_TRUE(last.Wait());
  ASSERT_TRUE(last.status.ok()) << StatusMessage(last.status);
  ExpectFloats(values[0], 5, 1);
  ExpectFloats(values[2], 1000, 2);
  EXPECT_EQ(dead, std::vector<bool>({false, true, false}));

  Received failed;
  const auto fails = [&](const Status& status, const std::vector<Rendezvous::Args>&, const Rendezvous::Args& args,
                         const std::vector<Tensor>&, const std::vector<bool>&) {
    failed.Callback()(status, Rendezvous::Args(), args, Tensor(), false);
  };
  static_cast<RemoteRendezvous*>(to)->FuseRecvFromRemoteAsync({Key("never"), Key("nor this")}, Rendezvous::Args(),
                                                              fails);
  from->StartAbort(MakeStatus(kAborted, "no more"));
  ASSERT_TRUE(failed.Wait());
  EXPECT_EQ(StatusNumber(failed.status), kAborted) << StatusMessage(failed.status);
  from->Unref();
  to->Unref();
}

TEST_F(RendezvousTest, FlowControlIsRefused) {
  auto* to = worker_->Step(23);
  Received refused;
  static_cast<RemoteRendezvous*>(to)->FlowControlRecvFromRemoteAsync("tag", Key("x"), Rendezvous::Args(),
                                                                     refused.Callback());
  ASSERT_TRUE(refused.Wait());
  EXPECT_EQ(StatusNumber(refused.status), kUnimplemented);
  EXPECT_NE(StatusMessage(refused.status).find("flow control between tasks: x from /job:ps"), std::string::npos)
      << StatusMessage(refused.status);
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
  const std::string words = "RecvTensor expects a different device incarnation";  // programs look for them
  EXPECT_NE(StatusMessage(received.status).find(words), std::string::npos);
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
