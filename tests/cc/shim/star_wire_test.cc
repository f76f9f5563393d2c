// The wire format of star calls: round trips and garbage.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cc/star/call_codec.h"
#include "cc/star/value_codec.h"
#include "cc/tensor/elements.h"
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

Tensor Ids(const std::vector<int64_t>& values) {
  Tensor tensor(tensorflow::DT_INT64, TensorShape({static_cast<int64_t>(values.size())}));
  for (size_t i = 0; i < values.size(); ++i) tensor.flat<Int64>()(i) = values[i];
  return tensor;
}

// Whether a value of Mixture() is used where it arrived.
bool IsInPlace(const StarValue& value) {
  if (value.kind != StarValue::Kind::kTensor || value.tensor.NumElements() == 0) return false;
  if (value.tensor.dtype() != tensorflow::DT_INT64) return tensorflow::DataTypeCanUseMemcpy(value.tensor.dtype());
  const auto ids = value.tensor.flat<Int64>();
  return ids.size() < 8 ||
         std::any_of(ids.data(), ids.data() + ids.size(), [](Int64 id) { return id < 0 || id >> 32 != 0; });
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
    switch (random() % 9) {
      case 8: {
        std::vector<int64_t> ids(random() % 30);
        for (int64_t& id : ids) id = static_cast<int64_t>(random());
        if (!ids.empty() && random() % 2 == 0) ids[random() % ids.size()] = random() % 2 == 0 ? -1 : int64_t{1} << 32;
        values.push_back(Ids(ids));
        break;
      }
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

// crates/protocol tests the layout of heads; this is the way there.
TEST(StarWire, HeadsAreAppended) {
  StarCall call;
  call.flags = StarCall::kLast | StarCall::kTrace;
  call.step_id = -5;
  call.incarnation = 0xF123456789ABCDEFu;
  call.plan.fill(9);
  const std::string handle = "direct_0123456789abcdef";
  call.session = Bytes(handle);
  call.keeps = {{1, 7, 0}, {4, 9, kAlsoReturned}};
  std::vector<uint8_t> meta = {77};
  ASSERT_TRUE(EncodeStarCall(call, &meta).ok());
  ASSERT_EQ(meta.size(), 1 + SW_STAR_HEAD_BYTES + handle.size() + 2 * 12);
  EXPECT_EQ(std::vector<uint8_t>(meta.begin(), meta.begin() + 6), (std::vector<uint8_t>{77, 2, 3, 0, 0, 23}));
  EXPECT_EQ(meta[17], 0xFB) << "the step";
  EXPECT_EQ(meta[25], 0xEF) << "the incarnation";
  EXPECT_EQ(meta[33], 9) << "the plan";
  EXPECT_EQ(std::string(meta.begin() + 81, meta.begin() + 81 + 23), handle);
  EXPECT_EQ(meta[meta.size() - 4], kAlsoReturned);

  meta.clear();
  ASSERT_TRUE(EncodeStarRegister(42, call.plan, Bytes(handle), &meta).ok());
  EXPECT_EQ(meta.size(), 48 + handle.size());
  EXPECT_EQ(meta[8], 42);
  meta.clear();
  ASSERT_TRUE(EncodeStarEnd(42, Bytes(handle), &meta).ok());
  EXPECT_EQ(meta.size(), 16 + handle.size());
  EXPECT_EQ(meta[8], 42);

  const std::string endless(5000, 'x');
  call.session = Bytes(endless);
  meta = {77};
  const Status status = EncodeStarCall(call, &meta);
  EXPECT_EQ(StatusNumber(status), kInvalidArgument);
  EXPECT_NE(StatusMessage(status).find("5000 bytes and 2 kept values is too long"), std::string::npos) << status;
  EXPECT_EQ(meta, std::vector<uint8_t>{77});
  EXPECT_FALSE(EncodeStarRegister(42, call.plan, Bytes(endless), &meta).ok());
  EXPECT_FALSE(EncodeStarEnd(42, Bytes(endless), &meta).ok());
}

TEST(StarWire, RepliesAreRead) {
  std::vector<uint8_t> meta(40, 0);
  meta[0] = 1;
  meta[1] = kRegister;
  meta[4] = 3;
  meta[8] = 4;
  meta[12] = 5;
  StarReply reply = {};
  ASSERT_TRUE(DecodeStarReply(Bytes(meta), &reply).ok());
  EXPECT_EQ(reply.flags, kRegister);
  EXPECT_EQ(reply.queue_micros, 3u);
  EXPECT_EQ(reply.run_micros, 4u);
  EXPECT_EQ(reply.stats_bytes, 5u);
  EXPECT_EQ(reply.table, 32u);
  meta[0] = 2;
  const Status status = DecodeStarReply(Bytes(meta), &reply);
  EXPECT_EQ(StatusNumber(status), kInvalidArgument);
  EXPECT_NE(StatusMessage(status).find("malformed star call reply: version 2"), std::string::npos) << status;
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
    ValueEncoder out;
    ASSERT_TRUE(out.Pack(sent.data(), sent.size(), &meta).ok());
    auto* body = new Body(out.Take());
    const uint8_t* const memory = body->memory;
    const int before = Body::released;
    std::vector<StarValue> received;
    {
      ValueDecoder in;
      ASSERT_TRUE(in.Adopt(Bytes(meta), body->parts.data(), body->parts.size(), body, Body::Release).ok());
      EXPECT_EQ(in.bytes(), out.bytes());
      ASSERT_TRUE(in.Finish(tensorflow::cpu_allocator(), &received).ok());
    }
    ExpectSame(sent, received);
    for (const StarValue& value : received) {
      if (value.kind != StarValue::Kind::kTensor || value.tensor.dtype() != DT_FLOAT) continue;
      if (value.tensor.NumElements() == 0) continue;
      const auto* data = static_cast<const uint8_t*>(static_cast<const void*>(value.tensor.tensor_data().data()));
      EXPECT_GE(data, memory) << "feeds are not copied";
      EXPECT_EQ(reinterpret_cast<uintptr_t>(data) % 64, 0u);
    }
    const bool is_used = std::any_of(received.begin(), received.end(), IsInPlace);
    EXPECT_EQ(Body::released, before + (is_used ? 0 : 1));
    received.clear();
    EXPECT_EQ(Body::released, before + 1) << "the body goes with the last tensor";
  }
}

TEST(StarWire, FetchesArriveInASlabAndInSeparateTensors) {
  for (int seed = 0; seed < 200; ++seed) {
    const std::vector<StarValue> sent = Mixture(seed + 1000);
    std::vector<uint8_t> meta;
    ValueEncoder out;
    ASSERT_TRUE(out.Pack(sent.data(), sent.size(), &meta).ok());
    const std::string stats = seed % 2 == 0 ? "" : "step stats";
    if (!stats.empty()) out.AddPart(stats);
    const sw_payload* payload = out.Take();
    std::vector<uint64_t> lens;
    for (size_t i = 0; payload != nullptr && i < payload->n_parts; ++i) lens.push_back(payload->parts[i].len);
    std::vector<void*> bufs(lens.size(), nullptr);
    ValueDecoder in;
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
  ValueEncoder out;
  ASSERT_TRUE(out.Pack(sent.data(), sent.size(), &meta).ok());
  const sw_payload* payload = out.Take();
  ASSERT_EQ(payload->n_parts, 2u);
  EXPECT_EQ(payload->parts[0].len, 100u * 4096);
  EXPECT_EQ(payload->parts[1].data, static_cast<const void*>(large.tensor_data().data()));
  payload->release(payload->owner);
}

TEST(StarWire, SmallIdsTakeHalfTheirBytes) {
  constexpr int64_t kMost = std::numeric_limits<uint32_t>::max();
  const auto bytes = [](std::vector<int64_t> ids) {
    const StarValue sent = Ids(ids);
    std::vector<uint8_t> meta;
    ValueEncoder out;
    EXPECT_TRUE(out.Pack(&sent, 1, &meta).ok());
    const sw_payload* payload = out.Take();
    payload->release(payload->owner);
    return out.bytes();
  };
  EXPECT_EQ(bytes({0, 1, 2, 3, 4, 5, 6, kMost}), 32u);
  EXPECT_EQ(bytes(std::vector<int64_t>(1 << 17, 9)), 4u << 17);
  EXPECT_EQ(bytes({0, 1, 2, 3, 4, 5, 6, kMost + 1}), 64u);
  EXPECT_EQ(bytes({0, 1, 2, 3, 4, 5, 6, -1}), 64u);
  EXPECT_EQ(bytes({1, 2}), 16u) << "too few";
  EXPECT_EQ(bytes(std::vector<int64_t>((1 << 17) + 1, 9)), (8u << 17) + 8) << "sent in place";
}

// As a slice of a batch may be.
TEST(StarWire, IdsNeedNotBeAlignedForVectors) {
  const Tensor all = Ids({-1, 1, 2, 3, 4, 5, 6, 7, 8, 9});
  const Tensor ids = all.Slice(1, 10);
  ASSERT_FALSE(ids.IsAligned());
  const StarValue sent = ids;
  std::vector<uint8_t> meta;
  ValueEncoder out;
  ASSERT_TRUE(out.Pack(&sent, 1, &meta).ok());
  EXPECT_EQ(out.bytes(), 36u);
  auto* body = new Body(out.Take());
  ValueDecoder in;
  std::vector<StarValue> received;
  ASSERT_TRUE(in.Adopt(Bytes(meta), body->parts.data(), body->parts.size(), body, Body::Release).ok());
  ASSERT_TRUE(in.Finish(tensorflow::cpu_allocator(), &received).ok());
  ASSERT_EQ(received.size(), 1u);
  ExpectEqual(received[0].tensor, Ids({1, 2, 3, 4, 5, 6, 7, 8, 9}));
}

// As those of a reference variable, which another step writes meanwhile.
TEST(StarWire, IdsThatChangeWhileTheyAreSentArriveAsNumbersThatTheyHad) {
  constexpr Int64 kSmall = 7, kLarge = (Int64{1} << 40) + 9;
  constexpr int kIds = 16, kPause = 300;  // numbers that stay as they are for about as long as they are looked at
  const Tensor ids = Ids(std::vector<int64_t>(kIds, kSmall));
  std::atomic<bool> is_over(false);
  std::thread writer([&] {
    auto* numbers = reinterpret_cast<volatile Int64*>(const_cast<char*>(ids.tensor_data().data()));
    while (!is_over.load()) {
      for (const Int64 number : {kLarge, kSmall}) {
        for (int i = 0; i < kIds; ++i) numbers[i] = number;
        for (volatile int i = 0; i < kPause; i = i + 1) continue;
      }
    }
  });
  Int64 wrong = kSmall;
  // Only while both threads run does the result change that often.
  size_t before = 0;
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  for (int changes = 0; changes < 20000 && wrong == kSmall && std::chrono::steady_clock::now() < end;) {
    const StarValue sent = ids;
    std::vector<uint8_t> meta;
    ValueEncoder out;
    EXPECT_TRUE(out.Pack(&sent, 1, &meta).ok());
    if (out.bytes() != std::exchange(before, out.bytes())) ++changes;
    auto* body = new Body(out.Take());
    ValueDecoder in;
    std::vector<StarValue> received;
    EXPECT_TRUE(in.Adopt(Bytes(meta), body->parts.data(), body->parts.size(), body, Body::Release).ok());
    EXPECT_TRUE(in.Finish(tensorflow::cpu_allocator(), &received).ok());
    const auto numbers = received.at(0).tensor.flat<Int64>();
    for (int i = 0; i < kIds; ++i) {
      if (numbers(i) != kSmall && numbers(i) != kLarge) wrong = numbers(i);
    }
  }
  is_over.store(true);
  writer.join();
  EXPECT_EQ(wrong, kSmall);
}

// Likewise. Strings as short as these are within the memory of their tensor.
TEST(StarWire, StringsThatChangeWhileTheyAreSentArriveOrTheCallEndsAborted) {
  constexpr int kStrings = 2000;
  Tensor strings(DT_STRING, TensorShape({kStrings}));
  for (int i = 0; i < kStrings; ++i) strings.flat<tensorflow::tstring>()(i) = "text";
  std::atomic<bool> is_over(false);
  std::thread writer([&] {
    while (!is_over.load()) {
      for (const char* text : {"longer", "text"}) {
        for (int i = 0; i < kStrings; ++i) strings.flat<tensorflow::tstring>()(i) = text;
      }
    }
  });
  int aborted = 0;
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (aborted < 20 && std::chrono::steady_clock::now() < end) {
    const StarValue sent = strings;
    std::vector<uint8_t> meta;
    ValueEncoder out;
    if (const Status status = out.Pack(&sent, 1, &meta); !status.ok()) {
      EXPECT_EQ(StatusNumber(status), kAborted) << StatusMessage(status);
      ++aborted;
      continue;
    }
    auto* body = new Body(out.Take());
    ValueDecoder in;
    std::vector<StarValue> received;
    EXPECT_TRUE(in.Adopt(Bytes(meta), body->parts.data(), body->parts.size(), body, Body::Release).ok());
    if (const Status status = in.Finish(tensorflow::cpu_allocator(), &received); !status.ok()) {
      ADD_FAILURE() << StatusMessage(status);
      break;
    }
  }
  is_over.store(true);
  writer.join();
  EXPECT_GT(aborted, 0);
}

// Entries as a hostile peer may write them.
TEST(StarWire, NarrowNumbersAreChecked) {
  const auto parse = [](uint16_t dtype, uint64_t elements, uint64_t bytes) {
    std::vector<uint8_t> meta(8 + 16 + 8, 0);
    meta[0] = 1;
    meta[8] = static_cast<uint8_t>(dtype);
    meta[10] = static_cast<uint8_t>(TensorEncoding::kNarrow);
    meta[11] = 1;
    for (int i = 0; i < 8; ++i) meta[16 + i] = static_cast<uint8_t>(bytes >> (8 * i));
    for (int i = 0; i < 8; ++i) meta[24 + i] = static_cast<uint8_t>(elements >> (8 * i));
    ValueDecoder in;
    void* buf = nullptr;
    return in.Prepare(Bytes(meta), 1, &bytes, 0, tensorflow::cpu_allocator(), &buf).ok();
  };
  EXPECT_TRUE(parse(tensorflow::DT_INT64, 4, 16));
  EXPECT_FALSE(parse(tensorflow::DT_INT64, 4, 32)) << "not narrow";
  EXPECT_FALSE(parse(tensorflow::DT_INT64, 4, 15));
  EXPECT_FALSE(parse(tensorflow::DT_INT64, 0, 0)) << "nothing";
  EXPECT_FALSE(parse(tensorflow::DT_INT64, uint64_t{1} << 62, 4)) << "the product wraps";
  EXPECT_FALSE(parse(tensorflow::DT_INT32, 4, 16));
  EXPECT_FALSE(parse(DT_FLOAT, 4, 16));
}

TEST(StarWire, UnsendableTensorsAreRefused) {
  std::vector<uint8_t> meta;
  ValueEncoder out;
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
    std::vector<uint8_t> meta;
    ValueEncoder out;
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
      StarReply reply = {};
      DecodeStarReply(Bytes(bad), &reply).IgnoreError();
      const sw_bytes table = Bytes(bad);
      ValueDecoder in;
      int released = 0;
      Status status = in.Adopt(table, body.parts.data(), body.parts.size(), &released,
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
      ValueDecoder reply_in;
      reply_in.Prepare(table, lens.size(), lens.data(), 0, tensorflow::cpu_allocator(), bufs.data()).IgnoreError();
    }
  }
}

}  // namespace
}  // namespace starwire
