// What becomes of calls to another task that this side cancels.
#include "cc/worker/remote_worker.h"

#include <gtest/gtest.h>

#include <future>
#include <memory>
#include <string>

#include "cc/base/status_codec.h"
#include "tensorflow/core/distributed_runtime/call_options.h"
#include "tensorflow/core/protobuf/worker.pb.h"
#include "tests/cc/shim/rig.h"

namespace starwire {
namespace {

using tensorflow::StatusGroup;

class LoneWorker : public EngineTask {
 public:
  explicit LoneWorker(const Cluster& cluster) : EngineTask("worker") { Start("grpc++", cluster); }
  ~LoneWorker() { engine->Stop(); }
};

// A session recovers from the error that led to the cancellation only if the cancelled call's own is not reported.
TEST(RemoteWorkerTest, ACancelledCallFailsWithADerivedError) {
  const Cluster cluster;
  LoneWorker task(cluster);
  std::shared_ptr<Channel> channel;
  ASSERT_TRUE(task.engine->OpenChannel(kPs, "127.0.0.1:1", &channel).ok());
  RemoteWorker worker(kPs, channel, nullptr);
  const tensorflow::GetStatusRequest request;
  tensorflow::GetStatusResponse response;
  tensorflow::CallOptions opts;
  std::promise<Status> ended;
  // There is no such task, so the call waits for it.
  worker.GetStatusAsync(&opts, &request, &response, /*fail_fast=*/false,
                        [&ended](const Status& status) { ended.set_value(status); });
  opts.StartCancel();
  auto result = ended.get_future();
  ASSERT_EQ(result.wait_for(kPatience), std::future_status::ready);
  const Status status = result.get();
  EXPECT_EQ(StatusNumber(status), kCancelled) << status;
  EXPECT_TRUE(StatusGroup::IsDerived(status)) << status;
}

TEST(RemoteWorkerTest, WhatACancellationDoesNotCauseIsReported) {
  for (const int code : {kCancelled, kAborted}) {
    EXPECT_TRUE(StatusGroup::IsDerived(AfterCancellation(MakeStatus(code, "late"))));
  }
  for (const int code : {kUnavailable, kInvalidArgument, kDeadlineExceeded}) {
    EXPECT_FALSE(StatusGroup::IsDerived(AfterCancellation(MakeStatus(code, "its own"))));
  }
  EXPECT_TRUE(AfterCancellation(OkStatus()).ok());
}

}  // namespace
}  // namespace starwire
