// A run of a sub-graph calls operator new exactly as often as its kernels do, and survives that there is no memory.
// crates/executor/tests/allocations.rs checks that the Rust half does not allocate.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "cc/executor/subgraph.h"
#include "tensorflow/core/common_runtime/device_factory.h"
#include "tensorflow/core/common_runtime/device_mgr.h"
#include "tensorflow/core/common_runtime/executor.h"
#include "tensorflow/core/framework/node_def_builder.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/graph/graph.h"
#include "tensorflow/core/graph/node_builder.h"
#include "tensorflow/core/public/session_options.h"
#include "tensorflow/core/public/version.h"

namespace {

// Counts allocations of this thread, if set.
thread_local int64_t* counted = nullptr;
// How many are left of this thread until some fail; negative: none does.
thread_local int64_t until_failure = -1;
thread_local int64_t failures = 0;

void* Allocate(size_t size, size_t alignment) {
  if (counted != nullptr) ++*counted;
  if (until_failure > 0) {
    --until_failure;
  } else if (until_failure == 0 && failures > 0) {
    --failures;
    throw std::bad_alloc();
  }
  void* memory = nullptr;
  if (posix_memalign(&memory, alignment < sizeof(void*) ? sizeof(void*) : alignment, size == 0 ? 1 : size) != 0)
    abort();
  return memory;
}

}  // namespace

