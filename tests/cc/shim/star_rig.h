// For tests of a parameter server that serves star calls over real connections.
#ifndef STARWIRE_TESTS_STAR_RIG_H_
#define STARWIRE_TESTS_STAR_RIG_H_

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cc/base/methods.h"
#include "cc/base/status_codec.h"
#include "cc/star/call_codec.h"
#include "cc/star/service.h"
#include "cc/star/value_codec.h"
#include "cc/worker/worker.h"
#include "tensorflow/core/distributed_runtime/call_options.h"
#include "tensorflow/core/distributed_runtime/graph_mgr.h"
#include "tensorflow/core/distributed_runtime/session_mgr.h"
#include "tensorflow/core/distributed_runtime/worker_cache_wrapper.h"
#include "tensorflow/core/framework/graph.pb.h"
#include "tensorflow/core/framework/step_stats.pb.h"
#include "tensorflow/core/framework/tensor_util.h"
#include "tensorflow/core/public/version.h"
#include "tests/cc/shim/rig.h"

namespace starwire {

using tensorflow::DT_FLOAT;
using tensorflow::DT_RESOURCE;
using tensorflow::GraphDef;
using tensorflow::NodeDef;
using tensorflow::Tensor;
using tensorflow::TensorShape;

inline constexpr char kCpu[] = "/job:ps/replica:0/task:0/device:CPU:0";

inline Tensor Floats(std::vector<float> values) {
  Tensor tensor(DT_FLOAT, TensorShape({static_cast<int64_t>(values.size())}));
  for (size_t i = 0; i < values.size(); ++i) tensor.flat<float>()(i) = values[i];
  return tensor;
}

// Builds the graph of a star call.
class Plan {
 public:
  Plan() { def_.mutable_versions()->set_producer(TF_GRAPH_DEF_VERSION); }
  NodeDef* Add(const std::string& name, const std::string& op, const std::vector<std::string>& inputs) {
    NodeDef* node = def_.add_node();
    node->set_name(name);
    node->set_op(op);
    node->set_device(kCpu);
    for (const std::string& input : inputs) node->add_input(input);
    return node;
  }
  void Type(NodeDef* node, tensorflow::DataType type, const std::string& attribute = "T") {
    (*node->mutable_attr())[attribute].set_type(type);
  }
  void Arg(int index, const std::string& name, tensorflow::DataType type = DT_FLOAT) {
    NodeDef* node = Add(name, "_Arg", {});
    Type(node, type);
    (*node->mutable_attr())["index"].set_i(index);
  }
  void Retval(int index, const std::string& of, tensorflow::DataType type = DT_FLOAT) {
    NodeDef* node = Add("retval_" + std::to_string(index), "_Retval", {of});
    Type(node, type);
    (*node->mutable_attr())["index"].set_i(index);
  }
  void Variable(const std::string& name) {
    NodeDef* node = Add(name, "VarHandleOp", {});
    Type(node, DT_FLOAT, "dtype");
    (*node->mutable_attr())["shape"].mutable_shape()->set_unknown_rank(true);
    (*node->mutable_attr())["shared_name"].set_s(name);
  }
  void Read(const std::string& name, const std::string& variable) {
    Type(Add(name, "ReadVariableOp", {variable}), DT_FLOAT, "dtype");
  }
  void Assign(const std::string& name, const std::string& variable, const std::string& value,
              const std::string& op = "AssignVariableOp") {
    Type(Add(name, op, {variable, value}), DT_FLOAT, "dtype");
  }
  void Constant(const std::string& name, const Tensor& value) {
    NodeDef* node = Add(name, "Const", {});
    Type(node, value.dtype(), "dtype");
    value.AsProtoTensorContent((*node->mutable_attr())["value"].mutable_tensor());
  }
  void Queue(const std::string& name) {
    NodeDef* node = Add(name, "FIFOQueueV2", {});
    (*node->mutable_attr())["component_types"].mutable_list()->add_type(DT_FLOAT);
    (*node->mutable_attr())["shared_name"].set_s(name);
  }
  std::string bytes() const { return def_.SerializeAsString(); }
  GraphDef* def() { return &def_; }

