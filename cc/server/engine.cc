#include "cc/server/engine.h"

#include <chrono>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cc/base/background_queue.h"
#include "cc/base/completion_batch.h"
#include "cc/base/guard.h"
#include "cc/base/status_codec.h"
#include "cc/graph/operations.h"
#include "cc/rendezvous/recv_service.h"
#include "cc/star/service.h"
#include "cc/tensor/arena_allocator.h"
#include "cc/tensor/slab.h"
#include "cc/worker/worker_cache.h"
#include "cc/worker/worker_service.h"
#include "tensorflow/core/lib/random/random.h"
#include "tensorflow/core/platform/logging.h"

namespace starwire {

// All run on reactor threads, the first possibly before sw_engine_new() has returned to Start().
struct Engine::Handlers {
  static Engine* Of(void* ctx) {
    Engine* engine = static_cast<Engine*>(ctx);
    // Takes microseconds: Start() is about to publish the engine.
    while (!engine->ready_.load(std::memory_order_acquire)) std::this_thread::yield();
    return engine;
  }

  static void OnRecv(void* ctx, const sw_recv_request* requests, size_t n) {
    Of(ctx)->services_.recv->OnRecv(requests, n);
  }
  static void OnCall(void* ctx, const sw_call_request* call) { Of(ctx)->services_.worker->OnCall(call); }
  // By now the body has an owner, or has been freed.
  static void CallThrew(const Status& thrown, void* ctx, const sw_call_request* call) {
    ReplyError(Of(ctx)->handle(), call->ticket, thrown);
  }
  static void* BodyAlloc(void*, size_t bytes) {
    ArenaAllocator* arena = ArenaAllocator::OfProcess();
    if (arena == nullptr || arena->WithRoomFor(bytes) != arena) return nullptr;
    return arena->AllocateInArena(Slab::kAlignment, bytes);
  }
  static void BodyFree(void* memory) { ArenaAllocator::OfProcess()->DeallocateRaw(memory); }
  static void OnCancel(void* ctx, sw_ticket ticket, uint32_t method, int64_t tag, uint32_t peer_gone) {
    Engine* engine = Of(ctx);
    if (method == 0) {
      engine->services_.recv->OnCancel(ticket, tag, peer_gone != 0);
    } else {
      engine->services_.worker->OnCancel(ticket);
    }
  }
  static void OnPeerCame(void* ctx, uint64_t conn, sw_bytes task, uint64_t incarnation) {
    Of(ctx)->services_.worker->OnPeerCame(conn, task, incarnation);
  }
  static void OnPeerGone(void* ctx, uint64_t conn) { Of(ctx)->services_.worker->OnPeerGone(conn); }
  static void* KeyNew(void* ctx, sw_bytes prefix) { return Of(ctx)->services_.recv->KeyNew(prefix); }
  static void KeyFree(void* ctx, void* key) { Of(ctx)->services_.recv->KeyFree(key); }
  // Needs nothing that Start() publishes, and may be called before that.
  static void RoundEnd(void* ctx) { CompletionBatch::Flush(static_cast<Engine*>(ctx)->compute_pool_); }
  static void Log(void*, int32_t level, sw_bytes line) {
    const std::string text = AsString(line);
    if (level <= 0) {
      LOG(INFO) << text;
    } else if (level == 1) {
      LOG(WARNING) << text;
    } else {
      LOG(ERROR) << text;
    }
  }
};

// Not movable: the options point at the other members.
struct Engine::Options {
  // `bound_port` replaces port 0 in the task's own entry.
  Options(const std::string& protocol, const tensorflow::ServerDef& def, int bound_port)
      : task(TaskName(def.job_name(), def.task_index())), addresses(AddressesOf(def.cluster())) {
    const auto own = addresses.find(task);
    if (own == addresses.end()) return;
    const size_t colon = own->second.rfind(':');
    if (colon != std::string::npos && own->second.substr(colon + 1) == "0") {
      own->second = own->second.substr(0, colon + 1) + std::to_string(bound_port);
    }
    for (const auto& entry : addresses) {
      names.push_back(AsBytes(entry.first));
      grpc_addresses.push_back(AsBytes(entry.second));
    }
    options.struct_size = sizeof(options);
    options.protocol = AsBytes(protocol);
    options.task = AsBytes(task);
    options.job = AsBytes(def.job_name());
    options.grpc_address = AsBytes(own->second);
    options.grpc_gives_way = STARWIRE_EAGER_PORT;
    options.cluster_tasks = static_cast<uint32_t>(addresses.size());
    options.cluster_addresses = grpc_addresses.data();
    options.cluster_names = names.data();
  }
  Options(const Options&) = delete;
  Options& operator=(const Options&) = delete;

  Status Check() const {
    if (options.struct_size != 0) return OkStatus();
    return MakeStatus(kInvalidArgument, "task " + task + " is not in the cluster of its own ServerDef");
  }

