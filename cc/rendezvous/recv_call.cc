#include "cc/rendezvous/recv_call.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "cc/base/compat_profiler.h"
#include "cc/base/completion_batch.h"
#include "cc/base/guard.h"
#include "cc/base/status_codec.h"
#include "tensorflow/core/framework/device_base.h"
#include "tensorflow/core/platform/env.h"

namespace starwire {
namespace {

using tensorflow::AllocatorAttributes;
using tensorflow::Rendezvous;
using tensorflow::Tensor;

// The two numbers after the last ';' of a rendezvous key, "frame:iteration".
struct KeySuffix {
  size_t prefix_size = 0;
  uint64_t frame = 0;
  uint64_t iteration = 0;
};

bool ParseNumber(const char** at, const char* end, uint64_t* out) {
  const char* begin = *at;
  uint64_t value = 0;
  for (; *at < end && **at >= '0' && **at <= '9'; ++*at) {
    if (__builtin_mul_overflow(value, uint64_t{10}, &value) ||
        __builtin_add_overflow(value, static_cast<uint64_t>(**at - '0'), &value)) {
      return false;
    }
  }
  *out = value;
  return *at > begin;
}

bool SplitKey(const char* key, size_t size, KeySuffix* out) {
  const void* found = memrchr(key, ';', size);
  if (found == nullptr) return false;
  const char* at = static_cast<const char*>(found);
  const char* end = key + size;
  out->prefix_size = static_cast<size_t>(at - key);
  ++at;
  if (!ParseNumber(&at, end, &out->frame) || at == end || *at != ':') return false;
  ++at;
  return ParseNumber(&at, end, &out->iteration) && at == end;
}

}  // namespace

const sw_op_vtable RecvCall::kVtable = {sizeof(sw_op_vtable), Guarded<&RecvCall::OnAlloc, &RecvCall::AllocThrew>,
                                        Guarded<&RecvCall::OnDone, &RecvCall::DoneThrew>};

RecvCall* RecvCall::New(Rendezvous* rendezvous, const Route* route, int64_t step_id, const Rendezvous::ParsedKey& key,
                        const Rendezvous::Args& args, Rendezvous::DoneCallback done) {
  RecvCall* call = Recycler<RecvCall>::Take();
  rendezvous->Ref();
  call->rendezvous_ = rendezvous;
  call->route_ = route;
  call->step_id_ = step_id;
  call->args_ = args;
  call->done_ = std::move(done);
  call->parties_.store(2, std::memory_order_relaxed);
  if (route->logger() != nullptr) {
    call->recorded_key_ = std::string(key.FullKey());
    call->start_micros_ = tensorflow::Env::Default()->NowMicros();
  }
  return call;
}

void RecvCall::Start(const Rendezvous::ParsedKey& key, std::function<void()> received) {
  received_ = std::move(received);
  const auto full = key.FullKey();
  KeySuffix suffix;
  if (!SplitKey(full.data(), full.size(), &suffix)) {
    Fail(MakeStatus(kInternal, "not a rendezvous key: " + std::string(full)));
    Received();
    Leave();
    return;
  }
  if ((begun_ = BeginActivity()) != 0) edge_ = std::string(key.edge_name);
  const uint64_t id =
      sw_channel_recv(route_->channel(), step_id_, {reinterpret_cast<const uint8_t*>(full.data()), suffix.prefix_size},
                      suffix.frame, suffix.iteration, &kVtable, this);
  id_.store(id, std::memory_order_seq_cst);
  if (failed_.load(std::memory_order_seq_cst)) {
    const Status reason = status();
    const std::string message = StatusMessage(reason);
    sw_channel_cancel(route_->channel(), id, StatusNumber(reason), AsBytes(message));
  }
  Leave();
}

void RecvCall::Start(std::function<void()> received) {
  received_ = std::move(received);
  Fail(MakeStatus(kInternal, "a tensor request was started without its key"));
  Received();
  Leave();
}

void RecvCall::StartAbort(const Status& reason) {
  // TensorFlow calls this while it cancels, before its executor sees that the step is cancelled.
  Fail(AfterCancellation(reason));
  const uint64_t id = id_.load(std::memory_order_seq_cst);
  if (id == kNoId) return;
  // The rendezvous holds its locks here, so completions must not run on this thread.
  CompletionBatch::DeferScope defer;
  const std::string message = StatusMessage(reason);
  sw_channel_cancel(route_->channel(), id, StatusNumber(reason), AsBytes(message));
}

Status RecvCall::status() const {
  if (!failed_.load(std::memory_order_acquire)) return OkStatus();
  std::lock_guard<std::mutex> lock(mu_);
  return status_;
}

void RecvCall::Fail(const Status& status) {
  {
    std::lock_guard<std::mutex> lock(mu_);
    if (status_.ok()) status_ = status;
  }
  failed_.store(true, std::memory_order_seq_cst);
}

Status RecvCall::FromPeer(const Status& status) const {
  return MakeStatus(StatusNumber(status), StatusMessage(status) + " (from " + route_->task() + ")");
}

tensorflow::Allocator* RecvCall::HostAllocator() const {
  AllocatorAttributes attributes = args_.alloc_attrs;
  if (!route_->OnHost(attributes)) {
    // Staging memory that the device can read directly.
    attributes.set_on_host(true);
    attributes.set_gpu_compatible(true);
  }
  return route_->destination()->GetAllocator(attributes);
}

sw_code RecvCall::OnAlloc(void* op, sw_bytes meta, size_t n, const uint64_t* lens, void** bufs) {
  auto* call = static_cast<RecvCall*>(op);
  Status status = call->receiver_.Prepare(meta, n, lens, call->HostAllocator(), bufs);
  if (status.ok()) return 0;
  status = call->FromPeer(status);
  call->Fail(status);
  return StatusNumber(status);
}

void RecvCall::OnDone(void* op, const sw_result* result) {
  auto* call = static_cast<RecvCall*>(op);
  if (result->code != 0) {
    // An error from OnAlloc comes back here; its original message has been stored.
    if (!call->failed_.load(std::memory_order_acquire)) call->Fail(StatusFromResult(*result, call->route_->task()));
  } else if (!call->receiver_.prepared()) {
    Status status = call->receiver_.Prepare(result->meta, 0, nullptr, call->HostAllocator(), nullptr);
    if (!status.ok()) call->Fail(call->FromPeer(status));
  }
  CompletionBatch::Add([call] { call->Arrived(); }, call->IsBrief());
}

sw_code RecvCall::AllocThrew(const Status& thrown, void* op, sw_bytes, size_t, const uint64_t*, void**) {
  static_cast<RecvCall*>(op)->Fail(thrown);
  return StatusNumber(thrown);
}

void RecvCall::DoneThrew(const Status& thrown, void* op, const sw_result*) {
  auto* call = static_cast<RecvCall*>(op);
  call->Fail(thrown);
  call->Received();
}

CompletionBatch::Kind RecvCall::IsBrief() const {
  if (failed_.load(std::memory_order_acquire)) return CompletionBatch::Kind::kAny;
  // The executor propagates the tensor and passes ready kernels to its pool. A device may have to be waited for.
  const TensorEncoding encoding = receiver_.header().encoding;
  const bool whole = encoding == TensorEncoding::kNone || encoding == TensorEncoding::kRaw;
  return whole && route_->OnHost(AllocatorAttributes()) ? CompletionBatch::Kind::kBrief : CompletionBatch::Kind::kAny;
}

void RecvCall::Arrived() {
  const bool on_its_way = Guard(
      "receiving a tensor", [this] { return Take(); },
      [this](const Status& thrown) {
        Fail(FromPeer(thrown));
        return false;
      });
  if (!on_its_way) Received();
}

bool RecvCall::Take() {
  if (!failed_.load(std::memory_order_acquire)) {
    const TensorHeader& header = receiver_.header();
    const bool on_host = header.is_dead || route_->OnHost(args_.alloc_attrs);
    if (!on_host && header.encoding == TensorEncoding::kFused) {
      // Both ends of a fused transfer are on the CPUs of their tasks.
      Fail(FromPeer(Malformed("fused tensors for " + route_->destination()->name())));
    } else if (!on_host && header.encoding == TensorEncoding::kProto) {
      // Objects may contain tensors, which the device copies one by one.
      Status status = MakeOnDevice();
      if (!status.ok()) Fail(FromPeer(status));
    } else {
      Status status = receiver_.Finish(HostAllocator());
      if (status.ok() && receiver_.fused_tensors() != 0) {
        sw_channel_count_fused(route_->channel(), receiver_.fused_tensors());
      }
      if (!status.ok()) {
        Fail(FromPeer(status));
      } else if (!on_host && receiver_.tensor().NumElements() > 0) {
        return CopyToDevice();
      }
    }
  }
  return false;
}

void RecvCall::Received() {
  // The callback recycles this object, so move it out first.
  const std::function<void()> received = std::move(received_);
  received();
}

Status RecvCall::MakeOnDevice() {
  tensorflow::TensorProto proto;
  Status status = receiver_.ParseProto(&proto);
  if (!status.ok()) return status;
  return route_->destination()->MakeTensorFromProto(proto, args_.alloc_attrs, receiver_.mutable_tensor());
}

bool RecvCall::CopyToDevice() {
  if (args_.device_context == nullptr) {
    Fail(MakeStatus(kInternal, "no device context for " + route_->destination()->name()));
    return false;
  }
  // The copy uses both until its callback runs.
  struct Copy {
    Tensor host;
    Tensor device;
  };
  auto* copy = new Copy;
  copy->host = receiver_.tensor();
  copy->device = Tensor(route_->destination()->GetAllocator(args_.alloc_attrs), copy->host.dtype(), copy->host.shape());
  if (!copy->device.IsInitialized()) {
    Fail(MakeStatus(kResourceExhausted, "out of memory on " + route_->destination()->name() +
                                            " for a received tensor of " + std::to_string(copy->host.TotalBytes()) +
                                            " bytes"));
    delete copy;
    return false;
  }
  args_.device_context->CopyCPUTensorToDevice(&copy->host, route_->destination(), &copy->device,
                                              [this, copy](const Status& status) {
                                                if (status.ok()) {
                                                  *receiver_.mutable_tensor() = std::move(copy->device);
                                                } else {
                                                  Fail(status);
                                                }
                                                delete copy;
                                                Received();
                                              });
  return true;
}

void RecvCall::Record() {
  const int64_t end = tensorflow::Env::Default()->NowMicros();
  // The sender's clock may differ from ours: clamp its time to between the request and the answer.
  int64_t start = start_micros_;
  const int64_t sent = receiver_.header().send_start_micros;
  if (sent != 0) start = std::min(std::max(start, sent), end - 1);
  Rendezvous::ParsedKey key;
  if (!Rendezvous::ParseKey(recorded_key_, &key).ok()) return;
  route_->logger()->RecordRecvTensor(step_id_, start, end, std::string(key.edge_name), std::string(key.src_device),
                                     std::string(key.dst_device),
                                     static_cast<int64_t>(receiver_.header().payload_bytes));
}

void RecvCall::Complete() {
  const Status final_status = status();
  if (final_status.ok() && route_->logger() != nullptr) Record();
  EndActivity(begun_, [this] { return "RecvTensor#tensor=" + edge_ + ",task=" + route_->task() + "#"; });
  begun_ = 0;
  const Rendezvous::DoneCallback done = std::move(done_);
  const Rendezvous::Args args = args_;
  Tensor tensor;
  bool is_dead = false;
  if (final_status.ok()) {
    tensor = std::move(*receiver_.mutable_tensor());
    is_dead = receiver_.header().is_dead;
  }
  // `done` may end the step and trigger its clean-up, which aborts a rendezvous that is still referenced and logs a
  // warning.
  Leave();
  done(final_status, Rendezvous::Args(), args, tensor, is_dead);
}

void RecvCall::CompleteUnstarted() {
  parties_.store(1, std::memory_order_relaxed);
  Complete();
}

void RecvCall::Leave() {
  if (parties_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  Rendezvous* rendezvous = rendezvous_;
  rendezvous_ = nullptr;
  route_ = nullptr;
  args_ = Rendezvous::Args();
  done_ = nullptr;
  received_ = nullptr;
  receiver_.Reset();
  id_.store(kNoId, std::memory_order_relaxed);
  if (failed_.load(std::memory_order_relaxed)) {
    failed_.store(false, std::memory_order_relaxed);
    std::lock_guard<std::mutex> lock(mu_);
    status_ = OkStatus();
  }
  if (!recorded_key_.empty()) recorded_key_.clear();
  Recycler<RecvCall>::Give(this);
  rendezvous->Unref();
}

}  // namespace starwire
