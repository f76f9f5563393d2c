#include "cc/rendezvous/recv_service.h"

#include <chrono>
#include <memory>
#include <string>
#include <utility>

#include "cc/base/compat_session.h"
#include "cc/base/guard.h"
#include "cc/base/status_codec.h"
#include "cc/rendezvous/rendezvous.h"
#include "cc/tensor/codec.h"
#include "tensorflow/core/common_runtime/copy_tensor.h"
#include "tensorflow/core/common_runtime/device.h"
#include "tensorflow/core/common_runtime/device_mgr.h"
#include "tensorflow/core/distributed_runtime/worker_session.h"
#include "tensorflow/core/framework/device_base.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/platform/env.h"
#include "tensorflow/core/platform/logging.h"
#include "tensorflow/core/util/device_name_utils.h"

namespace starwire {
namespace {

using tensorflow::Device;
using tensorflow::Rendezvous;
using tensorflow::Tensor;

// How long after a peer gave up its step is aborted here: the error that made it give up should reach the client first.
constexpr std::chrono::milliseconds kAbortDelay(1000);

// The copies of an eager context (TensorFlow 2) share one step, whose number is the context's and which goes on after
// an error.
bool IsOfEagerContext(tensorflow::RemoteRendezvous* rendezvous, int64_t step_id) {
  auto* ours = dynamic_cast<RemoteRendezvous*>(rendezvous);
  tensorflow::WorkerSession* session = ours == nullptr ? nullptr : ours->worker_session();
  // As TensorFlow's eager service names the sessions of its contexts.
  return session != nullptr && SessionNameOf(*session) == "eager_" + std::to_string(static_cast<uint64_t>(step_id));
}

// The destination of the answer to one request.
struct Answer {
  std::shared_ptr<sw_engine> engine;
  sw_ticket ticket;
  Device* source;
  Device* host;

  void Refuse(const Status& status) const { ReplyError(engine.get(), ticket, status); }

  // `tensor` is in host memory.
  void Send(const Tensor& tensor, bool is_dead) const {
    EncodedTensor encoded;
    Status status = encoded.Encode(tensor, is_dead, tensorflow::Env::Default()->NowMicros());
    if (!status.ok()) {
      Refuse(status);
      return;
    }
    if (encoded.fused_tensors() != 0) sw_engine_count_fused(engine.get(), encoded.fused_tensors());
    sw_engine_reply(engine.get(), ticket, 0, encoded.meta(), encoded.payload());
  }

  void SendFromDevice(const Rendezvous::Args& args, const Tensor& tensor, bool is_dead) const {
    if (args.device_context == nullptr) {
      Refuse(MakeStatus(kInternal, "no device context to copy a tensor from " + source->name()));
      return;
    }
    tensorflow::AllocatorAttributes attributes;
    attributes.set_on_host(true);
    attributes.set_gpu_compatible(true);
    // The copy uses both until its callback runs.
    struct Copy {
      Tensor device;
      Tensor host;
    };
    auto* copy = new Copy{tensor, Tensor()};
    // Variants are copied element by element into a tensor that ViaDMA makes.
    if (tensor.dtype() != tensorflow::DT_VARIANT) {
      copy->host = Tensor(source->GetAllocator(attributes), tensor.dtype(), tensor.shape());
      if (!copy->host.IsInitialized()) {
        Refuse(MakeStatus(kResourceExhausted, "out of host memory to send " + std::to_string(tensor.TotalBytes()) +
                                                  " bytes from " + source->name()));
        delete copy;
        return;
      }
    }
    tensorflow::CopyTensor::ViaDMA("starwire_send", args.device_context, nullptr, source, host, args.alloc_attrs,
                                   attributes, &copy->device, &copy->host, 0,
                                   [answer = *this, copy, is_dead](const Status& status) {
                                     if (status.ok()) {
                                       answer.Send(copy->host, is_dead);
                                     } else {
                                       answer.Refuse(status);
                                     }
                                     delete copy;
                                   });
  }

