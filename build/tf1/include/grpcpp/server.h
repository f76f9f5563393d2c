#pragma once
#include "grpcpp/grpcpp.h"
namespace grpc {
// Of the real class: it has a virtual destructor, and that is its first virtual function.
class Server {
 public:
  virtual ~Server();
};
}  // namespace grpc

// For an overload that is never chosen.
struct gpr_timespec {
  long tv_sec;
  int tv_nsec;
  int clock_type;
};
enum { GPR_CLOCK_MONOTONIC };
