// The kernels of a parameter server's star calls: compiles plans and runs them. Calls, plans in use, kept values and
// limits belong to the transport (crates/engine/src/star/), which asks for these two things through sw_star_handlers.
//
// Plans are compiled once for all sessions that share the server's devices, and once per session where their kernels
// have state or the session has its own devices.
#ifndef STARWIRE_CC_STAR_SERVICE_H_
#define STARWIRE_CC_STAR_SERVICE_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cc/base/background_queue.h"
#include "cc/base/compat.h"
#include "cc/base/handles.h"
#include "cc/star/handles.h"
#include "cc/star/plan.h"
#include "cc/star/state.h"
#include "cc/worker/hooks.h"
#include "include/starwire.h"
#include "tensorflow/core/distributed_runtime/worker_env.h"
#include "tensorflow/core/distributed_runtime/worker_session.h"
#include "tensorflow/core/framework/resource_mgr.h"

namespace starwire {

class StarRun;  // cc/star/run.h

class StarService : public SessionObserver, public std::enable_shared_from_this<StarService> {
 public:
  // `env` outlives Shutdown().
  explicit StarService(tensorflow::WorkerEnv* env);
  ~StarService() override;
  StarService(const StarService&) = delete;
  StarService& operator=(const StarService&) = delete;

  // For sw_handlers.star, with this object as the context; valid as long as it.
  sw_star_handlers Handlers() const;
  // Without it, calls cannot name handles. It outlives Shutdown(). Call it before Start().
  void SetHandles(HandleSource* handles) { handles_ = handles; }
  // Results go to this engine; `task` is for messages. Calls wait for it.
  void Start(std::shared_ptr<sw_engine> engine, const std::string& task, std::shared_ptr<ServerQueues> queues);

  void SessionClosed(const std::string& handle) override;
  void CleansUp(const std::vector<std::string>& containers) override;
  bool KeepsState() const override;
  std::function<void()> ChangesOf(const std::string& session, const tensorflow::GraphDef& graph) override;
  void AllChanged() override;
  void WhenWritten(std::function<void(const Status& status)> then) override;

  // Waits until no call, compilation or plan is left, at most `timeout_ms`. To be called after the engine was stopped,
  // which cancels the calls. False: something still runs.
  bool Shutdown(int64_t timeout_ms);

 private:
  friend class StarRun;

  // Of sw_star_handlers.
  static void Retain(void* object);
  static void Release(void* object);
  static void Spawn(void* ctx, sw_star_job* job);
  static void SpawnThrew(const Status& thrown, void* ctx, sw_star_job* job);
  static sw_code Session(void* ctx, sw_bytes session, uint32_t* is_isolated, sw_star_failure* failure);
  static sw_code Compile(void* ctx, sw_bytes session, sw_bytes plan, sw_star_compiled* compiled,
                         sw_star_failure* failure);
  static void* Run(void* ctx, const sw_star_request* request);
  static void* RunThrew(const Status& thrown, void* ctx, const sw_star_request* request);
  static void Cancel(void* ctx, void* run);
  static sw_code Restore(void* ctx, const sw_state* state, sw_star_failure* failure);
  static void Changes(void* ctx, sw_changes* changes, uint32_t early);
  static void ChangesThrew(const Status& thrown, void* ctx, sw_changes* changes, uint32_t early);
  static void ChangesWereLost(void* ctx);

  void ForgetPlans();
  bool SharesVariables(tensorflow::WorkerSession* session) const;
  Status FindSession(const std::string& handle, std::shared_ptr<tensorflow::WorkerSession>* session, bool* isolated);
  Status CompilePlan(const std::string& handle, sw_bytes bytes, sw_star_compiled* compiled, bool* names_peer);
  // On TensorFlow's pool. Keeps the service alive until `work` has run.
  void Schedule(std::function<void()> work);

  tensorflow::WorkerEnv* const env_;
  StarState state_;
  std::vector<uint64_t> incarnations_;
  HandleSource* handles_ = nullptr;
  std::atomic<bool> started_{false};
  std::shared_ptr<sw_engine> engine_;
  std::string task_;
  std::shared_ptr<ServerQueues> queues_;
  StarPlan::Census plans_alive_ = std::make_shared<std::atomic<int64_t>>(0);
  // Calls and jobs.
  std::atomic<int64_t> running_{0};
  std::atomic<int64_t> containers_{0};
  // For plans whose kernels use none.
  tensorflow::ScopedStepContainer no_container_{0, [](const std::string&) {}, "starwire_none"};
};

}  // namespace starwire

#endif  // STARWIRE_CC_STAR_SERVICE_H_