 private:
  GraphDef def_;
};

// A worker cache without workers.
class NoWorkers : public tensorflow::WorkerCacheWrapper {
 public:
  NoWorkers() : WorkerCacheWrapper(nullptr) {}
  void SetLogging(bool) override {}
  void ClearLogs() override {}
};

// The result of a call.
struct Result {
  Status status;
  StarReply reply = {};
  std::vector<StarValue> values;
  std::string extra;

  float first(size_t i = 0) const { return values.at(i).tensor.flat<float>()(0); }
};

// A call in flight.
class Call {
 public:
  bool Wait(std::chrono::milliseconds patience = kPatience) {
    std::unique_lock<std::mutex> lock(mu_);
    return changed_.wait_for(lock, patience, [this] { return done_; });
  }
  Result result;
  uint64_t id = 0;

  static const sw_op_vtable* Vtable() {
    static const sw_op_vtable kVtable = {sizeof(sw_op_vtable), &Call::Alloc, &Call::Done};
    return &kVtable;
  }

 private:
  static sw_code Alloc(void* op, sw_bytes meta, size_t n, const uint64_t* lens, void** bufs) {
    Call* call = static_cast<Call*>(op);
    call->prepared_ = true;
    Status status = DecodeStarReply(meta, &call->result.reply);
    if (status.ok()) {
      const size_t table = call->result.reply.table;
      status = call->in_.Prepare({meta.data + table, meta.len - table}, n, lens, call->result.reply.stats_bytes,
                                 tensorflow::cpu_allocator(), bufs);
    }
    EXPECT_TRUE(status.ok()) << status;
    return StatusNumber(status);
  }
  static void Done(void* op, const sw_result* result) {
    Call* call = static_cast<Call*>(op);
    Status status = StatusFromResult(*result, kPs);
    if (status.ok() && result->meta.len > 0) {
      if (!call->prepared_) {
        status = DecodeStarReply(result->meta, &call->result.reply);
        if (status.ok() && (call->result.reply.flags & kRegister) == 0) {
          const size_t table = call->result.reply.table;
          status = call->in_.Prepare({result->meta.data + table, result->meta.len - table}, 0, nullptr, 0,
                                     tensorflow::cpu_allocator(), nullptr);
          call->prepared_ = true;
        }
      }
      if (status.ok() && call->prepared_) {
        status = call->in_.Finish(tensorflow::cpu_allocator(), &call->result.values);
        call->result.extra = call->in_.extra();
      }
    }
    std::lock_guard<std::mutex> lock(call->mu_);
    call->result.status = status;
    call->done_ = true;
    call->changed_.notify_all();
  }

  std::mutex mu_;
  std::condition_variable changed_;
  ValueDecoder in_;
  bool prepared_ = false;
  bool done_ = false;
};

class Task : public EngineTask {
 public:
  Task(const std::string& job, const Cluster& cluster) : EngineTask(job) {
    sessions = std::make_unique<tensorflow::SessionMgr>(
        &env, name, std::make_unique<NoWorkers>(),
        [](const tensorflow::ServerDef&, tensorflow::WorkerCacheInterface**) {
          return MakeStatus(kUnimplemented, "no clusters");
        },
        nullptr);
    env.session_mgr = sessions.get();
    Start("star_server", cluster);
  }
  ~Task() {
    engine->Stop();
    star.reset();
    sessions.reset();
  }
  void NewSession(const std::string& handle, bool isolated = false) {
    const Status status = sessions->CreateSession(handle, tensorflow::ServerDef(), isolated);
    EXPECT_TRUE(status.ok()) << status;
  }
  double Metric(const std::string& metric) const { return EngineMetric("star_" + metric); }
  // Waits until the metric has this value.
  void ExpectMetric(const std::string& metric, double value) const {
    const auto give_up = std::chrono::steady_clock::now() + kPatience;
    while (Metric(metric) != value && std::chrono::steady_clock::now() < give_up) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    EXPECT_EQ(Metric(metric), value) << metric;
  }

  std::unique_ptr<tensorflow::SessionMgr> sessions;
};

class StarServiceTest : public testing::Test {
 protected:
  void SetUp() override { Start({}); }
  void TearDown() override { Stop(); }

