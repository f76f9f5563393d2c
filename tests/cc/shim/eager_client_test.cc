// Which of TensorFlow's eager requests go over the data port, and which over its own client.
#include "cc/worker/eager_client.h"

#include <gtest/gtest.h>

#include <functional>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cc/base/methods.h"
#include "cc/base/status_codec.h"
#include "cc/worker/worker_cache.h"
#include "tensorflow/core/distributed_runtime/call_options.h"
#include "tensorflow/core/distributed_runtime/worker_cache_wrapper.h"
#include "tensorflow/core/protobuf/eager_service.pb.h"
#include "tensorflow/core/protobuf/worker.pb.h"

namespace starwire {
namespace {

using tensorflow::CallOptions;
using tensorflow::StatusCallback;
using namespace tensorflow::eager;  // NOLINT: the names of the messages
using tensorflow::core::RefCountPtr;

constexpr char kTask[] = "/job:worker/replica:0/task:0";
constexpr char kDevice[] = "/job:worker/replica:0/task:0/device:CPU:0";

// What happened, in order: "port enqueue 7" is an Enqueue for context 7 over the data port.
using Journal = std::vector<std::string>;

class StockClient : public EagerClient {
 public:
  explicit StockClient(Journal* journal) : journal_(journal) {}

  void CreateContextAsync(const CreateContextRequest*, CreateContextResponse*, StatusCallback done) override {
    Note("create", 0, std::move(done));
  }
  virtual void CreateContextAsync(const CreateContextRequest*, CreateContextResponse*, StatusCallback done,
                                  int64_t timeout_ms, int retries) {
    Note("create with " + std::to_string(timeout_ms) + " ms and retries", static_cast<uint64_t>(retries),
         std::move(done));
  }
  void UpdateContextAsync(const UpdateContextRequest*, UpdateContextResponse*, StatusCallback done) override {
    Note("update", 0, std::move(done));
  }
  void WaitQueueDoneAsync(const WaitQueueDoneRequest*, WaitQueueDoneResponse*, StatusCallback done) override {
    Note("wait", 0, std::move(done));
  }
  void KeepAliveAsync(const KeepAliveRequest*, KeepAliveResponse*, StatusCallback done) override {
    Note("keep alive", 0, std::move(done));
  }
  void CloseContextAsync(const CloseContextRequest*, CloseContextResponse*, StatusCallback done) override {
    Note("close", 0, std::move(done));
  }
  void EnqueueAsync(CallOptions* opts, const EnqueueRequest* request, EnqueueResponse*, StatusCallback done) override {
    Note(opts == nullptr ? "enqueue" : "enqueue with options", request->context_id(), std::move(done));
  }
  void RunComponentFunctionAsync(CallOptions*, const RunComponentFunctionRequest* request,
                                 RunComponentFunctionResponse*, StatusCallback done) override {
    Note("run", request->context_id(), std::move(done));
  }
  void StreamingEnqueueAsync(bool streaming, CallOptions*, const EnqueueRequest* request, EnqueueResponse*,
                             StatusCallback done) override {
    journal_->push_back("grpc stream " + std::to_string(request->context_id()));
    EXPECT_TRUE(streaming);
    streamed.push_back(std::move(done));
  }
  bool allow_multiple_pending_requests() const override { return streams; }

  bool streams = true;
  std::vector<StatusCallback> streamed;  // not answered yet

 private:
  void Note(const std::string& what, uint64_t number, StatusCallback done) {
    journal_->push_back("grpc " + what + (number == 0 ? "" : " " + std::to_string(number)));
    done(OkStatus());
  }

  Journal* const journal_;
};

class Port : public RemoteEager {
 public:
  explicit Port(Journal* journal)
      : RemoteEager(kTask, MakeStatus(kInternal, "no channel"), nullptr), journal_(journal) {}

