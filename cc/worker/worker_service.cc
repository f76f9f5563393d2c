#include "cc/worker/worker_service.h"

#include <chrono>
#include <limits>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "cc/base/guard.h"
#include "cc/base/handles.h"
#include "cc/base/methods.h"
#include "cc/base/status_codec.h"
#include "cc/tensor/objects.h"
#include "cc/worker/recv_buf.h"
#include "cc/worker/session_recovery.h"
#include "tensorflow/core/distributed_runtime/call_options.h"
#include "tensorflow/core/distributed_runtime/message_wrappers.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/lib/core/threadpool.h"
#include "tensorflow/core/platform/logging.h"
#include "tensorflow/core/protobuf/worker.pb.h"
#if STARWIRE_EAGER_PORT
#include "cc/worker/eager_messages.h"
#endif

namespace starwire {

using tensorflow::StatusCallback;
using tensorflow::protobuf::MessageLite;

namespace {

// RunGraph with a body up to this many bytes starts on the reactor: it looks up the graph, schedules the executor's
// root nodes on the compute pool and returns. Bigger ones carry tensors that have to be decoded.
constexpr size_t kInlineRunGraphBytes = 4096;

void SendResponse(sw_engine* engine, sw_ticket ticket, const MessageLite& response) {
  const size_t size = response.ByteSizeLong();
  if (size > static_cast<size_t>(std::numeric_limits<int>::max())) {
    ReplyError(engine, ticket,
               MakeStatus(kResourceExhausted, "a reply of " + std::to_string(size) +
                                                  " bytes does not fit into a protocol buffer (2 GB at most)"));
    return;
  }
  if (size == 0) {
    sw_engine_reply(engine, ticket, 0, {nullptr, 0}, nullptr);
    return;
  }
  uint8_t* bytes = new uint8_t[size];
  response.SerializeWithCachedSizesToArray(bytes);
  const sw_part part = {bytes, size};
  const sw_payload payload = {&part, 1, bytes, Guarded<&DeleteArray<uint8_t>>};
  sw_engine_reply(engine, ticket, 0, {nullptr, 0}, &payload);
}

void SendResponse(sw_engine* engine, sw_ticket ticket, const OutgoingBuffer& response) {
  sw_engine_reply(engine, ticket, 0, {nullptr, 0}, response.payload());
}

// Checks of a request before and after its bytes are parsed: TensorFlow's worker trusts its input.
Status CheckBytes(sw_bytes, const MessageLite&) { return OkStatus(); }
Status CheckRequest(const MessageLite&, uint64_t) { return OkStatus(); }

Status CheckBytes(sw_bytes body, const tensorflow::RunGraphRequest&) {
  return CheckWire(body, TensorCarrier::kRunGraphRequest);
}
Status CheckRequest(const tensorflow::RunGraphRequest& request, uint64_t bytes) {
  return CheckTensors(request.send(), bytes);
}
Status CheckRequest(const tensorflow::RegisterGraphRequest& request, uint64_t) {
  return CheckConstants(request.graph_def());
}
#if STARWIRE_EAGER_PORT
Status CheckBytes(sw_bytes body, const tensorflow::eager::EnqueueRequest&) {
  return CheckWire(body, TensorCarrier::kEnqueueRequest);
}
Status CheckRequest(const tensorflow::eager::EnqueueRequest& request, uint64_t bytes) {
  return CheckTensorsOf(request, bytes);
}
Status CheckBytes(sw_bytes body, const tensorflow::eager::RunComponentFunctionRequest&) {
  return CheckWire(body, TensorCarrier::kRunComponentFunctionRequest);
}
Status CheckRequest(const tensorflow::eager::RunComponentFunctionRequest& request, uint64_t bytes) {
  return CheckTensorsOf(request, bytes);
}
#endif
Status CheckRequest(const tensorflow::CompleteInstanceRequest& request, uint64_t) {
  if (tensorflow::TensorShape::IsValid(request.shape())) return OkStatus();
  return MakeStatus(kInvalidArgument, "the shape of collective instance " + request.name() + " is invalid");
}

template <typename Request>
Status ParseBody(const sw_part* parts, size_t n_parts, uint32_t method, Request* request) {
  const sw_bytes body =
      n_parts == 1 ? sw_bytes{static_cast<const uint8_t*>(parts[0].data), parts[0].len} : sw_bytes{nullptr, 0};
  Status status = CheckBytes(body, *request);
  if (!status.ok()) return status;
  if (n_parts > 1 || body.len > static_cast<size_t>(std::numeric_limits<int>::max()) ||
      !request->ParseFromArray(body.data, static_cast<int>(body.len))) {
    return MakeStatus(kInvalidArgument, "the request is not the protocol buffer that worker method " +
                                            std::to_string(method) + " expects");
  }
  return CheckRequest(*request, body.len);
}

}  // namespace

// One call from its arrival to its answer.
struct WorkerService::ServedCall {
  ServedCall(BodyHandle owned, const sw_call_request& r)
      : ticket(r.ticket), parts(r.parts), n_parts(r.n_parts), body(std::move(owned)), method(r.method) {}
  virtual ~ServedCall() = default;
  virtual Status Parse() = 0;
  virtual void SendResponse(sw_engine* engine) = 0;

