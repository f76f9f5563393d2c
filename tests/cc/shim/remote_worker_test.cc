// What becomes of calls to another task that this side cancels.
#include "cc/worker/remote_worker.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <future>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cc/base/status_codec.h"
#include "cc/star/client.h"
#include "cc/star/state.h"
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

  std::shared_ptr<Channel> ToPs() {
    std::shared_ptr<Channel> channel;
    EXPECT_TRUE(engine->OpenChannel(kPs, "127.0.0.1:1", &channel).ok());
    return channel;
  }
};

// Accepts connections and says nothing, so that calls wait for it.
class SilentServer {
 public:
  explicit SilentServer(const Cluster& cluster) : socket_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(static_cast<uint16_t>(cluster.data_ports[0]));
    // The port was free with this option, too.
    const int yes = 1;
    EXPECT_EQ(setsockopt(socket_, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes)), 0);
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
  const std::shared_ptr<Channel> channel = task.ToPs();
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
  where.channel = task.ToPs();
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
  const std::shared_ptr<Channel> channel = task.ToPs();
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

// A parameter server that came back: it knows the graphs that were registered since.
class RestartedServer : public EngineTask {
 public:
  explicit RestartedServer(const Cluster& cluster, size_t runs = 1) : EngineTask("ps"), worker_(&env, runs) {
    Engine::Services services;
    services.recv = std::make_shared<RecvService>(&env);
    services.worker = std::make_shared<WorkerService>(&worker_, &env);
    services.star = star = std::make_shared<StarService>(&env);
    services.compute_pool = &pool;
    const Status status = engine->Start("grpc++", cluster.server("ps"), 0, services);
    EXPECT_TRUE(status.ok()) << StatusMessage(status);
  }
  ~RestartedServer() { engine->Stop(); }

  size_t graphs() const { return worker_.graphs(); }
  void Forget() { worker_.Forget(); }
  tensorflow::StatusCallback creating_session() { return worker_.creating.get_future().get(); }
  std::string deleted_session() { return worker_.deleted.get_future().get(); }

 private:
  class Worker : public StarwireWorker {
   public:
    Worker(tensorflow::WorkerEnv* env, size_t runs) : StarwireWorker(env, tensorflow::ConfigProto(), {}), runs_(runs) {}

    void CreateWorkerSessionAsync(const tensorflow::CreateWorkerSessionRequest*,
                                  tensorflow::CreateWorkerSessionResponse*, tensorflow::StatusCallback done) override {
      creating.set_value(std::move(done));
    }
    void DeleteWorkerSessionAsync(tensorflow::CallOptions*, const tensorflow::DeleteWorkerSessionRequest* request,
                                  tensorflow::DeleteWorkerSessionResponse*, tensorflow::StatusCallback done) override {
      deleted.set_value(request->session_handle());
      done(OkStatus());
    }
    void RegisterGraphAsync(const tensorflow::RegisterGraphRequest*, tensorflow::RegisterGraphResponse* response,
                            tensorflow::StatusCallback done) override {
      std::lock_guard<std::mutex> lock(mu_);
      response->set_graph_handle("again " + std::to_string(++registered_));
      graphs_.insert(response->graph_handle());
      done(OkStatus());
    }
    void DeregisterGraphAsync(const tensorflow::DeregisterGraphRequest* request, tensorflow::DeregisterGraphResponse*,
                              tensorflow::StatusCallback done) override {
      std::lock_guard<std::mutex> lock(mu_);
      EXPECT_EQ(graphs_.erase(request->graph_handle()), 1);
      done(OkStatus());
    }
    // Answers the first runs together.
    void RunGraphAsync(tensorflow::CallOptions*, tensorflow::RunGraphRequestWrapper* request,
                       tensorflow::MutableRunGraphResponseWrapper*, tensorflow::StatusCallback done) override {
      std::lock_guard<std::mutex> lock(mu_);
      if (graphs_.count(request->graph_handle()) != 0) return done(OkStatus());
      waiting_.push_back(std::move(done));
      if (waiting_.size() < runs_) return;
      for (const auto& each : waiting_) each(MakeStatus(kAborted, "Graph handle is not found: 1"));
      waiting_.clear();
    }

