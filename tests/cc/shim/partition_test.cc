// Whole partitions on the lock-free executor: their lifetime and their error messages. tests/python/test_partitions.py
// compares results with TensorFlow's executor.
#include "cc/partition/partition.h"

#include <memory>
#include <string>
#include <vector>

#include "cc/partition/ops.h"
#include "cc/partition/pass.h"
#include "cc/server/server.h"
#include "tensorflow/core/common_runtime/graph_constructor.h"
#include "tensorflow/core/framework/node_def_util.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/graph/graph.h"
#include "tensorflow/core/public/session.h"
#include "tensorflow/core/public/version.h"
#include "tests/cc/shim/rig.h"

namespace starwire {
namespace {

using tensorflow::DT_FLOAT;
using tensorflow::GraphDef;
using tensorflow::NodeDef;
using tensorflow::Tensor;

constexpr char kCpu[] = "/job:ps/replica:0/task:0/device:CPU:0";

NodeDef* Add(GraphDef* graph, const std::string& name, const std::string& op, const std::vector<std::string>& inputs) {
  graph->mutable_versions()->set_producer(TF_GRAPH_DEF_VERSION);
  NodeDef* node = graph->add_node();
  node->set_name(name);
  node->set_op(op);
  node->set_device(kCpu);
  for (const std::string& input : inputs) node->add_input(input);
  return node;
}

GraphDef Alone(int64_t number) {
  GraphDef graph;
  NodeDef* node = Add(&graph, kPartitionNodePrefix + std::to_string(number), kPartitionOp, {});
  tensorflow::AddNodeAttr(kPartitionNumberAttr, number, node);
  return graph;
}

// The number of live partitions in this process.
int Living() {
  int living = 0;
  for (int64_t number = 0; number < 1000; ++number) {
    GraphDef graph = Alone(number);
    ShowPartition(&graph);
    living += graph.node_size() != 1 || graph.node(0).op() != kPartitionOp ? 1 : 0;
  }
  return living;
}

class PartitionTest : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(RegisterServers().ok());
    setenv("STARWIRE_EXECUTOR", "on", 1);
    const Status status =
        StarwireServer::Create("grpc++", LonelyServer(), tensorflow::ServerFactory::Options(), &server_);
    unsetenv("STARWIRE_EXECUTOR");
    ASSERT_TRUE(status.ok()) << status;
    ASSERT_TRUE(server_->Start().ok());
  }
  void TearDown() override {
    if (server_ == nullptr) return;
    EXPECT_TRUE(static_cast<StarwireServer*>(server_.get())->ShutDown().ok());
  }
  std::unique_ptr<tensorflow::Session> NewSession() {
    tensorflow::SessionOptions options;
    options.target = server_->target();
    // Turn off constant folding, so that the failure happens at run time.
    auto* graph = options.config.mutable_graph_options();
    graph->mutable_rewrite_options()->set_disable_meta_optimizer(true);
    graph->mutable_optimizer_options()->set_opt_level(tensorflow::OptimizerOptions::L0);
    return std::unique_ptr<tensorflow::Session>(tensorflow::NewSession(options));
  }

  std::unique_ptr<tensorflow::ServerInterface> server_;
};

// A counter, and a node that fails.
GraphDef Counter() {
  GraphDef graph;
  NodeDef* variable = Add(&graph, "v", "VarHandleOp", {});
  (*variable->mutable_attr())["dtype"].set_type(DT_FLOAT);
  (*variable->mutable_attr())["shape"].mutable_shape();
  (*variable->mutable_attr())["shared_name"].set_s("v");
  NodeDef* one = Add(&graph, "one", "Const", {});
  Tensor value(DT_FLOAT, tensorflow::TensorShape({}));
  value.scalar<float>()() = 1;
  (*one->mutable_attr())["dtype"].set_type(DT_FLOAT);
  value.AsProtoTensorContent((*one->mutable_attr())["value"].mutable_tensor());
  for (const char* op : {"AssignVariableOp", "AssignAddVariableOp"}) {
    (*Add(&graph, op, op, {"v", "one"})->mutable_attr())["dtype"].set_type(DT_FLOAT);
  }
  (*Add(&graph, "read", "ReadVariableOp", {"v"})->mutable_attr())["dtype"].set_type(DT_FLOAT);
  NodeDef* checked = Add(&graph, "checked", "CheckNumerics", {"infinite"});
  (*checked->mutable_attr())["T"].set_type(DT_FLOAT);
  (*checked->mutable_attr())["message"].set_s("as told");
  NodeDef* infinite = Add(&graph, "infinite", "Log", {"zero"});
  (*infinite->mutable_attr())["T"].set_type(DT_FLOAT);
  NodeDef* zero = Add(&graph, "zero", "Sub", {"one", "read"});
  (*zero->mutable_attr())["T"].set_type(DT_FLOAT);
  return graph;
}

