#include "cc/worker/remote_worker.h"

#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "cc/base/status_codec.h"
#include "cc/tensor/objects.h"
#include "cc/worker/session_recovery.h"
#include "cc/worker/worker_call.h"
#include "tensorflow/core/distributed_runtime/call_options.h"
#include "tensorflow/core/distributed_runtime/tensor_coding.h"
#include "tensorflow/core/lib/strings/str_util.h"
#include "tensorflow/core/platform/env.h"
#include "tensorflow/core/protobuf/worker.pb.h"

namespace starwire {

using tensorflow::CallOptions;
using tensorflow::StatusCallback;
using tensorflow::protobuf::MessageLite;

namespace {

ReplyParser ParseInto(MessageLite* response) {
  return [response](sw_bytes reply) {
    return response->ParseFromArray(reply.data, static_cast<int>(reply.len)) ? OkStatus() : Unexpected(reply);
  };
}

ReplyParser ParseInto(tensorflow::RunGraphResponse* response) {
  return [response](sw_bytes reply) {
    Status status = CheckWire(reply, TensorCarrier::kRunGraphResponse);
    if (!status.ok()) return status;
    if (!response->ParseFromArray(reply.data, static_cast<int>(reply.len))) return Unexpected(reply);
    status = CheckTensors(response->recv(), reply.len);
    // Discard tensors that did not pass the check.
    if (!status.ok()) response->Clear();
    return status;
  };
}

}  // namespace

// Graphs that a server forgets when it is restarted, although it has its variables back: they are registered again.
// Lives as long as its requests.
class RemoteWorker::Graphs : public std::enable_shared_from_this<RemoteWorker::Graphs> {
 public:
  Graphs(std::string target, std::shared_ptr<Channel> channel)
      : target_(std::move(target)), channel_(std::move(channel)) {}

  void Register(const tensorflow::RegisterGraphRequest& request, tensorflow::RegisterGraphResponse* response,
                StatusCallback done) {
    const Needs needs = GraphNeeds(request.graph_def());
    const Status lacks = CheckNeeds(needs, target_, request.session_handle());
    if (!lacks.ok()) return done(lacks);
    if (needs != Needs::kState || !IsSessionKept(target_, request.session_handle())) {
      Start(Method::kRegisterGraph, request, ParseInto(response), std::move(done), nullptr, 0);
      return;
    }
    auto kept = std::make_shared<const tensorflow::RegisterGraphRequest>(request);
    StatusCallback keep = [self = shared_from_this(), kept, response, done = std::move(done)](const Status& status) {
      if (status.ok()) {
        std::lock_guard<std::mutex> lock(self->mu_);
        self->graphs_[{kept->session_handle(), response->graph_handle()}] = {kept, response->graph_handle()};
      }
      done(status);
    };
    RegisterInSession(kept, response, std::move(keep), nullptr, kMaxRestarts);
  }

  void ForgetSession(const std::string& session) {
    std::lock_guard<std::mutex> lock(mu_);
    const auto first = graphs_.lower_bound({session, ""});
    auto end = first;
    while (end != graphs_.end() && end->first.first == session) ++end;
    graphs_.erase(first, end);
  }

  // Returns the handle that the server knows.
  std::string Forget(const std::string& session, const std::string& handle) {
    std::lock_guard<std::mutex> lock(mu_);
    const auto found = graphs_.find({session, handle});
    if (found == graphs_.end()) return handle;
    const std::string current = found->second.handle;
    graphs_.erase(found);
    return current;
  }

  // `request` lives until `done`.
  template <typename Response>
  void Run(CallOptions* opts, const tensorflow::RunGraphRequest& request, Response* response, StatusCallback done) {
    const Graph graph = Find({request.session_handle(), request.graph_handle()});
    if (graph.request == nullptr) {
      Start(Method::kRunGraph, request, ParseInto(response), std::move(done), opts, 0);
      return;
    }
    auto cancellation = std::make_shared<StagedCancellation>();
    cancellation->Begin(opts);
    StatusCallback end = [cancellation, done = std::move(done)](const Status& status) {
      cancellation->End();
      done(status);
    };
    // What earlier parts of a run have done is gone with the server.
    RunAs(graph, cancellation, request, response, std::move(end), request.is_partial() ? 0 : kMaxRestarts);
  }

