// Real graphs on the lock-free executor, compared with TensorFlow's.
#include "tensorflow/core/common_runtime/executor.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cc/base/completion_batch.h"
#include "cc/executor/session_subgraph.h"
#include "cc/executor/subgraph.h"
#include "cc/star/row_ops.h"
#include "tensorflow/core/common_runtime/device_factory.h"
#include "tensorflow/core/common_runtime/device_mgr.h"
#include "tensorflow/core/common_runtime/graph_constructor.h"
#include "tensorflow/core/common_runtime/step_stats_collector.h"
#include "tensorflow/core/distributed_runtime/worker_session.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/function.h"
#include "tensorflow/core/framework/node_def_builder.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/step_stats.pb.h"
#include "tensorflow/core/framework/tensor_util.h"
#include "tensorflow/core/lib/core/threadpool.h"
#include "tensorflow/core/public/session_options.h"
#include "tensorflow/core/public/version.h"

namespace starwire {
namespace {

using tensorflow::DT_FLOAT;
using tensorflow::Graph;
using tensorflow::GraphDef;
using tensorflow::NodeDef;
using tensorflow::Tensor;
using tensorflow::TensorShape;

constexpr auto kLimit = std::chrono::seconds(60);

Tensor Floats(std::vector<float> values) {
  Tensor tensor(DT_FLOAT, TensorShape({static_cast<int64_t>(values.size())}));
  for (size_t i = 0; i < values.size(); ++i) tensor.flat<float>()(i) = values[i];
  return tensor;
}

Tensor Bool(bool value) {
  Tensor tensor(tensorflow::DT_BOOL, TensorShape({}));
  tensor.scalar<bool>()() = value;
  return tensor;
}

class Done : public Step {
 public:
  void OnDone(const Status& status) override {
    std::lock_guard<std::mutex> lock(mu_);
    status_ = status;
    thread_ = std::this_thread::get_id();
    ++done_;
    changed_.notify_all();
  }
  Status Wait() {
    std::unique_lock<std::mutex> lock(mu_);
    EXPECT_TRUE(changed_.wait_for(lock, kLimit, [this] { return done_ > 0; }));
    EXPECT_EQ(done_, 1) << "a run ends once";
    done_ = 0;
    return status_;
  }

  // After Wait().
  std::thread::id thread() const { return thread_; }

  tensorflow::CancellationManager cancellation;

 private:
  std::thread::id thread_;
  std::mutex mu_;
  std::condition_variable changed_;
  Status status_;
  int done_ = 0;
};

class Frame : public tensorflow::CallFrameInterface {
 public:
  Frame(std::vector<Tensor>* feeds, std::vector<Step::Value>* fetches) : feeds_(*feeds), fetches_(*fetches) {}
  size_t num_args() const override { return feeds_.size(); }
  size_t num_retvals() const override { return fetches_.size(); }
  Status GetArg(int index, const Tensor** value) override {
    *value = &feeds_[index];
    return Status();
  }
  Status SetRetval(int index, const Tensor& value) override {
    fetches_[index] = {value, false};
    return Status();
  }

 private:
  std::vector<Tensor>& feeds_;
  std::vector<Step::Value>& fetches_;
};

class SubgraphTest : public testing::Test {
 protected:
  SubgraphTest() : pool_(tensorflow::Env::Default(), "test", 3) {
    std::vector<std::unique_ptr<tensorflow::Device>> devices;
    EXPECT_TRUE(
        tensorflow::DeviceFactory::AddDevices(tensorflow::SessionOptions(), "/job:localhost/replica:0/task:0", &devices)
            .ok());
    devices_ = std::make_unique<tensorflow::StaticDeviceMgr>(std::move(devices));
    params_.device = devices_->ListDevices()[0];
    params_.create_kernel = [this](const std::shared_ptr<const tensorflow::NodeProperties>& properties,
                                   tensorflow::OpKernel** kernel) {
      // As in a session, both executors share stateful kernels.
      for (auto& known : kernels_) {
        if (known.first == properties->node_def.name()) {
          *kernel = known.second;
          return Status();
        }
      }
      Status status =
          tensorflow::CreateNonCachedKernel(params_.device, nullptr, properties, TF_GRAPH_DEF_VERSION, kernel);
      if (status.ok()) kernels_.emplace_back(properties->node_def.name(), *kernel);
      return status;
    };
    params_.delete_kernel = [](tensorflow::OpKernel*) {};
  }
  ~SubgraphTest() override {
    subgraph_.reset();
    stock_.reset();
    for (auto& kernel : kernels_) delete kernel.second;
  }