  void EagerEnqueueAsync(CallOptions*, const EnqueueRequest* request, EnqueueResponse*, StatusCallback done) override {
    journal_->push_back("port enqueue " + std::to_string(request->context_id()));
    if (before_answer) before_answer();
    done(answer);
  }
  void EagerRunComponentFunctionAsync(CallOptions*, const RunComponentFunctionRequest* request,
                                      RunComponentFunctionResponse*, StatusCallback done) override {
    journal_->push_back("port run " + std::to_string(request->context_id()));
    done(answer);
  }
  void CleanupGraphAsync(const tensorflow::CleanupGraphRequest* request, tensorflow::CleanupGraphResponse*,
                         StatusCallback done) override {
    journal_->push_back("port cleanup " + std::to_string(request->step_id()));
    done(OkStatus());
  }

  Status answer;
  std::function<void()> before_answer;

 private:
  Journal* const journal_;
};

class EagerPortClientTest : public testing::Test {
 protected:
  EagerPortClientTest()
      : stock_(new StockClient(&journal_)),
        port_(new Port(&journal_)),
        board_(std::make_shared<HandleBoard>()),
        client_(new EagerPortClient(RefCountPtr<EagerClient>(stock_), std::unique_ptr<RemoteEager>(port_), kDevice,
                                    std::make_shared<EagerPeer>(), board_)) {}

  Status Enqueue(uint64_t context, CallOptions* opts = nullptr) {
    auto request = std::make_unique<EnqueueRequest>();
    request->set_context_id(context);
    // TensorFlow may free the request as soon as it has been sent.
    port_->before_answer = [&request] { request.reset(); };
    EnqueueResponse response;
    Status ended = MakeStatus(kInternal, "not called");
    client_->EnqueueAsync(opts, request.get(), &response, [&ended](const Status& status) { ended = status; });
    return ended;
  }
  Status Run(uint64_t context) {
    RunComponentFunctionRequest request;
    RunComponentFunctionResponse response;
    request.set_context_id(context);
    CallOptions opts;
    Status ended = MakeStatus(kInternal, "not called");
    client_->RunComponentFunctionAsync(&opts, &request, &response, [&ended](const Status& status) { ended = status; });
    return ended;
  }
  void Stream(uint64_t context, bool streaming = true) {
    EnqueueRequest request;
    EnqueueResponse response;
    request.set_context_id(context);
    client_->StreamingEnqueueAsync(streaming, nullptr, &request, &response,
                                   [this](const Status&) { journal_.push_back("answered"); });
  }
  Journal Take() { return std::exchange(journal_, {}); }