  // A Rendezvous::DoneCallback.
  void operator()(const Status& status, const Rendezvous::Args& send_args, const Rendezvous::Args&,
                  const Tensor& tensor, bool is_dead) const {
    Guard(
        "sending a tensor", [&] { Give(status, send_args, tensor, is_dead); },
        [this](const Status& thrown) { Refuse(thrown); });
  }

  void Give(const Status& status, const Rendezvous::Args& send_args, const Tensor& tensor, bool is_dead) const {
    if (!status.ok()) {
      Refuse(status);
      return;
    }
    const bool on_device = IsAccelerator(*source) && !send_args.alloc_attrs.on_host();
    if (on_device && !is_dead && tensor.NumElements() > 0) {
      SendFromDevice(send_args, tensor, is_dead);
    } else {
      Send(tensor, is_dead);
    }
  }
};

}  // namespace

// A key that a peer has interned, parsed and checked once. Frame and iteration come with each request.
class RecvService::Key {
 public:
  // Null if `prefix` is not the start of a rendezvous key.
  static std::unique_ptr<Key> Parse(sw_bytes prefix, tensorflow::WorkerEnv* env) {
    auto key = std::make_unique<Key>();
    key->prefix_ = AsString(prefix);
    if (!Rendezvous::ParseKey(key->prefix_ + ";0:0", &key->outside_loops_).ok()) return nullptr;
    key->valid_ = key->FindSource(env);
    return key;
  }

  // Whether the source is a device of this incarnation of the task.
  const Status& valid() const { return valid_; }
  Device* source() const { return source_; }
  // The CPU, through which tensors of other devices are sent.
  Device* host() const { return host_; }
  const Rendezvous::ParsedKey& outside_loops() const { return outside_loops_; }
  Status InLoop(uint64_t frame, uint64_t iteration, Rendezvous::ParsedKey* out) const {
    return Rendezvous::ParseKey(prefix_ + ";" + std::to_string(frame) + ":" + std::to_string(iteration), out);
  }

 private:
  Status FindSource(tensorflow::WorkerEnv* env) {
    const std::string local = tensorflow::DeviceNameUtils::LocalName(std::string(outside_loops_.src_device));
    Status status = env->device_mgr->LookupDevice(local, &source_);
    if (status.ok()) status = env->device_mgr->LookupDevice("CPU:0", &host_);
    if (!status.ok()) return status;
    const auto own = source_->attributes().incarnation();
    if (own == outside_loops_.src_incarnation) return OkStatus();
    // TensorFlow's words, by which programs recognise a restarted task.
    return MakeStatus(kAborted, "RecvTensor expects a different device incarnation: " +
                                    std::to_string(outside_loops_.src_incarnation) + " vs. " + std::to_string(own) +
                                    ": the task of " + std::string(outside_loops_.src_device) +
                                    " was restarted since the step was planned");
  }

  std::string prefix_;
  Rendezvous::ParsedKey outside_loops_;
  Device* source_ = nullptr;
  Device* host_ = nullptr;
  Status valid_;
};

// Caches the rendezvous of the last step: most requests of a batch are for the same one.
class RecvService::Step {
 public:
  explicit Step(tensorflow::RendezvousMgrInterface* manager) : manager_(manager) {}
  ~Step() { Drop(); }
  Step(const Step&) = delete;
  Step& operator=(const Step&) = delete;

  // Null if the manager is not ours.
  RemoteRendezvous* Find(int64_t step_id) {
    if (found_ != nullptr && step_id == step_id_) return rendezvous_;
    Drop();
    found_ = TakeReference(manager_->Find(step_id));
    step_id_ = step_id;
    rendezvous_ = dynamic_cast<RemoteRendezvous*>(found_);
    return rendezvous_;
  }

 private:
  void Drop() {
    if (found_ != nullptr) found_->Unref();
    found_ = nullptr;
    rendezvous_ = nullptr;
  }

