// TensorFlow's worker. It also serves RecvTensor without gRPC, and calls the hooks of a feature.
#ifndef STARWIRE_CC_WORKER_WORKER_H_
#define STARWIRE_CC_WORKER_WORKER_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "cc/base/background_queue.h"
#include "cc/base/compat.h"
#include "cc/worker/hooks.h"
#include "tensorflow/core/distributed_runtime/rpc/grpc_worker_service.h"
#include "tensorflow/core/protobuf/worker.pb.h"

namespace starwire {

class StarwireWorker : public tensorflow::GrpcWorker {
 public:
  // `feature` may be null.
  StarwireWorker(tensorflow::WorkerEnv* env, const tensorflow::ConfigProto& config,
                 std::unique_ptr<const GraphFeature> feature);

  // Requests of a master in this process, see kNoRequestId in worker.cc.
  void RunGraphAsync(tensorflow::CallOptions* opts, tensorflow::RunGraphRequestWrapper* request,
                     tensorflow::MutableRunGraphResponseWrapper* response, tensorflow::StatusCallback done) override;
  // The answer over the data port.
  void ServeRunGraphAsync(tensorflow::CallOptions* opts, tensorflow::RunGraphRequest* request,
                          tensorflow::RunGraphResponse* response, tensorflow::StatusCallback done);

  // Notifies the observer first.
  void DeleteWorkerSessionAsync(tensorflow::CallOptions* opts, const tensorflow::DeleteWorkerSessionRequest* request,
                                tensorflow::DeleteWorkerSessionResponse* response,
                                tensorflow::StatusCallback done) override;
  void CleanupAllAsync(const tensorflow::CleanupAllRequest* request, tensorflow::CleanupAllResponse* response,
                       tensorflow::StatusCallback done) override;
  // Runs deferred work.
  void SetQueues(std::shared_ptr<ServerQueues> queues);
  void SetSessionObserver(std::weak_ptr<SessionObserver> observer);
  // Whether its variables outlive the process.
  bool KeepsState();

  void RegisterGraphAsync(const tensorflow::RegisterGraphRequest* request, tensorflow::RegisterGraphResponse* response,
                          tensorflow::StatusCallback done) override;
  void DeregisterGraphAsync(const tensorflow::DeregisterGraphRequest* request,
                            tensorflow::DeregisterGraphResponse* response, tensorflow::StatusCallback done) override;

  // The answer over the data port.
  void ServeGetStatusAsync(tensorflow::CallOptions* opts, const tensorflow::GetStatusRequest* request,
                           tensorflow::GetStatusResponse* response, tensorflow::StatusCallback done);

  // TensorFlow's own RecvTensor can only answer into gRPC's buffers.
  void RecvTensorProtoAsync(tensorflow::CallOptions* opts, const tensorflow::RecvTensorRequest* request,
                            tensorflow::RecvTensorResponse* response, tensorflow::StatusCallback done);

 private:
  std::shared_ptr<SessionObserver> Observer();
  // See SessionObserver. Null: the graph changes nothing.
  std::function<void()> ChangesOf(const std::string& graph_handle);
  // Takes off what RegisterGraphAsync has added. False: this process has not given the handle out.
  bool IsOwnHandle(std::string* graph_handle) const;
  std::shared_ptr<ServerQueues> queues();
  void AbortSoon(int64_t step_id);

  const std::unique_ptr<const GraphFeature> feature_;
  std::mutex mu_;
  std::weak_ptr<SessionObserver> observer_;
  std::shared_ptr<ServerQueues> queues_;
  struct Changes {
    std::string session;
    std::function<void()> changed;  // a graph has run, which changes something
  };
  std::unordered_map<std::string, Changes> changes_;  // by graph handle
  const std::string process_;
  std::atomic<uint64_t> registered_{0};
};

}  // namespace starwire

#endif  // STARWIRE_CC_WORKER_WORKER_H_
