// What becomes of calls to another task that this side cancels.
#include "cc/worker/remote_worker.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

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
  // The server accepts connections and says nothing, so the call waits for it.
  const int silent = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<uint16_t>(cluster.data_ports[0]));
  ASSERT_EQ(bind(silent, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  ASSERT_EQ(listen(silent, 8), 0);
  LoneWorker task(cluster);
  std::shared_ptr<Channel> channel;
  ASSERT_TRUE(task.engine->OpenChannel(kPs, "127.0.0.1:1", &channel).ok());
  RemoteWorker worker(kPs, channel, nullptr);
  const tensorflow::GetStatusRequest request;
  tensorflow::GetStatusResponse response;
  tensorflow::CallOptions opts;
  std::promise<Status> ended;
  worker.GetStatusAsync(&opts, &request, &response, /*fail_fast=*/false,
                        [&ended](const Status& status) { ended.set_value(status); });
  opts.StartCancel();
  auto result = ended.get_future();
  ASSERT_EQ(result.wait_for(kPatience), std::future_status::ready);
  const Status status = result.get();
  EXPECT_EQ(StatusNumber(status), kCancelled) << status;
  EXPECT_TRUE(StatusGroup::IsDerived(status)) << status;
  close(silent);
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
