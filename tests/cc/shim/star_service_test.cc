// A parameter server that serves star calls over real connections.
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
#include "cc/star/cargo.h"
#include "cc/star/service.h"
#include "cc/star/wire.h"
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
namespace {

using tensorflow::DT_FLOAT;
using tensorflow::DT_RESOURCE;
using tensorflow::GraphDef;
using tensorflow::NodeDef;
using tensorflow::Tensor;
using tensorflow::TensorShape;

constexpr char kCpu[] = "/job:ps/replica:0/task:0/device:CPU:0";

Tensor Floats(std::vector<float> values) {
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
  StarReply reply;
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
    size_t consumed = 0;
    Status status = DecodeStarReply(meta, &call->result.reply, &consumed);
    if (status.ok()) {
      status = call->in_.Prepare({meta.data + consumed, meta.len - consumed}, n, lens, call->result.reply.stats_bytes,
                                 tensorflow::cpu_allocator(), bufs);
    }
    EXPECT_TRUE(status.ok()) << status;
    return StatusNumber(status);
  }
  static void Done(void* op, const sw_result* result) {
    Call* call = static_cast<Call*>(op);
    Status status = StatusFromResult(*result, kPs);
    if (status.ok() && result->meta.len > 0) {
      size_t consumed = 0;
      if (!call->prepared_) {
        status = DecodeStarReply(result->meta, &call->result.reply, &consumed);
        if (status.ok() && (call->result.reply.flags & StarReply::kRegister) == 0) {
          status = call->in_.Prepare({result->meta.data + consumed, result->meta.len - consumed}, 0, nullptr, 0,
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
  CargoIn in_;
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
  double Metric(const std::string& metric) const {
    const sw_string text = sw_engine_metrics(engine->handle());
    const std::string all(reinterpret_cast<const char*>(text.data), text.len);
    sw_string_free(text);
    const size_t at = all.find("\nstarwire_star_" + metric + "{");
    if (at == std::string::npos) return -1;
    return std::stod(all.substr(all.find("} ", at) + 2));
  }
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
    CargoOut cargo;
    EXPECT_TRUE(cargo.Pack(feeds.data(), feeds.size(), &meta).ok());
    return Send(Method::kStarCall, meta, cargo.Take());
  }
  Result Run(const StarCall& head, const std::vector<StarValue>& feeds) {
    auto call = Begin(head, feeds);
    EXPECT_TRUE(call->Wait());
    return std::move(call->result);
  }
  Status Register(const std::string& session, const std::string& plan, const PlanHash& hash, uint64_t incarnation = 0) {
    StarRegister head;
    head.incarnation = incarnation;
    head.plan = hash;
    head.session = AsBytes(session);
    const sw_part part = {plan.data(), plan.size()};
    const sw_payload payload = {&part, 1, nullptr, nullptr};
    auto call = Send(Method::kStarRegister, EncodeStarRegister(head), &payload);
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
    for (int i = 0; i < 3 && (result.reply.flags & StarReply::kRegister) != 0; ++i) {
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

TEST_F(StarServiceTest, SessionsShareVariablesAndPlans) {
  const std::string push = Push("v"), pull = Pull("v");
  ASSERT_TRUE(Do("one", push, {Floats({3, 4})}).status.ok());
  EXPECT_EQ(registrations_, 1);
  ASSERT_TRUE(Do("two", push, {Floats({5, 6})}).status.ok());
  EXPECT_EQ(registrations_, 1) << "the plan is there already";
  const Result result = Do("one", pull);
  ASSERT_TRUE(result.status.ok()) << result.status;
  EXPECT_EQ(result.first(), 5);
  EXPECT_EQ(Do("two", pull).first(), 5);
  EXPECT_EQ(registrations_, 2);
  ps_->ExpectMetric("plans", 2);
  ps_->ExpectMetric("registrations_total", 2);
}

TEST_F(StarServiceTest, CheapPlansRunOnTheReactor) {
  // Must hold on a busy machine as well.
  Restart({{"STARWIRE_STAR_INLINE_US", "1000000"}});
  const std::string push = Push("v"), pull = Pull("v");
  for (int i = 0; i < 50; ++i) {
    ASSERT_TRUE(Do("one", push, {Floats({static_cast<float>(i)})}).status.ok());
    ASSERT_EQ(Do("one", pull).first(), i);
  }
  EXPECT_GT(ps_->Metric("calls_inline_total"), 50);
}

TEST_F(StarServiceTest, NoFileIsReadOnAReactor) {
  Restart({{"STARWIRE_STAR_INLINE_US", "1000000"}});
  Plan plan;
  plan.Arg(0, "name", tensorflow::DT_STRING);
  plan.Add("read", "ReadFile", {"name"});
  plan.Retval(0, "read", tensorflow::DT_STRING);
  const std::string bytes = plan.bytes();
  Tensor name(tensorflow::DT_STRING, TensorShape({}));
  name.scalar<tensorflow::tstring>()() = "/proc/self/comm";
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(Do("one", bytes, {name}).status.ok());
  EXPECT_EQ(ps_->Metric("calls_inline_total"), 0) << "however fast they were, the next one may be slow";
}

TEST_F(StarServiceTest, LargeTensorsGoBothWays) {
  const std::string push = Push("v"), pull = Pull("v");
  Tensor large(DT_FLOAT, TensorShape({1 << 20}));
  for (int64_t i = 0; i < large.NumElements(); ++i) large.flat<float>()(i) = static_cast<float>(i);
  for (int round = 0; round < 8; ++round) {
    large.flat<float>()(0) = static_cast<float>(round);
    ASSERT_TRUE(Do("one", push, {large}).status.ok());
    const Result result = Do("one", pull);
    ASSERT_TRUE(result.status.ok());
    EXPECT_EQ(result.values[0].tensor.tensor_data(), large.tensor_data());
  }
}

TEST_F(StarServiceTest, ManyStringsGoBothWays) {
  Plan plan;
  plan.Arg(0, "x", tensorflow::DT_STRING);
  plan.Type(plan.Add("same", "Identity", {"x"}), tensorflow::DT_STRING);
  plan.Retval(0, "same", tensorflow::DT_STRING);
  const std::string bytes = plan.bytes();
  Tensor strings(tensorflow::DT_STRING, TensorShape({20000}));
  for (int i = 0; i < 20000; ++i) strings.flat<tensorflow::tstring>()(i) = "string " + std::to_string(i);
  for (int round = 0; round < 6; ++round) {
    const Result result = Do("one", bytes, {strings});
    ASSERT_TRUE(result.status.ok()) << result.status;
    EXPECT_EQ(result.values[0].tensor.flat<tensorflow::tstring>()(19999), "string 19999");
  }
  EXPECT_EQ(ps_->Metric("calls_inline_total"), 0) << "making strings is nothing for a reactor";
}

TEST_F(StarServiceTest, StatefulKernelsBelongToTheSession) {
  Plan plan;
  Tensor shape(tensorflow::DT_INT32, TensorShape({1}));
  shape.flat<int32_t>()(0) = 1;
  plan.Constant("shape", shape);
  NodeDef* random = plan.Add("random", "RandomUniform", {"shape"});
  plan.Type(random, tensorflow::DT_INT32);
  plan.Type(random, DT_FLOAT, "dtype");
  (*random->mutable_attr())["seed"].set_i(1);
  (*random->mutable_attr())["seed2"].set_i(2);
  plan.Retval(0, "random");
  const std::string bytes = plan.bytes();
  std::vector<float> one, two;
  for (int i = 0; i < 3; ++i) one.push_back(Do("one", bytes).first());
  EXPECT_EQ(registrations_, 1);
  for (int i = 0; i < 3; ++i) two.push_back(Do("two", bytes).first());
  EXPECT_EQ(registrations_, 2) << "a plan with a state is each session's own";
  EXPECT_EQ(one, two) << "each session has the generator from its beginning";
  EXPECT_NE(one[0], one[1]);
  ps_->ExpectMetric("plans", 2);
  ps_->star->SessionClosed("one");
  ps_->ExpectMetric("plans", 1);
  ps_->star->SessionClosed("two");
  ps_->ExpectMetric("plans", 0);
}

TEST_F(StarServiceTest, PlansAreDroppedWhenTheWorkerClosesTheirSession) {
  StarwireWorker worker(&ps_->env, tensorflow::ConfigProto(), {});
  worker.SetSessionObserver(ps_->star);
  Plan plan;
  plan.Queue("queue");
  plan.Add("size", "QueueSizeV2", {"queue"});
  plan.Retval(0, "size", tensorflow::DT_INT32);
  const std::string of_session = plan.bytes(), of_all = Push("v");
  ASSERT_TRUE(Do("one", of_session).status.ok());
  ASSERT_TRUE(Do("one", of_all, {Floats({1})}).status.ok());
  ps_->ExpectMetric("plans", 2);
  tensorflow::CallOptions opts;
  tensorflow::DeleteWorkerSessionRequest request;
  tensorflow::DeleteWorkerSessionResponse response;
  request.set_session_handle("one");
  Status status = MakeStatus(2, "not called");
  worker.DeleteWorkerSessionAsync(&opts, &request, &response, [&status](const Status& s) { status = s; });
  EXPECT_TRUE(status.ok()) << status;
  ps_->ExpectMetric("plans", 1);
  EXPECT_EQ(StatusNumber(Do("one", of_all, {Floats({1})}).status), 10);
  EXPECT_TRUE(Do("two", of_all, {Floats({1})}).status.ok());
  EXPECT_EQ(registrations_, 2);
  tensorflow::CleanupAllRequest cleanup;
  tensorflow::CleanupAllResponse cleaned;
  worker.CleanupAllAsync(&cleanup, &cleaned, [&status](const Status& s) { status = s; });
  EXPECT_TRUE(status.ok()) << status;
  ps_->ExpectMetric("plans", 0);
}

TEST_F(StarServiceTest, IsolatedSessionsHaveTheirOwn) {
  ps_->NewSession("alone", /*isolated=*/true);
  const std::string push = Push("v"), pull = Pull("v");
  ASSERT_TRUE(Do("one", push, {Floats({1})}).status.ok());
  ASSERT_TRUE(Do("alone", push, {Floats({2})}).status.ok());
  EXPECT_EQ(registrations_, 2);
  EXPECT_EQ(Do("one", pull).first(), 1);
  EXPECT_EQ(Do("alone", pull).first(), 2);
  ps_->star->SessionClosed("alone");
  ASSERT_TRUE(ps_->sessions->DeleteSession("alone").ok());
  EXPECT_EQ(StatusNumber(Do("alone", pull).status), 10);
}

TEST_F(StarServiceTest, APlanThatWasEvictedIsRegisteredAgain) {
  Restart({{"STARWIRE_STAR_LIMITS", "plans=2"}});
  for (int round = 0; round < 3; ++round) {
    for (const char* variable : {"a", "b", "c"}) {
      ASSERT_TRUE(Do("one", Push(variable), {Floats({static_cast<float>(round)})}).status.ok());
    }
  }
  EXPECT_EQ(registrations_, 9);
  ps_->ExpectMetric("plans", 2);
  ps_->ExpectMetric("evictions_total", 7);
  EXPECT_EQ(Do("two", Pull("a")).first(), 2) << "variables stay";
}

TEST_F(StarServiceTest, EverythingIsForgottenAfterACleanup) {
  const std::string push = Push("v");
  ASSERT_TRUE(Do("one", push, {Floats({1})}).status.ok());
  ps_->star->AllCleanedUp();
  ps_->ExpectMetric("plans", 0);
  ASSERT_TRUE(Do("one", push, {Floats({1})}).status.ok());
  EXPECT_EQ(registrations_, 2);
}

TEST_F(StarServiceTest, ManyWorkersRegisterAtTheSameTime) {
  const std::string push = Push("v");
  std::vector<std::unique_ptr<Call>> calls;
  const PlanHash hash = PlanHashOf(AsBytes(push));
  const sw_part part = {push.data(), push.size()};
  const sw_payload payload = {&part, 1, nullptr, nullptr};
  for (int i = 0; i < 50; ++i) {
    StarRegister head;
    head.plan = hash;
    const std::string session = i % 2 == 0 ? "one" : "two";
    head.session = AsBytes(session);
    calls.push_back(Send(Method::kStarRegister, EncodeStarRegister(head), &payload));
  }
  for (auto& call : calls) {
    ASSERT_TRUE(call->Wait());
    EXPECT_TRUE(call->result.status.ok()) << call->result.status;
  }
  ps_->ExpectMetric("registrations_total", 1);
}

TEST_F(StarServiceTest, OnlyTheNamedPlanIsTaken) {
  const std::string push = Push("v"), other = Push("w");
  const Status status = Register("one", push, PlanHashOf(AsBytes(other)));
  EXPECT_EQ(StatusNumber(status), 3) << status;
  EXPECT_EQ(StatusNumber(Register("one", "nonsense", PlanHashOf(AsBytes(std::string("nonsense"))))), 3);
  Plan unknown;
  unknown.Add("x", "ThereIsNoSuchOperation", {});
  const std::string bytes = unknown.bytes();
  EXPECT_FALSE(Register("one", bytes, PlanHashOf(AsBytes(bytes))).ok());
  EXPECT_EQ(ps_->Metric("plans"), 0);
}

TEST_F(StarServiceTest, ARestartedServerReturnsAborted) {
  const std::string push = Push("v");
  StarCall head = Head("one", push);
  head.incarnation += 1;
  const Result result = Run(head, {Floats({1})});
  EXPECT_EQ(StatusNumber(result.status), 10) << result.status;
  EXPECT_NE(StatusMessage(result.status).find(kPs), std::string::npos);
  EXPECT_EQ(StatusNumber(Register("one", push, head.plan, head.incarnation)), 10);
  EXPECT_EQ(StatusNumber(Run(Head("no such session", push), {Floats({1})}).status), 10);
}

TEST_F(StarServiceTest, ErrorsNameTheNode) {
  const std::string pull = Pull("never_written");
  const Result result = Do("one", pull);
  EXPECT_EQ(StatusNumber(result.status), 9) << result.status;
  EXPECT_NE(StatusMessage(result.status).find("{{node read}}"), std::string::npos) << result.status;
}

TEST_F(StarServiceTest, ACancelledCallStopsWaiting) {
  Plan take, put;
  take.Queue("queue");
  NodeDef* dequeue = take.Add("dequeue", "QueueDequeueV2", {"queue"});
  (*dequeue->mutable_attr())["component_types"].mutable_list()->add_type(DT_FLOAT);
  take.Retval(0, "dequeue");
  put.Queue("queue");
  put.Arg(0, "x");
  NodeDef* enqueue = put.Add("enqueue", "QueueEnqueueV2", {"queue", "x"});
  (*enqueue->mutable_attr())["Tcomponents"].mutable_list()->add_type(DT_FLOAT);
  const std::string take_bytes = take.bytes(), put_bytes = put.bytes();
  ASSERT_TRUE(Register("one", take_bytes, PlanHashOf(AsBytes(take_bytes))).ok());

  auto waiting = Begin(Head("one", take_bytes), {});
  EXPECT_FALSE(waiting->Wait(std::chrono::milliseconds(200)));
  sw_channel_cancel(channel_->handle(), waiting->id, 1, AsBytes(std::string("no longer wanted")));
  ASSERT_TRUE(waiting->Wait());
  EXPECT_EQ(StatusNumber(waiting->result.status), 1);
  ps_->ExpectMetric("calls_total", 1);  // counted when the call ends
  ASSERT_TRUE(Do("one", put_bytes, {Floats({7})}).status.ok());
  EXPECT_EQ(Do("one", take_bytes).first(), 7) << "the cancelled call took the element";
}

TEST_F(StarServiceTest, AStopEndsPendingCalls) {
  Plan take;
  take.Queue("queue");
  NodeDef* dequeue = take.Add("dequeue", "QueueDequeueV2", {"queue"});
  (*dequeue->mutable_attr())["component_types"].mutable_list()->add_type(DT_FLOAT);
  take.Retval(0, "dequeue");
  const std::string bytes = take.bytes();
  ASSERT_TRUE(Register("one", bytes, PlanHashOf(AsBytes(bytes))).ok());
  auto waiting = Begin(Head("one", bytes), {});
  EXPECT_FALSE(waiting->Wait(std::chrono::milliseconds(100)));
  const auto begin = std::chrono::steady_clock::now();
  ps_->engine->Stop();
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
  EXPECT_TRUE(waiting->Wait());
  EXPECT_EQ(StatusNumber(waiting->result.status), 14) << waiting->result.status;
}

TEST_F(StarServiceTest, ValuesStayForLaterCalls) {
  Plan first, second;
  first.Arg(0, "x");
  first.Type(first.Add("neg", "Neg", {"x"}), DT_FLOAT);
  first.Retval(0, "x");
  first.Retval(1, "neg");
  second.Arg(0, "x");
  second.Type(second.Add("square", "Square", {"x"}), DT_FLOAT);
  second.Retval(0, "square");
  const std::string one = first.bytes(), two = second.bytes();

  StarCall keep = Head("one", one, 11);
  keep.keeps = {{1, 5, 0}};
  Result result = Do(keep, one, {Floats({3})});
  ASSERT_TRUE(result.status.ok()) << result.status;
  EXPECT_EQ(result.first(0), 3);
  EXPECT_EQ(result.values[1].kind, StarValue::Kind::kSlot);
  EXPECT_EQ(result.values[1].slot, 5u);
  ps_->ExpectMetric("slots", 1);

  StarCall use = Head("one", two, 11);
  EXPECT_EQ(Do(use, two, {StarValue::Slot(5)}).first(), 9);
  ps_->ExpectMetric("slots", 1);
  EXPECT_EQ(StatusNumber(Do(use, two, {StarValue::Slot(6)}).status), 9);
  use.step_id = 12;
  EXPECT_EQ(StatusNumber(Do(use, two, {StarValue::Slot(5)}).status), 9) << "another step's";

  // The last call frees the slots.
  use.step_id = 11;
  use.flags = StarCall::kLast;
  EXPECT_EQ(Do(use, two, {StarValue::Slot(5)}).first(), 9);
  ps_->ExpectMetric("slots", 0);
  EXPECT_EQ(StatusNumber(Do(use, two, {StarValue::Slot(5)}).status), 9);

  // So does the end of the step …
  keep.keeps = {{1, 5, StarKeep::kAlsoReturned}, {0, 6, 0}};
  result = Do(keep, one, {Floats({3})});
  EXPECT_EQ(result.first(1), -3);
  ps_->ExpectMetric("slots", 2);
  StarEnd end;
  end.step_id = 11;
  const std::string session = "one";
  end.session = AsBytes(session);
  auto ended = Send(Method::kStarEnd, EncodeStarEnd(end), nullptr);
  ASSERT_TRUE(ended->Wait());
  EXPECT_TRUE(ended->result.status.ok());
  ps_->ExpectMetric("slots", 0);

  // … and the end of the connection.
  ASSERT_TRUE(Do(keep, one, {Floats({3})}).status.ok());
  ps_->ExpectMetric("slots", 2);
  channel_.reset();
  worker_->engine->Stop();
  ps_->ExpectMetric("slots", 0);
}

TEST_F(StarServiceTest, LimitsNameThePeer) {
  Restart({{"STARWIRE_STAR_LIMITS", "values=1,calls=1"}});
  Plan plan;
  plan.Arg(0, "x");
  plan.Retval(0, "x");
  const std::string bytes = plan.bytes();
  StarCall keep = Head("one", bytes);
  keep.keeps = {{0, 1, 0}};
  ASSERT_TRUE(Do(keep, bytes, {Floats({3})}).status.ok());
  keep.keeps = {{0, 2, 0}};
  Result result = Do(keep, bytes, {Floats({3})});
  EXPECT_EQ(StatusNumber(result.status), 8) << result.status;
  EXPECT_NE(StatusMessage(result.status).find("/job:worker/replica:0/task:0 keeps 2 values"), std::string::npos)
      << result.status;

  Plan take;
  take.Queue("queue");
  NodeDef* dequeue = take.Add("dequeue", "QueueDequeueV2", {"queue"});
  (*dequeue->mutable_attr())["component_types"].mutable_list()->add_type(DT_FLOAT);
  take.Retval(0, "dequeue");
  const std::string take_bytes = take.bytes();
  ASSERT_TRUE(Register("one", take_bytes, PlanHashOf(AsBytes(take_bytes))).ok());
  auto waiting = Begin(Head("one", take_bytes), {});
  EXPECT_FALSE(waiting->Wait(std::chrono::milliseconds(100)));
  result = Run(Head("one", bytes), {Floats({1})});
  EXPECT_EQ(StatusNumber(result.status), 8) << result.status;
  EXPECT_NE(StatusMessage(result.status).find("STARWIRE_STAR_LIMITS=calls"), std::string::npos) << result.status;
  sw_channel_cancel(channel_->handle(), waiting->id, 1, AsBytes(std::string("enough")));
  EXPECT_TRUE(waiting->Wait());
}

TEST_F(StarServiceTest, ATraceShowsTheCostOfKernels) {
  const std::string push = Push("v");
  StarCall head = Head("one", push);
  head.flags = StarCall::kTrace;
  const Result result = Do(head, push, {Floats({1})});
  ASSERT_TRUE(result.status.ok()) << result.status;
  tensorflow::StepStats stats;
  ASSERT_TRUE(stats.ParseFromString(result.extra));
  ASSERT_EQ(stats.dev_stats_size(), 1);
  EXPECT_EQ(stats.dev_stats(0).device(), kCpu);
  bool found = false;
  for (const auto& node : stats.dev_stats(0).node_stats()) found = found || node.node_name() == "assign";
  EXPECT_TRUE(found);
}

TEST_F(StarServiceTest, WhatDoesNotFitThePlanIsRefused) {
  const std::string push = Push("v");
  ASSERT_TRUE(Do("one", push, {Floats({1})}).status.ok());
  EXPECT_EQ(StatusNumber(Run(Head("one", push), {}).status), 3) << "a feed is missing";
  EXPECT_EQ(StatusNumber(Run(Head("one", push), {Floats({1}), Floats({1})}).status), 3);
  EXPECT_EQ(StatusNumber(Run(Head("one", push), {StarValue::Dead()}).status), 3);
  StarCall keep = Head("one", push);
  keep.keeps = {{0, 1, 0}};
  EXPECT_EQ(StatusNumber(Run(keep, {Floats({1})}).status), 3) << "it has no fetch";
  Tensor integers(tensorflow::DT_INT32, TensorShape({1}));
  integers.flat<int32_t>()(0) = 1;
  const Result result = Run(Head("one", push), {integers});
  EXPECT_FALSE(result.status.ok()) << "a feed of another type";
}

TEST_F(StarServiceTest, GarbageIsRefused) {
  const std::string push = Push("v");
  ASSERT_TRUE(Do("one", push, {Floats({1})}).status.ok());
  std::vector<uint8_t> good;
  ASSERT_TRUE(EncodeStarCall(Head("one", push), &good).ok());
  CargoOut cargo;
  const StarValue feed = Floats({1});
  ASSERT_TRUE(cargo.Pack(&feed, 1, &good).ok());
  const sw_payload* kept = cargo.Take();
  std::mt19937_64 random(3);
  for (int round = 0; round < 600; ++round) {
    std::vector<uint8_t> bad = good;
    if (round % 3 == 0) {
      bad.resize(random() % bad.size());
    } else {
      for (int i = 0; i < 3; ++i) bad[random() % bad.size()] = static_cast<uint8_t>(random());
    }
    const Method method = std::vector<Method>{Method::kStarCall, Method::kStarRegister, Method::kStarEnd}[round % 3];
    const sw_payload payload = {kept->parts, kept->n_parts, nullptr, nullptr};
    auto call = Send(method, bad, round % 2 == 0 ? &payload : nullptr);
    ASSERT_TRUE(call->Wait());
  }
  kept->release(kept->owner);
  EXPECT_TRUE(Do("one", push, {Floats({1})}).status.ok()) << "it serves on";
}

}  // namespace
}  // namespace starwire
