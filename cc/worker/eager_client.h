// Clients of other tasks' EagerService (TensorFlow 2). What a step waits for goes over the data port: unary Enqueue and
// RunComponentFunction. Contexts, keep-alive and streams stay with TensorFlow's own client.
#ifndef STARWIRE_CC_WORKER_EAGER_CLIENT_H_
#define STARWIRE_CC_WORKER_EAGER_CLIENT_H_

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "cc/base/compat_server.h"
#include "cc/worker/remote_eager.h"
#include "cc/worker/step_handles.h"
#include "tensorflow/core/distributed_runtime/eager/eager_client.h"

namespace starwire {

// The order of requests is that of TensorFlow's client. It sends unary requests concurrently, but an unary request does
// not overtake a streamed one that is on its way, because both use one connection. Here they would use two. An unary
// request therefore follows the streamed ones over TensorFlow's client while any of them is unanswered.
//
// A peer that does not have the methods (an older starwire) is reached through TensorFlow's client alone.
struct EagerPeer {
  // Whether the peer has the methods.
  enum class Offer { kUnknown, kYes, kNo };
  std::atomic<Offer> offer{Offer::kUnknown};
  std::atomic<int64_t> streamed{0};  // requests on the stream that are not answered yet
};

// TensorFlow has a client for a task and one for each of its devices, which share what is known of the peer.
//
// A component function without nodes and outputs does nothing. star_server leaves such functions: star calls do their
// work. The peer is told neither of them nor of the steps that run nothing else there.
class EagerPortClient : public tensorflow::eager::EagerClient {
 public:
  // `board` is told which handles the steps of component functions have.
  EagerPortClient(tensorflow::core::RefCountPtr<tensorflow::eager::EagerClient> stock,
                  std::unique_ptr<RemoteEager> worker, std::string target, std::shared_ptr<EagerPeer> peer,
                  std::shared_ptr<HandleBoard> board);
  ~EagerPortClient() override;

  void CreateContextAsync(const tensorflow::eager::CreateContextRequest* request,
                          tensorflow::eager::CreateContextResponse* response, tensorflow::StatusCallback done) override;
  // Without `override`: each version has one of the two at most.
  virtual void CreateContextAsync(const tensorflow::eager::CreateContextRequest* request,
                                  tensorflow::eager::CreateContextResponse* response, tensorflow::StatusCallback done,
                                  int64_t timeout_ms);
  virtual void CreateContextAsync(const tensorflow::eager::CreateContextRequest* request,
                                  tensorflow::eager::CreateContextResponse* response, tensorflow::StatusCallback done,
                                  int64_t timeout_ms, int retries);
  void UpdateContextAsync(const tensorflow::eager::UpdateContextRequest* request,
                          tensorflow::eager::UpdateContextResponse* response, tensorflow::StatusCallback done) override;
  void WaitQueueDoneAsync(const tensorflow::eager::WaitQueueDoneRequest* request,
                          tensorflow::eager::WaitQueueDoneResponse* response, tensorflow::StatusCallback done) override;
  void KeepAliveAsync(const tensorflow::eager::KeepAliveRequest* request,
                      tensorflow::eager::KeepAliveResponse* response, tensorflow::StatusCallback done) override;
  void CloseContextAsync(const tensorflow::eager::CloseContextRequest* request,
                         tensorflow::eager::CloseContextResponse* response, tensorflow::StatusCallback done) override;
  void EnqueueAsync(tensorflow::CallOptions* opts, const tensorflow::eager::EnqueueRequest* request,
                    tensorflow::eager::EnqueueResponse* response, tensorflow::StatusCallback done) override;
  void RunComponentFunctionAsync(tensorflow::CallOptions* opts,
                                 const tensorflow::eager::RunComponentFunctionRequest* request,
                                 tensorflow::eager::RunComponentFunctionResponse* response,
                                 tensorflow::StatusCallback done) override;
  void StreamingEnqueueAsync(bool streaming, tensorflow::CallOptions* opts,
                             const tensorflow::eager::EnqueueRequest* request,
                             tensorflow::eager::EnqueueResponse* response, tensorflow::StatusCallback done) override;
  bool allow_multiple_pending_requests() const override;

 private:
  using Offer = EagerPeer::Offer;

  template <typename Request, typename Response, typename OverPort, typename OverGrpc>
  void Start(const Request* request, Response* response, tensorflow::StatusCallback done, OverPort over_port,
             OverGrpc over_grpc);
  // A component function.
  struct Component {
    bool is_nothing = false;
    std::string handles_of;  // kHandlesOfAttr; empty: nobody wants to know its handles
  };
  // What a step runs on the target. A function and those that it calls share one.
  struct StepRuns {
    int64_t begun = 0;  // and not cleaned up
    bool sent = false;
  };
  struct Context {
    std::unordered_map<std::string, Component> components;  // those that are special, by name
    std::unordered_map<int64_t, StepRuns> steps;
  };

  // Notes what the request registers or cleans up. Whether the peer need not be told.
  bool EndsHere(const tensorflow::eager::EnqueueRequest& request, tensorflow::eager::EnqueueResponse* response);
  // Whether the request only registers a component function that does nothing.
  bool RegistersNothing(const tensorflow::eager::EnqueueRequest& request);
  // Notes what a request is about to run. Whether there is nothing to run.
  bool RunsNothing(const tensorflow::eager::RunComponentFunctionRequest& request);
  // Whether the peer has to be told.
  bool CleansUp(uint64_t context_id, int64_t step_id);
  // Keeps this client until `done` has run.
  tensorflow::StatusCallback Held(tensorflow::StatusCallback done);

  const tensorflow::core::RefCountPtr<tensorflow::eager::EagerClient> stock_;
  const std::unique_ptr<RemoteEager> worker_;
  const std::string target_;  // a task or one of its devices
  const std::shared_ptr<EagerPeer> peer_;
  const std::shared_ptr<HandleBoard> board_;
  std::mutex mu_;
  std::unordered_map<uint64_t, Context> contexts_;  // guarded by mu_
};

// Hands out one client for each task and each of its devices.
class EagerPortClientCache : public tensorflow::eager::EagerClientCache {
 public:
  // Null for a task that TensorFlow's client serves alone.
  using Open = std::function<std::unique_ptr<RemoteEager>(const std::string& target)>;
  EagerPortClientCache(std::unique_ptr<tensorflow::eager::EagerClientCache> stock, Open open,
                       std::shared_ptr<HandleBoard> board);
  ~EagerPortClientCache() override;

  Status GetClient(const std::string& target,
                   tensorflow::core::RefCountPtr<tensorflow::eager::EagerClient>* client) override;

 private:
  const std::unique_ptr<tensorflow::eager::EagerClientCache> stock_;
  const Open open_;
  const std::shared_ptr<HandleBoard> board_;
  std::mutex mu_;
  // Guarded by mu_.
  std::unordered_map<std::string, tensorflow::core::RefCountPtr<tensorflow::eager::EagerClient>> clients_;
  std::unordered_map<std::string, std::shared_ptr<EagerPeer>> peers_;  // by task
};

}  // namespace starwire

#endif  // STARWIRE_CC_WORKER_EAGER_CLIENT_H_
