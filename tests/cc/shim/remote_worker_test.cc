// What becomes of calls to another task that this side cancels.
#include "cc/worker/remote_worker.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "cc/base/status_codec.h"
#include "cc/star/client.h"
#include "cc/worker/session_recovery.h"
#include "cc/worker/worker_call.h"
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

// Accepts connections and says nothing, so that calls wait for it.
class SilentServer {
 public:
  explicit SilentServer(const Cluster& cluster) : socket_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(static_cast<uint16_t>(cluster.data_ports[0]));
    EXPECT_EQ(bind(socket_, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    EXPECT_EQ(listen(socket_, 8), 0);
  }
  ~SilentServer() { close(socket_); }

 private:
  const int socket_;
};

// A session recovers from the error that led to the cancellation only if the cancelled call's own is not reported.
TEST(RemoteWorkerTest, ACancelledCallFailsWithADerivedError) {
  const Cluster cluster;
  const SilentServer server(cluster);
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
}

// While TensorFlow cancels a step, its executor does not know it yet.
TEST(StarClientTest, CallsOfACancelledStepFailWithDerivedErrors) {
  const Cluster cluster;
  const SilentServer server(cluster);
  LoneWorker task(cluster);
  StarCallee callee;
  callee.name = "call";
  callee.task = kPs;
  callee.can_repeat = true;
  tensorflow::CancellationManager cancellation;
  StarClient::Where where;
  ASSERT_TRUE(task.engine->OpenChannel(kPs, "127.0.0.1:1", &where.channel).ok());
  where.cancellation = &cancellation;
  for (const bool is_late : {false, true}) {
    std::promise<Status> ended;
    StarClient::Start(&callee, where, {}, [&ended](const Status& status, std::vector<StarValue>, const std::string&) {
      ended.set_value(status);
    });
    if (!is_late) cancellation.StartCancel();
    auto result = ended.get_future();
    ASSERT_EQ(result.wait_for(kPatience), std::future_status::ready);
    const Status status = result.get();
    EXPECT_EQ(StatusNumber(status), kCancelled) << status;
    EXPECT_TRUE(StatusGroup::IsDerived(status)) << status;
  }
}

// TensorFlow cancels a request once, whichever of its calls is under way, or none.
TEST(RemoteWorkerTest, ACancellationBetweenTwoCallsReachesTheNext) {
  tensorflow::CallOptions opts;
  opts.SetTimeout(1234);
  const auto cancellation = std::make_shared<StagedCancellation>();
  cancellation->Begin(&opts);
  EXPECT_EQ(cancellation->current()->GetTimeout(), 1234);
  int cancelled = 0;
  const auto start = [&] {
    cancellation->current()->SetCancelCallback([&cancelled] { ++cancelled; });
    cancellation->Started();
  };
  start();
  EXPECT_EQ(cancelled, 0);
  cancellation->current()->ClearCancelCallback();
  opts.StartCancel();
  EXPECT_EQ(cancelled, 0) << "nothing is under way";
  start();
  EXPECT_EQ(cancelled, 1);
  cancellation->current()->ClearCancelCallback();
  cancellation->End();
  opts.StartCancel();
}

// A partition whose peer has lost its session fails with the peer's error, and has run.
TEST(RemoteWorkerTest, OnlyItsOwnErrorSaysWhatATaskHasForgotten) {
  const Status session = MakeStatus(kAborted, "Session handle is not found: 7"),
               graph = MakeStatus(kAborted, "Graph handle is not found: 7");
  EXPECT_TRUE(IsSessionForgotten(session) && IsGraphForgotten(graph));
  EXPECT_FALSE(IsSessionForgotten(StatusGroup::MakeDerived(session)));
  EXPECT_FALSE(IsGraphForgotten(StatusGroup::MakeDerived(graph)));
  EXPECT_FALSE(IsSessionForgotten(graph) || IsGraphForgotten(session));
}

// The server, which came back, ends again before it has created the session.
TEST(RemoteWorkerTest, WhoeverWaitsForASessionMayStop) {
  const Cluster cluster;
  const SilentServer server(cluster);
  LoneWorker task(cluster);
  std::shared_ptr<Channel> channel;
  ASSERT_TRUE(task.engine->OpenChannel(kPs, "127.0.0.1:1", &channel).ok());
  tensorflow::CreateWorkerSessionRequest request;
  request.set_session_handle("kept");
  KeepSession(kPs, request);
  std::promise<Status> first, second;
  const uint64_t ticket = NewTicket();
  const Status forgotten = MakeStatus(kAborted, "Session handle is not found: kept");
  CreateSessionAgain(kPs, "kept", channel, forgotten, ticket,
                     [&first](const Status& status) { first.set_value(status); });
  CreateSessionAgain(kPs, "kept", channel, forgotten, NewTicket(),
                     [&second](const Status& status) { second.set_value(status); });
  StopWaiting(ticket);
  auto ended = first.get_future(), other = second.get_future();
  ASSERT_EQ(ended.wait_for(kPatience), std::future_status::ready);
  EXPECT_EQ(StatusNumber(ended.get()), kCancelled);
  StopWaiting(ticket);
  EXPECT_EQ(other.wait_for(std::chrono::seconds(0)), std::future_status::timeout);
  DropSession(kPs, "kept");
  ASSERT_EQ(other.wait_for(kPatience), std::future_status::ready);
  EXPECT_EQ(StatusNumber(other.get()), kCancelled);
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