  const sw_ticket ticket;
  const sw_part* parts;
  const size_t n_parts;
  BodyHandle body;
  const uint32_t method;
  tensorflow::CallOptions opts;
  std::atomic<bool> cancelled{false};
  std::atomic<bool> finished{false};
};

template <typename RequestProto, typename ResponseProto>
struct WorkerService::TypedCall : WorkerService::ServedCall {
  using ServedCall::ServedCall;
  Status Parse() override { return ParseBody(parts, n_parts, method, &request); }
  void SendResponse(sw_engine* engine) override { starwire::SendResponse(engine, ticket, response); }
  RequestProto request;
  ResponseProto response;
};

WorkerService::WorkerService(StarwireWorker* worker, tensorflow::WorkerEnv* env)
    : worker_(worker),
      env_(env),
      peer_sessions_([this](const std::string& task, bool is_back, PeerSessions::Registered registered) {
        Drop(task, is_back, std::move(registered));
      }) {}

WorkerService::~WorkerService() = default;

void WorkerService::Start(std::shared_ptr<sw_engine> engine, std::shared_ptr<ServerQueues> queues) {
  engine_ = std::move(engine);
  queues_ = std::move(queues);
  peer_sessions_.SetIdleLimit(std::chrono::seconds(sw_engine_session_idle_s(engine_.get())));
}

WorkerService::Shard& WorkerService::ShardOf(sw_ticket ticket) { return shards_[TicketHash()(ticket) % kShards]; }

template <typename RequestProto, typename ResponseProto, typename Run>
void WorkerService::Serve(const sw_call_request* request, Place place, Run run) {
  using Typed = TypedCall<RequestProto, ResponseProto>;
  auto call = std::make_shared<Typed>(BodyHandle(request->body), *request);
  running_.fetch_add(1, std::memory_order_relaxed);
  auto serve = [self = shared_from_this(), call, run] {
    const Status parsed = call->Parse();
    call->body.reset();
    if (!parsed.ok()) {
      self->Finish(call, self->peer_sessions_.Named(parsed, call->ticket.conn));
      return;
    }
    if (call->cancelled.load()) {
      self->Finish(call, MakeStatus(kCancelled, "cancelled before it was started"));
      return;
    }
    run(self->worker_, call.get(), [self, call](const Status& status) { self->Finish(call, status); });
    // A cancellation may have come before the method set its callback.
    if (call->cancelled.load() && !call->finished.load()) call->opts.StartCancel();
  };
  const auto fail = [self = shared_from_this(), call](const Status& thrown) { self->Finish(call, thrown); };
  auto work = [serve = std::move(serve), fail] { Guard("a worker method", serve, fail); };
  const auto start = [&] {
    {
      Shard& shard = ShardOf(call->ticket);
      std::lock_guard<std::mutex> lock(shard.mu);
      shard.calls[call->ticket] = call;
    }
    switch (place) {
      case Place::kReactor:
        work();
        break;
      case Place::kPool:
        env_->compute_pool->Schedule(std::move(work));
        break;
      case Place::kBackground:
        queues_->slow.Run(std::move(work));
        break;
      case Place::kThread: {
        BlockingThreads::Work blocking = std::move(work);
        // The process may have no thread left; TensorFlow's own service uses the pool as well.
        if (!queues_->eager.Run(&blocking)) env_->compute_pool->Schedule(std::move(blocking));
        break;
      }
    }
  };
  Guard("a worker method", start, fail);
}

template <typename Class, typename RequestProto, typename ResponseProto>
void WorkerService::Serve(const sw_call_request* request, Place place,
                          void (Class::*method)(tensorflow::CallOptions*, RequestProto*, ResponseProto*,
                                                StatusCallback)) {
  Serve<std::remove_const_t<RequestProto>, ResponseProto>(
      request, place, [method](StarwireWorker* worker, auto* call, StatusCallback done) {
        (worker->*method)(&call->opts, &call->request, &call->response, std::move(done));
      });
}

template <typename Class, typename RequestProto, typename ResponseProto>
void WorkerService::Serve(const sw_call_request* request, Place place,
                          void (Class::*method)(RequestProto*, ResponseProto*, StatusCallback)) {
  Serve<std::remove_const_t<RequestProto>, ResponseProto>(
      request, place, [method](StarwireWorker* worker, auto* call, StatusCallback done) {
        (worker->*method)(&call->request, &call->response, std::move(done));
      });
}

void WorkerService::Finish(const std::shared_ptr<ServedCall>& call, const Status& status) {
  if (call->finished.exchange(true)) return;
  {
    Shard& shard = ShardOf(call->ticket);
    std::lock_guard<std::mutex> lock(shard.mu);
    auto found = shard.calls.find(call->ticket);
    if (found != shard.calls.end() && found->second == call) shard.calls.erase(found);
  }
  const auto refuse = [&](const Status& error) { ReplyError(engine_.get(), call->ticket, error); };
  if (status.ok()) {
    // There may be no memory for the answer.
    Guard(
        "answering a worker method", [&] { call->SendResponse(engine_.get()); }, refuse);
  } else {
    VLOG(1) << "starwire: worker method " << std::to_string(call->method) << " failed: " << status;
    refuse(status);
  }
  running_.fetch_sub(1, std::memory_order_release);
}

void WorkerService::Cancel(const std::shared_ptr<ServedCall>& call) {
  call->cancelled.store(true);
  // Cancelling aborts rendezvous and wakes kernels: TensorFlow code of unknown length, not for a reactor.
  queues_->urgent.Run([call] {
    if (!call->finished.load()) call->opts.StartCancel();
  });
}

void WorkerService::OnCancel(sw_ticket ticket) {
  std::shared_ptr<ServedCall> call;
  {
    Shard& shard = ShardOf(ticket);
    std::lock_guard<std::mutex> lock(shard.mu);
    auto found = shard.calls.find(ticket);
    if (found == shard.calls.end()) return;
    call = found->second;
  }
  Cancel(call);
}

void WorkerService::OnPeerCame(uint64_t conn, sw_bytes task, uint64_t incarnation) {
  peer_sessions_.PeerConnected(conn, AsString(task), incarnation);
}

void WorkerService::OnPeerGone(uint64_t conn) { peer_sessions_.PeerDisconnected(conn); }

void WorkerService::Drop(const std::string& task, bool is_back, PeerSessions::Registered registered) {
  // As text: not every version of TensorFlow exports the functions that log numbers.
  const std::string graphs = std::to_string(registered.graphs.size()),
                    sessions = std::to_string(registered.sessions.size());
  const LogBudget::Say say = release_lines_.Take();
  if (say != LogBudget::Say::kNothing) {
    const std::string what = is_back ? " was restarted: releasing " + graphs + " graphs and " + sessions +
                                           " sessions of its previous incarnation"
                                     : " has had no connection for too long: releasing its " + graphs + " graphs and " +
                                           sessions + " sessions";
    LOG(INFO) << "starwire: " + task + what +
                     (say == LogBudget::Say::kLastLine ? " (repeats are suppressed for a minute)" : "");
  }
  running_.fetch_add(1, std::memory_order_relaxed);
  // For the same reason as Place::kBackground.
  queues_->slow.Run([self = shared_from_this(), registered = std::move(registered)] {
    for (const auto& [handle, session] : registered.graphs) {
      tensorflow::DeregisterGraphRequest request;
      tensorflow::DeregisterGraphResponse response;
      request.set_graph_handle(handle);
      request.set_session_handle(session.first);
      request.set_create_worker_session_called(session.second);
      // Completes before it returns. A graph that is not found is already gone.
      self->worker_->DeregisterGraphAsync(&request, &response, [](const Status&) {});
    }
    for (const std::string& session : registered.sessions) {
      tensorflow::CallOptions options;
      tensorflow::DeleteWorkerSessionRequest request;
      tensorflow::DeleteWorkerSessionResponse response;
      request.set_session_handle(session);
      self->worker_->DeleteWorkerSessionAsync(&options, &request, &response, [](const Status&) {});
    }
    self->running_.fetch_sub(1, std::memory_order_release);
  });
}

bool WorkerService::Shutdown(int64_t timeout_ms) {
  for (Shard& shard : shards_) {
    std::vector<std::shared_ptr<ServedCall>> calls;
    {
      std::lock_guard<std::mutex> lock(shard.mu);
      for (auto& entry : shard.calls) calls.push_back(entry.second);
    }
    for (const auto& call : calls) Cancel(call);
  }
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
  while (running_.load(std::memory_order_acquire) > 0) {
    if (std::chrono::steady_clock::now() > give_up) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

#if STARWIRE_EAGER_PORT
bool WorkerService::ServeEager(const sw_call_request* request) {
  using namespace tensorflow::eager;  // NOLINT: the names of the messages
  if (eager_ == nullptr) return false;
  if (static_cast<Method>(request->method) == Method::kEagerEnqueue) {
    Serve<EnqueueRequest, EnqueueResponse>(
        request, Place::kThread, [this, eager = eager_](StarwireWorker*, auto* call, StatusCallback done) {
          prepare_(&call->request);
          const Status status = eager->Enqueue(&call->opts, &call->request, &call->response);
          const Status spelt = SpellOutObjects(&call->response);
          done(status.ok() ? spelt : status);
        });
    return true;
  }
  // It returns when the function has started.
  Serve<RunComponentFunctionRequest, RunComponentFunctionResponse>(
      request, Place::kPool, [eager = eager_](StarwireWorker*, auto* call, StatusCallback done) {
        eager->RunComponentFunction(&call->opts, &call->request, &call->response,
                                    [call, done = std::move(done)](const Status& status) {
                                      const Status spelt = SpellOutObjects(&call->response);
                                      done(status.ok() ? spelt : status);
                                    });
      });
  return true;
}
#else
bool WorkerService::ServeEager(const sw_call_request*) { return false; }
#endif

void WorkerService::OnCall(const sw_call_request* request) {
  using namespace tensorflow;  // NOLINT: the names of the messages
  // The one place that decides what runs on a reactor.
  switch (static_cast<Method>(request->method)) {
    case Method::kGetStatus:
      return Serve(request, Place::kPool, &StarwireWorker::ServeGetStatusAsync);
    case Method::kCreateWorkerSession:
      return Serve<CreateWorkerSessionRequest, CreateWorkerSessionResponse>(
          request, Place::kPool,
          [this, peer = peer_sessions_.PeerOf(request->ticket.conn)](StarwireWorker* worker, auto* call,
                                                                     StatusCallback done) {
            worker->CreateWorkerSessionAsync(&call->request, &call->response,
                                             [this, peer, call, done = std::move(done)](const Status& status) {
                                               if (status.ok()) {
                                                 peer_sessions_.SessionCreated(peer, call->request.session_handle());
                                                 if (worker_->KeepsState()) SayThatStateIsKept(&call->response);
                                               }
                                               done(status);
                                             });
          });
    case Method::kDeleteWorkerSession:
      return Serve<DeleteWorkerSessionRequest, DeleteWorkerSessionResponse>(
          request, Place::kBackground, [this](StarwireWorker* worker, auto* call, StatusCallback done) {
            peer_sessions_.SessionDeleted(call->ticket.conn, call->request.session_handle());
            worker->DeleteWorkerSessionAsync(&call->opts, &call->request, &call->response, std::move(done));
          });
    case Method::kRegisterGraph:
      return Serve<RegisterGraphRequest, RegisterGraphResponse>(
          request, Place::kPool,
          [this, peer = peer_sessions_.PeerOf(request->ticket.conn)](StarwireWorker* worker, auto* call,
                                                                     StatusCallback done) {
            worker->RegisterGraphAsync(
                &call->request, &call->response, [this, peer, call, done = std::move(done)](const Status& status) {
                  if (status.ok()) {
                    const auto& request = call->request;
                    peer_sessions_.GraphRegistered(peer, call->response.graph_handle(), request.session_handle(),
                                                   request.create_worker_session_called());
                  }
                  done(status);
                });
          });
    case Method::kDeregisterGraph:
      return Serve<DeregisterGraphRequest, DeregisterGraphResponse>(
          request, Place::kPool, [this](StarwireWorker* worker, auto* call, StatusCallback done) {
            peer_sessions_.GraphDeregistered(call->ticket.conn, call->request.graph_handle());
            worker->DeregisterGraphAsync(&call->request, &call->response, std::move(done));
          });
    case Method::kRunGraph: {
      const size_t size = request->n_parts == 1 ? request->parts[0].len : 0;
      const Place place = size <= kInlineRunGraphBytes ? Place::kReactor : Place::kPool;
      return Serve(request, place, &StarwireWorker::ServeRunGraphAsync);
    }
    case Method::kCleanupGraph:
      return Serve(request, Place::kReactor, &StarwireWorker::CleanupGraphAsync);
    case Method::kCleanupAll:
      return Serve(request, Place::kPool, &StarwireWorker::CleanupAllAsync);
    case Method::kRecvTensor:
      return Serve(request, Place::kPool, &StarwireWorker::RecvTensorProtoAsync);
    case Method::kLogging:
      return Serve(request, Place::kPool, &StarwireWorker::LoggingAsync);
    case Method::kTracing:
      return Serve(request, Place::kPool, &StarwireWorker::TracingAsync);
    case Method::kRecvBuf:
      return Serve<RecvBufRequest, OutgoingBuffer>(
          request, Place::kPool, [env = env_](StarwireWorker*, auto* call, StatusCallback done) {
            ServeRecvBuf(env, &call->request, &call->response, std::move(done));
          });
    case Method::kCompleteGroup:
      return Serve(request, Place::kPool, &StarwireWorker::CompleteGroupAsync);
    case Method::kCompleteInstance:
      return Serve(request, Place::kPool, &StarwireWorker::CompleteInstanceAsync);
    case Method::kGetStepSequence:
      return Serve(request, Place::kPool, &StarwireWorker::GetStepSequenceAsync);
    case Method::kEagerEnqueue:
    case Method::kEagerRunComponentFunction:
      if (ServeEager(request)) return;
      break;
    case Method::kStarHandles: {
      if (eager_ == nullptr) break;
      const BodyHandle body(request->body);
      sw_engine_reply(engine_.get(), request->ticket, 0, {nullptr, 0}, nullptr);
      return;
    }
    case Method::kStarCall:
    case Method::kStarRegister:
    case Method::kStarEnd:
    case Method::kMeasure:
      break;  // the transport serves them
  }
  const BodyHandle body(request->body);
  ReplyError(engine_.get(), request->ticket, MakeStatus(kUnimplemented, NoSuchMethod(request->method)));
}

}  // namespace starwire
