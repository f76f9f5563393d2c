#include "cc/worker/resolver.h"

#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "cc/base/guard.h"
#include "cc/base/status_codec.h"
#include "cc/worker/advertisement.h"
#include "tensorflow/core/distributed_runtime/call_options.h"
#include "tensorflow/core/platform/env.h"
#include "tensorflow/core/platform/logging.h"
#include "tensorflow/core/protobuf/worker.pb.h"

namespace starwire {

struct Resolver::Query {
  std::shared_ptr<sw_engine> engine;
  uint64_t token = 0;
  std::string task;
  std::string address;
  std::shared_ptr<tensorflow::WorkerCacheInterface> stock;
  tensorflow::WorkerInterface* worker = nullptr;
  tensorflow::CallOptions opts;
  tensorflow::GetStatusRequest request;
  tensorflow::GetStatusResponse response;

  std::string Who() const { return "task " + task + (address.empty() ? "" : " at " + address); }

  void Answer(const Status& status, const std::string& advertisement) {
    const std::string text = status.ok() ? advertisement : StatusMessage(status);
    sw_engine_resolved(engine.get(), token, StatusNumber(status), AsBytes(text));
  }
};

Resolver::Resolver(std::string protocol) : protocol_(std::move(protocol)) {}

Resolver::~Resolver() = default;

void Resolver::Register(const std::string& task, const std::string& address,
                        std::shared_ptr<tensorflow::WorkerCacheInterface> stock) {
  std::lock_guard<std::mutex> lock(mu_);
  // A replaced cache is destroyed here unless its session still holds it.
  if (!shut_down_) caches_[{task, address}].swap(stock);
}

void Resolver::Resolve(std::shared_ptr<sw_engine> engine, const std::string& task, const std::string& address,
                       uint64_t token) {
  auto query = std::make_shared<Query>();
  query->engine = std::move(engine);
  query->token = token;
  query->task = task;
  query->address = address;
  Status refused;
  {
    std::lock_guard<std::mutex> lock(mu_);
    auto found = caches_.find({task, address});
    if (shut_down_) {
      refused = MakeStatus(kUnavailable, "the server is stopping");
    } else if (found == caches_.end()) {
      refused = MakeStatus(kInternal, query->Who() + " is not in any cluster of this server");
    } else {
      query->stock = found->second;
      queries_.insert(query);
    }
  }
  if (!refused.ok()) {
    query->Answer(refused, "");
    return;
  }
  // gRPC may do DNS look-ups and take locks before the call is in progress: not on the calling thread, which is a
  // reactor.
  Guard(
      "asking a task for its data port",
      [&] { tensorflow::Env::Default()->SchedClosure([self = shared_from_this(), query] { self->Ask(query); }); },
      [&](const Status& thrown) { Answered(query, thrown); });
}

void Resolver::Ask(std::shared_ptr<Query> query) {
  query->worker = query->stock->GetOrCreateWorker(query->task);
  if (query->worker == nullptr) {
    Answered(query, MakeStatus(kInternal, query->Who() + " has no gRPC channel"));
    return;
  }
  query->opts.SetTimeout(kTimeoutMs);
  query->worker->GetStatusAsync(
      &query->opts, &query->request, &query->response, /*fail_fast=*/true,
      [self = shared_from_this(), query](const Status& status) { self->Answered(query, status); });
}

void Resolver::Answered(const std::shared_ptr<Query>& query, const Status& status) {
  if (query->worker != nullptr) query->stock->ReleaseWorker(query->task, query->worker);
  const std::string advertisement = status.ok() ? FindAdvertisement(query->response) : "";
  if (!status.ok()) {
    constexpr int kDeadlineExceeded = 4, kUnavailable = 14;
    const int code = StatusNumber(status) == kDeadlineExceeded ? kUnavailable : StatusNumber(status);
    query->Answer(
        MakeStatus(code, query->Who() + " does not answer GetStatus on its gRPC port: " + StatusMessage(status)), "");
  } else if (advertisement.empty()) {
    query->Answer(
        MakeStatus(kFailedPrecondition,
                   query->Who() + " does not offer protocol " + protocol_ +
                       " (it answered TensorFlow's gRPC without a starwire data port): start it with protocol=\"" +
                       protocol_ + "\""),
        "");
  } else {
    query->Answer(OkStatus(), advertisement);
  }
  query->stock.reset();
  std::lock_guard<std::mutex> lock(mu_);
  queries_.erase(query);
  idle_.notify_all();
}

void Resolver::Shutdown() {
  std::vector<std::shared_ptr<Query>> under_way;
  std::map<std::pair<std::string, std::string>, std::shared_ptr<tensorflow::WorkerCacheInterface>> caches;
  {
    std::lock_guard<std::mutex> lock(mu_);
    shut_down_ = true;
    under_way.assign(queries_.begin(), queries_.end());
    caches.swap(caches_);
  }
  for (const auto& query : under_way) query->opts.StartCancel();
  std::unique_lock<std::mutex> lock(mu_);
  // gRPC ends a call at its deadline; the rest allows for scheduling.
  const auto bound = std::chrono::milliseconds(kTimeoutMs + 5000);
  if (!idle_.wait_for(lock, bound, [this] { return queries_.empty(); })) {
    LOG(ERROR) << "starwire: " << std::to_string(queries_.size()) << " GetStatus calls outlived their deadline";
  }
}

}  // namespace starwire