  void Start(const std::vector<std::pair<const char*, const char*>>& variables) {
    for (const auto& variable : variables) setenv(variable.first, variable.second, 1);
    const Cluster cluster;
    ps_ = std::make_unique<Task>("ps", cluster);
    worker_ = std::make_unique<Task>("worker", cluster);
    ASSERT_TRUE(worker_->engine->OpenChannel(kPs, "127.0.0.1:1", &channel_).ok());
    for (const auto& variable : variables) unsetenv(variable.first);
    ps_->NewSession("one");
    ps_->NewSession("two");
  }
  void Stop() {
    channel_.reset();
    worker_.reset();
    ps_.reset();
  }
  void Restart(const std::vector<std::pair<const char*, const char*>>& variables) {
    Stop();
    Start(variables);
  }

  std::unique_ptr<Call> Send(Method method, const std::vector<uint8_t>& meta, const sw_payload* payload) {
    auto call = std::make_unique<Call>();
    call->id = sw_channel_call(channel_->handle(), static_cast<uint32_t>(method), {meta.data(), meta.size()}, payload,
                               0, SW_CALL_WAIT_FOR_READY, Call::Vtable(), call.get());
    return call;
  }
  std::unique_ptr<Call> Begin(const StarCall& head, const std::vector<StarValue>& feeds) {
    std::vector<uint8_t> meta;
    EXPECT_TRUE(EncodeStarCall(head, &meta).ok());
    ValueEncoder cargo;
    EXPECT_TRUE(cargo.Pack(feeds.data(), feeds.size(), &meta).ok());
    return Send(Method::kStarCall, meta, cargo.Take());
  }
  Result Run(const StarCall& head, const std::vector<StarValue>& feeds) {
    auto call = Begin(head, feeds);
    EXPECT_TRUE(call->Wait());
    return std::move(call->result);
  }
  Status Register(const std::string& session, const std::string& plan, const PlanHash& hash, uint64_t incarnation = 0) {
    std::vector<uint8_t> meta;
    EXPECT_TRUE(EncodeStarRegister(incarnation, hash, AsBytes(session), &meta).ok());
    const sw_part part = {plan.data(), plan.size()};
    const sw_payload payload = {&part, 1, nullptr, nullptr};
    auto call = Send(Method::kStarRegister, meta, &payload);
    EXPECT_TRUE(call->Wait());
    return call->result.status;
  }
  StarCall Head(const std::string& session, const std::string& plan, int64_t step = 1) {
    StarCall head;
    head.session = AsBytes(*sessions_.insert(session).first);
    head.plan = PlanHashOf(AsBytes(plan));
    head.step_id = step;
    head.incarnation = ps_->incarnation();
    return head;
  }
  // Registers the plan if requested, as a worker does.
  Result Do(const StarCall& head, const std::string& plan, const std::vector<StarValue>& feeds = {}) {
    Result result = Run(head, feeds);
    for (int i = 0; i < 3 && (result.reply.flags & kRegister) != 0; ++i) {
      ++registrations_;
      const Status status = Register(AsString(head.session), plan, head.plan);
      if (!status.ok()) {
        result.status = status;
        return result;
      }
      result = Run(head, feeds);
    }
    return result;
  }
  Result Do(const std::string& session, const std::string& plan, const std::vector<StarValue>& feeds = {}) {
    return Do(Head(session, plan), plan, feeds);
  }

  // Assigns feed 0 to a variable.
  static std::string Push(const std::string& variable) {
    Plan plan;
    plan.Variable(variable);
    plan.Arg(0, "x");
    plan.Assign("assign", variable, "x");
    return plan.bytes();
  }
  static std::string Pull(const std::string& variable) {
    Plan plan;
    plan.Variable(variable);
    plan.Read("read", variable);
    plan.Retval(0, "read");
    return plan.bytes();
  }

  std::unique_ptr<Task> ps_, worker_;
  std::shared_ptr<Channel> channel_;
  std::set<std::string> sessions_;
  int registrations_ = 0;
};

}  // namespace starwire

#endif  // STARWIRE_TESTS_STAR_RIG_H_
