// Calls of another task's worker methods, one by one or repeated.
#ifndef STARWIRE_CC_WORKER_WORKER_CALL_H_
#define STARWIRE_CC_WORKER_WORKER_CALL_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "cc/base/channel.h"
#include "cc/base/compat.h"
#include "cc/base/completion_batch.h"
#include "cc/base/guard.h"
#include "cc/base/methods.h"
#include "cc/base/recovery.h"
#include "cc/base/status_codec.h"
#include "tensorflow/core/distributed_runtime/call_options.h"
#include "tensorflow/core/distributed_runtime/worker_interface.h"

namespace starwire {

// Connects TensorFlow's cancel callback to a call that may not have an id yet, or may be over.
class Cancellation {
 public:
  explicit Cancellation(std::shared_ptr<Channel> channel) : channel_(std::move(channel)) {}

  void Started(uint64_t id) {
    bool cancel;
    {
      std::lock_guard<std::mutex> lock(mu_);
      id_ = id;
      started_ = true;
      cancel = wanted_;
    }
    if (cancel) Send();
  }

  bool wanted() {
    std::lock_guard<std::mutex> lock(mu_);
    return wanted_;
  }

  // Runs under the lock of the CallOptions, which the completion takes as well.
  void Cancel() {
    {
      std::lock_guard<std::mutex> lock(mu_);
      wanted_ = true;
      if (!started_) return;
    }
    Send();
  }

 private:
  void Send() {
    static const std::string kMessage = "cancelled by the caller";
    CompletionBatch::DeferScope defer;
    sw_channel_cancel(channel_->handle(), id_, kCancelled, AsBytes(kMessage));
  }

  const std::shared_ptr<Channel> channel_;
  std::mutex mu_;
  uint64_t id_ = 0;  // written once, before started_
  bool started_ = false;
  bool wanted_ = false;
};

using ReplyParser = std::function<Status(sw_bytes reply)>;

// Of OneCall::Start(): the call waits for a connection, at most RecoverMs().
constexpr uint32_t kWaitToConnect = SW_CALL_WAIT_FOR_READY | SW_CALL_DEADLINE_TO_CONNECT;

Status Unexpected(sw_bytes reply);

// One call in progress. Belongs to the transport from sw_channel_call() to Done().
class OneCall {
 public:
  OneCall(std::shared_ptr<Channel> channel, std::string target, ReplyParser parse, tensorflow::StatusCallback done,
          tensorflow::CallOptions* opts)
      : channel_(std::move(channel)),
        target_(std::move(target)),
        parse_(std::move(parse)),
        done_(std::move(done)),
        opts_(opts) {}

  // The reply is not parsed: its `size` bytes go to `to`.
  void ReceiveInto(void* to, size_t size) {
    destination_ = to;
    expected_ = size;
    into_ = true;
  }

  // Called instead of the completion if the connection is lost, so that nobody knows whether the request has run.
  void IfLost(tensorflow::StatusCallback again) { if_lost_ = std::move(again); }

  // Instead of Start(), or if that throws.
  void Fail(const Status& status) {
    status_ = status;
    Finish();
  }

  // Owns itself from here on.
  void Start(Method method, const tensorflow::protobuf::MessageLite& request, uint32_t flags) {
    // After a graph has run, a master only records that and decrements a counter.
    brief_ = method == Method::kRunGraph || method == Method::kCleanupGraph;
    const size_t size = request.ByteSizeLong();
    if (size > static_cast<size_t>(std::numeric_limits<int>::max())) {
      done_(MakeStatus(kInvalidArgument, "a request of " + std::to_string(size) + " bytes to " + target_ +
                                             " does not fit into a protocol buffer (2 GB at most)"));
      delete this;
      return;
    }
    waits_ = flags == kWaitToConnect;
    uint32_t deadline_ms = waits_ ? RecoverMs() : 0;
    std::shared_ptr<Cancellation> cancellation;
    if (opts_ != nullptr) {
      const int64_t timeout = opts_->GetTimeout();
      if (timeout > 0) {
        deadline_ms = static_cast<uint32_t>(std::min<int64_t>(timeout, std::numeric_limits<uint32_t>::max()));
        flags &= ~static_cast<uint32_t>(SW_CALL_DEADLINE_TO_CONNECT);
        waits_ = false;
      }
      cancellation_ = cancellation = std::make_shared<Cancellation>(channel_);
      opts_->SetCancelCallback([cancellation] { cancellation->Cancel(); });
    }
    static const sw_op_vtable kVtable = {sizeof(sw_op_vtable), Guarded<&OneCall::Alloc>,
                                         Guarded<&OneCall::Done, &OneCall::DoneThrew>};
    const std::shared_ptr<Channel> channel = channel_;  // `this` may be gone when sw_channel_call returns
    uint64_t id;
    if (size == 0) {
      id = sw_channel_call(channel->handle(), static_cast<uint32_t>(method), {nullptr, 0}, nullptr, deadline_ms, flags,
                           &kVtable, this);
    } else {
      uint8_t* bytes = new uint8_t[size];
      request.SerializeWithCachedSizesToArray(bytes);
      const sw_part part = {bytes, size};
      const sw_payload payload = {&part, 1, bytes, Guarded<&DeleteArray<uint8_t>>};
      id = sw_channel_call(channel->handle(), static_cast<uint32_t>(method), {nullptr, 0}, &payload, deadline_ms, flags,
                           &kVtable, this);
    }
    if (cancellation != nullptr) cancellation->Started(id);
  }

