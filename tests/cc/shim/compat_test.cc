// What cc/base/compat*.h finds in classes that are like DeepRec's, which is TensorFlow 1.15 with parts of later
// versions and some of its own. tests/deeprec compiles all of cc/ against such classes.
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "cc/base/compat_executor.h"
#include "cc/base/compat_server.h"
#include "cc/base/compat_session.h"

namespace starwire {
namespace {

// A run's arguments cannot be copied.
struct DeepRecArgs {
  std::unique_ptr<int> ref_send_inputs_mu_ptr;
};

// Inputs are in vectors, as in 1.15, without device contexts, as in 2.x.
struct DeepRecParams {
  bool run_all_kernels_inline = false;
  const std::vector<int>* inputs = nullptr;
  const std::vector<char>* input_alloc_attrs = nullptr;
};

struct TensorFlow1Params : DeepRecParams {
  const std::vector<const int*>* input_device_contexts = nullptr;
};

TEST(CompatTest, RunsOfDeepRec) {
  using Args = compat_internal::RunArgs<DeepRecArgs>;
  static_assert(!std::is_copy_constructible_v<Args>);
  Args args;
  args.run_all_kernels_inline = true;
  DeepRecParams params;
  SetInline(&params, args.run_all_kernels_inline);
  EXPECT_TRUE(params.run_all_kernels_inline);
  struct None {
  } tensorflow1;
  SetInline(&tensorflow1, true);
}

TEST(CompatTest, InputsInVectorsWithAndWithoutContexts) {
  int values[] = {1, 2, 3};
  char attributes[] = {4, 5, 6};
  DeepRecParams params;
  KernelInputs<DeepRecParams> inputs;
  inputs.Set(&params, values, attributes, 3);
  EXPECT_EQ(*params.inputs, std::vector<int>({1, 2, 3}));
  EXPECT_EQ(*params.input_alloc_attrs, std::vector<char>({4, 5, 6}));

  TensorFlow1Params old;
  KernelInputs<TensorFlow1Params> with_contexts;
  with_contexts.Set(&old, values, attributes, 2);
  EXPECT_EQ(*old.inputs, std::vector<int>({1, 2}));
  ASSERT_NE(old.input_device_contexts, nullptr);
  EXPECT_EQ(old.input_device_contexts->size(), 2u);
}

// 2.x has options.
struct TensorFlow2Worker {
  void GetStatusAsync(tensorflow::CallOptions* opts, const int*, int* response, bool fail_fast,
                      const std::function<void(int)>& done) {
    *response = fail_fast && opts != nullptr ? 2 : 0;
    done(2);
  }
};
struct TensorFlow1Worker {
  void GetStatusAsync(const int*, int* response, const std::function<void(int)>& done) {
    *response = 1;
    done(1);
  }
};

TEST(CompatTest, StatusWithAndWithoutOptions) {
  int version = 0;
  const std::function<void(int)> done = [&version](int which) { version = which; };
  const int request = 0;
  int response = 0;
  tensorflow::CallOptions opts;
  TensorFlow2Worker new_worker;
  AnswerStatus(&new_worker, &opts, &request, &response, done);
  EXPECT_EQ(version, 2);
  EXPECT_EQ(response, 2);
  TensorFlow1Worker old_worker;
  AnswerStatus(&old_worker, &opts, &request, &response, done);
  EXPECT_EQ(version, 1);
  EXPECT_EQ(response, 1);
}

struct DeepRecConfig {
  bool tensor_fuse() const { return on; }
  bool on = false;
};

TEST(CompatTest, TensorFuseIsAField) {
  EXPECT_TRUE(HasTensorFuse(DeepRecConfig{true}));
  EXPECT_FALSE(HasTensorFuse(DeepRecConfig{false}));
  EXPECT_FALSE(HasTensorFuse(tensorflow::ConfigProto()));
}

// Versions have one of these.
struct Request {};
struct Response {};
struct WithoutLimits {
  void CreateContextAsync(const Request*, Response*, int) { called = 3; }
  int called = 0;
};
struct WithTimeout : WithoutLimits {
  using WithoutLimits::CreateContextAsync;
  void CreateContextAsync(const Request*, Response*, int, int64_t timeout) { called = static_cast<int>(timeout); }
};
struct WithRetries : WithoutLimits {
  using WithoutLimits::CreateContextAsync;
  void CreateContextAsync(const Request*, Response*, int, int64_t timeout, int retries) {
    called = static_cast<int>(timeout) + retries;
  }
};

TEST(CompatTest, LimitsOfEagerContexts) {
  const Request request;
  Response response;
  WithoutLimits none;
  CreateEagerContext(&none, &request, &response, 0, int64_t{100}, 5);
  EXPECT_EQ(none.called, 3);
  WithTimeout timeout;
  CreateEagerContext(&timeout, &request, &response, 0, int64_t{100});
  EXPECT_EQ(timeout.called, 100);
  WithRetries retries;
  CreateEagerContext(&retries, &request, &response, 0, int64_t{100}, 5);
  EXPECT_EQ(retries.called, 105);
}

}  // namespace
}  // namespace starwire
