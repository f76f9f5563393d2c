// star_server's planner through the C ABI.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "starwire.h"

namespace {

// The worker reads a variable on task 1, uses it and updates it.
class PlanStar : public testing::Test {
 protected:
  PlanStar() {
    nodes_ = {{1, 1, SW_NODE_PLAIN, SW_NODE_IS_STATEFUL | SW_NODE_IS_CLONEABLE, 0, -1},
              {1, 1, SW_NODE_PLAIN, SW_NODE_IS_STATEFUL | SW_NODE_IS_READ, 0, -1},
              {0, 0, SW_NODE_PLAIN, 0, 0, -1},
              {1, 1, SW_NODE_PLAIN, SW_NODE_IS_STATEFUL, 0, -1}};
    edges_ = {Edge(0, 1, 0, SW_EDGE_RESOURCE), Edge(1, 2, 0, SW_EDGE_PLAIN), Edge(0, 3, 0, SW_EDGE_RESOURCE),
              Edge(2, 3, 1, SW_EDGE_PLAIN)};
  }
  ~PlanStar() override {
    sw_star_plan_free(plan_);
    sw_error_free(error_);
  }

  static sw_plan_edge Edge(uint32_t src, uint32_t dst, int32_t input, uint32_t type_class) {
    return {src, 0, dst, input, type_class, 0, -1};
  }

  sw_code Plan(uint32_t lite) {
    const sw_plan_graph graph = {sizeof(sw_plan_graph), nodes_.data(), nodes_.size(), edges_.data(),
                                 edges_.size(),         nullptr,       nullptr};
    const uint8_t servers[] = {0, 1};
    const sw_star_options options = {sizeof(sw_star_options), lite, servers, 2, 0};
    return sw_star_plan_new(&graph, &options, &plan_, &error_);
  }

  static std::string Text(sw_bytes bytes) { return {reinterpret_cast<const char*>(bytes.data), bytes.len}; }
  std::string Message() const { return Text(sw_error_message(error_)); }

  std::vector<sw_plan_node> nodes_;
  std::vector<sw_plan_edge> edges_;
  sw_star_plan* plan_ = nullptr;
  sw_error* error_ = nullptr;
};

TEST_F(PlanStar, APullAndAPush) {
  for (uint32_t lite : {0, 1}) {
    sw_star_plan_free(plan_);
    plan_ = nullptr;
    ASSERT_EQ(Plan(lite), 0) << Message();
    const sw_star_lists lists = sw_star_plan_lists(plan_);
    const sw_star_call* calls = lists.calls;
    ASSERT_EQ(lists.n_calls, 2u) << Text(sw_star_plan_text(plan_));
    EXPECT_EQ(calls[0].task, 1u);
    EXPECT_EQ(calls[0].round, 1u);
    ASSERT_EQ(calls[0].n_nodes, 1u);
    EXPECT_EQ(calls[0].nodes[0], 1u);
    ASSERT_EQ(calls[0].n_copies, 1u);
    EXPECT_EQ(calls[0].copies[0], 0u);
    EXPECT_EQ(calls[0].n_feeds, 0u);
    ASSERT_EQ(calls[0].n_fetches, 1u);
    EXPECT_EQ(calls[0].fetches[0].src, 1u);
    EXPECT_EQ(calls[1].round, 2u);
    ASSERT_EQ(calls[1].n_feeds, 1u);
    EXPECT_EQ(calls[1].feeds[0].src, 2u);
    EXPECT_EQ(calls[1].feeds[0].way, static_cast<uint32_t>(SW_WAY_FEED));
    EXPECT_EQ(calls[1].n_fetches, 0u);
    EXPECT_EQ(calls[1].n_after + calls[1].n_controls, 0u);
    ASSERT_EQ(lists.n_nodes, 4u);
    const std::vector<uint32_t> calls_of(lists.calls_of, lists.calls_of + 4);
    EXPECT_EQ(calls_of, (std::vector<uint32_t>{UINT32_MAX, 0, UINT32_MAX, 1}));
    const sw_star_way* ways = lists.ways;
    ASSERT_EQ(lists.n_ways, 4u);
    EXPECT_EQ(ways[0].way, static_cast<uint32_t>(SW_WAY_COPY));
    EXPECT_EQ(ways[1].way, static_cast<uint32_t>(SW_WAY_FETCH));
    EXPECT_EQ(ways[3].way, static_cast<uint32_t>(SW_WAY_FEED));
    EXPECT_EQ(lists.n_kept, 0u);
    EXPECT_EQ(lists.places[0], static_cast<uint32_t>(SW_PLACE_COPIED));
    EXPECT_EQ(lists.places[3], static_cast<uint32_t>(SW_PLACE_CALLED));
  }
}

TEST_F(PlanStar, SaysWhatIsWrong) {
  edges_.push_back(Edge(7, 0, 0, SW_EDGE_PLAIN));
  EXPECT_EQ(Plan(0), 3);
  EXPECT_EQ(Message(), "planner: edge 4 names node 7, but the graph has only 4 nodes");
}

TEST_F(PlanStar, OneLineForTheLog) {
  ASSERT_EQ(Plan(0), 0) << Message();
  EXPECT_EQ(Text(sw_star_plan_summary(plan_)), "2 calls in 2 rounds run 2 of 4 nodes");
}

TEST(Servers, AreFoundOutOrNamed) {
  const auto name = [](const char* text) {
    return sw_bytes{reinterpret_cast<const uint8_t*>(text), std::strlen(text)};
  };
  const sw_star_task tasks[] = {{name("/job:a/replica:0/task:0"), 0}, {name("/job:b/replica:0/task:0"), 1}};
  uint8_t servers[2] = {7, 7};
  ASSERT_EQ(sw_star_servers(tasks, 2, 0, servers, nullptr), 0);
  EXPECT_EQ(servers[0] * 10 + servers[1], 1);
  ASSERT_EQ(sw_star_servers(tasks, 2, 1, servers, nullptr), 0);
  EXPECT_EQ(servers[0] * 10 + servers[1], 0);
  setenv("STARWIRE_PS_JOBS", "a", 1);
  EXPECT_EQ(sw_star_servers(tasks, 2, 1, servers, nullptr), 0);
  EXPECT_EQ(servers[0] * 10 + servers[1], 10);
  setenv("STARWIRE_PS_JOBS", "a b", 1);
  sw_error* error = nullptr;
  EXPECT_EQ(sw_star_servers(tasks, 2, 1, servers, &error), 3);
  const sw_bytes message = sw_error_message(error);
  EXPECT_NE(std::string(reinterpret_cast<const char*>(message.data), message.len).find("STARWIRE_PS_JOBS"),
            std::string::npos);
  sw_error_free(error);
  unsetenv("STARWIRE_PS_JOBS");
}

}  // namespace