  // Adds a node; inputs as in a NodeDef.
  NodeDef* Add(const std::string& name, const std::string& op, const std::vector<std::string>& inputs) {
    NodeDef* node = def_.add_node();
    node->set_name(name);
    node->set_op(op);
    node->set_device(params_.device->name());
    for (const std::string& input : inputs) node->add_input(input);
    return node;
  }
  NodeDef* Typed(const std::string& name, const std::string& op, const std::vector<std::string>& inputs,
                 tensorflow::DataType type = DT_FLOAT) {
    NodeDef* node = Add(name, op, inputs);
    (*node->mutable_attr())["T"].set_type(type);
    return node;
  }
  void Arg(const std::string& name, int index, tensorflow::DataType type = DT_FLOAT) {
    (*Typed(name, "_Arg", {}, type)->mutable_attr())["index"].set_i(index);
  }
  void Retval(int index, const std::string& input, tensorflow::DataType type = DT_FLOAT) {
    (*Typed("retval" + std::to_string(index), "_Retval", {input}, type)->mutable_attr())["index"].set_i(index);
  }
  void Const(const std::string& name, const Tensor& value, const std::vector<std::string>& inputs = {}) {
    NodeDef* node = Add(name, "Const", inputs);
    (*node->mutable_attr())["dtype"].set_type(value.dtype());
    value.AsProtoTensorContent((*node->mutable_attr())["value"].mutable_tensor());
  }
  void Variable(const std::string& name) {
    NodeDef* node = Add(name, "VariableV2", {});
    (*node->mutable_attr())["dtype"].set_type(DT_FLOAT);
    TensorShape({2}).AsProto((*node->mutable_attr())["shape"].mutable_shape());
  }

  void Compile(int threads = 1) {
    std::string unsupported;
    ASSERT_TRUE(TryCompile(&unsupported, threads).ok());
    ASSERT_EQ(unsupported, "");
    tensorflow::Executor* stock = nullptr;
    ASSERT_TRUE(tensorflow::NewLocalExecutor(params_, *graph_, &stock).ok());
    stock_.reset(stock);
  }
  Status TryCompile(std::string* unsupported, int threads = 1) {
    def_.mutable_versions()->set_producer(TF_GRAPH_DEF_VERSION);
    graph_ = std::make_unique<Graph>(tensorflow::OpRegistry::Global());
    tensorflow::GraphConstructorOptions options;
    options.allow_internal_ops = true;
    options.expect_device_spec = true;
    Status status = tensorflow::ConvertGraphDefToGraph(options, def_, graph_.get());
    EXPECT_TRUE(status.ok()) << StatusMessage(status);
    return Subgraph::Compile(params_, *graph_, threads, &subgraph_, unsupported);
  }

  void Prepare(Done* step, const std::vector<Tensor>& feeds) {
    step->feeds = feeds;
    step->fetches.assign(subgraph_->num_fetches(), {});
    step->args.runner = [this](std::function<void()> work) { pool_.Schedule(std::move(work)); };
    step->args.cancellation_manager = &step->cancellation;
  }

  // Runs the graph on both executors and expects equal results.
  Status Both(const std::vector<Tensor>& feeds, std::vector<Step::Value>* fetches) {
    Done step;
    Prepare(&step, feeds);
    subgraph_->Run(&step);
    Status status = step.Wait();

    std::vector<Tensor> arguments = feeds;
    fetches->assign(subgraph_->num_fetches(), {});
    Frame frame(&arguments, fetches);
    tensorflow::Executor::Args args;
    args.call_frame = &frame;
    args.runner = step.args.runner;
    Status expected = stock_->Run(args);
    EXPECT_EQ(StatusNumber(status), StatusNumber(expected))
        << StatusMessage(status) << " / " << StatusMessage(expected);
    if (status.ok()) {
      for (size_t i = 0; i < fetches->size(); ++i) {
        EXPECT_FALSE(step.fetches[i].dead || (*fetches)[i].dead) << i;
        EXPECT_EQ(step.fetches[i].tensor.SummarizeValue(99), (*fetches)[i].tensor.SummarizeValue(99)) << i;
      }
    }
    return status;
  }

