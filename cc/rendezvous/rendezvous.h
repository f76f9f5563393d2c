// The receiving side of the rendezvous: fetches tensors that other tasks produce over starwire.
#ifndef STARWIRE_CC_RENDEZVOUS_RENDEZVOUS_H_
#define STARWIRE_CC_RENDEZVOUS_RENDEZVOUS_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "cc/base/compat.h"
#include "cc/rendezvous/route.h"
#include "cc/worker/step_handles.h"
#include "tensorflow/core/distributed_runtime/base_rendezvous_mgr.h"

namespace starwire {

// State that a feature keeps for a step.
class StepState {
 public:
  virtual ~StepState() = default;
  // The step has failed, or was cancelled, perhaps before this object was made, which may stay for ever.
  virtual void Aborted() {}
};

// The rendezvous of one step.
class RemoteRendezvous : public tensorflow::BaseRemoteRendezvous {
 public:
  RemoteRendezvous(const tensorflow::WorkerEnv* env, StepId step_id, std::shared_ptr<HandleBoard> board);

  // Goes straight to the network for tensors of other tasks. The base class would first copy the key and wrap `done`.
  void RecvAsync(const ParsedKey& key, const tensorflow::Rendezvous::Args& args, DoneCallback done) override;
  Status Send(const ParsedKey& key, const tensorflow::Rendezvous::Args& args, const tensorflow::Tensor& value,
              bool is_dead) override;
  // What DeepRec's operations ask for, and TensorFlow's never do; so without `override`. Several tensors at once are as
  // many receives. A receive that releases a sender's tokens would have to tell the sender, which no call of ours does.
  using FusedDone = std::function<void(const Status&, const std::vector<tensorflow::Rendezvous::Args>&,
                                       const tensorflow::Rendezvous::Args&, const std::vector<tensorflow::Tensor>&,
                                       const std::vector<bool>&)>;
  virtual void FuseRecvFromRemoteAsync(const std::vector<ParsedKey>& keys, const tensorflow::Rendezvous::Args& args,
                                       FusedDone done);
  virtual void FlowControlRecvFromRemoteAsync(const absl::string_view& tag, const ParsedKey& key,
                                              const tensorflow::Rendezvous::Args& args, DoneCallback done);
  // For peers; replaces RecvLocalAsync(), which cannot be overridden. `done` is a DoneCallback.
  template <typename Done>
  void ServeAsync(const ParsedKey& key, Done done) {
    Opens(&waiting_);
    RecvLocalAsync(key, Answering(std::move(done)));
  }

  // `CleanupGraph` aborts the rendezvous of successful steps, too, in case something is still waiting, and TensorFlow
  // never frees an aborted rendezvous. So if nothing is waiting, the clean-up abort is deferred until something does.
  void StartAbort(const Status& status) override;

  // Null until the step is set up.
  tensorflow::WorkerSession* worker_session() { return session(); }
  // The server's; null without one.
  const std::shared_ptr<HandleBoard>& board() const { return board_; }
  // The step's T, a StepState that is created from the step's id at the first call and freed with the step.
  template <typename T>
  T* State() {
    std::lock_guard<std::mutex> lock(states_mu_);
    for (const auto& state : states_) {
      if (auto* found = dynamic_cast<T*>(state.get())) return found;
    }
    auto made = std::make_unique<T>(step_id_);
    T* state = made.get();
    if (was_aborted_) state->Aborted();
    states_.push_back(std::move(made));
    return state;
  }

 protected:
  void RecvFromRemoteAsync(const tensorflow::Rendezvous::ParsedKey& key, const tensorflow::Rendezvous::Args& args,
                           DoneCallback done) override;

 private:
  ~RemoteRendezvous() override;

  // Called before a receive waits, or a value is left for a receiver.
  void Opens(std::atomic<int64_t>* count) {
    count->fetch_add(1);
    if (abort_owed_.load()) PayAbort();
  }
  void PayAbort();
  void Abort(const Status& status);
  // The callback of a receive of one of this task's values.
  template <typename Done>
  auto Answering(Done done) {
    return [this, done = std::move(done)](const Status& status, const tensorflow::Rendezvous::Args& send_args,
                                          const tensorflow::Rendezvous::Args& recv_args,
                                          const tensorflow::Tensor& value, bool is_dead) {
      // Before the answer, which may end the step and trigger the clean-up before this function returns.
      if (status.ok()) unclaimed_.fetch_sub(1);
      waiting_.fetch_sub(1);
      done(status, send_args, recv_args, value, is_dead);
    };
  }

  // 1.15's DeregisterCall() takes only the call.
  template <typename Call>
  auto Deregister(Call* call, const tensorflow::Rendezvous::Args& args, int) -> decltype(DeregisterCall(call, args)) {
    DeregisterCall(call, args);
  }
  template <typename Call>
  void Deregister(Call* call, const tensorflow::Rendezvous::Args&, long) {
    DeregisterCall(call);
  }

  const Route* FindRoute(const ParsedKey& key, const tensorflow::WorkerCacheInterface* cache) const;
  Status MakeRoute(tensorflow::WorkerSession* session, const ParsedKey& key, const Route** out);
  void Fetch(const Route* route, const ParsedKey& key, const tensorflow::Rendezvous::Args& args, DoneCallback done);

  const std::shared_ptr<HandleBoard> board_;

  // Receives without an answer, and values without a receiver. A thread that adds to them reads abort_owed_ afterwards,
  // and a thread that sets that reads them afterwards: at least one of the two sees the other and aborts.
  std::atomic<int64_t> waiting_{0};
  std::atomic<int64_t> unclaimed_{0};
  std::atomic<bool> abort_owed_{false};

  // Only grows, at its head, so it can be walked without a lock.
  std::atomic<Route*> routes_{nullptr};
  std::mutex routes_mu_;  // for adding
  std::mutex states_mu_;
  std::vector<std::unique_ptr<StepState>> states_;  // guarded by states_mu_
  bool was_aborted_ = false;                        // guarded by states_mu_
};

// For GrpcServerOptions::rendezvous_mgr_func. Sources whose worker is not a RemoteWorker are refused with
// FailedPrecondition.
class RendezvousMgr : public tensorflow::BaseRendezvousMgr {
 public:
  explicit RendezvousMgr(const tensorflow::WorkerEnv* env, std::shared_ptr<HandleBoard> board = nullptr);

  void RecvLocalAsync(StepId step_id, const tensorflow::Rendezvous::ParsedKey& key,
                      tensorflow::Rendezvous::DoneCallback done) override;
  void Cleanup(StepId step_id) override;

 protected:
  CreatedRendezvous Create(StepId step_id, const tensorflow::WorkerEnv* env) override;

 private:
  const std::shared_ptr<HandleBoard> board_;
};

}  // namespace starwire

#endif  // STARWIRE_CC_RENDEZVOUS_RENDEZVOUS_H_
