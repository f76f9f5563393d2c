// A task that is reached over starwire, with the methods of its EagerService (TensorFlow 2).
#ifndef STARWIRE_CC_WORKER_REMOTE_EAGER_H_
#define STARWIRE_CC_WORKER_REMOTE_EAGER_H_

#include "cc/worker/remote_worker.h"
#include "tensorflow/core/protobuf/eager_service.pb.h"

namespace starwire {

class RemoteEager : public RemoteWorker {
 public:
  using RemoteWorker::RemoteWorker;

  // Errors name the task as TensorFlow's own client does.
  virtual void EagerEnqueueAsync(tensorflow::CallOptions* opts, const tensorflow::eager::EnqueueRequest* request,
                                 tensorflow::eager::EnqueueResponse* response, tensorflow::StatusCallback done);
  virtual void EagerRunComponentFunctionAsync(tensorflow::CallOptions* opts,
                                              const tensorflow::eager::RunComponentFunctionRequest* request,
                                              tensorflow::eager::RunComponentFunctionResponse* response,
                                              tensorflow::StatusCallback done);

 private:
  template <typename Request, typename Response>
  void CallEager(Method method, tensorflow::CallOptions* opts, const Request& request, Response* response,
                 tensorflow::StatusCallback done);
};

}  // namespace starwire

#endif  // STARWIRE_CC_WORKER_REMOTE_EAGER_H_