  Journal journal_;
  StockClient* const stock_;
  Port* const port_;
  const std::shared_ptr<HandleBoard> board_;
  const RefCountPtr<EagerPortClient> client_;
};

TEST_F(EagerPortClientTest, WhatAStepWaitsForUsesThePort) {
  EXPECT_TRUE(Enqueue(1).ok());
  EXPECT_TRUE(Run(2).ok());
  EXPECT_EQ(Take(), Journal({"port enqueue 1", "port run 2"}));
}

TEST_F(EagerPortClientTest, TheRestDoesNot) {
  CreateContextRequest create;
  CreateContextResponse created;
  CloseContextRequest close;
  CloseContextResponse closed;
  KeepAliveRequest keep;
  KeepAliveResponse kept;
  int done = 0;
  client_->CreateContextAsync(&create, &created, [&done](const Status&) { ++done; });
  client_->KeepAliveAsync(&keep, &kept, [&done](const Status&) { ++done; });
  client_->CloseContextAsync(&close, &closed, [&done](const Status&) { ++done; });
  EXPECT_EQ(done, 3);
  EXPECT_EQ(Take(), Journal({"grpc create", "grpc keep alive", "grpc close"}));
}

TEST_F(EagerPortClientTest, CleanupsAreNotWaitedFor) {
  EnqueueRequest request;
  EnqueueResponse response;
  request.add_queue()->mutable_cleanup_function()->set_step_id(-77);
  bool done = false;
  client_->EnqueueAsync(nullptr, &request, &response, [&done](const Status& status) { done = status.ok(); });
  EXPECT_TRUE(done);
  EXPECT_EQ(Take(), Journal({"port cleanup -77"}));
  // Only as the only one.
  request.add_queue()->mutable_handle_to_decref();
  client_->EnqueueAsync(nullptr, &request, &response, [](const Status&) {});
  EXPECT_EQ(Take(), Journal({"port enqueue 0"}));
}

TEST_F(EagerPortClientTest, AnUnaryRequestDoesNotOvertakeAStreamedOne) {
  Stream(1);
  EXPECT_TRUE(Enqueue(2).ok());
  EXPECT_TRUE(Run(3).ok());
  Stream(4);
  stock_->streamed[0](OkStatus());
  EXPECT_TRUE(Enqueue(5).ok());
  stock_->streamed[1](MakeStatus(kUnavailable, "lost"));
  EXPECT_TRUE(Enqueue(6).ok());
  EXPECT_EQ(Take(), Journal({"grpc stream 1", "grpc enqueue 2", "grpc run 3", "grpc stream 4", "answered",
                             "grpc enqueue 5", "answered", "port enqueue 6"}));
}

TEST_F(EagerPortClientTest, WithoutStreamsRequestsAreWaitedFor) {
  Stream(1, false);
  stock_->streams = false;
  Stream(2, true);
  EXPECT_EQ(Take(), Journal({"port enqueue 1", "answered", "port enqueue 2", "answered"}));
}

// As RemoteWorker reports it.
Status Missing(Method method) {
  return FromRemoteTarget(MakeStatus(kUnimplemented, NoSuchMethod(static_cast<uint32_t>(method))), kTask);
}

TEST_F(EagerPortClientTest, APeerWithoutTheMethodsIsReachedOverGrpc) {
  port_->answer = Missing(Method::kEagerEnqueue);
  CallOptions opts;
  EXPECT_TRUE(Enqueue(1, &opts).ok());
  EXPECT_TRUE(Run(2).ok());
  EXPECT_EQ(Take(), Journal({"port enqueue 1", "grpc enqueue with options 1", "grpc run 2"}));
}

TEST_F(EagerPortClientTest, AsTheFirstFunctionFindsOut) {
  port_->answer = Missing(Method::kEagerRunComponentFunction);
  EXPECT_TRUE(Run(1).ok());
  EXPECT_TRUE(Enqueue(2).ok());
  EXPECT_EQ(Take(), Journal({"port run 1", "grpc run 1", "grpc enqueue 2"}));
}

TEST_F(EagerPortClientTest, UnimplementedByAnOperationIsItsError) {
  for (const char* message : {"not implemented for this type", "this server has no worker method 200"}) {
    port_->answer = MakeStatus(kUnimplemented, message);
    EXPECT_EQ(StatusNumber(Enqueue(1)), kUnimplemented);
    EXPECT_EQ(Take(), Journal({"port enqueue 1"})) << "it has been executed, and must not be again";
  }
  port_->answer = OkStatus();
  EXPECT_TRUE(Enqueue(2).ok());
  EXPECT_EQ(Take(), Journal({"port enqueue 2"}));
}

// A request that was sent when the methods were known to exist cannot be repeated.
TEST_F(EagerPortClientTest, APeerThatWasReplacedByAnOlderOne) {
  EXPECT_TRUE(Enqueue(1).ok());
  port_->answer = Missing(Method::kEagerEnqueue);
  EXPECT_EQ(StatusNumber(Enqueue(2)), kUnimplemented);
  EXPECT_TRUE(Enqueue(3).ok());
  EXPECT_EQ(Take(), Journal({"port enqueue 1", "port enqueue 2", "grpc enqueue 3"}));
}

TEST_F(EagerPortClientTest, ErrorsOfTheWayDecideNothing) {
  port_->answer = MakeStatus(kUnavailable, "lost");
  EXPECT_EQ(StatusNumber(Enqueue(1)), kUnavailable);
  port_->answer = Missing(Method::kEagerEnqueue);
  EXPECT_TRUE(Enqueue(2).ok());
  EXPECT_EQ(Take(), Journal({"port enqueue 1", "port enqueue 2", "grpc enqueue 2"}));
}

TEST(RemoteTarget, IsNamedOnce) {
  Status status = MakeStatus(kInvalidArgument, "told so");
  SetStatusPayload(&status, "type.example/mark", "kept");
  const Status named = FromRemoteTarget(status, kTask);
  EXPECT_EQ(StatusNumber(named), kInvalidArgument);
  EXPECT_NE(StatusMessage(named).find("told so\nAdditional GRPC error information from remote target /job:worker/"),
            std::string::npos)
      << StatusMessage(named);
  EXPECT_EQ(EncodeErrorDetails(named), EncodeErrorDetails(status));
  EXPECT_EQ(StatusMessage(FromRemoteTarget(named, kTask)), StatusMessage(named));
  EXPECT_TRUE(FromRemoteTarget(OkStatus(), kTask).ok());
}

// Functions whose work is done by star calls. ------------------------------------------------------------------------

class ComponentFunctionTest : public EagerPortClientTest {
 protected:
  void Register(const std::string& name, const std::string& handles_of, bool has_nodes) {
    EnqueueRequest request;
    EnqueueResponse response;
    request.set_context_id(7);
    auto* registered = request.add_queue()->mutable_register_function();
    registered->set_is_component_function(true);
    auto* function = registered->mutable_function_def();
    function->mutable_signature()->set_name(name);
    if (has_nodes) function->add_node_def()->set_op("NoOp");
    if (!handles_of.empty()) (*(*function->mutable_arg_attr())[0].mutable_attr())[kHandlesOfAttr].set_s(handles_of);
    client_->EnqueueAsync(nullptr, &request, &response, [](const Status& status) { EXPECT_TRUE(status.ok()); });
  }
  void RunIt(const std::string& name, int64_t step, int64_t op_id) {
    RunComponentFunctionRequest request;
    RunComponentFunctionResponse response;
    request.set_context_id(7);
    auto* operation = request.mutable_operation();
    operation->set_name(name);
    operation->set_device(kDevice);
    operation->set_func_step_id(step);
    auto* handle = operation->add_op_inputs()->mutable_remote_handle();
    handle->set_op_id(op_id);
    handle->set_output_num(1);
    handle->set_op_device(kDevice);
    auto* elsewhere = operation->add_op_inputs()->mutable_remote_handle();
    elsewhere->set_op_id(op_id + 1);
    elsewhere->set_op_device(std::string(kTask) + "1/device:CPU:0");
    CallOptions opts;
    client_->RunComponentFunctionAsync(&opts, &request, &response,
                                       [](const Status& status) { EXPECT_TRUE(status.ok()); });
  }
  void CleanUp(int64_t step) {
    EnqueueRequest request;
    EnqueueResponse response;
    request.set_context_id(7);
    request.add_queue()->mutable_cleanup_function()->set_step_id(step);
    client_->EnqueueAsync(nullptr, &request, &response, [](const Status& status) { EXPECT_TRUE(status.ok()); });
  }
  // The operations of the handles of a step; empty: it waits.
  std::vector<int64_t> Handles(int64_t step, const std::string& function,
                               tensorflow::CancellationManager* cancellation = nullptr) {
    std::vector<int64_t> handles;
    board_->Get("eager_7", step, kDevice, function, cancellation, [&](const Status& status, HandleBoard::Found found) {
      if (!status.ok()) return;
      for (const auto& name : found->names) handles.push_back(name.output < 0 ? -1 : name.op_id);
    });
    return handles;
  }
};

TEST_F(ComponentFunctionTest, AFunctionThatDoesNothingIsKeptFromThePeer) {
  Register("empty", "f", false);
  RunIt("empty", 1, 40);
  EXPECT_EQ(Handles(1, "f"), (std::vector<int64_t>{40, -1})) << "the second one is on another task";
  CleanUp(1);
  EXPECT_EQ(Take(), Journal());
  EXPECT_EQ(board_->size(), 0);
}

TEST_F(ComponentFunctionTest, OneThatDoesSomethingIsSentAsEver) {
  Register("some", "f", true);
  RunIt("some", 1, 40);
  EXPECT_EQ(Handles(1, "f"), (std::vector<int64_t>{40, -1}));
  CleanUp(1);
  EXPECT_EQ(Take(), Journal({"port enqueue 7", "port run 7", "port cleanup 1"}));
  EXPECT_EQ(board_->size(), 0);
}

TEST_F(ComponentFunctionTest, AFunctionThatIsCalledByAnotherSharesItsStep) {
  Register("outer", "f", false);
  Register("inner", "", true);
  RunIt("outer", 1, 40);
  RunIt("inner", 1, 50);
  CleanUp(1);
  EXPECT_EQ(Handles(1, "f"), (std::vector<int64_t>{40, -1})) << "the outer one is not over, and has its own handles";
  CleanUp(1);
  EXPECT_EQ(board_->size(), 0);
  EXPECT_EQ(Take(), Journal({"port enqueue 7", "port run 7", "port cleanup 1", "port cleanup 1"}));
}

TEST_F(ComponentFunctionTest, ACallWaitsForTheHandles) {
  Register("empty", "f", false);
  std::vector<int64_t> got;
  board_->Get("eager_7", 1, kDevice, "f", nullptr, [&](const Status& status, HandleBoard::Found found) {
    ASSERT_TRUE(status.ok());
    got.push_back(found->names[0].op_id);
  });
  RunIt("empty", 2, 30);
  EXPECT_TRUE(got.empty()) << "another step";
  RunIt("empty", 1, 40);
  EXPECT_EQ(got, std::vector<int64_t>{40});
}

TEST_F(ComponentFunctionTest, TheEndOfTheStepEndsTheWait) {
  Register("empty", "g", false);
  int code = 0;
  board_->Get("eager_7", 1, kDevice, "f", nullptr,
              [&code](const Status& status, HandleBoard::Found) { code = StatusNumber(status); });
  RunIt("empty", 1, 40);
  CleanUp(1);
  EXPECT_EQ(code, kCancelled);
  EXPECT_EQ(board_->size(), 0);
}

TEST_F(ComponentFunctionTest, CancellationEndsTheWait) {
  tensorflow::CancellationManager cancellation;
  std::promise<Status> ended;
  board_->Get("eager_7", 1, kDevice, "f", &cancellation,
              [&ended](const Status& status, HandleBoard::Found) { ended.set_value(status); });
  EXPECT_EQ(board_->size(), 1);
  cancellation.StartCancel();
  const Status status = ended.get_future().get();
  EXPECT_EQ(StatusNumber(status), kCancelled);
  EXPECT_TRUE(tensorflow::StatusGroup::IsDerived(status)) << status;
  EXPECT_EQ(board_->size(), 0);
  Status late;
  board_->Get("eager_7", 1, kDevice, "f", &cancellation,
              [&late](const Status& status, HandleBoard::Found) { late = status; });
  EXPECT_EQ(StatusNumber(late), kCancelled);
  EXPECT_TRUE(tensorflow::StatusGroup::IsDerived(late)) << late;
}

TEST_F(ComponentFunctionTest, AClosedContextIsForgotten) {
  Register("empty", "f", false);
  CloseContextRequest close;
  CloseContextResponse closed;
  close.set_context_id(7);
  client_->CloseContextAsync(&close, &closed, [](const Status&) {});
  RunIt("empty", 1, 40);
  EXPECT_EQ(Take(), Journal({"grpc close", "port run 7"})) << "a function of another context may have this name";
}

// TensorFlow's part of a worker cache, as far as its eager clients go.
class StockCacheOfClients : public tensorflow::WorkerCacheWrapper {
 public:
  explicit StockCacheOfClients(Journal* journal) : WorkerCacheWrapper(nullptr), journal_(journal) {}
  Status GetEagerClientCache(std::unique_ptr<EagerClientCache>* cache) override {
    class Clients : public EagerClientCache {
     public:
      explicit Clients(Journal* journal) : journal_(journal) {}
      Status GetClient(const std::string&, RefCountPtr<EagerClient>* client) override {
        client->reset(new StockClient(journal_));
        return OkStatus();
      }

     private:
      Journal* const journal_;
    };
    *cache = std::make_unique<Clients>(journal_);
    return OkStatus();
  }