  tensorflow::RendezvousMgrInterface* const manager_;
  int64_t step_id_ = 0;
  tensorflow::RemoteRendezvous* found_ = nullptr;
  RemoteRendezvous* rendezvous_ = nullptr;
};

RecvService::RecvService(tensorflow::WorkerEnv* env) : env_(env), aborts_(std::make_shared<Aborts>()) {}

RecvService::~RecvService() = default;

void RecvService::Start(const std::shared_ptr<sw_engine>& engine, std::shared_ptr<ServerQueues> queues) {
  engine_ = engine;
  queues_ = std::move(queues);
}

void* RecvService::KeyNew(sw_bytes prefix) { return Key::Parse(prefix, env_).release(); }

void RecvService::KeyFree(void* key) { delete static_cast<Key*>(key); }

void RecvService::OnRecv(const sw_recv_request* requests, size_t n) {
  const std::shared_ptr<sw_engine> engine = engine_.lock();
  if (engine == nullptr) return;
  Step step(env_->rendezvous_mgr);
  for (size_t i = 0; i < n; ++i) {
    Guard(
        "a request for a tensor", [&] { Serve(requests[i], engine, &step); },
        [&](const Status& thrown) { ReplyError(engine.get(), requests[i].ticket, thrown); });
  }
}

void RecvService::Serve(const sw_recv_request& request, const std::shared_ptr<sw_engine>& engine, Step* step) {
  const Key* key = static_cast<const Key*>(request.key);
  if (key == nullptr) {
    ReplyError(engine.get(), request.ticket, MakeStatus(kInvalidArgument, "a request without a rendezvous key"));
    return;
  }
  if (!key->valid().ok()) {
    ReplyError(engine.get(), request.ticket, key->valid());
    return;
  }
  RemoteRendezvous* rendezvous = step->Find(request.step_id);
  if (rendezvous == nullptr) {
    ReplyError(
        engine.get(), request.ticket,
        MakeStatus(kInternal, "the rendezvous of step " + std::to_string(request.step_id) + " is not starwire's"));
    return;
  }
  Answer answer{engine, request.ticket, key->source(), key->host()};
  if (request.frame_id == 0 && request.iter_id == 0) {
    rendezvous->ServeAsync(key->outside_loops(), std::move(answer));
    return;
  }
  Rendezvous::ParsedKey in_loop;
  Status status = key->InLoop(request.frame_id, request.iter_id, &in_loop);
  if (!status.ok()) {
    answer.Refuse(status);
    return;
  }
  rendezvous->ServeAsync(in_loop, std::move(answer));
}

void RecvService::OnCancel(sw_ticket, int64_t step_id, bool peer_gone) {
  const std::shared_ptr<sw_engine> engine = engine_.lock();
  if (engine == nullptr) return;
  {
    std::lock_guard<std::mutex> lock(aborts_->mu);
    if (!aborts_->due.insert(step_id).second) return;
  }
  tensorflow::RemoteRendezvous* rendezvous = TakeReference(env_->rendezvous_mgr->Find(step_id));
  if (IsOfEagerContext(rendezvous, step_id)) {
    // An abort would end other copies as well. The tensor is dropped if it is produced: each copy has its own key.
    rendezvous->Unref();
    std::lock_guard<std::mutex> lock(aborts_->mu);
    aborts_->due.erase(step_id);
    return;
  }
  const LogBudget::Say say = abort_lines_.Take();
  if (say != LogBudget::Say::kNothing) {
    LOG(WARNING) << "starwire: " << (peer_gone ? "the peer disconnected" : "the peer gave up")
                 << " while waiting for tensors of step " << std::to_string(step_id) << ": the step is aborted"
                 << (say == LogBudget::Say::kLastLine ? " (repeats are suppressed for a minute)" : "");
  }
  queues_->urgent.RunAfter(kAbortDelay, [rendezvous, step_id, aborts = aborts_] {
    rendezvous->StartAbort(MakeStatus(kAborted, "Step " + std::to_string(step_id)));
    rendezvous->Unref();
    std::lock_guard<std::mutex> lock(aborts->mu);
    aborts->due.erase(step_id);
  });
}

}  // namespace starwire