TEST_F(PartitionTest, IsFreedWithItsSession) {
  ASSERT_EQ(Living(), 0);
  for (int round = 0; round < 3; ++round) {
    auto session = NewSession();
    ASSERT_TRUE(session->Create(Counter()).ok());
    ASSERT_TRUE(session->Run({}, {}, {"AssignVariableOp"}, nullptr).ok());
    std::vector<Tensor> out;
    for (int i = 0; i < 5; ++i) ASSERT_TRUE(session->Run({}, {}, {"AssignAddVariableOp"}, nullptr).ok());
    const Status status = session->Run({}, {"read"}, {}, &out);
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_EQ(out.at(0).scalar<float>()(), 6) << "graphs of a session share their variables";
    EXPECT_EQ(Living(), 3);
    EXPECT_TRUE(session->Close().ok());
    EXPECT_EQ(Living(), 0);
  }
}

TEST_F(PartitionTest, AnErrorNamesTheNodeAndNothingElse) {
  auto session = NewSession();
  ASSERT_TRUE(session->Create(Counter()).ok());
  ASSERT_TRUE(session->Run({}, {}, {"AssignVariableOp"}, nullptr).ok());
  std::vector<Tensor> out;
  const Status status = session->Run({}, {"checked"}, {}, &out);
  EXPECT_EQ(StatusNumber(status), kInvalidArgument) << status;
  EXPECT_NE(StatusMessage(status).find("as told"), std::string::npos) << status;
  EXPECT_NE(StatusMessage(status).find("{{node checked}}"), std::string::npos) << status;
  EXPECT_EQ(StatusMessage(status).find(kPartitionNodePrefix), std::string::npos) << status;
  EXPECT_TRUE(session->Run({}, {"read"}, {}, &out).ok()) << "the next step is as good as the first";
  EXPECT_TRUE(session->Close().ok());
}

TEST_F(PartitionTest, NobodyElseMayBringOne) {
  auto session = NewSession();
  GraphDef graph = Alone(0);
  ASSERT_TRUE(session->Create(graph).ok());
  const Status status = session->Run({}, {}, {graph.node(0).name()}, nullptr);
  EXPECT_EQ(StatusNumber(status), kFailedPrecondition) << status;
  EXPECT_NE(StatusMessage(status).find("a graph that contains it cannot run"), std::string::npos) << status;
  EXPECT_TRUE(session->Close().ok());
}

TEST(Partition, LoopsAndAcceleratorsStay) {
  tensorflow::Graph graph(tensorflow::OpRegistry::Global());
  tensorflow::GraphConstructorOptions options;
  options.allow_internal_ops = true;
  ASSERT_TRUE(tensorflow::ConvertGraphDefToGraph(options, Counter(), &graph).ok());
  EXPECT_EQ(WhyPartitionStays(graph, kCpu), "");
  EXPECT_EQ(WhyPartitionStays(graph, "/job:ps/replica:0/task:0/device:GPU:0"), "the device is not a CPU");
  GraphDef more = Counter();
  NodeDef* enter = Add(&more, "enter", "Enter", {"one"});
  (*enter->mutable_attr())["T"].set_type(DT_FLOAT);
  (*enter->mutable_attr())["frame_name"].set_s("loop");
  tensorflow::Graph loop(tensorflow::OpRegistry::Global());
  ASSERT_TRUE(tensorflow::ConvertGraphDefToGraph(options, more, &loop).ok());
  EXPECT_EQ(WhyPartitionStays(loop, kCpu), "node enter belongs to a loop");
}

TEST(Partition, ItsNameIsRemovedFromErrors) {
  const GraphDef graph = Alone(7);
  NodeDef inner;
  inner.set_name("inner");
  inner.set_op("NoOp");
  const Status failed = tensorflow::AttachDef(MakeStatus(kDataLoss, "lost"), inner);
  const Status wrapped = tensorflow::AttachDef(failed, graph.node(0));
  ASSERT_NE(StatusMessage(wrapped).find(kPartitionNodePrefix), std::string::npos);
  EXPECT_EQ(WithoutPartition(wrapped), failed);
  const Status lost = MakeStatus(kDataLoss, "lost");
  EXPECT_EQ(WithoutPartition(tensorflow::AttachDef(lost, graph.node(0))), lost);
  // Joined with other errors by TensorFlow.
  const std::string joined = "2 root error(s) found.\n  (0) " + StatusMessage(wrapped) + "\n  (1) " +
                             StatusMessage(wrapped) + "\n0 successful operations.";
  const std::string expected = "2 root error(s) found.\n  (0) " + StatusMessage(failed) + "\n  (1) " +
                               StatusMessage(failed) + "\n0 successful operations.";
  EXPECT_EQ(StatusMessage(WithoutPartition(MakeStatus(kDataLoss, joined))), expected);
  EXPECT_EQ(WithoutPartition(failed), failed);
  EXPECT_TRUE(WithoutPartition(OkStatus()).ok());
  // Truncated.
  const Status odd = MakeStatus(kDataLoss, std::string("x\n\t [[{{node ") + kPartitionNodePrefix);
  EXPECT_EQ(WithoutPartition(odd), odd);
}

}  // namespace
}  // namespace starwire
