// The op table (crates/planner/src/ops.txt) against TensorFlow's registry.
#include "cc/graph/operations.h"

#include <set>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "include/starwire.h"
#include "tensorflow/core/framework/node_def_builder.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_def.pb.h"
#include "tensorflow/core/framework/types.pb.h"
#include "tensorflow/core/graph/graph.h"
#include "tensorflow/core/graph/node_builder.h"

namespace starwire {
namespace {

using tensorflow::OpDef;

std::vector<std::string> Table() {
  std::vector<std::string> names;
  for (size_t at = 0;; ++at) {
    const sw_bytes name = sw_op_name(at);
    if (name.len == 0) return names;
    names.emplace_back(reinterpret_cast<const char*>(name.data), name.len);
  }
}

const OpDef* Find(const std::string& name) {
  const OpDef* op = nullptr;
  return tensorflow::OpRegistry::Global()->LookUpOpDef(name, &op).ok() ? op : nullptr;
}

bool TakesOrGives(const OpDef& op, tensorflow::DataType type) {
  for (const auto& arg : op.input_arg()) {
    if (arg.type() == type) return true;
  }
  for (const auto& arg : op.output_arg()) {
    if (arg.type() == type) return true;
  }
  return false;
}

bool HasReference(const OpDef& op) {
  for (const auto& arg : op.input_arg()) {
    if (arg.is_ref()) return true;
  }
  for (const auto& arg : op.output_arg()) {
    if (arg.is_ref()) return true;
  }
  return false;
}

bool AnyConstant(const std::string&) { return true; }
bool NoConstant(const std::string&) { return false; }

bool TakesFunctions(const OpDef& op) {
  for (const auto& attr : op.attr()) {
    if (attr.type() == "func" || attr.type() == "list(func)") return true;
  }
  return false;
}

// Control flow forwards references, whatever they refer to.
bool IsControlFlow(const std::string& name) {
  static const std::set<std::string> all = {"Switch",   "_SwitchN",         "RefSwitch",     "Merge",   "RefMerge",
                                            "Enter",    "RefEnter",         "Exit",          "RefExit", "NextIteration",
                                            "LoopCond", "RefNextIteration", "ControlTrigger"};
  return all.count(name) != 0;
}

TEST(Operations, MostOfTheTableIsInThisTensorFlow) {
  size_t known = 0;
  const std::vector<std::string> names = Table();
  for (const std::string& name : names) known += Find(name) != nullptr ? 1 : 0;
  EXPECT_GT(names.size(), 1000u);
  EXPECT_GT(known, names.size() * 8 / 10);
}

TEST(Operations, PureOperationsHaveNoStateAndTakeNoReference) {
  for (const std::string& name : Table()) {
    const OpDef* op = Find(name);
    if (op == nullptr || (KnowledgeOf(name) & SW_OP_IS_PURE) == 0 || IsControlFlow(name)) continue;
    EXPECT_FALSE(op->is_stateful()) << name;
    EXPECT_FALSE(HasReference(*op)) << name;
    EXPECT_FALSE(TakesOrGives(*op, tensorflow::DT_RESOURCE)) << name;
    EXPECT_FALSE(TakesFunctions(*op)) << name;
    EXPECT_FALSE(op->is_distributed_communication()) << name;
  }
}

TEST(Operations, ForwardingOperationsReturnTheirFirstReference) {
  for (const std::string& name : Table()) {
    const OpDef* op = Find(name);
    if (op == nullptr || (KnowledgeOf(name) & SW_OP_FORWARDS) == 0) continue;
    ASSERT_GT(op->input_arg_size(), 0) << name;
    ASSERT_EQ(op->output_arg_size(), 1) << name;
    EXPECT_TRUE(op->input_arg(0).is_ref() && op->output_arg(0).is_ref()) << name;
  }
}

TEST(Operations, ReadsAndUpdatesTakeAVariable) {
  for (const std::string& name : Table()) {
    const OpDef* op = Find(name);
    const uint32_t known = KnowledgeOf(name);
    if (op == nullptr || (known & (SW_OP_READS | SW_OP_UPDATES)) == 0) continue;
    ASSERT_GT(op->input_arg_size(), 0) << name;
    EXPECT_TRUE(op->input_arg(0).is_ref() || op->input_arg(0).type() == tensorflow::DT_RESOURCE) << name;
    if ((known & SW_OP_READS) == 0) continue;
    for (const auto& arg : op->output_arg()) EXPECT_FALSE(arg.is_ref()) << name;
  }
}

TEST(Operations, NamedOperationsNeedNoInput) {
  for (const std::string& name : Table()) {
    const OpDef* op = Find(name);
    if (op == nullptr || (KnowledgeOf(name) & SW_OP_IS_NAMED) == 0) continue;
    EXPECT_EQ(op->input_arg_size(), 0) << name;
    EXPECT_EQ(op->output_arg_size(), 1) << name;
  }
}

// Every operation that may change a reference variable in place is either known to update it, or unknown.
TEST(Operations, NoReferenceOperationCountsAsHarmless) {
  tensorflow::OpList all;
  tensorflow::OpRegistry::Global()->Export(/*include_internal=*/true, &all);
  for (const OpDef& op : all.op()) {
    const uint32_t known = KnowledgeOf(op.name());
    if (known == 0 || IsControlFlow(op.name())) continue;
    for (const auto& arg : op.input_arg()) {
      if (!arg.is_ref() || arg.type() == tensorflow::DT_STRING) continue;  // old handles are references to strings
      const bool only_looks = op.name() == "IsVariableInitialized" || op.name() == "RefIdentity";
      const bool session = (known & (SW_OP_IS_PURE | SW_OP_READS)) == 0;
      EXPECT_TRUE((known & SW_OP_UPDATES) != 0 || only_looks || session) << op.name();
    }
  }
}

TEST(Operations, UnknownOperationsMayDoAnything) {
  for (const char* name :
       {"Unstage", "MapUnstage", "OrderedMapUnstage", "Stage", "PyFunc", "InplaceUpdate", "TakeDataset"}) {
    tensorflow::NodeDef node;
    node.set_op(name);
    EXPECT_EQ(KnowledgeOf(name), 0u) << name;
    EXPECT_FALSE(IsLinear(node, AnyConstant)) << name;
  }
  for (const char* name : {"_Send", "_Recv"}) {
    tensorflow::NodeDef node;
    node.set_op(name);
    EXPECT_NE(KnowledgeOf(name) & SW_OP_WAITS, 0u) << name;
    EXPECT_FALSE(IsLinear(node, AnyConstant)) << name;
  }
  tensorflow::NodeDef read;
  read.set_op("ReadFile");
  EXPECT_FALSE(IsLinear(read, AnyConstant)) << "no file is read by a thread that others wait for";
}

TEST(Operations, AShapeThatIsFedIsNotLinear) {
  tensorflow::NodeDef add, gather;
  add.set_op("AddV2");
  add.add_input("a");
  add.add_input("b");
  EXPECT_TRUE(IsLinear(add, NoConstant));
  gather.set_op("GatherV2");
  for (const char* input : {"params", "ids:1", "axis", "^before"}) gather.add_input(input);
  EXPECT_FALSE(IsLinear(gather, NoConstant));
  EXPECT_TRUE(IsLinear(gather, [](const std::string& name) { return name == "axis"; }));
  gather.mutable_input()->RemoveLast();
  gather.mutable_input()->RemoveLast();
  gather.mutable_input()->RemoveLast();
  gather.mutable_input()->RemoveLast();
  EXPECT_FALSE(IsLinear(gather, AnyConstant)) << "it has no axis";
}

TEST(Operations, LinearOperationsHaveTheConstantsThatTheyNeed) {
  for (const std::string& name : Table()) {
    const OpDef* op = Find(name);
    const uint32_t known = KnowledgeOf(name);
    if (op == nullptr || (known & SW_OP_IS_LINEAR) == 0) continue;
    const auto constants = static_cast<int>(known >> SW_OP_CONSTANTS_SHIFT);
    ASSERT_GE(op->input_arg_size(), constants) << name;
    for (int i = 0; i < constants; ++i) {
      const auto& arg = op->input_arg(op->input_arg_size() - 1 - i);
      EXPECT_TRUE(arg.number_attr().empty() && arg.type_list_attr().empty()) << name << " " << arg.name();
    }
  }
}

tensorflow::Node* Variable(tensorflow::Graph* graph, const std::string& name, const std::string& shared) {
  tensorflow::Node* node = nullptr;
  const auto status = tensorflow::NodeBuilder(name, "VarHandleOp")
                          .Attr("dtype", tensorflow::DT_FLOAT)
                          .Attr("shape", tensorflow::TensorShape({2}))
                          .Attr("shared_name", shared)
                          .Finalize(graph, &node);
  EXPECT_TRUE(status.ok());
  return node;
}

TEST(Operations, AVariableThatIsMadeAnewEachTimeIsNotCopied) {
  tensorflow::Graph graph(tensorflow::OpRegistry::Global());
  const tensorflow::Node* named = Variable(&graph, "a", "v");
  const tensorflow::Node* anonymous = Variable(&graph, "b", "cd2c89b7-88b7-44c8-ad83-06c2a9158347");
  EXPECT_NE(NodeFlags(*named) & SW_NODE_IS_CLONEABLE, 0u);
  EXPECT_EQ(NodeFlags(*anonymous) & SW_NODE_IS_CLONEABLE, 0u);
  EXPECT_EQ(VariableName(*named), VariableName(*Variable(&graph, "c", "v")));
  EXPECT_NE(VariableName(*named), VariableName(*anonymous));
}

}  // namespace
}  // namespace starwire