  tensorflow::thread::ThreadPool pool_;
  std::unique_ptr<tensorflow::StaticDeviceMgr> devices_;
  tensorflow::LocalExecutorParams params_;
  std::vector<std::pair<std::string, tensorflow::OpKernel*>> kernels_;
  GraphDef def_;
  std::unique_ptr<Graph> graph_;
  std::unique_ptr<Subgraph> subgraph_;
  std::unique_ptr<tensorflow::Executor> stock_;
};

TEST_F(SubgraphTest, ComputesAndChangesNothingThatOthersRead) {
  Arg("a", 0);
  Const("c", Floats({10, 20}));
  Typed("sum", "AddV2", {"a", "c"});
  Typed("square", "Mul", {"sum", "sum"});
  Typed("again", "Neg", {"sum"});
  Typed("last", "AddV2", {"square", "again"});
  Retval(0, "last");
  Retval(1, "sum");
  Retval(2, "c");
  Retval(3, "a");
  Compile();
  EXPECT_EQ(subgraph_->num_feeds(), 1u);
  std::vector<Step::Value> fetches;
  for (int i = 0; i < 5; ++i) {
    const Tensor feed = Floats({1, 2});
    ASSERT_TRUE(Both({feed}, &fetches).ok());
    EXPECT_EQ(fetches[0].tensor.flat<float>()(1), 22.0f * 22 - 22);
    EXPECT_EQ(feed.flat<float>()(0), 1) << "somebody else's tensor was changed";
  }
}

TEST_F(SubgraphTest, UnsharedFeedsAreChangedInPlace) {
  Arg("a", 0);
  Typed("neg", "Neg", {"a"});
  Retval(0, "neg");
  Compile();
  Done step;
  Prepare(&step, {});
  step.feeds.push_back(Floats({1, 2}));
  const void* data = step.feeds[0].tensor_data().data();
  subgraph_->Run(&step);
  ASSERT_TRUE(step.Wait().ok());
  EXPECT_EQ(step.fetches[0].tensor.tensor_data().data(), data);
}

TEST_F(SubgraphTest, ReferenceVariables) {
  Variable("v");
  Arg("x", 0);
  Typed("assign", "Assign", {"v", "x"});
  Typed("add", "AssignAdd", {"assign", "x"});
  Typed("read", "Identity", {"v", "^add"});
  Retval(0, "read");
  Retval(1, "add");
  Compile();
  std::vector<Step::Value> fetches;
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(Both({Floats({1, 2})}, &fetches).ok());
    EXPECT_EQ(fetches[0].tensor.flat<float>()(1), 4);
  }
}

TEST_F(SubgraphTest, UninitializedVariable) {
  Variable("v");
  NodeDef* known = Add("known", "IsVariableInitialized", {"v"});
  (*known->mutable_attr())["dtype"].set_type(DT_FLOAT);
  Retval(0, "known", tensorflow::DT_BOOL);
  Compile();
  std::vector<Step::Value> fetches;
  ASSERT_TRUE(Both({}, &fetches).ok());
  EXPECT_FALSE(fetches[0].tensor.scalar<bool>()());
  Typed("neg", "Neg", {"v"});
  Retval(1, "neg");
  Compile();
  Status status = Both({}, &fetches);
  EXPECT_EQ(StatusNumber(status), 9);
  EXPECT_NE(StatusMessage(status).find("Attempting to use uninitialized value v"), std::string::npos)
      << StatusMessage(status);
}

TEST_F(SubgraphTest, ResourceVariables) {
  NodeDef* handle = Add("handle", "VarHandleOp", {});
  (*handle->mutable_attr())["dtype"].set_type(DT_FLOAT);
  (*handle->mutable_attr())["shared_name"].set_s("w");
  TensorShape({2}).AsProto((*handle->mutable_attr())["shape"].mutable_shape());
  Arg("x", 0);
  auto typed = [this](const std::string& name, const std::string& op, const std::vector<std::string>& inputs) {
    (*Add(name, op, inputs)->mutable_attr())["dtype"].set_type(DT_FLOAT);
  };
  typed("assign", "AssignVariableOp", {"handle", "x"});
  typed("add", "AssignAddVariableOp", {"handle", "x", "^assign"});
  typed("read", "ReadVariableOp", {"handle", "^add"});
  Retval(0, "read");
  Compile();
  std::vector<Step::Value> fetches;
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(Both({Floats({1, 2})}, &fetches).ok());
    EXPECT_EQ(fetches[0].tensor.flat<float>()(1), 4);
  }
}

