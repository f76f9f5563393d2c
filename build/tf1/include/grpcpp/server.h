#pragma once
#include "grpcpp/grpcpp.h"

struct gpr_timespec {
  long tv_sec;
  int tv_nsec;
  int clock_type;
};
enum { GPR_CLOCK_MONOTONIC = 0 };

namespace grpc {
// The virtual functions of gRPC 1.19, which TensorFlow 1.15 is built with. Only the last one is called; the others are
// here for their places.
class Server {
 public:
  virtual ~Server();
  virtual void PerformOpsOnCall();
  virtual void Wait();
  virtual void RegisterService();
  virtual void RegisterAsyncGenericService();
  virtual void AddListeningPort();
  virtual void Start();
  virtual void ShutdownInternal(gpr_timespec deadline);
};
}  // namespace grpc
