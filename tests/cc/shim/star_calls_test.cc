// A parameter server that serves star calls over real connections: the life of a call, kept values, limits, and what a
// call costs at the border.
#include <dlfcn.h>

#include <atomic>
#include <cstring>
#include <random>

#include "cc/star/client.h"
#include "tensorflow/core/framework/step_stats.pb.h"
#include "tests/cc/shim/star_rig.h"

namespace {
// Calls of the transport's functions by the thread of a reactor that serves a star call.
struct Crossings {
  std::atomic<int> bodies{0}, slots{0}, done{0}, replies{0};
};
Crossings crossings;

template <typename Function>
Function Next(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}
}  // namespace

// Interposes the transport's functions for the whole process.
extern "C" void sw_body_free(sw_body* body) {
  static const auto next = Next<decltype(&sw_body_free)>("sw_body_free");
  ++crossings.bodies;
  next(body);
}
extern "C" void* sw_star_slots_get(const sw_star_slots* slots, uint32_t slot) {
  static const auto next = Next<decltype(&sw_star_slots_get)>("sw_star_slots_get");
  ++crossings.slots;
  return next(slots, slot);
}
extern "C" void sw_engine_star_done(const sw_engine* engine, sw_ticket ticket, const sw_star_outcome* outcome) {
  static const auto next = Next<decltype(&sw_engine_star_done)>("sw_engine_star_done");
  ++crossings.done;
  next(engine, ticket, outcome);
}
extern "C" void sw_engine_reply(sw_engine* engine, sw_ticket ticket, sw_code code, sw_bytes meta,
                                const sw_payload* payload) {
  static const auto next = Next<decltype(&sw_engine_reply)>("sw_engine_reply");
  ++crossings.replies;
  next(engine, ticket, code, meta, payload);
}

