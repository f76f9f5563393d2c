#include "cc/server/server.h"

#include <unistd.h>

#include <algorithm>
#include <type_traits>
#include <utility>
#include <vector>

#include "cc/base/compat_server.h"
#include "cc/base/compat_session.h"
#include "cc/executor/row_gathers.h"
#include "cc/executor/row_updates.h"
#include "cc/fuse/ops.h"
#include "cc/fuse/pass.h"
#include "cc/fuse/switch.h"
#include "cc/rendezvous/recv_service.h"
#include "cc/rendezvous/rendezvous.h"
#include "cc/server/arena_devices.h"
#include "cc/server/grpc_listener.h"
#include "cc/server/grpc_shutdown.h"
#include "cc/server/local_masters.h"
#include "cc/star/graphs.h"
#include "cc/star/ops.h"
#include "cc/star/pass.h"
#include "cc/star/peers.h"
#include "cc/star/row_ops.h"
#include "cc/star/service.h"
#include "cc/star/state.h"
#include "cc/star/switch.h"
#include "cc/work_queue/ops.h"
#include "cc/worker/session_recovery.h"
#include "cc/worker/step_handles.h"
#include "cc/worker/worker_cache.h"
#include "cc/worker/worker_service.h"
#include "tensorflow/core/common_runtime/device_mgr.h"
#include "tensorflow/core/distributed_runtime/master.h"
#include "tensorflow/core/distributed_runtime/rpc/grpc_worker_service_impl.h"
#include "tensorflow/core/distributed_runtime/session_mgr.h"
#include "tensorflow/core/platform/env.h"
#include "tensorflow/core/platform/logging.h"
#if STARWIRE_EAGER_PORT
#include "cc/server/eager_handles.h"
#include "cc/worker/component_functions.h"
#endif

namespace starwire {

using tensorflow::GrpcServer;
using tensorflow::GrpcServerOptions;
using tensorflow::ServerDef;
using tensorflow::WorkerCacheFactoryOptions;
using tensorflow::WorkerCacheInterface;

namespace {

struct Protocol {
  const char* name;          // ServerDef.protocol
  const char* factory_name;  // key in TensorFlow's table of factories
  const char* other_name;    // in jobs that were written for DeepRec; or null
};

constexpr Protocol kProtocols[] = {
    {"grpc++", "STARWIRE_GRPCPP_SERVER", "grpc+seastar"},
    {"grpc+verbs", "STARWIRE_VERBS_SERVER", nullptr},
    {"star_server", "STARWIRE_STAR_SERVER", "star_server_v2"},
    {"star_server_lite", "STARWIRE_STAR_LITE_SERVER", nullptr},
};

// Protocols of TensorFlow 1 and of DeepRec that starwire does not have.
struct MissingProtocol {
  const char* name;
  const char* instead;
};

constexpr MissingProtocol kMissingProtocols[] = {
    {"grpc+gdr", "grpc+verbs for RDMA"},
    {"grpc+mpi", "grpc++, or grpc+verbs for RDMA"},
    {"grpc+ucx", "grpc+verbs for RDMA"},
    {"elastic-grpc", "star_server"},
};

// In front of a protocol's name: ours, also where TensorFlow was built with a protocol of that name. DeepRec may be.
constexpr char kOwnPrefix[] = "starwire+";

// Whether a factory that is registered already answers to the name.
bool IsTaken(const std::string& protocol) {
  ServerDef def;
  def.set_protocol(protocol);
  tensorflow::ServerFactory* factory = nullptr;
  return tensorflow::ServerFactory::GetFactory(def, &factory).ok();
}

// The servers that exist in this process. Python never destroys one.
struct Servers {
  std::mutex mu;
  std::vector<StarwireServer*> live;
  pid_t pid = 0;  // the process that created them
};

Servers* AllServers() {
  static auto* servers = new Servers;
  return servers;
}

// WorkerCacheFactoryOptions holds pointers up to 2.13 and values from 2.14 on.
template <typename T>
const T& Value(const T* pointer) {
  static const T kNone = T();
  return pointer == nullptr ? kNone : *pointer;
}
template <typename T>
const T& Value(const T& value) {
  return value;
}

// The port that TensorFlow will bind; 0 if it is to choose one, or will refuse the ServerDef.
int RequestedPort(const ServerDef& def) {
  if (PortOf(def) != 0) return PortOf(def);
  const TaskAddresses addresses = AddressesOf(def.cluster());
  const auto own = addresses.find(TaskName(def.job_name(), def.task_index()));
  if (own == addresses.end()) return 0;
  const size_t colon = own->second.rfind(':');
  if (colon == std::string::npos) return 0;
  int port = 0;
  for (char c : own->second.substr(colon + 1)) {
    if (c < '0' || c > '9' || port > 65535) return 0;
    port = port * 10 + (c - '0');
  }
  return port;
}

class Factory : public tensorflow::ServerFactory {
 public:
  // `plain_names`: those to which no other factory answers. If two did, which one TensorFlow takes would be an accident
  // of its hash table.
  Factory(const char* protocol, std::vector<std::string> plain_names)
      : protocol_(protocol), plain_names_(std::move(plain_names)) {}

