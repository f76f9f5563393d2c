// Ends TensorFlow's own gRPC server, which it can not do itself.
#ifndef STARWIRE_CC_SERVER_GRPC_SHUTDOWN_H_
#define STARWIRE_CC_SERVER_GRPC_SHUTDOWN_H_

#include <cstdint>
#include <memory>

#include "cc/base/compat.h"
#include "tensorflow/core/distributed_runtime/rpc/grpc_server_lib.h"

namespace starwire {

// Closes the port, ends the services and their threads, and leaves the server stopped, so that it can be destroyed and
// its port be bound again. DeadlineExceeded if that takes longer than `timeout_ms`: some call does not end; a thread
// keeps waiting for it, and the server must not be destroyed.
Status ShutDownGrpcServer(tensorflow::GrpcServer* server, int64_t timeout_ms);

// Ends the threads on which TensorFlow's gRPC clients of this server ran: some seventy. There must be no such client
// (worker cache) any more.
Status EndGrpcClients(tensorflow::GrpcServer* server, int64_t timeout_ms);

// Takes the Master out of a server that is about to be destroyed: in-process clients keep pointers to it (LocalMaster),
// for ever.
std::unique_ptr<tensorflow::Master> ReleaseMaster(tensorflow::GrpcServer* server);

}  // namespace starwire

#endif  // STARWIRE_CC_SERVER_GRPC_SHUTDOWN_H_