TEST_F(SubgraphTest, AFailureNamesTheNodeAndLeavesNothingBehind) {
  Arg("a", 0);
  Arg("b", 1);
  Typed("neg", "Neg", {"a"});
  Typed("sum", "AddV2", {"neg", "b"});
  Retval(0, "sum");
  Compile();
  std::vector<Step::Value> fetches;
  for (int i = 0; i < 4; ++i) {
    Status status = Both({Floats({1, 2}), Floats({1, 2, 3})}, &fetches);
    EXPECT_EQ(StatusNumber(status), 3);
    EXPECT_NE(StatusMessage(status).find("sum"), std::string::npos) << StatusMessage(status);
    ASSERT_TRUE(Both({Floats({1, 2}), Floats({1, 2})}, &fetches).ok());
  }
  Done step;
  Prepare(&step, {Floats({1})});
  subgraph_->Run(&step);
  EXPECT_EQ(StatusNumber(step.Wait()), 3) << "too few arguments";
}

// Adds what it takes from two queues.
class WaitingTest : public SubgraphTest {
 protected:
  void Queue(const std::string& name) { Types(Add(name, "FIFOQueueV2", {}), "component_types"); }
  static void Types(NodeDef* node, const std::string& attribute) {
    (*node->mutable_attr())[attribute].mutable_list()->add_type(DT_FLOAT);
  }
  void Build() {
    std::string unsupported;
    for (std::unique_ptr<Subgraph>& push : push_) {
      const std::string name = "q" + std::to_string(&push - push_);
      def_.Clear();
      Queue(name);
      Arg("x", 0);
      Types(Add("push_" + name, "QueueEnqueueV2", {name, "x"}), "Tcomponents");
      ASSERT_TRUE(TryCompile(&unsupported).ok());
      push = std::move(subgraph_);
    }
    def_.Clear();
    for (const std::string name : {"q0", "q1"}) {
      Queue(name);
      Types(Add("pop_" + name, "QueueDequeueV2", {name}), "component_types");
    }
    Typed("sum", "AddV2", {"pop_q0", "pop_q1"});
    Retval(0, "sum");
    Compile();
    EXPECT_TRUE(subgraph_->is_async());
  }
  void Push(size_t queue, const Tensor& value) {
    Done step;
    Prepare(&step, {value});
    push_[queue]->Run(&step);
    EXPECT_TRUE(step.Wait().ok());
  }
  void TearDown() override {
    for (std::unique_ptr<Subgraph>& push : push_) push.reset();
  }

 private:
  std::unique_ptr<Subgraph> push_[2];
};

TEST_F(WaitingTest, WaitsForValuesFromElsewhere) {
  Build();
  for (int i = 0; i < 50; ++i) {
    Done step;
    Prepare(&step, {});
    std::thread early;
    if (i % 2 == 0) Push(0, Floats({1, 2}));
    if (i % 3 == 0) early = std::thread([&] { Push(1, Floats({3, 4})); });
    subgraph_->Run(&step);
    if (early.joinable()) early.join();
    if (i % 3 != 0) Push(1, Floats({3, 4}));
    if (i % 2 != 0) Push(0, Floats({1, 2}));
    ASSERT_TRUE(step.Wait().ok());
    EXPECT_EQ(step.fetches[0].tensor.flat<float>()(1), 6);
  }
}

// It serves connections, and what a run does after it has waited may take long.
TEST_F(WaitingTest, AReactorThatEndsAWaitDoesNotGoOnWithTheRun) {
  Build();
  Done step;
  Prepare(&step, {});
  subgraph_->Run(&step);
  Push(0, Floats({1, 2}));
  std::thread::id reactor;
  std::thread([&] {
    CompletionBatch::Flush(&pool_);
    reactor = std::this_thread::get_id();
    Push(1, Floats({3, 4}));
  }).join();
  ASSERT_TRUE(step.Wait().ok());
  EXPECT_EQ(step.fetches[0].tensor.flat<float>()(1), 6);
  EXPECT_NE(step.thread(), reactor);
}