 private:
  Journal* const journal_;
};

// TensorFlow streams operations to a task, and runs functions on one of its devices.
TEST(EagerClientsOfATask, ShareTheOrderOfTheirRequests) {
  Journal journal;
  std::vector<StockClient*> made;
  class Clients : public EagerClientCache {
   public:
    Clients(Journal* journal, std::vector<StockClient*>* made) : journal_(journal), made_(made) {}
    Status GetClient(const std::string&, RefCountPtr<EagerClient>* client) override {
      made_->push_back(new StockClient(journal_));
      client->reset(made_->back());
      return OkStatus();
    }

   private:
    Journal* const journal_;
    std::vector<StockClient*>* const made_;
  };
  EagerPortClientCache clients(
      std::make_unique<Clients>(&journal, &made), [&](const std::string&) { return std::make_unique<Port>(&journal); },
      std::make_shared<HandleBoard>());
  RefCountPtr<EagerClient> of_task, of_device, of_other;
  ASSERT_TRUE(clients.GetClient(kTask, &of_task).ok());
  ASSERT_TRUE(clients.GetClient(kDevice, &of_device).ok());
  ASSERT_TRUE(clients.GetClient("/job:worker/replica:0/task:1/device:CPU:0", &of_other).ok());
  EnqueueRequest release, request;
  EnqueueResponse response;
  release.add_queue()->mutable_handle_to_decref();
  const auto ignore = [](const Status&) {};
  of_task->StreamingEnqueueAsync(true, nullptr, &release, &response, ignore);
  of_device->EnqueueAsync(nullptr, &request, &response, ignore);
  of_task->StreamingEnqueueAsync(true, nullptr, &request, &response, ignore);
  of_device->EnqueueAsync(nullptr, &request, &response, ignore);
  of_other->EnqueueAsync(nullptr, &request, &response, ignore);
  for (const StatusCallback& answered : made[0]->streamed) answered(OkStatus());
  of_device->EnqueueAsync(nullptr, &request, &response, ignore);
  EXPECT_EQ(journal, Journal({"grpc stream 0", "port enqueue 0", "grpc stream 0", "grpc enqueue", "port enqueue 0",
                              "port enqueue 0"}));
}

class Opener : public ChannelOpener {
 public:
  Status OpenChannel(const std::string& task, const std::string&, std::shared_ptr<Channel>*) override {
    opened.push_back(task);
    return MakeStatus(kInternal, "no channel");
  }
  Journal opened;
};

// TensorFlow replaces a worker cache when the cluster changes, for example after a worker's restart, and clients of the
// old one are opened meanwhile.
TEST(EagerClientsOfAWorkerCache, OutliveItButNotTheServer) {
  Journal journal;
  auto opener = std::make_shared<Opener>();
  auto caches = std::make_shared<WorkerCaches>();
  const TaskAddresses addresses = {{kTask, "127.0.0.1:1"}, {"/job:ps/replica:0/task:0", "127.0.0.1:2"}};
  auto cache = std::make_unique<WorkerCache>(std::make_unique<StockCacheOfClients>(&journal), addresses,
                                             "/job:chief/replica:0/task:0", nullptr, opener, caches,
                                             std::make_shared<HandleBoard>());
  std::unique_ptr<EagerClientCache> clients;
  ASSERT_TRUE(cache->GetEagerClientCache(&clients).ok());
  cache.reset();
  RefCountPtr<EagerClient> client;
  ASSERT_TRUE(clients->GetClient(kTask, &client).ok());
  EXPECT_EQ(opener->opened, Journal({kTask}));
  caches->DropStock();
  ASSERT_TRUE(clients->GetClient("/job:ps/replica:0/task:0", &client).ok());
  EXPECT_EQ(opener->opened, Journal({kTask})) << "the server was stopped";
}

}  // namespace
}  // namespace starwire
