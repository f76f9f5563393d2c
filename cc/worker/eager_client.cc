#include "cc/worker/eager_client.h"

#include <algorithm>
#include <future>
#include <utility>

#include "cc/base/methods.h"
#include "cc/worker/component_functions.h"
#include "tensorflow/core/distributed_runtime/call_options.h"
#include "tensorflow/core/protobuf/eager_service.pb.h"
#include "tensorflow/core/protobuf/worker.pb.h"
#include "tensorflow/core/util/device_name_utils.h"

namespace starwire {

using tensorflow::CallOptions;
using tensorflow::StatusCallback;
using tensorflow::core::RefCountPtr;
using tensorflow::eager::EagerClient;
using tensorflow::eager::EagerClientCache;
using tensorflow::eager::EnqueueRequest;
using tensorflow::eager::EnqueueResponse;
using tensorflow::eager::RunComponentFunctionRequest;
using tensorflow::eager::RunComponentFunctionResponse;

namespace {

// Only that handles are not used any more: what follows may overtake it.
bool IsRelease(const EnqueueRequest& request) {
  return request.queue_size() > 0 &&
         std::all_of(request.queue().begin(), request.queue().end(),
                     [](const tensorflow::eager::QueueItem& item) { return item.has_handle_to_decref(); });
}

// The task of a task or device.
std::string TaskOf(const std::string& target) {
  tensorflow::DeviceNameUtils::ParsedName name;
  std::string task;
  const bool is_task = tensorflow::DeviceNameUtils::ParseFullName(target, &name) &&
                       tensorflow::DeviceNameUtils::GetTaskName(name, &task);
  return is_task ? task : target;
}

// The end of a step at a task that ran a part of it.
bool IsCleanup(const EnqueueRequest& request) {
  return request.queue_size() == 1 && request.queue(0).has_cleanup_function();
}

bool IsMissing(const Status& status) {
  if (StatusNumber(status) != kUnimplemented) return false;
  const std::string message = StatusMessage(status);
  for (Method method : {Method::kEagerEnqueue, Method::kEagerRunComponentFunction}) {
    // What RemoteWorker adds to the message begins in a new line.
    const std::string missing = NoSuchMethod(static_cast<uint32_t>(method));
    if (message.compare(0, missing.size(), missing) == 0 &&
        (message.size() == missing.size() || message[missing.size()] == '\n')) {
      return true;
    }
  }
  return false;
}

}  // namespace

EagerPortClient::EagerPortClient(RefCountPtr<EagerClient> stock, std::unique_ptr<RemoteEager> worker,
                                 std::string target, std::shared_ptr<EagerPeer> peer,
                                 std::shared_ptr<HandleBoard> board)
    : stock_(std::move(stock)),
      worker_(std::move(worker)),
      target_(std::move(target)),
      peer_(std::move(peer)),
      board_(std::move(board)) {}

EagerPortClient::~EagerPortClient() = default;

void EagerPortClient::CreateContextAsync(const tensorflow::eager::CreateContextRequest* request,
                                         tensorflow::eager::CreateContextResponse* response, StatusCallback done) {
  stock_->CreateContextAsync(request, response, std::move(done));
}

void EagerPortClient::CreateContextAsync(const tensorflow::eager::CreateContextRequest* request,
                                         tensorflow::eager::CreateContextResponse* response, StatusCallback done,
                                         int64_t timeout_ms) {
  CreateEagerContext(stock_.get(), request, response, std::move(done), timeout_ms);
}

void EagerPortClient::CreateContextAsync(const tensorflow::eager::CreateContextRequest* request,
                                         tensorflow::eager::CreateContextResponse* response, StatusCallback done,
                                         int64_t timeout_ms, int retries) {
  CreateEagerContext(stock_.get(), request, response, std::move(done), timeout_ms, retries);
}

void EagerPortClient::UpdateContextAsync(const tensorflow::eager::UpdateContextRequest* request,
                                         tensorflow::eager::UpdateContextResponse* response, StatusCallback done) {
  stock_->UpdateContextAsync(request, response, std::move(done));
}

void EagerPortClient::WaitQueueDoneAsync(const tensorflow::eager::WaitQueueDoneRequest* request,
                                         tensorflow::eager::WaitQueueDoneResponse* response, StatusCallback done) {
  stock_->WaitQueueDoneAsync(request, response, std::move(done));
}

void EagerPortClient::KeepAliveAsync(const tensorflow::eager::KeepAliveRequest* request,
                                     tensorflow::eager::KeepAliveResponse* response, StatusCallback done) {
  stock_->KeepAliveAsync(request, response, std::move(done));
}

void EagerPortClient::CloseContextAsync(const tensorflow::eager::CloseContextRequest* request,
                                        tensorflow::eager::CloseContextResponse* response, StatusCallback done) {
  {
    std::lock_guard<std::mutex> lock(mu_);
    contexts_.erase(request->context_id());
  }
  stock_->CloseContextAsync(request, response, std::move(done));
}

StatusCallback EagerPortClient::Held(StatusCallback done) {
  Ref();
  return [this, done = std::move(done)](const Status& status) {
    done(status);
    Unref();
  };
}

template <typename Request, typename Response, typename OverPort, typename OverGrpc>
void EagerPortClient::Start(const Request* request, Response* response, StatusCallback done, OverPort over_port,
                            OverGrpc over_grpc) {
  const Offer offer = peer_->offer.load(std::memory_order_acquire);
  if (offer == Offer::kNo || peer_->streamed.load(std::memory_order_acquire) > 0) {
    over_grpc(request, std::move(done));
    return;
  }
  // The caller may free the request once it has been sent, but it may have to be sent again.
  std::shared_ptr<const Request> copy;
  if (offer == Offer::kUnknown) copy = std::make_shared<Request>(*request);
  over_port(request, Held([this, copy, over_grpc, done = std::move(done)](const Status& status) {
              if (IsMissing(status)) {
                peer_->offer.store(Offer::kNo, std::memory_order_release);
                if (copy != nullptr) {
                  // The peer did nothing. Whoever it is now, gRPC reaches it.
                  over_grpc(copy.get(), [copy, done](const Status& second) { done(second); });
                  return;
                }
              } else if (status.ok()) {
                Offer unknown = Offer::kUnknown;
                peer_->offer.compare_exchange_strong(unknown, Offer::kYes, std::memory_order_acq_rel);
              }
              done(status);
            }));
}

void EagerPortClient::EnqueueAsync(CallOptions* opts, const EnqueueRequest* request, EnqueueResponse* response,
                                   StatusCallback done) {
  if (EndsHere(*request, response)) {
    done(OkStatus());
    return;
  }
  if (IsCleanup(*request)) {
    // TensorFlow waits for the answer before it ends the step, but has no use for it. Every starwire server has the
    // method, which does the same as the clean-up of a function.
    tensorflow::CleanupGraphRequest cleanup;
    tensorflow::CleanupGraphResponse unused;
    cleanup.set_step_id(request->queue(0).cleanup_function().step_id());
    worker_->CleanupGraphAsync(&cleanup, &unused, std::move(done));
    return;
  }
  Start(
      request, response, std::move(done),
      [this, opts, response](const EnqueueRequest* sent, StatusCallback answered) {
        worker_->EagerEnqueueAsync(opts, sent, response, std::move(answered));
      },
      [this, opts, response](const EnqueueRequest* sent, StatusCallback answered) {
        stock_->EnqueueAsync(opts, sent, response, std::move(answered));
      });
}

bool EagerPortClient::EndsHere(const EnqueueRequest& request, EnqueueResponse* response) {
  const bool ends = IsCleanup(request) ? !CleansUp(request.context_id(), request.queue(0).cleanup_function().step_id())
                                       : RegistersNothing(request);
  if (ends) response->add_queue_response();
  return ends;
}

bool EagerPortClient::RegistersNothing(const EnqueueRequest& request) {
  if (request.queue_size() != 1 || !request.queue(0).has_register_function()) return false;
  const auto& registered = request.queue(0).register_function();
  const auto& function = registered.function_def();
  const auto& signature = function.signature();
  if (!registered.is_component_function()) return false;
  // TensorFlow adds it to its list when this is answered.
  ReserveComponentFunctions(request.context_id());
  Component component;
  component.is_nothing =
      function.node_def_size() == 0 && signature.output_arg_size() == 0 && signature.control_output_size() == 0;
  for (const auto& argument : function.arg_attr()) {
    const auto handles_of = argument.second.attr().find(kHandlesOfAttr);
    if (handles_of != argument.second.attr().end()) component.handles_of = handles_of->second.s();
  }
  const bool is_nothing = component.is_nothing;
  if (is_nothing || !component.handles_of.empty()) {
    std::lock_guard<std::mutex> lock(mu_);
    contexts_[request.context_id()].components[signature.name()] = std::move(component);
  }
  return is_nothing;
}

bool EagerPortClient::RunsNothing(const RunComponentFunctionRequest& request) {
  Component component;
  {
    std::lock_guard<std::mutex> lock(mu_);
    Context& context = contexts_[request.context_id()];
    const auto found = context.components.find(request.operation().name());
    if (found != context.components.end()) component = found->second;
    StepRuns& runs = context.steps[request.operation().func_step_id()];
    ++runs.begun;
    runs.sent = runs.sent || !component.is_nothing;
  }
  if (!component.handles_of.empty()) board_->Put(component.handles_of, request);
  return component.is_nothing;
}

bool EagerPortClient::CleansUp(uint64_t context_id, int64_t step_id) {
  bool sent = true;
  {
    std::lock_guard<std::mutex> lock(mu_);
    const auto context = contexts_.find(context_id);
    if (context == contexts_.end()) return true;
    const auto runs = context->second.steps.find(step_id);
    if (runs == context->second.steps.end()) return true;
    sent = runs->second.sent;
    if (--runs->second.begun > 0) return sent;
    context->second.steps.erase(runs);
  }
  board_->Drop(context_id, step_id, target_);
  return sent;
}

void EagerPortClient::RunComponentFunctionAsync(CallOptions* opts, const RunComponentFunctionRequest* request,
                                                RunComponentFunctionResponse* response, StatusCallback done) {
  if (RunsNothing(*request)) {
    done(OkStatus());
    return;
  }
  Start(
      request, response, std::move(done),
      [this, opts, response](const RunComponentFunctionRequest* sent, StatusCallback answered) {
        worker_->EagerRunComponentFunctionAsync(opts, sent, response, std::move(answered));
      },
      [this, opts, response](const RunComponentFunctionRequest* sent, StatusCallback answered) {
        stock_->RunComponentFunctionAsync(opts, sent, response, std::move(answered));
      });
}

void EagerPortClient::StreamingEnqueueAsync(bool streaming, CallOptions* opts, const EnqueueRequest* request,
                                            EnqueueResponse* response, StatusCallback done) {
  if (streaming && stock_->allow_multiple_pending_requests()) {
    if (EndsHere(*request, response)) {
      done(OkStatus());
      return;
    }
    const int64_t count = IsRelease(*request) ? 0 : 1;
    peer_->streamed.fetch_add(count, std::memory_order_acq_rel);
    stock_->StreamingEnqueueAsync(streaming, opts, request, response,
                                  Held([this, count, done = std::move(done)](const Status& status) {
                                    peer_->streamed.fetch_sub(count, std::memory_order_acq_rel);
                                    done(status);
                                  }));
    return;
  }
  // As TensorFlow's client: the caller may rely on the request having been executed.
  auto answer = std::make_shared<std::promise<Status>>();
  EnqueueAsync(opts, request, response, [answer](const Status& status) { answer->set_value(status); });
  done(answer->get_future().get());
}

bool EagerPortClient::allow_multiple_pending_requests() const { return stock_->allow_multiple_pending_requests(); }

EagerPortClientCache::EagerPortClientCache(std::unique_ptr<EagerClientCache> stock, Open open,
                                           std::shared_ptr<HandleBoard> board)
    : stock_(std::move(stock)), open_(std::move(open)), board_(std::move(board)) {}

EagerPortClientCache::~EagerPortClientCache() = default;

Status EagerPortClientCache::GetClient(const std::string& target, RefCountPtr<EagerClient>* client) {
  std::lock_guard<std::mutex> lock(mu_);
  auto found = clients_.find(target);
  if (found == clients_.end()) {
    RefCountPtr<EagerClient> made;
    Status status = stock_->GetClient(target, &made);
    if (!status.ok()) return status;
    std::unique_ptr<RemoteEager> worker = open_(target);
    if (worker != nullptr) {
      std::shared_ptr<EagerPeer>& peer = peers_[TaskOf(target)];
      if (peer == nullptr) peer = std::make_shared<EagerPeer>();
      made.reset(new EagerPortClient(std::move(made), std::move(worker), target, peer, board_));
    }
    found = clients_.emplace(target, std::move(made)).first;
  }
  found->second->Ref();
  client->reset(found->second.get());
  return OkStatus();
}

void HandleBoard::Put(const std::string& function, const tensorflow::eager::RunComponentFunctionRequest& request) {
  const auto& operation = request.operation();
  auto handles = std::make_shared<StepHandles>();
  handles->context_id = request.context_id();
  handles->names.reserve(operation.op_inputs_size());
  for (const auto& input : operation.op_inputs()) {
    StepHandles::Name name;
    const auto& handle = input.remote_handle();
    // TensorFlow takes a handle that is elsewhere for another one of this task, or fetches it: neither has this name.
    const bool is_there = input.has_remote_handle() &&
                          (handle.op_device() == operation.device() || handle.device() == operation.device());
    if (is_there) name = {handle.op_id(), handle.output_num()};
    handles->names.push_back(name);
  }
  std::map<uint64_t, Waiting> waiting;
  const Found found = std::move(handles);
  {
    std::lock_guard<std::mutex> lock(mu_);
    Entry& entry =
        entries_[{EagerSessionOf(request.context_id()), operation.func_step_id(), operation.device(), function}];
    entry.found = found;
    waiting.swap(entry.waiting);
  }
  for (auto& one : waiting) Answer(std::move(one.second), OkStatus(), found);
}

}  // namespace starwire