 private:
  // While one request is made.
  static constexpr int kMaxRestarts = 10;
  // The session, and the graph's handle that the master knows. Each session numbers its graphs from one.
  using Key = std::pair<std::string, std::string>;
  struct Graph {
    std::shared_ptr<const tensorflow::RegisterGraphRequest> request;
    std::string handle;  // the current one
    int again = 0;       // how often it was registered again
  };

  Graph Find(const Key& key) {
    std::lock_guard<std::mutex> lock(mu_);
    const auto found = graphs_.find(key);
    return found == graphs_.end() ? Graph() : found->second;
  }

  // `restarts`: of the server, at most so many.
  template <typename Response>
  void RunAs(const Graph& graph, const std::shared_ptr<StagedCancellation>& cancellation,
             const tensorflow::RunGraphRequest& request, Response* response, StatusCallback done, int restarts) {
    StatusCallback heal = [self = shared_from_this(), graph, cancellation, &request, response, done = std::move(done),
                           restarts](const Status& status) {
      if (restarts > 0 && (IsSessionForgotten(status) || IsGraphForgotten(status))) {
        self->RunAgain(graph, cancellation, request, response, done, restarts - 1);
      } else {
        done(status);
      }
    };
    if (graph.handle == request.graph_handle()) {
      Start(Method::kRunGraph, request, ParseInto(response), std::move(heal), cancellation->current());
    } else {
      tensorflow::RunGraphRequest renamed = request;
      renamed.set_graph_handle(graph.handle);
      Start(Method::kRunGraph, renamed, ParseInto(response), std::move(heal), cancellation->current());
    }
    cancellation->Started();
  }

  template <typename Response>
  void RunAgain(const Graph& graph, const std::shared_ptr<StagedCancellation>& cancellation,
                const tensorflow::RunGraphRequest& request, Response* response, StatusCallback done, int restarts) {
    const Key key = {request.session_handle(), request.graph_handle()};
    const Graph now = Find(key);
    if (now.request != nullptr && now.again != graph.again) {
      return RunAs(now, cancellation, request, response, std::move(done), restarts);
    }
    auto registered = std::make_shared<tensorflow::RegisterGraphResponse>();
    StatusCallback run = [self = shared_from_this(), key, graph, cancellation, &request, response, registered,
                          done = std::move(done), restarts](const Status& status) {
      if (!status.ok()) return done(status);
      const Graph current = self->Registered(key, graph, registered->graph_handle());
      self->RunAs(current, cancellation, request, response, done, restarts);
    };
    RegisterInSession(graph.request, registered.get(), std::move(run), cancellation, restarts);
  }

  // `graph` was registered again, as `handle`. Returns what is to be run: another step may have been faster.
  Graph Registered(const Key& key, const Graph& graph, const std::string& handle) {
    Graph current = {graph.request, handle, graph.again + 1};
    {
      std::lock_guard<std::mutex> lock(mu_);
      const auto found = graphs_.find(key);
      if (found == graphs_.end()) return current;
      if (found->second.again == graph.again) return found->second = current;
      current = found->second;
    }
    tensorflow::DeregisterGraphRequest surplus;
    surplus.set_session_handle(key.first);
    surplus.set_create_worker_session_called(graph.request->create_worker_session_called());
    surplus.set_graph_handle(handle);
    auto response = std::make_shared<tensorflow::DeregisterGraphResponse>();
    Start(
        Method::kDeregisterGraph, surplus, ParseInto(response.get()), [response](const Status&) {}, nullptr);
    return current;
  }

  // Creates the session again if the server has forgotten it.
  void RegisterInSession(const std::shared_ptr<const tensorflow::RegisterGraphRequest>& request,
                         tensorflow::RegisterGraphResponse* response, StatusCallback done,
                         const std::shared_ptr<StagedCancellation>& cancellation, int restarts) {
    StatusCallback heal = [self = shared_from_this(), request, response, done = std::move(done), cancellation,
                           restarts](const Status& status) {
      if (restarts == 0 || !IsSessionForgotten(status)) return done(status);
      const uint64_t ticket = NewTicket();
      if (cancellation != nullptr) cancellation->current()->SetCancelCallback([ticket] { StopWaiting(ticket); });
      CreateSessionAgain(self->target_, request->session_handle(), self->channel_, status, ticket,
                         [self, request, response, done, cancellation, restarts](const Status& created) {
                           if (cancellation != nullptr) cancellation->current()->ClearCancelCallback();
                           if (!created.ok()) return done(created);
                           self->RegisterInSession(request, response, done, cancellation, restarts - 1);
                         });
      if (cancellation != nullptr) cancellation->Started();
    };
    CallRepeatedly({channel_, target_, Method::kRegisterGraph, request, ParseInto(response), std::move(heal),
                    kWaitToConnect, cancellation});
  }

