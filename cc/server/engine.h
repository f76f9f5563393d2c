// The transport of one TensorFlow server: owns the sw_engine, opens channels, passes incoming work to the services.
#ifndef STARWIRE_CC_SERVER_ENGINE_H_
#define STARWIRE_CC_SERVER_ENGINE_H_

#include <atomic>
#include <memory>
#include <string>

#include "cc/base/background_queue.h"
#include "cc/base/channel.h"
#include "cc/base/compat.h"
#include "cc/base/handles.h"
#include "include/starwire.h"
#include "tensorflow/core/lib/core/threadpool.h"
#include "tensorflow/core/protobuf/tensorflow_server.pb.h"

namespace starwire {

class RecvService;    // cc/rendezvous/recv_service.h
class StarService;    // cc/star/service.h
class WorkerService;  // cc/worker/worker_service.h

// Set up in two steps because engine and services need each other: construct it, pass it to the services, then call
// Start() with the services. Whatever answers requests keeps a shared_ptr<Engine>: the transport drops an answer after
// Stop(), but an answer after destruction would crash.
class Engine : public ChannelOpener, public std::enable_shared_from_this<Engine> {
 public:
  struct Services {
    std::shared_ptr<RecvService> recv;
    std::shared_ptr<WorkerService> worker;
    std::shared_ptr<StarService> star;
    // Payloads may lie in memory of an accelerator's driver.
    bool private_payloads = false;
    // Runs the completions of a reactor's round.
    tensorflow::thread::ThreadPool* compute_pool = nullptr;
  };

  Engine();
  ~Engine() override;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // If STARWIRE_STATE_FROM names another process of the task, returns once this one has its state. Call it first.
  Status TakeOver(const std::string& protocol, const tensorflow::ServerDef& def);
  // Binds the port of the ClusterSpec if it is the server's only one; `requested_port` replaces that of the task's own
  // entry if it is not 0. Call it before TensorFlow's gRPC server is made, which then listens at grpc_address().
  Status Bind(const std::string& protocol, const tensorflow::ServerDef& def, int requested_port);
  // The server's only port; 0: it has two.
  int only_port() const { return sw_port_number(port_.get()); }
  std::string grpc_address() const;

  // Reads the environment and .endpoint_map, binds the data port unless Bind() has, starts the reactors.
  // `bound_grpc_port` replaces port 0 in the task's own entry.
  Status Start(const std::string& protocol, const tensorflow::ServerDef& def, int bound_grpc_port, Services services);
  // Ends every call and joins the engine's threads. Idempotent; not to be called from a reactor thread. False if a
  // worker method is still running.
  bool Stop();

  // Not null once a service has been called or Start() has returned OK. Valid as long as this object.
  sw_engine* handle() const;
  // The same for later answers; keeps this object alive.
  std::shared_ptr<sw_engine> shared_handle();
  const std::string& task() const { return task_; }
  const std::shared_ptr<ServerQueues>& queues() const { return queues_; }

  // Where a gRPC client of this process reaches the server of the task with this address in the ClusterSpec. Before
  // Start(), that address itself.
  Status TunnelAddress(const std::string& grpc_address, std::string* out);

  Status OpenChannel(const std::string& task, const std::string& grpc_address, std::shared_ptr<Channel>* out) override;

 private:
  struct Handlers;  // the C functions of sw_handlers
  struct Options;   // sw_engine_options and what they point at

  std::atomic<sw_engine*> handle_{nullptr};  // owned_, once it is published to all threads
  std::atomic<bool> ready_{false};
  std::atomic<bool> stopped_{false};
  std::atomic<bool> ended_{true};  // no worker method outlived Stop()
  Services services_;
  tensorflow::thread::ThreadPool* compute_pool_ = nullptr;
  const std::shared_ptr<ServerQueues> queues_ = std::make_shared<ServerQueues>();
  std::string task_;
  PortHandle port_;
  EngineHandle owned_;  // last: its threads end before the members that they use
};

}  // namespace starwire

#endif  // STARWIRE_CC_SERVER_ENGINE_H_
