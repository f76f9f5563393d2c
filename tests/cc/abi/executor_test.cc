// The executor through the C ABI, with kernels that add numbers.
#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "peer.h"

namespace {

// The contents of a scratch area.
struct Values {
  int64_t slot[8];
  uint32_t released;
  struct Adder* adder;
};

// Node i's output is i plus its inputs; each node has one output.
struct Adder {
  static void Open(void* owner, void* scratch) {
    static_cast<Values*>(scratch)->adder = static_cast<Adder*>(owner);
    ++static_cast<Adder*>(owner)->opened;
  }
  static void Close(void* owner, void*) { --static_cast<Adder*>(owner)->opened; }
  static uint32_t Run(void* scratch, sw_run* run, const sw_task* task, uint32_t) {
    auto* values = static_cast<Values*>(scratch);
    Adder* self = values->adder;
    const uint32_t node = task->node;
    if (node == self->fails_at) return SW_OUTCOME_FAILED;
    int64_t sum = node;
    for (const uint32_t input : self->inputs[node]) sum += values->slot[input];
    const uint32_t* lists = sw_exec_lists(self->plan) + task->first;
    for (uint32_t i = 0; i < task->released; ++i) Release(scratch, lists[task->unshared + i]);
    values->slot[node] = sum;
    if (node != self->async_at) return SW_OUTCOME_DONE;
    self->reporter = std::thread([run, node] { sw_run_report(run, node, 0); });
    return SW_OUTCOME_PENDING;
  }
  static void Release(void* scratch, uint32_t) { ++static_cast<Values*>(scratch)->released; }
  static void Unshare(void*, uint32_t) {}
  static void Finished(void* scratch, uint32_t failed) {
    auto* values = static_cast<Values*>(scratch);
    Adder* self = values->adder;
    std::lock_guard<std::mutex> lock(self->mu);
    self->failed = failed;
    self->released = values->released;
    std::memcpy(self->result, values->slot, sizeof(self->result));
    self->ended = true;
    self->changed.notify_all();
  }
  static void Invite(void*, sw_run* helper) { sw_run_help(helper); }

  sw_code Compile(const std::vector<sw_exec_node>& nodes, const std::vector<sw_exec_edge>& edges, sw_error** error) {
    inputs.assign(nodes.size(), {});
    for (size_t i = 0; i < nodes.size(); ++i) inputs[i].resize(nodes[i].inputs);
    for (const sw_exec_edge& e : edges) {
      if (e.input < 8) inputs[e.dst][e.input] = e.src;
    }
    const sw_exec_spec spec = {sizeof(sw_exec_spec), nodes.data(), nodes.size(), edges.data(), edges.size(), 1};
    const sw_kernels kernels = {sizeof(sw_kernels), sizeof(Values), alignof(Values), &Open,  &Close, &Run,
                                &Release,           &Unshare,       &Finished,       &Invite};
    return sw_exec_new(&spec, &kernels, this, &plan, error);
  }

  bool Step() {
    void* scratch = nullptr;
    sw_run* run = sw_exec_begin(plan, &scratch);
    static_cast<Values*>(scratch)->released = 0;
    ended = false;
    sw_run_go(run, 0);
    std::unique_lock<std::mutex> lock(mu);
    const bool waited = changed.wait_for(lock, kPatience, [this] { return ended; });
    lock.unlock();
    if (reporter.joinable()) reporter.join();
    return waited;
  }

  ~Adder() {
    sw_exec_free(plan);
    EXPECT_EQ(opened, 0) << "every scratch that was opened is closed";
  }

  sw_exec* plan = nullptr;
  std::vector<std::vector<uint32_t>> inputs;
  uint32_t fails_at = 99, async_at = 99;
  std::atomic<int> opened{0};
  std::thread reporter;
  std::mutex mu;
  std::condition_variable changed;
  bool ended = false;
  uint32_t failed = 0, released = 0;
  int64_t result[8] = {};
};

// 0 -> {1, 2} -> 3
std::vector<sw_exec_edge> Diamond() { return {{0, 0, 1, 0}, {0, 0, 2, 0}, {1, 0, 3, 0}, {2, 0, 3, 1}}; }
std::vector<sw_exec_node> DiamondNodes() { return {{0, 0, 1, 0}, {0, 1, 1, 0}, {0, 1, 1, 0}, {0, 2, 1, 0}}; }

TEST(AbiExecutor, Diamond) {
  for (uint32_t async_at : {99u, 1u}) {
    Adder adder;
    adder.async_at = async_at;
    std::vector<sw_exec_node> nodes = DiamondNodes();
    if (async_at == 1) nodes[1].kind = SW_EXEC_ASYNC;
    ASSERT_EQ(adder.Compile(nodes, Diamond(), nullptr), 0);
    for (int i = 0; i < 3; ++i) {
      ASSERT_TRUE(adder.Step());
      EXPECT_EQ(adder.failed, 0u);
      EXPECT_EQ(adder.result[3], 3 + (1 + 0) + (2 + 0));
      EXPECT_EQ(adder.released, 3u) << "each value that is read is released once";
    }
  }
}

TEST(AbiExecutor, Failure) {
  Adder adder;
  adder.fails_at = 2;
  ASSERT_EQ(adder.Compile(DiamondNodes(), Diamond(), nullptr), 0);
  ASSERT_TRUE(adder.Step());
  EXPECT_EQ(adder.failed, 1u);
  adder.fails_at = 99;
  ASSERT_TRUE(adder.Step());
  EXPECT_EQ(adder.failed, 0u);
}

TEST(AbiExecutor, Abandoned) {
  Adder adder;
  ASSERT_EQ(adder.Compile(DiamondNodes(), Diamond(), nullptr), 0);
  void* scratch = nullptr;
  sw_run_abandon(sw_exec_begin(adder.plan, &scratch));
  EXPECT_EQ(adder.opened, 1);
  ASSERT_TRUE(adder.Step());
  EXPECT_EQ(adder.opened, 1) << "the arena was used again";
}

TEST(AbiExecutor, NonsenseIsRefused) {
  Adder adder;
  sw_error* error = nullptr;
  ASSERT_EQ(adder.Compile(DiamondNodes(), {}, &error), 3);
  EXPECT_NE(Text(sw_error_message(error)).find("input 0 of node 1"), std::string::npos);
  sw_error_free(error);
  const sw_exec_spec spec = {sizeof(sw_exec_spec) - 1, nullptr, 0, nullptr, 0, 1};
  const sw_kernels kernels = {};
  ASSERT_EQ(sw_exec_new(&spec, &kernels, nullptr, &adder.plan, &error), 9);
  sw_error_free(error);
  const sw_exec_spec empty = {sizeof(sw_exec_spec), nullptr, 0, nullptr, 0, 1};
  sw_kernels nothing = {};
  nothing.struct_size = sizeof(sw_kernels);
  ASSERT_EQ(sw_exec_new(&empty, &nothing, nullptr, &adder.plan, &error), 3);
  sw_error_free(error);
}

}  // namespace