 private:
  static sw_code Alloc(void* op, sw_bytes, size_t n, const uint64_t* lens, void** bufs) {
    OneCall* call = static_cast<OneCall*>(op);
    if (call->into_) {
      if (n != 1 || lens[0] != call->expected_) {
        call->status_ = call->WrongSize(n == 1 ? lens[0] : 0);
        return kInternal;
      }
      call->size_ = call->expected_;
      bufs[0] = call->destination_;
      return 0;
    }
    if (n != 1 || lens[0] > static_cast<uint64_t>(std::numeric_limits<int>::max())) return kInternal;
    call->size_ = static_cast<size_t>(lens[0]);
    if (call->size_ > 0) {
      call->body_.reset(new (std::nothrow) char[call->size_]);
      if (call->body_ == nullptr) return 8;  // RESOURCE_EXHAUSTED
    }
    bufs[0] = call->body_.get();
    return 0;
  }

  static void Done(void* op, const sw_result* result) {
    OneCall* call = static_cast<OneCall*>(op);
    // An error from Alloc() comes back here; its original message has been stored.
    if (call->status_.ok()) call->status_ = StatusFromResult(*result, call->target_);
    // Sessions recover from a server that is down, but not from a deadline.
    if (call->waits_ && result->from_peer == 0 && result->code == kDeadlineExceeded) {
      call->status_ = MakeStatus(kUnavailable, StatusMessage(call->status_));
    }
    call->lost_ = result->lost != 0;
    const bool brief = call->brief_ && call->status_.ok() && call->size_ <= kBriefBytes;
    CompletionBatch::Add([call] { call->Finish(); },
                         brief ? CompletionBatch::Kind::kBrief : CompletionBatch::Kind::kAny);
  }

  static void DoneThrew(const Status& thrown, void* op, const sw_result*) { static_cast<OneCall*>(op)->Fail(thrown); }

  void Finish() {
    if (opts_ != nullptr) opts_->ClearCancelCallback();
    if (cancellation_ != nullptr && cancellation_->wanted()) status_ = AfterCancellation(status_);
    if (into_) {
      if (status_.ok() && size_ != expected_) status_ = WrongSize(size_);
    } else if (status_.ok()) {
      const sw_bytes reply = {reinterpret_cast<const uint8_t*>(body_.get()), size_};
      const Status parsed = Guard(
          "reading the reply to a worker method", [&] { return parse_(reply); },
          [](const Status& thrown) { return thrown; });
      if (!parsed.ok()) status_ = MakeStatus(StatusNumber(parsed), StatusMessage(parsed) + " (from " + target_ + ")");
    }
    body_.reset();
    (lost_ && if_lost_ != nullptr ? if_lost_ : done_)(status_);
    delete this;
  }

  Status WrongSize(uint64_t size) const {
    return MakeStatus(kInternal, target_ + " has a buffer of " + std::to_string(size) +
                                     " bytes for this collective, but " + std::to_string(expected_) +
                                     " were expected: all workers must call it with the same shapes and types");
  }

  const std::shared_ptr<Channel> channel_;
  const std::string target_;
  const ReplyParser parse_;
  const tensorflow::StatusCallback done_;
  tensorflow::StatusCallback if_lost_;
  tensorflow::CallOptions* const opts_;
  std::shared_ptr<Cancellation> cancellation_;  // null if the call cannot be cancelled
  // Bigger replies carry tensors that have to be decoded.
  static constexpr size_t kBriefBytes = 4096;

  std::unique_ptr<char[]> body_;
  size_t size_ = 0;
  bool into_ = false;
  void* destination_ = nullptr;
  size_t expected_ = 0;
  bool brief_ = false;
  bool waits_ = false;
  bool lost_ = false;
  Status status_;
};

// The cancellation of a request that consists of several calls, one after another. TensorFlow cancels once, also
// between two of them.
class StagedCancellation : public std::enable_shared_from_this<StagedCancellation> {
 public:
  // Until End(). `opts` may be null.
  void Begin(tensorflow::CallOptions* opts) {
    opts_ = opts;
    if (opts == nullptr) return;
    current_.SetTimeout(opts->GetTimeout());
    opts->SetCancelCallback([self = shared_from_this()] {
      self->wanted_.store(true);
      self->current_.StartCancel();
    });
  }

  void End() {
    if (opts_ != nullptr) opts_->ClearCancelCallback();
  }

  // The options of each call, and what is called when it has started.
  tensorflow::CallOptions* current() { return &current_; }
  void Started() {
    if (wanted_.load()) current_.StartCancel();
  }

 private:
  tensorflow::CallOptions* opts_ = nullptr;
  tensorflow::CallOptions current_;
  std::atomic<bool> wanted_{false};
};

// A request that does no harm if it is made twice, which is sent again if its connection is lost.
struct RepeatableCall {
  std::shared_ptr<Channel> channel;
  std::string target;
  Method method;
  std::shared_ptr<const tensorflow::protobuf::MessageLite> request;
  ReplyParser parse;
  tensorflow::StatusCallback done;
  uint32_t flags;
  // Null: it cannot be cancelled.
  std::shared_ptr<StagedCancellation> cancellation = nullptr;
};

// Sends it again as often as a star call.
void CallRepeatedly(RepeatableCall call);

// Calls a method whose reply does not matter, and which may run twice. Waits for a task that is down, at most
// RecoverMs().
void CallTask(const std::shared_ptr<Channel>& channel, const std::string& task, Method method,
              std::shared_ptr<const tensorflow::protobuf::MessageLite> request, tensorflow::StatusCallback done);

}  // namespace starwire

#endif  // STARWIRE_CC_WORKER_WORKER_CALL_H_