  bool AcceptsOptions(const ServerDef& def) override {
    return std::find(plain_names_.begin(), plain_names_.end(), def.protocol()) != plain_names_.end() ||
           def.protocol() == kOwnPrefix + protocol_;
  }

  // Without `override`: 1.15 has the second, later versions the first.
  Status NewServer(const ServerDef& def, const FactoryOptions& options,
                   std::unique_ptr<tensorflow::ServerInterface>* out) {
    return StarwireServer::Create(protocol_, def, options, out);
  }
  Status NewServer(const ServerDef& def, std::unique_ptr<tensorflow::ServerInterface>* out) {
    return StarwireServer::Create(protocol_, def, FactoryOptions(), out);
  }

 private:
  const std::string protocol_;
  const std::vector<std::string> plain_names_;
};

// Says what to use instead of a protocol that neither TensorFlow nor starwire has.
class MissingFactory : public tensorflow::ServerFactory {
 public:
  explicit MissingFactory(std::vector<MissingProtocol> protocols) : protocols_(std::move(protocols)) {}

  bool AcceptsOptions(const ServerDef& def) override { return Find(def) != nullptr; }

  Status NewServer(const ServerDef& def, const FactoryOptions&, std::unique_ptr<tensorflow::ServerInterface>*) {
    return Refuse(def);
  }
  Status NewServer(const ServerDef& def, std::unique_ptr<tensorflow::ServerInterface>*) { return Refuse(def); }

 private:
  const MissingProtocol* Find(const ServerDef& def) const {
    const auto is_wanted = [&def](const MissingProtocol& protocol) { return def.protocol() == protocol.name; };
    const auto found = std::find_if(protocols_.begin(), protocols_.end(), is_wanted);
    return found == protocols_.end() ? nullptr : &*found;
  }
  Status Refuse(const ServerDef& def) const {
    const MissingProtocol* protocol = Find(def);
    return MakeStatus(kUnimplemented, "starwire: there is no protocol " + def.protocol() + " here: use " +
                                          (protocol == nullptr ? "" : protocol->instead));
  }

