// Moves TensorFlow's own gRPC server behind the only port of a task.
#ifndef STARWIRE_CC_SERVER_GRPC_LISTENER_H_
#define STARWIRE_CC_SERVER_GRPC_LISTENER_H_

#include <string>

#include "cc/base/compat.h"
#include "grpcpp/server_builder.h"
#include "tensorflow/core/distributed_runtime/rpc/grpc_server_lib.h"

namespace starwire {

#if STARWIRE_EAGER_PORT
// The server that `builder` is about to start listens at `address` ("unix:/path") instead of a port of its own, and
// presents `port` as the one that it has bound.
Status ListenBehind(tensorflow::GrpcServer* server, ::grpc::ServerBuilder* builder, const std::string& address,
                    int port);
#else
// TensorFlow 1.15 comes without gRPC's headers.
inline Status ListenBehind(tensorflow::GrpcServer*, ::grpc::ServerBuilder*, const std::string&, int) {
  return MakeStatus(kUnimplemented,
                    "STARWIRE_PORTS=one needs TensorFlow 2.12 or later: the gRPC server of " STARWIRE_TF_VERSION
                    " cannot be moved behind the port");
}
#endif

}  // namespace starwire

#endif  // STARWIRE_CC_SERVER_GRPC_LISTENER_H_
