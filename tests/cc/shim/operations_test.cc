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

bool AnyConstant(const std::string&) { return true; }
bool NoConstant(const std::string&) { return false; }

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

TEST(Operations, TheRegistryContradictsNoEntry) {
  for (const std::string& name : Table()) {
    const OpDef* op = Find(name);
    if (op != nullptr && !IsControlFlow(name)) {
      EXPECT_EQ(ContradictionOf(*op, KnowledgeOf(name)), "") << name;
    }
  }
}

// What a team might write about TensorFlow's own operations, if those were its own.
TEST(Operations, ContradictionsAreFound) {
  const auto contradiction = [](const char* name, uint32_t known) {
    return ContradictionOf(*Find(name), known | SW_OP_KNOWN);
  };
  const auto is_refused = [&](const char* name, uint32_t known, const char* reason) {
    return contradiction(name, known).find(reason) != std::string::npos;
  };
  constexpr uint32_t kShared = SW_OP_IS_SHAREABLE, kPure = SW_OP_IS_PURE | kShared;
  EXPECT_EQ(contradiction("MatMul", kPure), "");
  EXPECT_EQ(contradiction("LookupTableFindV2", 0), "") << "keeps state for the session";
  EXPECT_TRUE(is_refused("RandomUniform", kPure, "stateful"));
  EXPECT_TRUE(is_refused("ReadVariableOp", kPure, "stateful"));
  EXPECT_TRUE(is_refused("LookupTableFindV2", kShared, "takes a variable or another object"));
  EXPECT_TRUE(is_refused("Assign", kShared, "takes a variable or another object"));
  EXPECT_TRUE(is_refused("StatelessIf", kPure, "functions"));
  EXPECT_TRUE(is_refused("MatMul", kShared | SW_OP_UPDATES, "first input is no variable"));
  EXPECT_TRUE(is_refused("AssignAdd", kShared | SW_OP_READS, "returns no reference"));
  EXPECT_TRUE(is_refused("AssignVariableOp", kShared | SW_OP_UPDATES | SW_OP_FORWARDS, "references"));
  EXPECT_TRUE(is_refused("MatMul", kPure | SW_OP_IS_NAMED, "found by its name"));
  EXPECT_TRUE(is_refused("Neg", kPure | SW_OP_IS_LINEAR | 2 << SW_OP_CONSTANTS_SHIFT, "fewer inputs"));
  EXPECT_TRUE(is_refused("Pack", kPure | SW_OP_IS_LINEAR | 1 << SW_OP_CONSTANTS_SHIFT, "is a list"));
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
