// Shuts down TensorFlow's own gRPC server, which TensorFlow cannot do itself.
#ifndef STARWIRE_CC_SERVER_GRPC_SHUTDOWN_H_
#define STARWIRE_CC_SERVER_GRPC_SHUTDOWN_H_

#include <cstdint>
#include <memory>

#include "cc/base/compat.h"
#include "tensorflow/core/distributed_runtime/eager/eager_service_impl.h"
#include "tensorflow/core/distributed_runtime/rpc/grpc_server_lib.h"

namespace starwire {

// The implementation of the server's eager service, which has the contexts of both ports. It lives until
// ShutDownGrpcServer(). Null before the server has been initialised.
tensorflow::eager::EagerServiceImpl* EagerServiceOf(tensorflow::GrpcServer* server);

// Ends the server's part in the coordination service. ShutDownGrpcServer() does that as well, unless it was done.
Status SignOff(tensorflow::GrpcServer* server, int64_t timeout_ms);

// Closes the port, ends the services and their threads, and leaves the server stopped, so that it can be destroyed and
// its port bound again. `eager_idle`: no call to the eager service is running outside of gRPC; otherwise the service is
// kept. DeadlineExceeded if a call does not end within `timeout_ms`: a thread keeps waiting for it, and the server must
// not be destroyed.
Status ShutDownGrpcServer(tensorflow::GrpcServer* server, bool eager_idle, int64_t timeout_ms);

// Ends the threads of TensorFlow's gRPC clients of this server, about seventy. No such client (worker cache) may exist
// any more.
Status EndGrpcClients(tensorflow::GrpcServer* server, int64_t timeout_ms);

// Takes the Master out of a server that is about to be destroyed: in-process clients (LocalMaster) keep pointers to it
// that never expire.
std::unique_ptr<tensorflow::Master> ReleaseMaster(tensorflow::GrpcServer* server);

}  // namespace starwire

#endif  // STARWIRE_CC_SERVER_GRPC_SHUTDOWN_H_
