#include "cc/worker/worker.h"

#include <chrono>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <utility>

#include "cc/base/compat_server.h"
#include "cc/base/compat_tensor.h"
#include "cc/tensor/elements.h"
#include "cc/worker/session_recovery.h"
#include "tensorflow/core/common_runtime/device.h"
#include "tensorflow/core/distributed_runtime/message_wrappers.h"
#include "tensorflow/core/distributed_runtime/rendezvous_mgr_interface.h"
#include "tensorflow/core/distributed_runtime/worker_env.h"
#include "tensorflow/core/framework/rendezvous.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/platform/env.h"

namespace starwire {

using tensorflow::GrpcWorker;
using tensorflow::Rendezvous;
using tensorflow::StatusCallback;
using tensorflow::Tensor;

namespace {

// TensorFlow's worker remembers the ids of the last 100,000 RunGraph requests and refuses one that it has seen, because
// gRPC may deliver a request twice. An id is the first random number of a new thread, whose generator is seeded with 32
// bits (TensorFlow 2.21): among so many ids two are soon equal, and about one step in 10^5 fails for no reason. Neither
// the data port nor a call within a process delivers anything twice, so ids need not be remembered. 0 turns this off.
constexpr int64_t kNoRequestId = 0;

Status FillResponse(const Tensor& tensor, bool is_dead, tensorflow::RecvTensorResponse* response) {
  response->set_is_dead(is_dead);
  response->set_send_start_micros(static_cast<int64_t>(tensorflow::Env::Default()->NowMicros()));
  const bool encoded = Succeeds([&] { return tensor.AsProtoTensorContent(response->mutable_tensor()); });
  return encoded ? OkStatus() : NotEncodable(tensor);
}

// Ends a graph's number in its handle. No other process has the same.
std::string NameOfProcess() {
  std::random_device random;
  return "@" + std::to_string((static_cast<uint64_t>(random()) << 32) | random()) + ".";
}

struct RenamedRequest {
  RenamedRequest(const tensorflow::RunGraphRequest& request, const std::string& handle)
      : proto(request), wrapper(&proto) {
    proto.set_graph_handle(handle);
  }
  tensorflow::RunGraphRequest proto;
  tensorflow::ProtoRunGraphRequest wrapper;
};

}  // namespace

StarwireWorker::StarwireWorker(tensorflow::WorkerEnv* env, const tensorflow::ConfigProto& config,
                               std::unique_ptr<const GraphFeature> feature)
    : GrpcWorker(env, config), feature_(std::move(feature)), process_(NameOfProcess()) {}

void StarwireWorker::RunGraphAsync(tensorflow::CallOptions* opts, tensorflow::RunGraphRequestWrapper* request,
                                   tensorflow::MutableRunGraphResponseWrapper* response, StatusCallback done) {
  // Requests that came over gRPC are not mutable, and keep their id.
  auto* in_process = dynamic_cast<tensorflow::MutableRunGraphRequestWrapper*>(request);
  if (in_process != nullptr) in_process->set_request_id(kNoRequestId);
  if (feature_ != nullptr && request->exec_opts().record_partition_graphs()) {
    done = [this, response, done = std::move(done)](const Status& status) {
      feature_->ShowGraphs(response);
      done(status);
    };
  }
  const std::shared_ptr<SessionObserver> observer = Observer();
  if (observer == nullptr || !observer->KeepsState()) {
    GrpcWorker::RunGraphAsync(opts, request, response, std::move(done));
    return;
  }
  std::string handle = request->graph_handle();
  if (std::function<void()> changed = ChangesOf(handle)) {
    done = [observer, changed = std::move(changed), done = std::move(done)](const Status& status) {
      changed();
      observer->WhenWritten([status, done](const Status& written) { done(status.ok() ? written : status); });
    };
  }
  if (!IsOwnHandle(&handle)) return done(MakeStatus(kAborted, "Graph handle is not found: " + handle));
  if (in_process != nullptr) {
    in_process->set_graph_handle(handle);
    GrpcWorker::RunGraphAsync(opts, in_process, response, std::move(done));
    return;
  }
  auto renamed = std::make_shared<RenamedRequest>(request->ToProto(), handle);
  GrpcWorker::RunGraphAsync(opts, &renamed->wrapper, response,
                            [renamed, done = std::move(done)](const Status& status) { done(status); });
}

std::function<void()> StarwireWorker::ChangesOf(const std::string& graph_handle) {
  std::lock_guard<std::mutex> lock(mu_);
  const auto found = changes_.find(graph_handle);
  return found == changes_.end() ? nullptr : found->second.changed;
}

bool StarwireWorker::IsOwnHandle(std::string* graph_handle) const {
  const size_t end = graph_handle->find(process_);
  if (end == std::string::npos) return false;
  graph_handle->resize(end);
  return true;
}

void StarwireWorker::RegisterGraphAsync(const tensorflow::RegisterGraphRequest* request,
                                        tensorflow::RegisterGraphResponse* response, StatusCallback done) {
  const Status checked = feature_ == nullptr ? OkStatus() : feature_->Check(*request);
  if (!checked.ok()) {
    done(checked);
    return;
  }
  const std::shared_ptr<SessionObserver> observer = Observer();
  if (observer != nullptr && observer->KeepsState()) {
    std::function<void()> changes = observer->ChangesOf(request->session_handle(), request->graph_def());
    // Each session numbers its graphs from one, and so does a session that is created again in the next process.
    done = [this, response, session = request->session_handle(), changes = std::move(changes),
            done = std::move(done)](const Status& status) {
      if (status.ok()) {
        response->mutable_graph_handle()->append(process_ + std::to_string(registered_.fetch_add(1)));
        std::lock_guard<std::mutex> lock(mu_);
        if (changes != nullptr) changes_[response->graph_handle()] = {session, changes};
      }
      done(status);
    };
  }
  GrpcWorker::RegisterGraphAsync(request, response, std::move(done));
}

void StarwireWorker::DeregisterGraphAsync(const tensorflow::DeregisterGraphRequest* request,
                                          tensorflow::DeregisterGraphResponse* response, StatusCallback done) {
  {
    std::lock_guard<std::mutex> lock(mu_);
    changes_.erase(request->graph_handle());
  }
  auto renamed = std::make_shared<tensorflow::DeregisterGraphRequest>(*request);
  IsOwnHandle(renamed->mutable_graph_handle());
  GrpcWorker::DeregisterGraphAsync(renamed.get(), response,
                                   [renamed, done = std::move(done)](const Status& status) { done(status); });
}

void StarwireWorker::ServeRunGraphAsync(tensorflow::CallOptions* opts, tensorflow::RunGraphRequest* request,
                                        tensorflow::RunGraphResponse* response, StatusCallback done) {
  request->set_request_id(kNoRequestId);
  if (request->store_errors_in_response_body()) {
    request->set_store_errors_in_response_body(false);
    done = [response, done = std::move(done)](const Status& status) {
      // In the body a derived error would lose its mark: the master would take it for a cause.
      if (status.ok() || tensorflow::StatusGroup::IsDerived(status)) return done(status);
      // The master's process may register the graph again, and does not look into the body.
      if (IsSessionForgotten(status) || IsGraphForgotten(status)) return done(status);
      tensorflow::NonOwnedProtoRunGraphResponse(response).set_status(status);
      done(OkStatus());
    };
  }
  WorkerInterface::RunGraphAsync(opts, request, response, std::move(done));
}

void StarwireWorker::SetSessionObserver(std::weak_ptr<SessionObserver> observer) {
  std::lock_guard<std::mutex> lock(mu_);
  observer_ = std::move(observer);
}

bool StarwireWorker::KeepsState() {
  const std::shared_ptr<SessionObserver> observer = Observer();
  return observer != nullptr && observer->KeepsState();
}

std::shared_ptr<SessionObserver> StarwireWorker::Observer() {
  std::lock_guard<std::mutex> lock(mu_);
  return observer_.lock();
}

void StarwireWorker::DeleteWorkerSessionAsync(tensorflow::CallOptions* opts,
                                              const tensorflow::DeleteWorkerSessionRequest* request,
                                              tensorflow::DeleteWorkerSessionResponse* response, StatusCallback done) {
  if (const auto observer = Observer()) observer->SessionClosed(request->session_handle());
  {
    // Its graphs go with it; no master deregisters them.
    std::lock_guard<std::mutex> lock(mu_);
    for (auto graph = changes_.begin(); graph != changes_.end();) {
      graph = graph->second.session == request->session_handle() ? changes_.erase(graph) : std::next(graph);
    }
  }
  GrpcWorker::DeleteWorkerSessionAsync(opts, request, response, std::move(done));
}

void StarwireWorker::CleanupAllAsync(const tensorflow::CleanupAllRequest* request,
                                     tensorflow::CleanupAllResponse* response, StatusCallback done) {
  if (const auto observer = Observer()) {
    observer->CleansUp({request->container().begin(), request->container().end()});
    done = [observer, done = std::move(done)](const Status& status) {
      observer->AllChanged();
      done(status);
    };
  }
  GrpcWorker::CleanupAllAsync(request, response, std::move(done));
}

void StarwireWorker::ServeGetStatusAsync(tensorflow::CallOptions* opts, const tensorflow::GetStatusRequest* request,
                                         tensorflow::GetStatusResponse* response, StatusCallback done) {
  AnswerStatus(this, opts, request, response, done);
}

// As TensorFlow's Worker::AbortStep, without a thread for each: the original error gets a second to arrive.
void StarwireWorker::AbortSoon(int64_t step_id) {
  constexpr auto kDelay = std::chrono::seconds(1);
  tensorflow::RemoteRendezvous* rendezvous = TakeReference(env_->rendezvous_mgr->Find(step_id));
  auto end = [rendezvous, step_id] {
    rendezvous->StartAbort(MakeStatus(kAborted, "Step " + std::to_string(step_id)));
    rendezvous->Unref();
  };
  if (const auto runner = queues()) {
    runner->urgent.RunAfter(kDelay, std::move(end));
  } else {
    end();
  }
}

std::shared_ptr<ServerQueues> StarwireWorker::queues() {
  std::lock_guard<std::mutex> lock(mu_);
  return queues_;
}

void StarwireWorker::SetQueues(std::shared_ptr<ServerQueues> queues) {
  std::lock_guard<std::mutex> lock(mu_);
  queues_ = std::move(queues);
}

void StarwireWorker::RecvTensorProtoAsync(tensorflow::CallOptions* opts, const tensorflow::RecvTensorRequest* request,
                                          tensorflow::RecvTensorResponse* response, StatusCallback done) {
  Rendezvous::ParsedKey key;
  tensorflow::Device* source = nullptr;
  Status status = Rendezvous::ParseKey(request->rendezvous_key(), &key);
  if (status.ok()) status = PrepareRecvTensor(key, &source);
  if (!status.ok()) {
    done(status);
    return;
  }
  const int64_t step_id = request->step_id();
  opts->SetCancelCallback([this, step_id] { AbortSoon(step_id); });
  env_->rendezvous_mgr->RecvLocalAsync(
      step_id, key,
      [opts, response, source, done = std::move(done)](const Status& received, const Rendezvous::Args& send_args,
                                                       const Rendezvous::Args&, const Tensor& tensor, bool is_dead) {
        opts->ClearCancelCallback();
        if (!received.ok()) {
          done(received);
          return;
        }
        const bool on_host = send_args.alloc_attrs.on_host() || source->device_type() == tensorflow::DEVICE_CPU;
        if (on_host || is_dead || send_args.device_context == nullptr) {
          done(FillResponse(tensor, is_dead, response));
          return;
        }
        tensorflow::AllocatorAttributes host;
        host.set_on_host(true);
        host.set_gpu_compatible(true);
        auto copy = std::make_shared<Tensor>(source->GetAllocator(host), tensor.dtype(), tensor.shape());
        auto original = std::make_shared<Tensor>(tensor);  // the source must outlive the copy
        auto* context = send_args.device_context;
        context->Ref();
        context->CopyDeviceTensorToCPU(original.get(), "RecvTensor", source, copy.get(),
                                       [copy, original, context, response, done](const Status& copied) {
                                         context->Unref();
                                         done(copied.ok() ? FillResponse(*copy, /*is_dead=*/false, response) : copied);
                                       });
      });
}

}  // namespace starwire
