// The receive of one tensor.
#ifndef STARWIRE_CC_RENDEZVOUS_RECV_CALL_H_
#define STARWIRE_CC_RENDEZVOUS_RECV_CALL_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>

#include "cc/base/compat.h"
#include "cc/base/completion_batch.h"
#include "cc/base/recycler.h"
#include "cc/rendezvous/route.h"
#include "cc/tensor/codec.h"
#include "include/starwire.h"
#include "tensorflow/core/distributed_runtime/base_rendezvous_mgr.h"

namespace starwire {

// Two parties use a call: the one that starts it, until Start() returns, and the one that completes it, until it has
// passed the tensor on. The last one recycles the call, because the answer may arrive before Start() returns.
class RecvCall : public tensorflow::BaseRecvTensorCall {
 public:
  // Keeps `rendezvous`, and with it `route`, until the call is recycled.
  static RecvCall* New(tensorflow::Rendezvous* rendezvous, const Route* route, int64_t step_id,
                       const tensorflow::Rendezvous::ParsedKey& key, const tensorflow::Rendezvous::Args& args,
                       tensorflow::Rendezvous::DoneCallback done);

  // Sends the request. `key` is the one given to New. Calls `received` once, when the tensor is at its destination or
  // the call has failed.
  void Start(const tensorflow::Rendezvous::ParsedKey& key, std::function<void()> received);
  // Passes the tensor or the error to the requester, and ends the completing party's use of the call.
  void Complete();
  // For a call that was aborted before Start().
  void CompleteUnstarted();

  const tensorflow::Rendezvous::Args& args() const { return args_; }

  void Start(std::function<void()> received) override;
  void StartAbort(const Status& reason) override;
  Status status() const override;

  RecvCall* next_free = nullptr;

 private:
  friend class Recycler<RecvCall>;
  RecvCall() = default;
  ~RecvCall() override = default;

  static sw_code OnAlloc(void* op, sw_bytes meta, size_t n, const uint64_t* lens, void** bufs);
  static void OnDone(void* op, const sw_result* result);
  static sw_code AllocThrew(const Status& thrown, void* op, sw_bytes meta, size_t n, const uint64_t* lens, void** bufs);
  static void DoneThrew(const Status& thrown, void* op, const sw_result* result);
  static const sw_op_vtable kVtable;

  // Records the error unless there is an earlier one: the first is the cause.
  void Fail(const Status& status);
  Status FromPeer(const Status& status) const;
  CompletionBatch::Kind IsBrief() const;
  void Arrived();
  void Received();
  // Both return true if Received() will be called later.
  bool Take();
  bool CopyToDevice();
  Status MakeOnDevice();
  void Record();
  void Leave();

  tensorflow::Allocator* HostAllocator() const;

  static constexpr uint64_t kNoId = ~uint64_t{0};

  tensorflow::Rendezvous* rendezvous_ = nullptr;
  const Route* route_ = nullptr;
  int64_t step_id_ = 0;
  tensorflow::Rendezvous::Args args_;
  tensorflow::Rendezvous::DoneCallback done_;
  std::function<void()> received_;
  TensorReceiver receiver_;

  std::atomic<int> parties_{0};
  // StartAbort() stores failed_ and then reads id_; Start() stores id_ and then reads failed_. At least one of them
  // sees the other's store and cancels.
  std::atomic<uint64_t> id_{kNoId};
  std::atomic<bool> failed_{false};
  mutable std::mutex mu_;
  Status status_;  // guarded by mu_

  // Only for the profiler.
  int64_t begun_ = 0;
  std::string edge_;
  // Only for timelines.
  std::string recorded_key_;
  int64_t start_micros_ = 0;
};

}  // namespace starwire

#endif  // STARWIRE_CC_RENDEZVOUS_RECV_CALL_H_
