// The planners through the C ABI.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "starwire.h"

namespace {

// Two producers on task 0, two consumers on task 1, one edge each, and one back.
class PlanFuse : public testing::Test {
 protected:
  PlanFuse() {
    for (uint32_t task : {0, 0, 1, 1, 0}) nodes_.push_back({task, task, SW_NODE_PLAIN, 0, 0, -1});
    edges_ = {Data(0, 2), Data(1, 3), Data(2, 4)};
  }
  ~PlanFuse() override {
    sw_fuse_plan_free(plan_);
    sw_error_free(error_);
  }

  static sw_plan_edge Data(uint32_t src, uint32_t dst) { return {src, 0, dst, 0, SW_EDGE_PLAIN, 0, 4096}; }

  sw_code Plan(bool named = false) {
    const sw_plan_graph graph = {sizeof(sw_plan_graph), nodes_.data(),           nodes_.size(), edges_.data(),
                                 edges_.size(),         named ? &Name : nullptr, this};
    return sw_fuse_plan_new(&graph, &plan_, &error_);
  }
  static sw_bytes Name(void* ctx, uint32_t node) {
    auto* self = static_cast<PlanFuse*>(ctx);
    self->name_ = "model/" + std::to_string(node);
    return {reinterpret_cast<const uint8_t*>(self->name_.data()), self->name_.size()};
  }

  static std::string Text(sw_bytes bytes) { return {reinterpret_cast<const char*>(bytes.data), bytes.len}; }
  std::string Message() const { return Text(sw_error_message(error_)); }

  std::vector<sw_plan_node> nodes_;
  std::vector<sw_plan_edge> edges_;
  sw_fuse_plan* plan_ = nullptr;
  sw_error* error_ = nullptr;
  std::string name_;
};

TEST_F(PlanFuse, GroupsTensorsThatCrossTogether) {
  ASSERT_EQ(Plan(true), 0) << Message();
  size_t n = 0;
  const sw_fuse_group* groups = sw_fuse_plan_groups(plan_, &n);
  ASSERT_EQ(n, 1u);
  EXPECT_EQ(groups->src_task, 0u);
  EXPECT_EQ(groups->dst_task, 1u);
  ASSERT_EQ(groups->n_items, 2u);
  for (uint32_t i : {0, 1}) {
    EXPECT_EQ(groups->items[i].src, i);
    EXPECT_EQ(groups->items[i].src_output, 0);
    ASSERT_EQ(groups->items[i].n_edges, 1u);
    EXPECT_EQ(groups->items[i].edges[0], i);
  }
  EXPECT_EQ(sw_fuse_plan_crossings(plan_), 3u);
  EXPECT_NE(Text(sw_fuse_plan_text(plan_)).find("\"model/2\":0 to task 0 alone: NoCompany"), std::string::npos);
}

TEST_F(PlanFuse, ObeysLimits) {
  int32_t enabled = 0;
  ASSERT_EQ(sw_fuse_settings(&enabled, nullptr), 0);
  EXPECT_EQ(enabled, -1) << "the environment does not say";
  setenv("STARWIRE_TENSOR_FUSE_LIMITS", "small=1000,large=4095", 1);
  const sw_code code = Plan();
  unsetenv("STARWIRE_TENSOR_FUSE_LIMITS");
  ASSERT_EQ(code, 0) << Message();
  size_t n = 1;
  sw_fuse_plan_groups(plan_, &n);
  EXPECT_EQ(n, 0u);
}

TEST_F(PlanFuse, AnEmptyGraphHasAnEmptyPlan) {
  nodes_.clear();
  edges_.clear();
  ASSERT_EQ(Plan(), 0) << Message();
  EXPECT_EQ(sw_fuse_plan_crossings(plan_), 0u);
}

TEST_F(PlanFuse, ExplainsInvalidGraphs) {
  edges_.push_back(Data(4, 0));
  EXPECT_EQ(Plan(true), 3);
  EXPECT_EQ(Message(), "planner: \"model/0\" depends on itself without a NextIteration");
}

TEST_F(PlanFuse, ChecksItsArguments) {
  edges_.push_back(Data(0, 5));
  EXPECT_EQ(Plan(), 3);
  EXPECT_EQ(Message(), "planner: edge 3 names node 5, but the graph has only 5 nodes");
}

TEST_F(PlanFuse, ChecksKinds) {
  nodes_[2].kind = 77;
  EXPECT_EQ(Plan(), 3);
  EXPECT_EQ(Message(), "planner: unknown node kind 77 at index 2");
}

TEST_F(PlanFuse, ChecksControlEdges) {
  edges_[1].src_output = -1;
  EXPECT_EQ(Plan(), 3);
  EXPECT_EQ(Message(), "planner: edge 1 is a control edge at one end only");
}

TEST_F(PlanFuse, RefusesOtherStructs) {
  sw_plan_graph graph = {};
  graph.struct_size = sizeof(graph) - 8;
  EXPECT_EQ(sw_fuse_plan_new(&graph, &plan_, &error_), 9);
  EXPECT_EQ(plan_, nullptr);
}

}  // namespace