void* operator new(size_t size) { return Allocate(size, __STDCPP_DEFAULT_NEW_ALIGNMENT__); }
void* operator new[](size_t size) { return Allocate(size, __STDCPP_DEFAULT_NEW_ALIGNMENT__); }
void* operator new(size_t size, std::align_val_t alignment) { return Allocate(size, static_cast<size_t>(alignment)); }
void* operator new[](size_t size, std::align_val_t alignment) { return Allocate(size, static_cast<size_t>(alignment)); }
void operator delete(void* memory) noexcept { free(memory); }
void operator delete[](void* memory) noexcept { free(memory); }
void operator delete(void* memory, size_t) noexcept { free(memory); }
void operator delete[](void* memory, size_t) noexcept { free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { free(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { free(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { free(memory); }
void operator delete[](void* memory, size_t, std::align_val_t) noexcept { free(memory); }

namespace starwire {
namespace {

using tensorflow::DT_FLOAT;
using tensorflow::Node;
using tensorflow::Tensor;
using tensorflow::TensorShape;

class OneStep : public Step {
 public:
  void OnDone(const Status& status) override { EXPECT_TRUE(status.ok()) << StatusMessage(status); }
};

class AnyStep : public Step {
 public:
  void OnDone(const Status& status) override {
    code = StatusNumber(status);
    ++ended;
  }
  int code = -1;
  int ended = 0;
};

// Ends before it returns: a run counts arrivals, but has no other thread.
class AsyncNeg : public tensorflow::AsyncOpKernel {
 public:
  using AsyncOpKernel::AsyncOpKernel;
  void ComputeAsync(tensorflow::OpKernelContext* context, DoneCallback done) override {
    context->set_output(0, context->input(0));
    done();
  }
};

// Calls what a test wants to happen in the middle of a run.
std::function<void()> in_the_middle;
class MiddleNeg : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(tensorflow::OpKernelContext* context) override {
    context->set_output(0, context->input(0));
    if (const auto act = std::exchange(in_the_middle, nullptr)) act();
  }
};

constexpr char kMiddleLabel[] = "starwire_test_middle";
REGISTER_KERNEL_BUILDER(Name("Neg").Device(tensorflow::DEVICE_CPU).Label(kMiddleLabel), MiddleNeg);

constexpr char kAsyncLabel[] = "starwire_test_async";
REGISTER_KERNEL_BUILDER(Name("Neg").Device(tensorflow::DEVICE_CPU).Label(kAsyncLabel), AsyncNeg);

class AllocationTest : public testing::Test {
 protected:
  AllocationTest() : graph_(tensorflow::OpRegistry::Global()) {
    std::vector<std::unique_ptr<tensorflow::Device>> devices;
    EXPECT_TRUE(
        tensorflow::DeviceFactory::AddDevices(tensorflow::SessionOptions(), "/job:ps/replica:0/task:0", &devices).ok());
    devices_ = std::make_unique<tensorflow::StaticDeviceMgr>(std::move(devices));
    params_.device = devices_->ListDevices()[0];
    params_.create_kernel = [this](const std::shared_ptr<const tensorflow::NodeProperties>& properties,
                                   tensorflow::OpKernel** kernel) {
      return tensorflow::CreateNonCachedKernel(params_.device, nullptr, properties, TF_GRAPH_DEF_VERSION, kernel);
    };
    params_.delete_kernel = [](tensorflow::OpKernel* kernel) { delete kernel; };
  }

  Node* Add(const std::string& op, const std::vector<Node*>& inputs, int index = -1, const char* label = nullptr) {
    tensorflow::NodeBuilder builder("n" + std::to_string(graph_.num_node_ids()), op);
    for (Node* input : inputs) builder.Input(input, 0);
    builder.Attr("T", DT_FLOAT);
    if (index >= 0) builder.Attr("index", index);
    if (label != nullptr) builder.Attr("_kernel", label);
    Node* node = nullptr;
    EXPECT_TRUE(builder.Finalize(&graph_, &node).ok());
    return node;
  }

  // Allocations of a run in an arena that was used before.
  int64_t CountRun() {
    std::unique_ptr<Subgraph> subgraph;
    std::string unsupported;
    EXPECT_TRUE(Subgraph::Compile(params_, graph_, 1, &subgraph, &unsupported).ok());
    OneStep step;
    step.feeds.resize(subgraph->num_feeds());
    step.fetches.resize(subgraph->num_fetches());
    step.args.session_handle = "a session's handle is too long for a small string";
    step.args.runner = [](std::function<void()> work) { work(); };
    int64_t count = 0;
    for (int run = 0; run < 10; ++run) {
      for (Tensor& feed : step.feeds) feed = Value();
      count = 0;
      counted = &count;
      subgraph->Run(&step);
      counted = nullptr;
    }
    return count;
  }

  // Allocations of one kernel of this node, with its own input.
  int64_t CountKernel(Node* node) {
    tensorflow::OpKernel* kernel = nullptr;
    EXPECT_TRUE(params_.create_kernel(node->properties(), &kernel).ok());
    tensorflow::AllocatorAttributes attributes;
    int64_t count = 0;
    // The first run may allocate more.
    for (int run = 0; run < 3; ++run) {
      Tensor input = Value();
      tensorflow::TensorValue value(&input);
      tensorflow::OpKernelContext::Params params;
      params.op_kernel = kernel;
      params.device = params_.device;
      params.inputs = {&value, 1};
      params.input_alloc_attrs = {&attributes, 1};
      params.output_attr_array = &attributes;
      tensorflow::OpKernelContext context(&params);
      count = 0;
      counted = &count;
      params_.device->Compute(kernel, &context);
      counted = nullptr;
    }
    delete kernel;
    return count;
  }

  static Tensor Value() {
    Tensor value(DT_FLOAT, TensorShape({4}));
    value.flat<float>().setZero();
    return value;
  }

  std::unique_ptr<tensorflow::StaticDeviceMgr> devices_;
  tensorflow::LocalExecutorParams params_;
  tensorflow::Graph graph_;
};

TEST_F(AllocationTest, OnlyKernelsAllocate) {
  std::unique_ptr<int> seen;
  int64_t count = 0;
  counted = &count;
  seen = std::make_unique<int>(1);
  counted = nullptr;
  ASSERT_EQ(count, 1) << "operator new is counted";

  Node* node = Add("_Arg", {}, 0);
  for (int i = 0; i < 20; ++i) node = Add("Neg", {node});
  const int64_t kernel = CountKernel(node);
  Add("_Retval", {node}, 0);
  EXPECT_GT(kernel, 0);
  EXPECT_EQ(CountRun(), 20 * kernel);
}

TEST_F(AllocationTest, ARunWithoutMemoryFailsAndTheNextOneDoesNot) {
  Node* node = Add("_Arg", {}, 0);
  for (int i = 0; i < 3; ++i) node = Add("Neg", {node}, -1, i == 0 ? kMiddleLabel : nullptr);
  Add("_Retval", {node}, 0);
  int failed = 0;
  bool was_enough = false;
  for (int64_t number = 0; !was_enough; ++number) {
    std::unique_ptr<Subgraph> subgraph;
    std::string unsupported;
    ASSERT_TRUE(Subgraph::Compile(params_, graph_, 1, &subgraph, &unsupported).ok());
    const auto prepare = [&](AnyStep* step) {
      step->fetches.resize(subgraph->num_fetches());
      step->args.runner = [](std::function<void()> work) { work(); };
      step->feeds = {Value()};
    };
    // The plan has the memory of one run already, so this is a second one beside it.
    AnyStep outer, inner, last;
    for (AnyStep* step : {&outer, &inner, &last}) prepare(step);
    in_the_middle = [&] {
      until_failure = number;
      failures = 8;  // the first attempt, what says that it failed, and the second one
      subgraph->Run(&inner);
      was_enough = failures == 8;
      until_failure = -1;
      subgraph->Run(&last);
    };
    subgraph->Run(&outer);
    ASSERT_EQ((std::vector<int>{outer.ended, inner.ended, last.ended}), (std::vector<int>{1, 1, 1})) << number;
    ASSERT_TRUE(inner.code == 0 || inner.code == kResourceExhausted) << inner.code;
    ASSERT_EQ((std::vector<int>{outer.code, last.code}), (std::vector<int>{0, 0})) << number;
    failed += inner.code != 0;
  }
  EXPECT_GT(failed, 5);
}

TEST_F(AllocationTest, OnlyKernelsAllocateBesideAnAsynchronousOne) {
  Node* node = Add("_Arg", {}, 0);
  for (int i = 0; i < 20; ++i) node = Add("Neg", {node});
  const int64_t kernel = CountKernel(node);
  Add("_Retval", {Add("Neg", {node}, -1, kAsyncLabel)}, 0);
  // Its output is a second tensor for the same memory.
  EXPECT_EQ(CountRun(), 20 * kernel + 1);
}

}  // namespace
}  // namespace starwire
