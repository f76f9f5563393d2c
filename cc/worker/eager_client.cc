#include "cc/worker/eager_client.h"

#include <future>
#include <utility>

#include "cc/base/methods.h"
#include "tensorflow/core/distributed_runtime/call_options.h"
#include "tensorflow/core/protobuf/eager_service.pb.h"
#include "tensorflow/core/protobuf/worker.pb.h"

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

EagerPortClient::EagerPortClient(RefCountPtr<EagerClient> stock, std::unique_ptr<RemoteWorker> worker)
    : stock_(std::move(stock)), worker_(std::move(worker)) {}

EagerPortClient::~EagerPortClient() = default;

void EagerPortClient::CreateContextAsync(const tensorflow::eager::CreateContextRequest* request,
                                         tensorflow::eager::CreateContextResponse* response, StatusCallback done) {
  stock_->CreateContextAsync(request, response, std::move(done));
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
  const Offer offer = offer_.load(std::memory_order_acquire);
  if (offer == Offer::kNo || streamed_.load(std::memory_order_acquire) > 0) {
    over_grpc(request, std::move(done));
    return;
  }
  // The caller may free the request once it has been sent, but it may have to be sent again.
  std::shared_ptr<const Request> copy;
  if (offer == Offer::kUnknown) copy = std::make_shared<Request>(*request);
  over_port(request, Held([this, copy, over_grpc, done = std::move(done)](const Status& status) {
              if (IsMissing(status)) {
                offer_.store(Offer::kNo, std::memory_order_release);
                if (copy != nullptr) {
                  // The peer did nothing. Whoever it is now, gRPC reaches it.
                  over_grpc(copy.get(), [copy, done](const Status& second) { done(second); });
                  return;
                }
              } else if (status.ok()) {
                Offer unknown = Offer::kUnknown;
                offer_.compare_exchange_strong(unknown, Offer::kYes, std::memory_order_acq_rel);
              }
              done(status);
            }));
}

void EagerPortClient::EnqueueAsync(CallOptions* opts, const EnqueueRequest* request, EnqueueResponse* response,
                                   StatusCallback done) {
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

void EagerPortClient::RunComponentFunctionAsync(CallOptions* opts, const RunComponentFunctionRequest* request,
                                                RunComponentFunctionResponse* response, StatusCallback done) {
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
    streamed_.fetch_add(1, std::memory_order_acq_rel);
    stock_->StreamingEnqueueAsync(streaming, opts, request, response,
                                  Held([this, done = std::move(done)](const Status& status) {
                                    streamed_.fetch_sub(1, std::memory_order_acq_rel);
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

EagerPortClientCache::EagerPortClientCache(std::unique_ptr<EagerClientCache> stock, Open open)
    : stock_(std::move(stock)), open_(std::move(open)) {}

EagerPortClientCache::~EagerPortClientCache() = default;

Status EagerPortClientCache::GetClient(const std::string& target, RefCountPtr<EagerClient>* client) {
  std::lock_guard<std::mutex> lock(mu_);
  auto found = clients_.find(target);
  if (found == clients_.end()) {
    RefCountPtr<EagerClient> made;
    Status status = stock_->GetClient(target, &made);
    if (!status.ok()) return status;
    std::unique_ptr<RemoteWorker> worker = open_(target);
    if (worker != nullptr) made.reset(new EagerPortClient(std::move(made), std::move(worker)));
    found = clients_.emplace(target, std::move(made)).first;
  }
  found->second->Ref();
  client->reset(found->second.get());
  return OkStatus();
}

}  // namespace starwire
