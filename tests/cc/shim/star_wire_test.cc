// The wire format of star calls: round trips and garbage.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cc/star/cargo.h"
#include "cc/star/wire.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/variant.h"
#include "tensorflow/core/framework/variant_encode_decode.h"

namespace starwire {
namespace {

using tensorflow::DT_FLOAT;
using tensorflow::DT_STRING;
using tensorflow::Tensor;
using tensorflow::TensorShape;

sw_bytes Bytes(const std::vector<uint8_t>& bytes) { return {bytes.data(), bytes.size()}; }
sw_bytes Bytes(const std::string& text) { return {reinterpret_cast<const uint8_t*>(text.data()), text.size()}; }
std::string Text(sw_bytes bytes) { return std::string(reinterpret_cast<const char*>(bytes.data), bytes.len); }

class NoMemory : public tensorflow::Allocator {
 public:
  std::string Name() override { return "none"; }
  void* AllocateRaw(size_t, size_t) override { return nullptr; }
  void DeallocateRaw(void*) override {}
};

Tensor Floats(int64_t n, float first) {
  Tensor tensor(DT_FLOAT, TensorShape({n}));
  for (int64_t i = 0; i < n; ++i) tensor.flat<float>()(i) = first + static_cast<float>(i);
  return tensor;
}

Tensor Strings(const std::vector<std::string>& values) {
  Tensor tensor(DT_STRING, TensorShape({static_cast<int64_t>(values.size())}));
  for (size_t i = 0; i < values.size(); ++i) tensor.flat<tensorflow::tstring>()(i) = values[i];
  return tensor;
}

// The body of a call as the transport passes it: parts at multiples of 64 in one allocation.
struct Body {
  explicit Body(const sw_payload* payload) {
    size_t total = 0;
    for (size_t i = 0; payload != nullptr && i < payload->n_parts; ++i) total += (payload->parts[i].len + 63) / 64 * 64;
    memory = static_cast<uint8_t*>(std::aligned_alloc(64, total + 64));
    uint8_t* at = memory;
    for (size_t i = 0; payload != nullptr && i < payload->n_parts; ++i) {
      std::memcpy(at, payload->parts[i].data, payload->parts[i].len);
      parts.push_back({at, payload->parts[i].len});
      at += (payload->parts[i].len + 63) / 64 * 64;
    }
    if (payload != nullptr) payload->release(payload->owner);
  }
  ~Body() { std::free(memory); }
  static void Release(void* body) {
    ++released;
    delete static_cast<Body*>(body);
  }
  static int released;
  uint8_t* memory;
  std::vector<sw_part> parts;
};
int Body::released = 0;

void ExpectEqual(const Tensor& a, const Tensor& b) {
  ASSERT_EQ(a.dtype(), b.dtype());
  ASSERT_EQ(a.shape(), b.shape());
  if (a.dtype() == DT_STRING) {
    for (int64_t i = 0; i < a.NumElements(); ++i) {
      ASSERT_EQ(a.flat<tensorflow::tstring>()(i), b.flat<tensorflow::tstring>()(i));
    }
  } else if (a.dtype() != tensorflow::DT_VARIANT) {
    ASSERT_EQ(a.tensor_data(), b.tensor_data());
  }
}

// A random mixture: small, large, empty and oddly sized tensors, strings, variants, dead and kept values.
std::vector<StarValue> Mixture(int seed) {
  std::mt19937 random(seed);
  std::vector<StarValue> values;
  const int n = static_cast<int>(random() % 40);
  for (int i = 0; i < n; ++i) {
    switch (random() % 8) {
      case 0:
        values.push_back(Floats(2048 + static_cast<int64_t>(random() % 5000), 1));
        break;
      case 1:
        values.push_back(Floats(0, 0));
        break;
      case 2:
        values.push_back(Strings({"a", std::string(random() % 100, 'x'), ""}));
        break;
      case 3:
        values.push_back(StarValue::Dead());
        break;
      case 4:
        values.push_back(StarValue::Slot(random()));
        break;
      case 5: {
        Tensor scalar(tensorflow::DT_VARIANT, TensorShape({}));
        scalar.scalar<tensorflow::Variant>()() = 7;
        values.push_back(scalar);
        break;
      }
      case 6: {
        Tensor flag(tensorflow::DT_BOOL, TensorShape({}));
        flag.scalar<bool>()() = true;
        values.push_back(flag);
        break;
      }
      default:
        values.push_back(Floats(1 + static_cast<int64_t>(random() % 50), static_cast<float>(i)));
    }
  }
  return values;
}

void ExpectSame(const std::vector<StarValue>& sent, const std::vector<StarValue>& received) {
  ASSERT_EQ(sent.size(), received.size());
  for (size_t i = 0; i < sent.size(); ++i) {
    ASSERT_EQ(sent[i].kind, received[i].kind);
    ASSERT_EQ(sent[i].slot, received[i].slot);
    if (sent[i].kind == StarValue::Kind::kTensor) ExpectEqual(sent[i].tensor, received[i].tensor);
  }
}

TEST(StarWire, HeadsSurviveARoundTrip) {
  StarCall call;
  call.flags = StarCall::kLast | StarCall::kTrace;
  call.number = 513;
  call.step_id = -5;
  call.incarnation = 0xF123456789ABCDEFu;
  for (size_t i = 0; i < call.plan.size(); ++i) call.plan[i] = static_cast<uint8_t>(i);
  const std::string handle = "direct_0123456789abcdef";
  call.session = Bytes(handle);
  call.keeps = {{1, 7, 0}, {4, 9, StarKeep::kAlsoReturned}};
  std::vector<uint8_t> meta;
  ASSERT_TRUE(EncodeStarCall(call, &meta).ok());
  const size_t head = meta.size();
  meta.push_back(77);
  StarCall got;
  size_t consumed = 0;
  ASSERT_TRUE(DecodeStarCall(Bytes(meta), &got, &consumed).ok());
  EXPECT_EQ(consumed, head);
  EXPECT_EQ(got.flags, call.flags);
  EXPECT_EQ(got.number, call.number);
  EXPECT_EQ(got.step_id, call.step_id);
  EXPECT_EQ(got.incarnation, call.incarnation);
  EXPECT_EQ(got.plan, call.plan);
  EXPECT_EQ(Text(got.session), handle);
  ASSERT_EQ(got.keeps.size(), 2u);
  EXPECT_EQ(got.keeps[1].fetch, 4u);
  EXPECT_EQ(got.keeps[1].slot, 9u);
  EXPECT_EQ(got.keeps[1].flags, StarKeep::kAlsoReturned);

  StarReply reply, got_reply;
  reply.flags = StarReply::kRegister;
  reply.queue_micros = 3;
  reply.run_micros = 4;
  reply.stats_bytes = 5;
  meta.clear();
  EncodeStarReply(reply, &meta);
  ASSERT_TRUE(DecodeStarReply(Bytes(meta), &got_reply, &consumed).ok());
  EXPECT_EQ(consumed, meta.size());
  EXPECT_EQ(got_reply.flags, reply.flags);
  EXPECT_EQ(got_reply.queue_micros, 3u);
  EXPECT_EQ(got_reply.run_micros, 4u);
  EXPECT_EQ(got_reply.stats_bytes, 5u);

  StarRegister registration, got_registration;
  registration.incarnation = 42;
  registration.plan = call.plan;
  registration.session = Bytes(handle);
  meta = EncodeStarRegister(registration);
  ASSERT_TRUE(DecodeStarRegister(Bytes(meta), &got_registration).ok());
  EXPECT_EQ(got_registration.incarnation, 42u);
  EXPECT_EQ(got_registration.plan, call.plan);
  EXPECT_EQ(Text(got_registration.session), handle);

  StarEnd end, got_end;
  end.step_id = 1234567890123;
  end.session = Bytes(handle);
  meta = EncodeStarEnd(end);
  ASSERT_TRUE(DecodeStarEnd(Bytes(meta), &got_end).ok());
  EXPECT_EQ(got_end.step_id, end.step_id);
  EXPECT_EQ(Text(got_end.session), handle);
}

TEST(StarWire, APlanIsNamedByItsSha256) {
  const PlanHash hash = PlanHashOf(Bytes(std::string("abc")));
  const uint8_t expected[] = {0xba, 0x78, 0x16, 0xbf};
  EXPECT_EQ(std::memcmp(hash.data(), expected, 4), 0);
}

TEST(StarWire, FeedsArriveInTheBodyOfTheCall) {
  for (int seed = 0; seed < 200; ++seed) {
    const std::vector<StarValue> sent = Mixture(seed);
    std::vector<uint8_t> meta;
    CargoOut out;
    ASSERT_TRUE(out.Pack(sent.data(), sent.size(), &meta).ok());
    auto* body = new Body(out.Take());
    const uint8_t* const memory = body->memory;
    const int before = Body::released;
    std::vector<StarValue> received;
    {
      CargoIn in;
      ASSERT_TRUE(in.Adopt(Bytes(meta), body->parts.data(), body->parts.size(), body, Body::Release).ok());
      EXPECT_EQ(in.bytes(), out.bytes());
      ASSERT_TRUE(in.Finish(tensorflow::cpu_allocator(), &received).ok());
    }
    ExpectSame(sent, received);
    bool alias = false;
    for (const StarValue& value : received) {
      if (value.kind != StarValue::Kind::kTensor || value.tensor.dtype() != DT_FLOAT) continue;
      if (value.tensor.NumElements() == 0) continue;
      const auto* data = static_cast<const uint8_t*>(static_cast<const void*>(value.tensor.tensor_data().data()));
      EXPECT_GE(data, memory) << "feeds are not copied";
      EXPECT_EQ(reinterpret_cast<uintptr_t>(data) % 64, 0u);
      alias = true;
    }
    EXPECT_EQ(Body::released, before + (alias ||
                                                [&] {
                                                  for (const StarValue& value : received) {
                                                    if (value.tensor.dtype() == tensorflow::DT_BOOL &&
                                                        value.kind == StarValue::Kind::kTensor) {
                                                      return true;
                                                    }
                                                  }
                                                  return false;
                                                }()
                                            ? 0
                                            : 1));
    received.clear();
    EXPECT_EQ(Body::released, before + 1) << "the body goes with the last tensor";
  }
}

TEST(StarWire, FetchesArriveInASlabAndInSeparateTensors) {
  for (int seed = 0; seed < 200; ++seed) {
    const std::vector<StarValue> sent = Mixture(seed + 1000);
    std::vector<uint8_t> meta;
    CargoOut out;
    ASSERT_TRUE(out.Pack(sent.data(), sent.size(), &meta).ok());
    const std::string stats = seed % 2 == 0 ? "" : "step stats";
    if (!stats.empty()) out.AddPart(stats);
    const sw_payload* payload = out.Take();
    std::vector<uint64_t> lens;
    for (size_t i = 0; payload != nullptr && i < payload->n_parts; ++i) lens.push_back(payload->parts[i].len);
    std::vector<void*> bufs(lens.size(), nullptr);
    CargoIn in;
    ASSERT_TRUE(in.Prepare(Bytes(meta), lens.size(), lens.data(), static_cast<uint32_t>(stats.size()),
                           tensorflow::cpu_allocator(), bufs.data())
                    .ok());
    for (size_t i = 0; i < lens.size(); ++i) std::memcpy(bufs[i], payload->parts[i].data, lens[i]);
    if (payload != nullptr) payload->release(payload->owner);
    std::vector<StarValue> received;
    ASSERT_TRUE(in.Finish(tensorflow::cpu_allocator(), &received).ok());
    ExpectSame(sent, received);
    EXPECT_EQ(in.extra(), stats);
  }
}

TEST(StarWire, SmallTensorsShareAPartAndLargeOnesAreSentInPlace) {
  std::vector<StarValue> sent;
  for (int i = 0; i < 100; ++i) sent.push_back(Floats(1024, static_cast<float>(i)));
  const Tensor large = Floats(1 << 16, 0);
  sent.push_back(large);
  std::vector<uint8_t> meta;
  CargoOut out;
  ASSERT_TRUE(out.Pack(sent.data(), sent.size(), &meta).ok());
  const sw_payload* payload = out.Take();
  ASSERT_EQ(payload->n_parts, 2u);
  EXPECT_EQ(payload->parts[0].len, 100u * 4096);
  EXPECT_EQ(payload->parts[1].data, static_cast<const void*>(large.tensor_data().data()));
  payload->release(payload->owner);
}

TEST(StarWire, UnsendableTensorsAreRefused) {
  std::vector<uint8_t> meta;
  CargoOut out;
  NoMemory none;
  const StarValue uninitialized = Tensor(&none, DT_FLOAT, TensorShape({3}));
  EXPECT_EQ(StatusNumber(out.Pack(&uninitialized, 1, &meta)), kInvalidArgument);
  const std::vector<StarValue> many((1 << 20) / 16, StarValue::Dead());
  EXPECT_EQ(StatusNumber(out.Pack(many.data(), many.size(), &meta)), kInvalidArgument);
}

// Every prefix and many single-byte changes yield a status or a result, never a crash.
TEST(StarWire, GarbageIsAnInvalidArgument) {
  std::mt19937_64 random(7);
  for (int seed = 0; seed < 60; ++seed) {
    const std::vector<StarValue> sent = Mixture(seed);
    StarCall call;
    call.keeps = {{0, 1, 0}};
    const std::string handle = "handle";
    call.session = Bytes(handle);
    std::vector<uint8_t> meta;
    ASSERT_TRUE(EncodeStarCall(call, &meta).ok());
    const size_t head = meta.size();
    CargoOut out;
    ASSERT_TRUE(out.Pack(sent.data(), sent.size(), &meta).ok());
    const sw_payload* payload = out.Take();
    Body body(payload);
    for (int round = 0; round < 400; ++round) {
      std::vector<uint8_t> bad = meta;
      if (round % 4 == 0) {
        bad.resize(random() % (bad.size() + 1));
      } else {
        for (uint64_t i = random() % 3; i < 3; ++i) {
          bad[random() % bad.size()] = static_cast<uint8_t>(random() % 3 == 0 ? 255 : random());
        }
      }
      StarCall got;
      size_t consumed = 0;
      Status status = DecodeStarCall(Bytes(bad), &got, &consumed);
      StarReply reply;
      DecodeStarReply(Bytes(bad), &reply, &consumed).IgnoreError();
      StarRegister registration;
      DecodeStarRegister(Bytes(bad), &registration).IgnoreError();
      StarEnd end;
      DecodeStarEnd(Bytes(bad), &end).IgnoreError();
      if (!status.ok()) {
        EXPECT_EQ(StatusNumber(status), kInvalidArgument) << status;
        continue;
      }
      ASSERT_LE(consumed, bad.size());
      const size_t from = std::min(bad.size(), head);
      const sw_bytes table = {bad.data() + from, bad.size() - from};
      CargoIn in;
      int released = 0;
      status = in.Adopt(table, body.parts.data(), body.parts.size(), &released,
                        [](void* count) { ++*static_cast<int*>(count); });
      std::vector<StarValue> values;
      if (status.ok()) status = in.Finish(tensorflow::cpu_allocator(), &values);
      values.clear();
      if (!status.ok()) {
        EXPECT_EQ(StatusNumber(status), kInvalidArgument) << status;
      }
      std::vector<uint64_t> lens;
      for (const sw_part& part : body.parts) lens.push_back(part.len);
      std::vector<void*> bufs(lens.size(), nullptr);
      CargoIn reply_in;
      reply_in.Prepare(table, lens.size(), lens.data(), 0, tensorflow::cpu_allocator(), bufs.data()).IgnoreError();
    }
  }
}

}  // namespace
}  // namespace starwire