TEST_F(WaitingTest, CancellationEndsARunThatWaits) {
  Build();
  for (int i = 0; i < 20; ++i) {
    Done step;
    Prepare(&step, {});
    if (i % 2 == 0) step.cancellation.StartCancel();
    subgraph_->Run(&step);
    step.cancellation.StartCancel();
    EXPECT_EQ(StatusNumber(step.Wait()), 1);
  }
}

// As a slice of a batch may be.
TEST_F(SubgraphTest, IdsThatAreCollectedNeedNotBeAligned) {
  const tensorflow::OpDef* known = nullptr;
  if (!tensorflow::OpRegistry::Global()->LookUpOpDef(kUniqueIdsOp, &known).ok()) RegisterRowOps();
  Arg("ids", 0, tensorflow::DT_INT64);
  NodeDef* node = Add("once", kUniqueIdsOp, {"ids"});
  (*node->mutable_attr())["Tids"].set_type(tensorflow::DT_INT64);
  Retval(0, "once", tensorflow::DT_INT64);
  Retval(1, "once:1", tensorflow::DT_INT32);
  Compile();
  Tensor all(tensorflow::DT_INT64, TensorShape({6}));
  for (int i = 0; i < 6; ++i) all.flat<Int64>()(i) = i % 3;
  const Tensor ids = all.Slice(1, 6);
  ASSERT_FALSE(ids.IsAligned());
  std::vector<Step::Value> fetches;
  ASSERT_TRUE(Both({ids}, &fetches).ok());
  EXPECT_EQ(fetches[0].tensor.SummarizeValue(9), "1 2 0");
  EXPECT_EQ(fetches[1].tensor.SummarizeValue(9), "0 1 2 0 1");
}

TEST_F(SubgraphTest, Statistics) {
  Arg("a", 0);
  Typed("neg", "Neg", {"a"});
  Typed("square", "Square", {"neg"});
  Retval(0, "square");
  Compile();
  tensorflow::StepStats stats;
  tensorflow::StepStatsCollector collector(&stats);
  Done step;
  Prepare(&step, {Floats({1, 2})});
  step.args.stats_collector = &collector;
  subgraph_->Run(&step);
  ASSERT_TRUE(step.Wait().ok());
  collector.Finalize();
  ASSERT_EQ(stats.dev_stats_size(), 1);
  ASSERT_EQ(stats.dev_stats(0).node_stats_size(), 2);
  EXPECT_EQ(stats.dev_stats(0).node_stats(0).node_name(), "neg");
  EXPECT_EQ(stats.dev_stats(0).node_stats(0).output_size(), 1);
}

TEST_F(SubgraphTest, ExpensiveKernelsAreDistributed) {
  Arg("a", 0);
  for (int i = 0; i < 4; ++i) {
    const std::string name = "product" + std::to_string(i);
    Typed(name, "MatMul", {"a", "a"});
    Retval(i, name);
  }
  Compile(4);
  Tensor feed(DT_FLOAT, TensorShape({256, 256}));
  feed.flat<float>().setConstant(1);
  std::vector<Step::Value> fetches;
  for (int i = 0; i < 30; ++i) ASSERT_TRUE(Both({feed}, &fetches).ok());
  EXPECT_GT(subgraph_->CostNanos(), 4u * 25000) << "too fast to be shared out: the test tests nothing";
}

class SessionSubgraphTest : public SubgraphTest {
 protected:
  SessionSubgraphTest() {
    session_ = tensorflow::WorkerSession::CreateWithBorrowedDeviceMgr(
        "session", "/job:localhost/replica:0/task:0", nullptr, devices_.get(), nullptr, nullptr,
        [](tensorflow::WorkerSession*, bool, tensorflow::DeviceMgr*) {
          return std::unique_ptr<tensorflow::DistributedFunctionLibraryRuntime>();
        });
  }
  Status Register(std::unique_ptr<SessionSubgraph>* out) {
    def_.mutable_versions()->set_producer(TF_GRAPH_DEF_VERSION);
    return SessionSubgraph::Register(session_, "session", def_, tensorflow::ConfigProto(), 2, KernelOwner::kSession,
                                     out);
  }
  Status Run(const SessionSubgraph& subgraph, const std::vector<Tensor>& feeds, Done* step) {
    step->feeds = feeds;
    step->fetches.assign(subgraph.num_fetches(), {});
    step->args.runner = [this](std::function<void()> work) { pool_.Schedule(std::move(work)); };
    subgraph.Run(step);
    return step->Wait();
  }
  std::shared_ptr<tensorflow::WorkerSession> session_;
};