    size_t graphs() const {
      std::lock_guard<std::mutex> lock(mu_);
      return graphs_.size();
    }
    void Forget() {
      std::lock_guard<std::mutex> lock(mu_);
      graphs_.clear();
    }
    std::promise<tensorflow::StatusCallback> creating;
    std::promise<std::string> deleted;

   private:
    const size_t runs_;
    mutable std::mutex mu_;
    int registered_ = 0;                               // guarded by mu_
    std::set<std::string> graphs_;                     // guarded by mu_
    std::vector<tensorflow::StatusCallback> waiting_;  // guarded by mu_
  };

  Worker worker_;
};

// Its master does not delete it again.
TEST(RemoteWorkerTest, ASessionThatWasDroppedWhileItWasCreatedAgainIsDeleted) {
  const Cluster cluster;
  RestartedServer server(cluster);
  LoneWorker task(cluster);
  const std::shared_ptr<Channel> channel = task.ToPs();
  tensorflow::CreateWorkerSessionRequest request;
  request.set_session_handle("dropped");
  KeepSession(kPs, request);
  std::promise<Status> ended;
  CreateSessionAgain(kPs, "dropped", channel, MakeStatus(kAborted, "Session handle is not found: dropped"), NewTicket(),
                     [&ended](const Status& status) { ended.set_value(status); });
  const tensorflow::StatusCallback created = server.creating_session();
  DropSession(kPs, "dropped");
  EXPECT_EQ(StatusNumber(ended.get_future().get()), kCancelled);
  created(OkStatus());
  EXPECT_EQ(server.deleted_session(), "dropped");
}

TEST(RemoteWorkerTest, AGraphThatSeveralStepsRegisterAgainIsThereOnce) {
  const Cluster cluster;
  constexpr size_t kRuns = 4;
  RestartedServer server(cluster, kRuns);
  LoneWorker task(cluster);
  const std::shared_ptr<Channel> channel = task.ToPs();
  RemoteWorker worker(kPs, channel, nullptr, /*recovers=*/true);
  tensorflow::CreateWorkerSessionRequest session;
  session.set_session_handle("kept");
  KeepSession(kPs, session);
  SetNeedsOf([](const tensorflow::GraphDef&) { return Needs::kState; });
  tensorflow::RegisterGraphRequest registered;
  registered.set_session_handle("kept");
  tensorflow::RegisterGraphResponse registration;
  std::promise<Status> is_registered;
  worker.RegisterGraphAsync(&registered, &registration,
                            [&is_registered](const Status& status) { is_registered.set_value(status); });
  ASSERT_TRUE(is_registered.get_future().get().ok());
  SetNeedsOf(NeedsOf);
  // It is restarted.
  std::vector<tensorflow::RunGraphRequest> requests(kRuns);
  std::vector<tensorflow::RunGraphResponse> responses(kRuns);
  std::vector<std::promise<Status>> ended(kRuns);
  server.Forget();
  for (size_t i = 0; i < kRuns; ++i) {
    requests[i].set_session_handle("kept");
    requests[i].set_graph_handle(registration.graph_handle());
    worker.RunGraphAsync(nullptr, &requests[i], &responses[i],
                         [&ended, i](const Status& status) { ended[i].set_value(status); });
  }
  for (auto& each : ended) {
    const Status status = each.get_future().get();
    EXPECT_TRUE(status.ok()) << status;
  }
  // The others are deregistered, which nobody waits for.
  const auto until = std::chrono::steady_clock::now() + kPatience;
  while (server.graphs() != 1 && std::chrono::steady_clock::now() < until) std::this_thread::yield();
  EXPECT_EQ(server.graphs(), 1);
  DropSession(kPs, "kept");
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
