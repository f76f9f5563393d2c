// A task that is reached over starwire: every method of WorkerInterface is one call on a channel.
#ifndef STARWIRE_CC_WORKER_REMOTE_WORKER_H_
#define STARWIRE_CC_WORKER_REMOTE_WORKER_H_

#include <functional>
#include <memory>
#include <string>

#include "cc/base/channel.h"
#include "cc/base/methods.h"
#include "cc/base/recovery.h"
#include "include/starwire.h"
#include "tensorflow/core/distributed_runtime/worker_cache_logger.h"
#include "tensorflow/core/distributed_runtime/worker_interface.h"

namespace starwire {

// The rendezvous finds its channel by casting the result of WorkerCacheInterface::GetOrCreateWorker() to this class. A
// call keeps its own reference to the channel: the worker may be released while calls are in progress.
class RemoteWorker : public tensorflow::WorkerInterface {
 public:
  // `logger` records transfers for timelines; it belongs to the worker cache, which outlives its workers.
  // `recovers`: from a restart of a task with a state.
  RemoteWorker(std::string target, std::shared_ptr<Channel> channel, tensorflow::WorkerCacheLogger* logger,
               bool recovers = RecoverMs() != 0);
  // For a channel that could not be opened: every call fails with `status`, which says why. (TensorFlow crashes on a
  // null worker for a task of the cluster.)
  RemoteWorker(std::string target, Status status, tensorflow::WorkerCacheLogger* logger);
  ~RemoteWorker() override;

  // If not OK, channel() is null.
  const Status& status() const { return status_; }
  sw_channel* channel() const { return channel_ == nullptr ? nullptr : channel_->handle(); }
  // For calls that may outlive the worker.
  const std::shared_ptr<Channel>& shared_channel() const { return channel_; }
  // "/job:ps/replica:0/task:0"
  const std::string& target() const { return target_; }
  tensorflow::WorkerCacheLogger* logger() const { return logger_; }

  // Without `override`: in 2.x TensorFlow has the first, in 1.15 the second, in DeepRec the second and third.
  void GetStatusAsync(tensorflow::CallOptions* opts, const tensorflow::GetStatusRequest* request,
                      tensorflow::GetStatusResponse* response, bool fail_fast, tensorflow::StatusCallback done);
  void GetStatusAsync(const tensorflow::GetStatusRequest* request, tensorflow::GetStatusResponse* response,
                      tensorflow::StatusCallback done);
  void GetStatusAsyncWithOptions(const tensorflow::GetStatusRequest* request, tensorflow::GetStatusResponse* response,
                                 tensorflow::StatusCallback done, tensorflow::CallOptions* opts);
  void CreateWorkerSessionAsync(const tensorflow::CreateWorkerSessionRequest* request,
                                tensorflow::CreateWorkerSessionResponse* response,
                                tensorflow::StatusCallback done) override;
  void DeleteWorkerSessionAsync(tensorflow::CallOptions* opts, const tensorflow::DeleteWorkerSessionRequest* request,
                                tensorflow::DeleteWorkerSessionResponse* response,
                                tensorflow::StatusCallback done) override;
  void RegisterGraphAsync(const tensorflow::RegisterGraphRequest* request, tensorflow::RegisterGraphResponse* response,
                          tensorflow::StatusCallback done) override;
  void DeregisterGraphAsync(const tensorflow::DeregisterGraphRequest* request,
                            tensorflow::DeregisterGraphResponse* response, tensorflow::StatusCallback done) override;
  void RunGraphAsync(tensorflow::CallOptions* opts, tensorflow::RunGraphRequestWrapper* request,
                     tensorflow::MutableRunGraphResponseWrapper* response, tensorflow::StatusCallback done) override;
  void RunGraphAsync(tensorflow::CallOptions* opts, const tensorflow::RunGraphRequest* request,
                     tensorflow::RunGraphResponse* response, tensorflow::StatusCallback done) override;
  tensorflow::MutableRunGraphRequestWrapper* CreateRunGraphRequest() override;
  tensorflow::MutableRunGraphResponseWrapper* CreateRunGraphResponse() override;
  void CleanupGraphAsync(const tensorflow::CleanupGraphRequest* request, tensorflow::CleanupGraphResponse* response,
                         tensorflow::StatusCallback done) override;
  void CleanupAllAsync(const tensorflow::CleanupAllRequest* request, tensorflow::CleanupAllResponse* response,
                       tensorflow::StatusCallback done) override;
  void RecvTensorAsync(tensorflow::CallOptions* opts, const tensorflow::RecvTensorRequest* request,
                       tensorflow::TensorResponse* response, tensorflow::StatusCallback done) override;
  void LoggingAsync(const tensorflow::LoggingRequest* request, tensorflow::LoggingResponse* response,
                    tensorflow::StatusCallback done) override;
  void TracingAsync(const tensorflow::TracingRequest* request, tensorflow::TracingResponse* response,
                    tensorflow::StatusCallback done) override;
  void RecvBufAsync(tensorflow::CallOptions* opts, const tensorflow::RecvBufRequest* request,
                    tensorflow::RecvBufResponse* response, tensorflow::StatusCallback done) override;
  void CompleteGroupAsync(tensorflow::CallOptions* opts, const tensorflow::CompleteGroupRequest* request,
                          tensorflow::CompleteGroupResponse* response, tensorflow::StatusCallback done) override;
  void CompleteInstanceAsync(tensorflow::CallOptions* opts, const tensorflow::CompleteInstanceRequest* request,
                             tensorflow::CompleteInstanceResponse* response, tensorflow::StatusCallback done) override;
  void GetStepSequenceAsync(const tensorflow::GetStepSequenceRequest* request,
                            tensorflow::GetStepSequenceResponse* response, tensorflow::StatusCallback done) override;

 protected:
  // Parses what a peer sent.
  using Parser = std::function<Status(sw_bytes reply)>;
  static Status NotExpected(sw_bytes reply);
  // `opts` may be null. The request is serialised at once.
  void Call(Method method, const tensorflow::protobuf::MessageLite& request, Parser parse,
            tensorflow::StatusCallback done, tensorflow::CallOptions* opts);

 private:
  class Graphs;

  const std::string target_;
  const std::shared_ptr<Channel> channel_;
  const Status status_;
  tensorflow::WorkerCacheLogger* const logger_;
  // Null unless servers come back.
  const std::shared_ptr<Graphs> graphs_;
};

}  // namespace starwire

#endif  // STARWIRE_CC_WORKER_REMOTE_WORKER_H_