TEST_F(SessionSubgraphTest, GraphsOfASessionShareItsVariables) {
  Variable("v");
  Arg("x", 0);
  Typed("assign", "Assign", {"v", "x"});
  std::unique_ptr<SessionSubgraph> push, pull;
  ASSERT_TRUE(Register(&push).ok());
  def_.Clear();
  Variable("v");
  Typed("read", "Identity", {"v"});
  Retval(0, "read");
  ASSERT_TRUE(Register(&pull).ok());
  EXPECT_EQ(push->num_feeds(), 1u);
  EXPECT_EQ(push->unsupported() + pull->unsupported(), "");
  Done step;
  EXPECT_EQ(StatusNumber(Run(*pull, {}, &step)), 9) << "not initialized yet";
  ASSERT_TRUE(Run(*push, {Floats({7, 8})}, &step).ok());
  ASSERT_TRUE(Run(*pull, {}, &step).ok());
  EXPECT_EQ(step.fetches[0].tensor.flat<float>()(1), 8);
  push.reset();
  ASSERT_TRUE(Run(*pull, {}, &step).ok()) << "the variable is the session's, not the graph's";
}

TEST_F(SessionSubgraphTest, UnsupportedGraphsRunOnTensorFlowsExecutor) {
  Arg("x", 0);
  NodeDef* enter = Typed("enter", "Enter", {"x"});
  (*enter->mutable_attr())["frame_name"].set_s("frame");
  Typed("neg", "Neg", {"enter"});
  Typed("exit", "Exit", {"neg"});
  Retval(0, "exit");
  std::unique_ptr<SessionSubgraph> subgraph;
  ASSERT_TRUE(Register(&subgraph).ok());
  EXPECT_EQ(subgraph->unsupported(), "node enter belongs to a branch or a loop");
  Done step;
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(Run(*subgraph, {Floats({1, 2})}, &step).ok());
    EXPECT_EQ(step.fetches[0].tensor.flat<float>()(1), -2);
  }
}

TEST_F(SessionSubgraphTest, BranchesRunOnTensorFlowsExecutor) {
  Arg("p", 0, tensorflow::DT_BOOL);
  Arg("x", 1);
  Typed("switch", "Switch", {"x", "p"});
  Typed("no", "Neg", {"switch:0"});
  Typed("yes", "Square", {"switch:1"});
  (*Typed("merge", "Merge", {"no", "yes"})->mutable_attr())["N"].set_i(2);
  Retval(0, "merge");
  Retval(1, "no");
  std::unique_ptr<SessionSubgraph> subgraph;
  ASSERT_TRUE(Register(&subgraph).ok());
  EXPECT_EQ(subgraph->unsupported(), "node switch belongs to a branch or a loop");
  Done step;
  for (const bool taken : {true, false, true}) {
    ASSERT_TRUE(Run(*subgraph, {Bool(taken), Floats({3, 4})}, &step).ok());
    EXPECT_EQ(step.fetches[0].tensor.flat<float>()(0), taken ? 9 : -3);
    EXPECT_EQ(step.fetches[1].dead, taken);
  }
}

TEST_F(SessionSubgraphTest, NonsenseIsRefused) {
  std::unique_ptr<SessionSubgraph> subgraph;
  EXPECT_EQ(StatusNumber(Register(&subgraph)), 3) << "no nodes";
  Arg("x", 0);
  Arg("y", 1);
  def_.mutable_node(1)->set_device("/job:localhost/replica:0/task:0/device:CPU:1");
  EXPECT_EQ(StatusNumber(Register(&subgraph)), 3) << "two devices";
  EXPECT_EQ(subgraph, nullptr);
}

TEST_F(SubgraphTest, UnsupportedGraphs) {
  NodeDef* receive = Add("receive", "_Recv", {});
  auto& attributes = *receive->mutable_attr();
  attributes["tensor_type"].set_type(DT_FLOAT);
  for (const char* name : {"tensor_name", "send_device", "recv_device"}) attributes[name].set_s("x");
  attributes["send_device_incarnation"].set_i(1);
  std::string unsupported;
  ASSERT_TRUE(TryCompile(&unsupported).ok());
  EXPECT_EQ(unsupported, "node receive sends or receives");
  EXPECT_EQ(subgraph_, nullptr);
}

}  // namespace
}  // namespace starwire