namespace starwire {
namespace {

// The other two are the start of the run and the release of the reply's memory.
TEST_F(StarServiceTest, TheCheapestCallCrossesTheBorderFourTimes) {
  Restart({{"STARWIRE_STAR_LIMITS", "inline_us=1000000"}});
  Plan plan;
  plan.Arg(0, "x");
  plan.Arg(1, "y");
  plan.Add("sum", "AddV2", {"x", "y"});
  plan.Type(plan.def()->mutable_node(2), DT_FLOAT);
  plan.Retval(0, "sum");
  const std::string bytes = plan.bytes();
  StarCall keep = Head("one", bytes, 7);
  keep.keeps = {{0, 5, kAlsoReturned}};
  ASSERT_EQ(Do(keep, bytes, {Floats({1}), Floats({2})}).first(), 3);
  for (int i = 0; i < 5; ++i) ASSERT_EQ(Do(Head("one", bytes, 7), bytes, {StarValue::Slot(5), Floats({2})}).first(), 5);
  for (int slots = 0; slots < 3; ++slots) {
    const int inlined = static_cast<int>(ps_->Metric("calls_inline_total"));
    crossings.bodies = crossings.slots = crossings.done = crossings.replies = 0;
    const StarValue slot = StarValue::Slot(5), value = Floats({3});
    ASSERT_EQ(Run(Head("one", bytes, 7), {slots > 0 ? slot : value, slots > 1 ? slot : value}).first(), 6);
    EXPECT_EQ(ps_->Metric("calls_inline_total"), inlined + 1);
    EXPECT_EQ(crossings.bodies, 1);
    EXPECT_EQ(crossings.done, 1);
    EXPECT_EQ(crossings.replies, 0);
    EXPECT_EQ(crossings.slots, slots);
  }
}

TEST_F(StarServiceTest, ACancelledCallStopsWaiting) {
  Plan take, put;
  take.Queue("queue");
  NodeDef* dequeue = take.Add("dequeue", "QueueDequeueV2", {"queue"});
  (*dequeue->mutable_attr())["component_types"].mutable_list()->add_type(DT_FLOAT);
  take.Retval(0, "dequeue");
  put.Queue("queue");
  put.Arg(0, "x");
  NodeDef* enqueue = put.Add("enqueue", "QueueEnqueueV2", {"queue", "x"});
  (*enqueue->mutable_attr())["Tcomponents"].mutable_list()->add_type(DT_FLOAT);
  const std::string take_bytes = take.bytes(), put_bytes = put.bytes();
  ASSERT_TRUE(Register("one", take_bytes, PlanHashOf(AsBytes(take_bytes))).ok());

  auto waiting = Begin(Head("one", take_bytes), {});
  EXPECT_FALSE(waiting->Wait(std::chrono::milliseconds(200)));
  sw_channel_cancel(channel_->handle(), waiting->id, 1, AsBytes(std::string("no longer wanted")));
  ASSERT_TRUE(waiting->Wait());
  EXPECT_EQ(StatusNumber(waiting->result.status), 1);
  ps_->ExpectMetric("calls_total", 1);  // counted when the call ends
  ASSERT_TRUE(Do("one", put_bytes, {Floats({7})}).status.ok());
  EXPECT_EQ(Do("one", take_bytes).first(), 7) << "the cancelled call took the element";
}

TEST_F(StarServiceTest, AStopEndsPendingCalls) {
  Plan take;
  take.Queue("queue");
  NodeDef* dequeue = take.Add("dequeue", "QueueDequeueV2", {"queue"});
  (*dequeue->mutable_attr())["component_types"].mutable_list()->add_type(DT_FLOAT);
  take.Retval(0, "dequeue");
  const std::string bytes = take.bytes();
  ASSERT_TRUE(Register("one", bytes, PlanHashOf(AsBytes(bytes))).ok());
  auto waiting = Begin(Head("one", bytes), {});
  const auto give_up = std::chrono::steady_clock::now() + kPatience;
  const auto has_it = [&] { return ps_->EngineMetric("requests_unanswered") == 1; };
  while (!has_it() && std::chrono::steady_clock::now() < give_up) std::this_thread::yield();
  EXPECT_TRUE(has_it());
  EXPECT_TRUE(ps_->engine->Stop()) << "it waited for a call that does not end";
  EXPECT_TRUE(waiting->Wait());
  EXPECT_EQ(StatusNumber(waiting->result.status), 14) << waiting->result.status;
}

TEST_F(StarServiceTest, ValuesStayForLaterCalls) {
  Plan first, second;
  first.Arg(0, "x");
  first.Type(first.Add("neg", "Neg", {"x"}), DT_FLOAT);
  first.Retval(0, "x");
  first.Retval(1, "neg");
  second.Arg(0, "x");
  second.Type(second.Add("square", "Square", {"x"}), DT_FLOAT);
  second.Retval(0, "square");
  const std::string one = first.bytes(), two = second.bytes();

  StarCall keep = Head("one", one, 11);
  keep.keeps = {{1, 5, 0}};
  Result result = Do(keep, one, {Floats({3})});
  ASSERT_TRUE(result.status.ok()) << result.status;
  EXPECT_EQ(result.first(0), 3);
  EXPECT_EQ(result.values[1].kind, StarValue::Kind::kSlot);
  EXPECT_EQ(result.values[1].slot, 5u);
  ps_->ExpectMetric("slots", 1);

  StarCall use = Head("one", two, 11);
  EXPECT_EQ(Do(use, two, {StarValue::Slot(5)}).first(), 9);
  ps_->ExpectMetric("slots", 1);
  EXPECT_EQ(StatusNumber(Do(use, two, {StarValue::Slot(6)}).status), kAborted);
  use.step_id = 12;
  EXPECT_EQ(StatusNumber(Do(use, two, {StarValue::Slot(5)}).status), kAborted) << "another step's";

  // The last call frees the slots.
  use.step_id = 11;
  use.flags = StarCall::kLast;
  EXPECT_EQ(Do(use, two, {StarValue::Slot(5)}).first(), 9);
  ps_->ExpectMetric("slots", 0);
  EXPECT_EQ(StatusNumber(Do(use, two, {StarValue::Slot(5)}).status), kAborted);

  // So does the end of the step …
  keep.keeps = {{1, 5, kAlsoReturned}, {0, 6, 0}};
  result = Do(keep, one, {Floats({3})});
  EXPECT_EQ(result.first(1), -3);
  ps_->ExpectMetric("slots", 2);
  std::vector<uint8_t> end;
  ASSERT_TRUE(EncodeStarEnd(11, AsBytes(std::string("one")), &end).ok());
  auto ended = Send(Method::kStarEnd, end, nullptr);
  ASSERT_TRUE(ended->Wait());
  EXPECT_TRUE(ended->result.status.ok());
  ps_->ExpectMetric("slots", 0);

  // … and the end of the connection.
  ASSERT_TRUE(Do(keep, one, {Floats({3})}).status.ok());
  ps_->ExpectMetric("slots", 2);
  channel_.reset();
  worker_->engine->Stop();
  ps_->ExpectMetric("slots", 0);
}

TEST_F(StarServiceTest, WhatFreesTheSlotsOfAnAbortedStepMayOvertakeItsCalls) {
  Plan plan;
  plan.Arg(0, "x");
  plan.Retval(0, "x");
  const std::string bytes = plan.bytes();
  StarCall keep = Head("one", bytes, 11);
  keep.keeps = {{0, 5, 0}};
  StarStep step(11);
  for (int call = 0; call < 2; ++call) step.Keeps(kPs, channel_, "one");
  step.Aborted();
  for (int call = 0; call < 2; ++call) {
    ASSERT_TRUE(Do(keep, bytes, {Floats({3})}).status.ok());
    ps_->ExpectMetric("slots", 1);
    step.Ended(kPs);
    ps_->ExpectMetric("slots", 0);
  }
}

TEST_F(StarServiceTest, LimitsNameThePeer) {
  Restart({{"STARWIRE_STAR_LIMITS", "values=1,calls=1"}});
  Plan plan;
  plan.Arg(0, "x");
  plan.Retval(0, "x");
  const std::string bytes = plan.bytes();
  StarCall keep = Head("one", bytes);
  keep.keeps = {{0, 1, 0}};
  ASSERT_TRUE(Do(keep, bytes, {Floats({3})}).status.ok());
  keep.keeps = {{0, 2, 0}};
  Result result = Do(keep, bytes, {Floats({3})});
  EXPECT_EQ(StatusNumber(result.status), 8) << result.status;
  EXPECT_NE(StatusMessage(result.status).find("/job:worker/replica:0/task:0 keeps 2 values"), std::string::npos)
      << result.status;

  Plan take;
  take.Queue("queue");
  NodeDef* dequeue = take.Add("dequeue", "QueueDequeueV2", {"queue"});
  (*dequeue->mutable_attr())["component_types"].mutable_list()->add_type(DT_FLOAT);
  take.Retval(0, "dequeue");
  const std::string take_bytes = take.bytes();
  ASSERT_TRUE(Register("one", take_bytes, PlanHashOf(AsBytes(take_bytes))).ok());
  auto waiting = Begin(Head("one", take_bytes), {});
  EXPECT_FALSE(waiting->Wait(std::chrono::milliseconds(100)));
  result = Run(Head("one", bytes), {Floats({1})});
  EXPECT_EQ(StatusNumber(result.status), 8) << result.status;
  EXPECT_NE(StatusMessage(result.status).find("STARWIRE_STAR_LIMITS=calls"), std::string::npos) << result.status;
  sw_channel_cancel(channel_->handle(), waiting->id, 1, AsBytes(std::string("enough")));
  EXPECT_TRUE(waiting->Wait());
}

TEST_F(StarServiceTest, ATraceShowsTheCostOfKernels) {
  const std::string push = Push("v");
  StarCall head = Head("one", push);
  head.flags = StarCall::kTrace;
  const Result result = Do(head, push, {Floats({1})});
  ASSERT_TRUE(result.status.ok()) << result.status;
  tensorflow::StepStats stats;
  ASSERT_TRUE(stats.ParseFromString(result.extra));
  ASSERT_EQ(stats.dev_stats_size(), 1);
  EXPECT_EQ(stats.dev_stats(0).device(), kCpu);
  bool found = false;
  for (const auto& node : stats.dev_stats(0).node_stats()) found = found || node.node_name() == "assign";
  EXPECT_TRUE(found);
}

TEST_F(StarServiceTest, WhatDoesNotFitThePlanIsRefused) {
  const std::string push = Push("v");
  ASSERT_TRUE(Do("one", push, {Floats({1})}).status.ok());
  EXPECT_EQ(StatusNumber(Run(Head("one", push), {}).status), 3) << "a feed is missing";
  EXPECT_EQ(StatusNumber(Run(Head("one", push), {Floats({1}), Floats({1})}).status), 3);
  EXPECT_EQ(StatusNumber(Run(Head("one", push), {StarValue::Dead()}).status), 3);
  StarCall keep = Head("one", push);
  keep.keeps = {{0, 1, 0}};
  EXPECT_EQ(StatusNumber(Run(keep, {Floats({1})}).status), 3) << "it has no fetch";
  Tensor integers(tensorflow::DT_INT32, TensorShape({1}));
  integers.flat<int32_t>()(0) = 1;
  const Result result = Run(Head("one", push), {integers});
  EXPECT_FALSE(result.status.ok()) << "a feed of another type";
}

TEST_F(StarServiceTest, GarbageIsRefused) {
  const std::string push = Push("v");
  ASSERT_TRUE(Do("one", push, {Floats({1})}).status.ok());
  std::vector<uint8_t> good;
  ASSERT_TRUE(EncodeStarCall(Head("one", push), &good).ok());
  ValueEncoder cargo;
  const StarValue feed = Floats({1});
  ASSERT_TRUE(cargo.Pack(&feed, 1, &good).ok());
  const sw_payload* kept = cargo.Take();
  std::mt19937_64 random(3);
  for (int round = 0; round < 600; ++round) {
    std::vector<uint8_t> bad = good;
    if (round % 3 == 0) {
      bad.resize(random() % bad.size());
    } else {
      for (int i = 0; i < 3; ++i) bad[random() % bad.size()] = static_cast<uint8_t>(random());
    }
    const Method method = std::vector<Method>{Method::kStarCall, Method::kStarRegister, Method::kStarEnd}[round % 3];
    const sw_payload payload = {kept->parts, kept->n_parts, nullptr, nullptr};
    auto call = Send(method, bad, round % 2 == 0 ? &payload : nullptr);
    ASSERT_TRUE(call->Wait());
  }
  kept->release(kept->owner);
  EXPECT_TRUE(Do("one", push, {Floats({1})}).status.ok()) << "it serves on";
}

}  // namespace
}  // namespace starwire
