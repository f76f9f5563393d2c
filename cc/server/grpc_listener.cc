#include "cc/server/grpc_listener.h"

#include "cc/base/private_members.h"

namespace starwire {
namespace {

// TensorFlow has given the builder its address, and has no hook to choose another.
STARWIRE_REACH(PortsTag, ::grpc::ServerBuilder::ports_);
STARWIRE_REACH(BoundPortTag, tensorflow::GrpcServer::bound_port_);

}  // namespace

Status ListenBehind(tensorflow::GrpcServer* server, ::grpc::ServerBuilder* builder, const std::string& address,
                    int port) {
  auto& ports = builder->*Reach(PortsTag());
  int& bound_port = server->*Reach(BoundPortTag());
  if (ports.size() != 1 || ports.front().selected_port != &bound_port) {
    return MakeStatus(kInternal, "this TensorFlow's gRPC server does not listen on exactly one port of its own");
  }
  ports.front().addr = address;
  ports.front().selected_port = nullptr;
  bound_port = port;
  return OkStatus();
}

}  // namespace starwire
