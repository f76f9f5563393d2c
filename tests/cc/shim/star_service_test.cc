// A parameter server that serves star calls over real connections: plans, sessions, and where they run.
#include "tests/cc/shim/star_rig.h"

namespace starwire {
namespace {

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
  Restart({{"STARWIRE_STAR_LIMITS", "inline_us=1000000"}});
  const std::string push = Push("v"), pull = Pull("v");
  for (int i = 0; i < 50; ++i) {
    ASSERT_TRUE(Do("one", push, {Floats({static_cast<float>(i)})}).status.ok());
    ASSERT_EQ(Do("one", pull).first(), i);
  }
  EXPECT_GT(ps_->Metric("calls_inline_total"), 50);
}

TEST_F(StarServiceTest, LargerFeedsThanThoseOfShortRunsLeaveTheReactor) {
  Restart({{"STARWIRE_STAR_LIMITS", "inline_us=1000000"}});
  const std::string push = Push("v");
  for (int i = 0; i < 10; ++i) ASSERT_TRUE(Do("one", push, {Floats({1})}).status.ok());
  double inlined = ps_->Metric("calls_inline_total");
  EXPECT_GT(inlined, 0);
  const auto on_reactor = [&](const Tensor& feed) {
    EXPECT_TRUE(Do("one", push, {feed}).status.ok());
    const double before = inlined;
    inlined = ps_->Metric("calls_inline_total");
    return inlined - before;
  };
  EXPECT_EQ(on_reactor(Floats({1, 2})), 1) << "not more than twice as large";
  EXPECT_EQ(on_reactor(Floats({1, 2, 3})), 0);
  EXPECT_EQ(on_reactor(Floats({1, 2, 3})), 1) << "that run was short";
  EXPECT_EQ(on_reactor(Tensor(DT_FLOAT, TensorShape({1, 1}))), 0) << "other dimensions";
  EXPECT_EQ(on_reactor(Floats({})), 1);
}

TEST_F(StarServiceTest, AShapeThatIsFedIsNothingForAReactor) {
  Restart({{"STARWIRE_STAR_LIMITS", "inline_us=1000000"}});
  Plan plan;
  plan.Arg(0, "shape", tensorflow::DT_INT32);
  Tensor value(DT_FLOAT, TensorShape({}));
  value.scalar<float>()() = 1;
  plan.Constant("value", value);
  NodeDef* fill = plan.Add("fill", "Fill", {"shape", "value"});
  plan.Type(fill, DT_FLOAT);
  plan.Type(fill, tensorflow::DT_INT32, "index_type");
  plan.Retval(0, "fill");
  const std::string bytes = plan.bytes();
  Tensor shape(tensorflow::DT_INT32, TensorShape({1}));
  shape.flat<int32_t>()(0) = 1;
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(Do("one", bytes, {shape}).status.ok());
  EXPECT_EQ(ps_->Metric("calls_inline_total"), 0) << "the next one may be for gigabytes";
}

TEST_F(StarServiceTest, NoFileIsReadOnAReactor) {
  Restart({{"STARWIRE_STAR_LIMITS", "inline_us=1000000"}});
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
  ps_->star->CleansUp({});
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
    const std::string session = i % 2 == 0 ? "one" : "two";
    std::vector<uint8_t> meta;
    ASSERT_TRUE(EncodeStarRegister(0, hash, AsBytes(session), &meta).ok());
    calls.push_back(Send(Method::kStarRegister, meta, &payload));
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

// Handles of eager contexts.
// -------------------------------------------------------------------------------------------

// Knows one context, 7, whose handles are numbers: ten times the operation plus the output.
class FakeHandles : public HandleSource {
 public:
  Status Find(uint64_t context_id, const std::vector<std::pair<int64_t, int32_t>>& names, bool may_wait,
              bool* would_wait, std::vector<Tensor>* handles) override {
    if (context_id != 7) return MakeStatus(kAborted, "no such context");
    if (late && !may_wait) {
      *would_wait = true;
      return OkStatus();
    }
    for (const auto& name : names) handles->push_back(Floats({10.0f * name.first + name.second}));
    return OkStatus();
  }
  std::atomic<bool> late{false};
};

// Adds feed 0 and two handles.
std::string SumOfHandles(int first = 1) {
  Plan plan;
  plan.Arg(first == 1 ? 0 : 2, "x");
  for (int i = 0; i < 2; ++i) {
    plan.Arg(first + i, "handle_" + std::to_string(i));
    (*plan.def()->mutable_node(plan.def()->node_size() - 1)->mutable_attr())[kHandleAttr].set_b(true);
  }
  NodeDef* sum = plan.Add("sum", "AddN", {"x", "handle_0", "handle_1"});
  plan.Type(sum, DT_FLOAT);
  (*sum->mutable_attr())["N"].set_i(3);
  plan.Retval(0, "sum");
  return plan.bytes();
}

Tensor Names(std::vector<int64_t> values) {
  Tensor tensor(tensorflow::DT_INT64, TensorShape({static_cast<int64_t>(values.size())}));
  for (size_t i = 0; i < values.size(); ++i) tensor.flat<int64_t>()(i) = values[i];
  return tensor;
}

TEST_F(StarServiceTest, ACallNamesHandles) {
  FakeHandles handles;
  Restart({{"STARWIRE_STAR_LIMITS", "inline_us=1000000"}});
  ps_->star->SetHandles(&handles);
  const std::string plan = SumOfHandles();
  for (int i = 0; i < 10; ++i) {
    // Those that are not there yet are waited for, which a reactor must not.
    handles.late = i >= 6;
    const Result result = Do("one", plan, {Floats({0.5f}), Names({7, i, 1, 2, 3})});
    ASSERT_TRUE(result.status.ok()) << result.status;
    EXPECT_EQ(result.first(), 0.5f + 10 * i + 1 + 23);
  }
  const double inlined = ps_->Metric("calls_inline_total");
  EXPECT_GT(inlined, 0);
  EXPECT_LE(inlined, 6);
  Stop();
}

TEST_F(StarServiceTest, BadNamesOfHandlesAreRefused) {
  FakeHandles handles;
  ps_->star->SetHandles(&handles);
  const std::string plan = SumOfHandles();
  const auto message = [&](const Tensor& names) { return StatusMessage(Do("one", plan, {Floats({1}), names}).status); };
  const std::string expected = "does not name the 2 handles that its plan needs";
  EXPECT_NE(message(Names({7, 1, 1})).find(expected), std::string::npos);
  EXPECT_NE(message(Names({7, 1, 1, 2, 2, 3, 3})).find(expected), std::string::npos);
  EXPECT_NE(message(Floats({1, 2, 3, 4, 5})).find(expected), std::string::npos);
  EXPECT_EQ(StatusNumber(Do("one", plan).status), kInvalidArgument);
  EXPECT_EQ(StatusNumber(Do("one", plan, {Floats({1}), Names({8, 1, 1, 2, 2})}).status), kAborted);
  EXPECT_NE(StatusMessage(Do("one", SumOfHandles(/*first=*/0), {Names({7, 1, 1, 2, 2})}).status)
                .find("has handles in front of other feeds"),
            std::string::npos);
  ps_->star->SetHandles(nullptr);
  EXPECT_NE(message(Names({7, 1, 1, 2, 2})).find("has no eager contexts"), std::string::npos);
  Stop();
}

}  // namespace
}  // namespace starwire
