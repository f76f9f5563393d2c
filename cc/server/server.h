// A TensorFlow server whose tasks talk over starwire.
#ifndef STARWIRE_CC_SERVER_SERVER_H_
#define STARWIRE_CC_SERVER_SERVER_H_

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "cc/base/compat.h"
#include "cc/base/compat_server.h"
#include "cc/server/engine.h"
#include "cc/star/handles.h"
#include "cc/worker/worker.h"
#include "tensorflow/core/common_runtime/device_mgr.h"
#include "tensorflow/core/distributed_runtime/rpc/grpc_server_lib.h"

namespace starwire {

class HandleBoard;
class WorkerCaches;

// Registers our protocols and operations with TensorFlow. Idempotent.
Status RegisterServers();

// Members that must outlive TensorFlow's part of the server.
struct OwnDevices {
  std::unique_ptr<tensorflow::DeviceMgr> own_devices;  // null: TensorFlow's
};

// TensorFlow's gRPC server keeps serving masters, eager execution and coordination; worker methods and tensors go over
// our data port.
class StarwireServer : private OwnDevices, public tensorflow::GrpcServer {
 public:
  static Status Create(const std::string& protocol, const tensorflow::ServerDef& def, const FactoryOptions& options,
                       std::unique_ptr<tensorflow::ServerInterface>* out);
  ~StarwireServer() override;

  // TensorFlow's contract for a started server: returns Unimplemented and keeps serving. Python calls this when the
  // last reference to a Server is dropped, and programs that keep none (such as TensorFlow's own tutorial for parameter
  // servers) rely on the server to live on. A server that was abandoned this way is shut down when another one needs
  // its port. A second call is never accidental: it is a ShutDown() (starwire.stop() in Python).
  Status Stop() override;
  // Without `override`: 1.15 does not have them.
  Status AddMasterEagerContextToEagerService(ContextId context_id, tensorflow::EagerContext* context);
  Status UpdateServerDef(const tensorflow::ServerDef& def);
  Status StopCoordinationService();

  // Ends the server: first the data port, then TensorFlow's port, and every thread of both. Idempotent.
  Status ShutDown();

  // Starts to shut down each abandoned server of this process that holds the port.
  static void MakeRoom(int grpc_port);

 protected:
  std::unique_ptr<tensorflow::Master> CreateMaster(tensorflow::MasterEnv* master_env) override;
#if STARWIRE_EAGER_PORT
  std::function<tensorflow::SharedGrpcChannelPtr(std::string)> GetChannelCreationFunction() const override;
#endif
  Status WorkerCacheFactory(const tensorflow::WorkerCacheFactoryOptions& options,
                            tensorflow::WorkerCacheInterface** worker_cache) override;

 private:
  StarwireServer(std::string protocol, const tensorflow::ServerDef& def);
  Status Init(tensorflow::GrpcServerOptions options);
  void MarkSessions();
  // Null if there is no such task.
  std::shared_ptr<Channel> OpenTask(const std::string& task);

  const std::string protocol_;
  const std::shared_ptr<Engine> engine_;
  const std::shared_ptr<WorkerCaches> caches_;
  const std::shared_ptr<HandleBoard> board_;
  std::unique_ptr<HandleSource> eager_handles_;
  StarwireWorker* worker_ = nullptr;                 // owned by GrpcServer
  tensorflow::MasterEnv* own_master_env_ = nullptr;  // never freed: see local_masters.h
  bool initialised_ = false;
  bool attached_ = false;  // to StarPeers
  bool borrows_devices_ = false;

  std::mutex stop_mu_;
  bool given_up_ = false;  // guarded by stop_mu_, as are the next two
  bool shut_down_ = false;
  Status shutdown_status_;
  // Its queue must not be shut down twice.
  std::atomic<bool> coordination_stopped_{false};
};

}  // namespace starwire

#endif  // STARWIRE_CC_SERVER_SERVER_H_