  const std::string task;
  TaskAddresses addresses;
  std::vector<sw_bytes> names, grpc_addresses;
  sw_engine_options options = {};
};

Engine::Engine() = default;

Engine::~Engine() = default;

sw_engine* Engine::handle() const { return handle_.load(std::memory_order_acquire); }

std::shared_ptr<sw_engine> Engine::shared_handle() { return std::shared_ptr<sw_engine>(shared_from_this(), handle()); }

Status Engine::TakeOver(const std::string& protocol, const tensorflow::ServerDef& def) {
  const Options made(protocol, def, 0);
  if (const Status status = made.Check(); !status.ok()) return status;
  ErrorHandle error;
  const sw_code code = sw_take_over(&made.options, Guarded<&Handlers::Log>, nullptr, Into(&error));
  return code == 0 ? OkStatus() : StatusFromError(code, error);
}

Status Engine::Bind(const std::string& protocol, const tensorflow::ServerDef& def, int requested_port) {
  const Options made(protocol, def, 0);
  if (const Status status = made.Check(); !status.ok()) return status;
  ErrorHandle error;
  const sw_code code = sw_port_bind(&made.options, static_cast<uint16_t>(requested_port), Into(&port_), Into(&error));
  return code == 0 ? OkStatus() : StatusFromError(code, error);
}

std::string Engine::grpc_address() const { return AsString(sw_port_grpc_address(port_.get())); }

Status Engine::Start(const std::string& protocol, const tensorflow::ServerDef& def, int bound_grpc_port,
                     Services services) {
  if (handle() != nullptr) return MakeStatus(kFailedPrecondition, "starwire: the engine is already started");
  Options made(protocol, def, bound_grpc_port);
  if (const Status status = made.Check(); !status.ok()) return status;
  if (const Status status = LoadOperations(); !status.ok()) return status;
  task_ = made.task;
  made.options.incarnation = tensorflow::random::New64();
  made.options.port = port_.get();
  sw_handlers handlers = {};
  handlers.struct_size = sizeof(handlers);
  handlers.on_recv = Guarded<&Handlers::OnRecv>;
  handlers.on_call = Guarded<&Handlers::OnCall, &Handlers::CallThrew>;
  handlers.body_alloc = Guarded<&Handlers::BodyAlloc>;
  handlers.body_free = Guarded<&Handlers::BodyFree>;
  handlers.on_cancel = Guarded<&Handlers::OnCancel>;
  handlers.on_peer_came = Guarded<&Handlers::OnPeerCame>;
  handlers.on_peer_gone = Guarded<&Handlers::OnPeerGone>;
  handlers.key_new = Guarded<&Handlers::KeyNew>;
  handlers.key_free = Guarded<&Handlers::KeyFree>;
  handlers.round_end = Guarded<&Handlers::RoundEnd>;
  handlers.private_payloads = services.private_payloads ? 1 : 0;
  handlers.log = Guarded<&Handlers::Log>;
  const sw_star_handlers star = services.star->Handlers();
  handlers.star = &star;
  handlers.star_ctx = services.star.get();

  compute_pool_ = services.compute_pool;
  services_ = std::move(services);
  ErrorHandle error;
  const sw_code code = sw_engine_new(&made.options, &handlers, this, Into(&owned_), Into(&error));
  if (code != 0) {
    services_ = Services();
    return StatusFromError(code, error);
  }
  sw_engine* handle = owned_.get();
  handle_.store(handle, std::memory_order_release);
  BackgroundQueue::OfProcess()->Run([] {});  // starts its thread: without one, work would run under the caller's locks
  services_.recv->Start(shared_handle(), queues_);
  services_.worker->Start(shared_handle(), queues_);
  services_.star->Start(shared_handle(), task_, queues_);
  ready_.store(true, std::memory_order_release);
  LOG(INFO) << AsString(sw_engine_banner(handle));
  return OkStatus();
}

bool Engine::Stop() {
  if (stopped_.exchange(true)) return ended_;
  sw_engine* handle = this->handle();
  if (handle == nullptr) return true;
  sw_engine_stop(handle);
  constexpr int64_t kPatienceMs = 10000;
  if (!services_.star->Shutdown(kPatienceMs)) {
    ended_ = false;
    LOG(WARNING) << "starwire: star calls are still running " << std::to_string(kPatienceMs / 1000) << " s after "
                 << task_ << " was stopped";
  }
  if (!services_.worker->Shutdown(kPatienceMs)) {
    ended_ = false;
    LOG(WARNING) << "starwire: worker methods are still running " << std::to_string(kPatienceMs / 1000) << " s after "
                 << task_ << " was stopped";
  }
  // The services hold references to this object.
  services_ = Services();
  const bool urgent = queues_->urgent.Stop(std::chrono::milliseconds(kPatienceMs));
  if (!queues_->slow.Stop(std::chrono::milliseconds(kPatienceMs)) || !urgent) {
    LOG(WARNING) << "starwire: background work is still running " << std::to_string(kPatienceMs / 1000) << " s after "
                 << task_ << " was stopped";
  }
  // The requests that these threads serve have been waited for above.
  queues_->eager.Stop(std::chrono::milliseconds(ended_ ? kPatienceMs : 0));
  return ended_;
}

Status Engine::TunnelAddress(const std::string& grpc_address, std::string* out) {
  sw_engine* handle = this->handle();
  if (handle == nullptr) {
    *out = grpc_address;
    return OkStatus();
  }
  OwnString tunnel;
  ErrorHandle error;
  const sw_code code = sw_engine_tunnel_address(handle, AsBytes(grpc_address), tunnel.out(), Into(&error));
  if (code != 0) return StatusFromError(code, error);
  *out = tunnel.text();
  return OkStatus();
}

Status Engine::OpenChannel(const std::string& task, const std::string& grpc_address, std::shared_ptr<Channel>* out) {
  sw_engine* handle = this->handle();
  if (handle == nullptr)
    return MakeStatus(kFailedPrecondition, "starwire: the server of this session has not started its data port");
  ChannelHandle channel;
  ErrorHandle error;
  const sw_code code = sw_channel_open(handle, AsBytes(task), AsBytes(grpc_address), Into(&channel), Into(&error));
  if (code != 0) return StatusFromError(code, error);
  *out = std::make_shared<Channel>(shared_handle(), std::move(channel));
  return OkStatus();
}

}  // namespace starwire
