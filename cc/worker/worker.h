// How tasks find each other's data port without any file: the answer to TensorFlow's own gRPC GetStatus carries it.
#ifndef STARWIRE_CC_WORKER_WORKER_H_
#define STARWIRE_CC_WORKER_WORKER_H_

#include <atomic>
#include <memory>
#include <mutex>
#include <string>

#include "cc/base/compat.h"
#include "cc/base/errands.h"
#include "cc/worker/hooks.h"
#include "tensorflow/core/distributed_runtime/rpc/grpc_worker_service.h"
#include "tensorflow/core/protobuf/worker.pb.h"

namespace starwire {

// Adds `starwire{advertisement}` to the description of the first CPU device in the reply, where it disturbs nobody:
// peers that run another protocol ignore it, and our own masters ask over the data port, whose replies stay as they
// are.
void AddAdvertisement(const std::string& advertisement, tensorflow::GetStatusResponse* response);
// The advertisement in a reply; empty if there is none.
std::string FindAdvertisement(const tensorflow::GetStatusResponse& response);

// TensorFlow's worker, which advertises, and which can serve RecvTensor without gRPC.
class StarwireWorker : public tensorflow::GrpcWorker {
 public:
  StarwireWorker(tensorflow::WorkerEnv* env, const tensorflow::ConfigProto& config);

  // Empty: advertise nothing (no data port yet, or none any more).
  void SetAdvertisement(const std::string& advertisement);

  void GetStatusAsync(tensorflow::CallOptions* opts, const tensorflow::GetStatusRequest* request,
                      tensorflow::GetStatusResponse* response, bool fail_fast,
                      tensorflow::StatusCallback done) override;

  // Requests of a master in this process, see kNoRequestId in advertise.cc.
  void RunGraphAsync(tensorflow::CallOptions* opts, tensorflow::RunGraphRequestWrapper* request,
                     tensorflow::MutableRunGraphResponseWrapper* response, tensorflow::StatusCallback done) override;
  // What the data port answers.
  void ServeRunGraphAsync(tensorflow::CallOptions* opts, tensorflow::RunGraphRequest* request,
                          tensorflow::RunGraphResponse* response, tensorflow::StatusCallback done);

  // Tell the observer first.
  void DeleteWorkerSessionAsync(tensorflow::CallOptions* opts, const tensorflow::DeleteWorkerSessionRequest* request,
                                tensorflow::DeleteWorkerSessionResponse* response,
                                tensorflow::StatusCallback done) override;
  void CleanupAllAsync(const tensorflow::CleanupAllRequest* request, tensorflow::CleanupAllResponse* response,
                       tensorflow::StatusCallback done) override;
  // What it does later is done by these.
  void SetErrands(std::shared_ptr<ServerErrands> errands);
  void SetSessionObserver(std::weak_ptr<SessionObserver> observer);

  // Whether partitions of graphs that are registered from now on run on the lock-free executor, if they can.
  void RunPartitions(bool on) { runs_partitions_.store(on); }
  void RegisterGraphAsync(const tensorflow::RegisterGraphRequest* request, tensorflow::RegisterGraphResponse* response,
                          tensorflow::StatusCallback done) override;

  // What the data port answers: the same without the advertisement.
  void PlainGetStatusAsync(tensorflow::CallOptions* opts, const tensorflow::GetStatusRequest* request,
                           tensorflow::GetStatusResponse* response, tensorflow::StatusCallback done);

  // TensorFlow's own RecvTensor answers into gRPC's buffers only.
  void RecvTensorProtoAsync(tensorflow::CallOptions* opts, const tensorflow::RecvTensorRequest* request,
                            tensorflow::RecvTensorResponse* response, tensorflow::StatusCallback done);

 private:
  std::shared_ptr<SessionObserver> Observer();
  std::shared_ptr<ServerErrands> errands();
  void AbortSoon(int64_t step_id);

  std::atomic<bool> runs_partitions_{false};
  std::mutex mu_;
  std::weak_ptr<SessionObserver> observer_;
  std::shared_ptr<ServerErrands> errands_;
  std::string advertisement_;
};

}  // namespace starwire

#endif  // STARWIRE_CC_WORKER_WORKER_H_