  // Waits for a server that is down, but sends nothing twice.
  void Start(Method method, const MessageLite& request, ReplyParser parse, StatusCallback done, CallOptions* opts,
             uint32_t flags = kWaitToConnect) {
    (new OneCall(channel_, target_, std::move(parse), std::move(done), opts))->Start(method, request, flags);
  }

  const std::string target_;
  const std::shared_ptr<Channel> channel_;
  std::mutex mu_;
  std::map<Key, Graph> graphs_;  // guarded by mu_
};

RemoteWorker::RemoteWorker(std::string target, std::shared_ptr<Channel> channel, tensorflow::WorkerCacheLogger* logger,
                           bool recovers)
    : target_(std::move(target)),
      channel_(std::move(channel)),
      logger_(logger),
      graphs_(recovers ? std::make_shared<Graphs>(target_, channel_) : nullptr) {}

RemoteWorker::RemoteWorker(std::string target, Status status, tensorflow::WorkerCacheLogger* logger)
    : target_(std::move(target)), status_(std::move(status)), logger_(logger) {}

RemoteWorker::~RemoteWorker() = default;

// Requests are serialised at once: TensorFlow may free them as soon as the completion has run.
#define STARWIRE_START(method, request, parse, done, opts, flags)                                              \
  do {                                                                                                         \
    if (!status_.ok()) {                                                                                       \
      (done)(status_);                                                                                         \
    } else {                                                                                                   \
      (new OneCall(channel_, target_, (parse), std::move(done), (opts)))->Start((method), (request), (flags)); \
    }                                                                                                          \
  } while (false)

void RemoteWorker::GetStatusAsync(CallOptions* opts, const tensorflow::GetStatusRequest* request,
                                  tensorflow::GetStatusResponse* response, bool fail_fast, StatusCallback done) {
  // A session may begin while a server is on its way back.
  if (graphs_ != nullptr && !fail_fast && opts == nullptr) {
    auto kept = std::make_shared<const tensorflow::GetStatusRequest>(*request);
    CallRepeatedly(
        {channel_, target_, Method::kGetStatus, kept, ParseInto(response), std::move(done), SW_CALL_WAIT_FOR_READY});
    return;
  }
  STARWIRE_START(Method::kGetStatus, *request, ParseInto(response), done, opts, fail_fast ? 0 : SW_CALL_WAIT_FOR_READY);
}

void RemoteWorker::GetStatusAsync(const tensorflow::GetStatusRequest* request, tensorflow::GetStatusResponse* response,
                                  StatusCallback done) {
  GetStatusAsync(nullptr, request, response, /*fail_fast=*/false, std::move(done));
}

void RemoteWorker::GetStatusAsyncWithOptions(const tensorflow::GetStatusRequest* request,
                                             tensorflow::GetStatusResponse* response, StatusCallback done,
                                             CallOptions* opts) {
  GetStatusAsync(opts, request, response, /*fail_fast=*/false, std::move(done));
}

void RemoteWorker::CreateWorkerSessionAsync(const tensorflow::CreateWorkerSessionRequest* request,
                                            tensorflow::CreateWorkerSessionResponse* response, StatusCallback done) {
  if (graphs_ == nullptr) {
    STARWIRE_START(Method::kCreateWorkerSession, *request, ParseInto(response), done, nullptr, 0);
    return;
  }
  // A server that has the session already leaves it as it is.
  auto kept = std::make_shared<const tensorflow::CreateWorkerSessionRequest>(*request);
  StatusCallback keep = [task = target_, kept, response, done = std::move(done)](const Status& status) {
    if (status.ok() && IsStateKept(*response)) KeepSession(task, *kept);
    done(status);
  };
  CallRepeatedly(
      {channel_, target_, Method::kCreateWorkerSession, kept, ParseInto(response), std::move(keep), kWaitToConnect});
}

void RemoteWorker::DeleteWorkerSessionAsync(CallOptions* opts, const tensorflow::DeleteWorkerSessionRequest* request,
                                            tensorflow::DeleteWorkerSessionResponse* response, StatusCallback done) {
  if (graphs_ != nullptr) {
    DropSession(target_, request->session_handle());
    graphs_->ForgetSession(request->session_handle());
  }
  STARWIRE_START(Method::kDeleteWorkerSession, *request, ParseInto(response), done, opts, 0);
}

void RemoteWorker::RegisterGraphAsync(const tensorflow::RegisterGraphRequest* request,
                                      tensorflow::RegisterGraphResponse* response, StatusCallback done) {
  if (graphs_ != nullptr) {
    graphs_->Register(*request, response, std::move(done));
    return;
  }
  STARWIRE_START(Method::kRegisterGraph, *request, ParseInto(response), done, nullptr, 0);
}

void RemoteWorker::DeregisterGraphAsync(const tensorflow::DeregisterGraphRequest* request,
                                        tensorflow::DeregisterGraphResponse* response, StatusCallback done) {
  if (graphs_ != nullptr) {
    tensorflow::DeregisterGraphRequest renamed = *request;
    renamed.set_graph_handle(graphs_->Forget(request->session_handle(), request->graph_handle()));
    STARWIRE_START(Method::kDeregisterGraph, renamed, ParseInto(response), done, nullptr, 0);
    return;
  }
  STARWIRE_START(Method::kDeregisterGraph, *request, ParseInto(response), done, nullptr, 0);
}

void RemoteWorker::RunGraphAsync(CallOptions* opts, tensorflow::RunGraphRequestWrapper* request,
                                 tensorflow::MutableRunGraphResponseWrapper* response, StatusCallback done) {
  if (graphs_ != nullptr) {
    graphs_->Run(opts, request->ToProto(), get_proto_from_wrapper(response), std::move(done));
    return;
  }
  STARWIRE_START(Method::kRunGraph, request->ToProto(), ParseInto(get_proto_from_wrapper(response)), done, opts, 0);
}

void RemoteWorker::RunGraphAsync(CallOptions* opts, const tensorflow::RunGraphRequest* request,
                                 tensorflow::RunGraphResponse* response, StatusCallback done) {
  if (graphs_ != nullptr) {
    graphs_->Run(opts, *request, response, std::move(done));
    return;
  }
  STARWIRE_START(Method::kRunGraph, *request, ParseInto(response), done, opts, 0);
}

tensorflow::MutableRunGraphRequestWrapper* RemoteWorker::CreateRunGraphRequest() {
  return new tensorflow::MutableProtoRunGraphRequest;
}

tensorflow::MutableRunGraphResponseWrapper* RemoteWorker::CreateRunGraphResponse() {
  return new tensorflow::OwnedProtoRunGraphResponse;
}

void RemoteWorker::CleanupGraphAsync(const tensorflow::CleanupGraphRequest* request, tensorflow::CleanupGraphResponse*,
                                     StatusCallback done) {
  if (!status_.ok()) {
    done(status_);
    return;
  }
  // The step is over and its client waits for the next: the answer is empty and not needed, and there is no remedy for
  // a failure.
  (new OneCall(
       channel_, target_, [](sw_bytes) { return OkStatus(); }, [](const Status&) {}, nullptr))
      ->Start(Method::kCleanupGraph, *request, 0);
  done(OkStatus());
}

void RemoteWorker::CleanupAllAsync(const tensorflow::CleanupAllRequest* request,
                                   tensorflow::CleanupAllResponse* response, StatusCallback done) {
  STARWIRE_START(Method::kCleanupAll, *request, ParseInto(response), done, nullptr, 0);
}

// The rendezvous requests tensors with sw_channel_recv; this is for direct users of the interface.
void RemoteWorker::RecvTensorAsync(CallOptions* opts, const tensorflow::RecvTensorRequest* request,
                                   tensorflow::TensorResponse* response, StatusCallback done) {
  auto parse = [response](sw_bytes reply) {
    tensorflow::RecvTensorResponse proto;
    Status status = CheckWire(reply, TensorCarrier::kRecvTensorResponse);
    if (!status.ok()) return status;
    if (!proto.ParseFromArray(reply.data, static_cast<int>(reply.len))) return Unexpected(reply);
    status = CheckTensor(proto.tensor(), reply.len);
    return status.ok() || proto.is_dead() ? response->InitFrom(&proto) : status;
  };
  StatusCallback finished = std::move(done);
  if (logger_ != nullptr && logger_->LoggingActive()) {
    const int64_t start = static_cast<int64_t>(tensorflow::Env::Default()->NowMicros());
    finished = [logger = logger_, request, response, start, inner = std::move(finished)](const Status& status) {
      // source device ; incarnation ; destination device ; tensor name ; frame and iteration
      const std::vector<std::string> key = tensorflow::str_util::Split(request->rendezvous_key(), ';');
      if (status.ok() && key.size() == 5) {
        logger->RecordRecvTensor(request->step_id(), start,
                                 static_cast<int64_t>(tensorflow::Env::Default()->NowMicros()), key[3], key[0], key[2],
                                 static_cast<int64_t>(response->tensor().TotalBytes()));
      }
      inner(status);
    };
  }
  if (!request->dma_ok()) {
    STARWIRE_START(Method::kRecvTensor, *request, parse, finished, opts, 0);
  } else {
    tensorflow::RecvTensorRequest copy(*request);
    copy.set_dma_ok(false);
    STARWIRE_START(Method::kRecvTensor, copy, parse, finished, opts, 0);
  }
}

void RemoteWorker::LoggingAsync(const tensorflow::LoggingRequest* request, tensorflow::LoggingResponse* response,
                                StatusCallback done) {
  STARWIRE_START(Method::kLogging, *request, ParseInto(response), done, nullptr, 0);
}

void RemoteWorker::TracingAsync(const tensorflow::TracingRequest* request, tensorflow::TracingResponse* response,
                                StatusCallback done) {
  STARWIRE_START(Method::kTracing, *request, ParseInto(response), done, nullptr, 0);
}

void RemoteWorker::RecvBufAsync(CallOptions* opts, const tensorflow::RecvBufRequest* request,
                                tensorflow::RecvBufResponse*, StatusCallback done) {
  if (!status_.ok()) {
    done(status_);
    return;
  }
  // A response without transport options means that the bytes are where the request wanted them.
  void* to = reinterpret_cast<void*>(static_cast<uintptr_t>(request->buf_ptr()));
  if (request->num_bytes() < 0 || (to == nullptr && request->num_bytes() != 0)) {
    done(MakeStatus(kInvalidArgument, "a request for " + std::to_string(request->num_bytes()) + " bytes of " + target_ +
                                          " has no destination buffer"));
    return;
  }
  auto* call = new OneCall(channel_, target_, nullptr, std::move(done), opts);
  call->ReceiveInto(to, static_cast<size_t>(request->num_bytes()));
  call->Start(Method::kRecvBuf, *request, 0);
}

void RemoteWorker::CompleteGroupAsync(CallOptions* opts, const tensorflow::CompleteGroupRequest* request,
                                      tensorflow::CompleteGroupResponse* response, StatusCallback done) {
  STARWIRE_START(Method::kCompleteGroup, *request, ParseInto(response), done, opts, 0);
}

void RemoteWorker::CompleteInstanceAsync(CallOptions* opts, const tensorflow::CompleteInstanceRequest* request,
                                         tensorflow::CompleteInstanceResponse* response, StatusCallback done) {
  STARWIRE_START(Method::kCompleteInstance, *request, ParseInto(response), done, opts, 0);
}

void RemoteWorker::GetStepSequenceAsync(const tensorflow::GetStepSequenceRequest* request,
                                        tensorflow::GetStepSequenceResponse* response, StatusCallback done) {
  STARWIRE_START(Method::kGetStepSequence, *request, ParseInto(response), done, nullptr, 0);
}

Status RemoteWorker::NotExpected(sw_bytes reply) { return Unexpected(reply); }

void RemoteWorker::Call(Method method, const MessageLite& request, Parser parse, StatusCallback done,
                        CallOptions* opts) {
  STARWIRE_START(method, request, std::move(parse), done, opts, 0);
}

#undef STARWIRE_START

}  // namespace starwire