  const std::vector<MissingProtocol> protocols_;
};

}  // namespace

Status RegisterServers() {
  static const bool registered = [] {
    for (const Protocol& protocol : kProtocols) {
      const std::string own_name = kOwnPrefix + std::string(protocol.name);
      const bool taken = IsTaken(protocol.name);
      // If our name is taken as well, this is another copy of the library.
      if (taken && !IsTaken(own_name)) {
        LOG(WARNING) << "starwire: this TensorFlow has a " << protocol.name
                     << " of its own, which keeps the name: ask for " << own_name << " to get starwire's";
      }
      std::vector<std::string> names;
      if (!taken) names.push_back(protocol.name);
      if (protocol.other_name != nullptr && !IsTaken(protocol.other_name)) names.push_back(protocol.other_name);
      RegisterServerFactory(protocol.factory_name, new Factory(protocol.name, std::move(names)));
    }
    std::vector<MissingProtocol> missing;
    for (const MissingProtocol& protocol : kMissingProtocols) {
      if (!IsTaken(protocol.name)) missing.push_back(protocol);
    }
    RegisterServerFactory("STARWIRE_MISSING_PROTOCOLS", new MissingFactory(std::move(missing)));
    SetNeedsOf(&NeedsOf);
    // If another copy of this library is loaded, its passes are enough.
    if (RegisterFuseOps()) {
      RegisterStarOps();
      RegisterRowOps();
      RegisterRowUpdates();
      RegisterRowGathers();
      RegisterWorkQueueOps();
      RegisterStarPass();
      RegisterFusePass();
    }
    return true;
  }();
  (void)registered;
  return OkStatus();
}

StarwireServer::StarwireServer(std::string protocol, const ServerDef& def)
    : GrpcServer(def, tensorflow::Env::Default()),
      protocol_(std::move(protocol)),
      engine_(std::make_shared<Engine>()),
      caches_(std::make_shared<WorkerCaches>()),
      board_(std::make_shared<HandleBoard>()) {}

Status StarwireServer::Create(const std::string& protocol, const ServerDef& def, const FactoryOptions& options,
                              std::unique_ptr<tensorflow::ServerInterface>* out) {
  Servers* servers = AllServers();
  {
    std::lock_guard<std::mutex> lock(servers->mu);
    if (servers->pid != 0 && servers->pid != getpid()) {
      return MakeStatus(
          kFailedPrecondition,
          "this process was forked from process " + std::to_string(servers->pid) + ", which had started a " + protocol +
              " server: TensorFlow's threads do not survive a fork. Fork first, or use the spawn start method");
    }
    servers->pid = getpid();
  }
  MakeRoom(RequestedPort(def));
  std::unique_ptr<StarwireServer> server(new StarwireServer(protocol, def));
  GrpcServerOptions grpc_options;
  Status status = OkStatus();
  if (CanUseDevices(grpc_options)) {
    if (options.local_device_mgr == nullptr) status = MakeArenaDevices(protocol, def, &server->own_devices);
    server->borrows_devices_ = options.local_device_mgr != nullptr;
    UseDevices(&grpc_options, server->own_devices == nullptr ? options.local_device_mgr : server->own_devices.get());
  }
  if (status.ok()) status = server->Init(std::move(grpc_options));
  if (!status.ok()) {
    LOG(ERROR) << StatusMessage(status);
    return status;
  }
  *out = std::move(server);
  return OkStatus();
}

Status StarwireServer::Init(GrpcServerOptions options) {
  options.rendezvous_mgr_func = [board =
                                     board_](const tensorflow::WorkerEnv* env) -> tensorflow::RendezvousMgrInterface* {
    return new RendezvousMgr(env, board);
  };
  options.worker_func = [this](tensorflow::WorkerEnv* env, const tensorflow::ConfigProto& config) {
    auto worker = std::make_unique<StarwireWorker>(env, config, std::make_unique<StarGraphs>());
    worker_ = worker.get();
    return std::unique_ptr<tensorflow::GrpcWorker>(std::move(worker));
  };
  // Peers use the data port. By default TensorFlow keeps eight threads and 13,000 calls ready on it, and 30 MB that
  // gRPC never frees.
  options.worker_service_options.num_serving_threads = 1;
  using Method = tensorflow::GrpcWorkerMethod;
  constexpr int kReadyCalls = 4;
  for (Method method : {Method::kRunGraph, Method::kCleanupGraph, Method::kRecvTensor, Method::kRecvBuf}) {
    options.worker_service_options.queue_depth[static_cast<int>(method)] = kReadyCalls;
  }
  Status status = engine_->TakeOver(protocol_, server_def());
  if (!status.ok()) return status;
  status = engine_->Bind(protocol_, server_def(), RequestedPort(server_def()));
  if (!status.ok()) return status;
  Status moved = OkStatus();
  if (engine_->only_port() != 0) {
    options.service_func = [this, &moved](const tensorflow::WorkerEnv*, ::grpc::ServerBuilder* builder) {
      moved = ListenBehind(this, builder, engine_->grpc_address(), engine_->only_port());
    };
  }
  status = GrpcServer::Init(options);
  if (!moved.ok()) status = moved;
  if (!status.ok()) {
    const std::string reason = StatusMessage(status);
    if (reason != "Could not start gRPC server") return status;
    return MakeStatus(StatusNumber(status),
                      reason + " for " + TaskName(server_def().job_name(), server_def().task_index()) + ": is port " +
                          std::to_string(RequestedPort(server_def())) + " in use?");
  }
  initialised_ = true;
  SetServerFuseWish(TaskName(server_def().job_name(), server_def().task_index()),
                    FuseWishOf(server_def().default_session_config()), StarStyleOf(protocol_) != StarStyle::kNone);
  MarkSessions();
  PointLocalMasterAt(target(), own_master_env_, *master_env());
  {
    Servers* servers = AllServers();
    std::lock_guard<std::mutex> lock(servers->mu);
    servers->live.push_back(this);
  }

  Engine::Services services;
  services.recv = std::make_shared<RecvService>(worker_env());
  services.worker = std::make_shared<WorkerService>(worker_, worker_env());
  services.star = std::make_shared<StarService>(worker_env());
  const std::string own_task = TaskName(server_def().job_name(), server_def().task_index());
#if STARWIRE_EAGER_PORT
  const StarStyle style =
      OptsOutOfStar(server_def().default_session_config()) ? StarStyle::kNone : StarStyleOf(protocol_);
  services.worker->SetEager(EagerServiceOf(this), [style](auto* request) { MarkFunctions(style, request); });
  AddEagerService(EagerServiceOf(this));
  eager_handles_ = std::make_unique<EagerHandles>(EagerServiceOf(this), own_task + "/device:CPU:0");
  services.star->SetHandles(eager_handles_.get());
#endif
  const std::weak_ptr<SessionObserver> observer = services.star;
  services.compute_pool = worker_env()->compute_pool;
  for (const tensorflow::Device* device : worker_env()->device_mgr->ListDevices()) {
    // XLA's device for the CPU, which 1.15 always has, has tensors copied to ordinary memory before they are sent.
    const std::string& type = device->device_type();
    services.private_payloads |= type != tensorflow::DEVICE_CPU && type != "XLA_CPU";
  }
  status = engine_->Start(protocol_, server_def(), bound_port(), std::move(services));
  if (!status.ok()) return status;
  worker_->SetSessionObserver(observer);
  worker_->SetQueues(engine_->queues());
  attached_ = true;
  StarPeers::Attach(own_task, [this](const std::string& task) { return OpenTask(task); });
  return OkStatus();
}

std::shared_ptr<Channel> StarwireServer::OpenTask(const std::string& task) {
  const auto cache = SharedWorkerCacheOf(*worker_env()->session_mgr->LegacySession());
  auto* worker = cache == nullptr ? nullptr : dynamic_cast<RemoteWorker*>(cache->GetOrCreateWorker(task));
  return worker == nullptr || !worker->status().ok() ? nullptr : worker->shared_channel();
}

// The master creates the graphs of its sessions; their configuration is the only way to tell it how.
void StarwireServer::MarkSessions() {
  const StarStyle style = StarStyleOf(protocol_);
  auto make = master_env()->master_session_factory;
  master_env()->master_session_factory = [style, make = std::move(make)](tensorflow::SessionOptions options,
                                                                         auto&&... rest) {
    MarkSession(style, &options.config);
    return make(std::move(options), std::forward<decltype(rest)>(rest)...);
  };
}

StarwireServer::~StarwireServer() {
  // Another server may have the task, if this one could not be started.
  if (attached_) StarPeers::Detach(TaskName(server_def().job_name(), server_def().task_index()));
  const Status status = ShutDown();
  if (!status.ok()) {
    LOG(ERROR) << "starwire: " << target() << " is being destroyed but did not stop: " << StatusMessage(status);
  }
  if (initialised_) ReleaseMaster(this).release();
  Servers* servers = AllServers();
  std::lock_guard<std::mutex> lock(servers->mu);
  servers->live.erase(std::remove(servers->live.begin(), servers->live.end(), this), servers->live.end());
}

Status StarwireServer::Stop() {
  {
    std::lock_guard<std::mutex> lock(stop_mu_);
    if (!std::exchange(given_up_, true) && !shut_down_) return GrpcServer::Stop();
  }
  return ShutDown();
}

Status StarwireServer::AddMasterEagerContextToEagerService(ContextId context_id, tensorflow::EagerContext* context) {
  // ShutDown() deletes the eager service unless it has a context: hold the lock until it has this one.
  std::lock_guard<std::mutex> lock(stop_mu_);
  if (shut_down_) return MakeStatus(kFailedPrecondition, "the server at " + target() + " was stopped");
  return GrpcServer::AddMasterEagerContextToEagerService(context_id, context);
}

Status StarwireServer::ShutDown() {
  std::lock_guard<std::mutex> lock(stop_mu_);
  const bool is_first = !std::exchange(shut_down_, true);
  // Without a thread, the rest was not begun: another call may end it.
  if (!is_first && StatusNumber(shutdown_status_) != kResourceExhausted) return shutdown_status_;
  constexpr int64_t kPatienceMs = 10000;
  // The coordination service's agent signs off over the only port.
  if (is_first && engine_->only_port() != 0) SignOff(this, kPatienceMs).IgnoreError();
  const bool ended = engine_->Stop();
  if (is_first && own_master_env_ != nullptr && initialised_) CloseMaster(target(), own_master_env_);
#if STARWIRE_EAGER_PORT
  RemoveEagerService(EagerServiceOf(this));
#endif
  shutdown_status_ = ShutDownGrpcServer(this, ended, kPatienceMs);
  if (shutdown_status_.ok() && caches_->DropStock()) EndGrpcClients(this, kPatienceMs).IgnoreError();
  // Those of an eager context go on, also if this server could not be started.
  if (worker_env()->device_mgr != nullptr && !borrows_devices_) worker_env()->device_mgr->ClearContainers({});
  return shutdown_status_;
}

void StarwireServer::MakeRoom(int grpc_port) {
  if (grpc_port == 0) return;
  std::vector<StarwireServer*> in_the_way;
  {
    Servers* servers = AllServers();
    std::lock_guard<std::mutex> lock(servers->mu);
    for (StarwireServer* server : servers->live) {
      std::lock_guard<std::mutex> stop_lock(server->stop_mu_);
      if (server->given_up_ && !server->shut_down_ && server->bound_port() == grpc_port) in_the_way.push_back(server);
    }
  }
  for (StarwireServer* server : in_the_way) {
    LOG(INFO) << "starwire: stopping the abandoned server " << server->target() << ": its port is needed again";
    const Status status = server->ShutDown();
    if (!status.ok()) LOG(WARNING) << "starwire: " << StatusMessage(status);
  }
}

Status StarwireServer::UpdateServerDef(const ServerDef& def) {
  {
    std::lock_guard<std::mutex> lock(stop_mu_);
    if (shut_down_) return MakeStatus(kFailedPrecondition, "the server at " + target() + " was stopped");
  }
  const Status status = StockUpdateServerDef(this, def);
  if (status.ok()) PointLocalMasterAt(target(), own_master_env_, *master_env());
  return status;
}

Status StarwireServer::StopCoordinationService() {
  // Not before Init() has finished: TensorFlow uses its session manager without checking that there is one.
  if (worker_env()->session_mgr == nullptr || coordination_stopped_.exchange(true)) return OkStatus();
  return StockStopCoordination(this);
}

std::unique_ptr<tensorflow::Master> StarwireServer::CreateMaster(tensorflow::MasterEnv* master_env) {
  own_master_env_ = new tensorflow::MasterEnv(*master_env);  // filled in at the end of Init()
  constexpr double kNeverCollectSessions = 0.0;
  return std::make_unique<tensorflow::Master>(own_master_env_, kNeverCollectSessions);
}

#if STARWIRE_EAGER_PORT
// The channels of what peers still use gRPC for: the coordination service, contexts of eager execution.
std::function<tensorflow::SharedGrpcChannelPtr(std::string)> StarwireServer::GetChannelCreationFunction() const {
  return [open = GrpcServer::GetChannelCreationFunction(), engine = engine_](const std::string& address) {
    std::string tunnel;
    if (const Status status = engine->TunnelAddress(address, &tunnel); !status.ok()) {
      LOG(ERROR) << "starwire: no gRPC channel to " << address << ": " << StatusMessage(status);
      return tensorflow::SharedGrpcChannelPtr();
    }
    return open(tunnel);
  };
}
#endif

Status StarwireServer::WorkerCacheFactory(const WorkerCacheFactoryOptions& options,
                                          WorkerCacheInterface** worker_cache) {
  WorkerCacheInterface* stock = nullptr;
  const Status status = GrpcServer::WorkerCacheFactory(options, &stock);
  if (!status.ok()) return status;
  *worker_cache =
      new WorkerCache(std::unique_ptr<WorkerCacheInterface>(stock), AddressesOf(Value(options.cluster_def)),
                      TaskName(Value(options.job_name), options.task_index), worker_, engine_, caches_, board_);
  return OkStatus();
}

}  // namespace starwire
