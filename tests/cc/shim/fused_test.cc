// Fused tensors: their memory, their wire and proto formats, the two operations, and hostile input.
#include "cc/tensor/fused.h"

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cc/fuse/ops.h"
#include "cc/tensor/codec.h"
#include "cc/tensor/slab.h"
#include "tensorflow/core/common_runtime/device_factory.h"
#include "tensorflow/core/framework/node_def_builder.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.pb.h"
#include "tensorflow/core/framework/variant.h"
#include "tensorflow/core/framework/variant_encode_decode.h"
#include "tensorflow/core/platform/tstring.h"
#include "tensorflow/core/public/session_options.h"
#include "tensorflow/core/public/version.h"

namespace starwire {
namespace {

using tensorflow::DataType;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::tstring;
using tensorflow::Variant;

// Counts live allocations, and fails on demand.
class CountingAllocator : public tensorflow::Allocator {
 public:
  std::string Name() override { return "counting"; }
  void* AllocateRaw(size_t alignment, size_t bytes) override {
    if (exhausted) return nullptr;
    ++live;
    return tensorflow::cpu_allocator()->AllocateRaw(alignment, bytes);
  }
  void DeallocateRaw(void* memory) override {
    --live;
    tensorflow::cpu_allocator()->DeallocateRaw(memory);
  }
  int live = 0;
  bool exhausted = false;
};

TensorShape Shape(const std::vector<int64_t>& dims) {
  TensorShape shape;
  EXPECT_TRUE(TensorShape::BuildTensorShape(dims, &shape).ok());
  return shape;
}

Tensor Random(DataType dtype, const std::vector<int64_t>& dims, std::mt19937* random) {
  Tensor tensor(tensorflow::cpu_allocator(), dtype, Shape(dims));
  if (dtype == tensorflow::DT_STRING) {
    auto strings = tensor.flat<tstring>();
    for (int i = 0; i < strings.size(); ++i) strings(i) = std::string((*random)() % 40, 'a' + i % 26);
    return tensor;
  }
  auto data = tensor.tensor_data();
  for (size_t i = 0; i < data.size(); ++i) const_cast<char*>(data.data())[i] = static_cast<char>((*random)() & 1);
  return tensor;
}

// Every possible member type; scalars, empty tensors, and some long enough to be sent without a copy.
std::vector<Tensor> Mixture() {
  std::mt19937 random(20240611);
  std::vector<Tensor> tensors;
  const std::vector<std::vector<int64_t>> shapes = {{}, {0}, {3, 0}, {1}, {7}, {2, 3, 4}, {63}, {65}, {20000}};
  for (int number = 1; number < 64; ++number) {
    if (!tensorflow::DataType_IsValid(number)) continue;
    const auto dtype = static_cast<DataType>(number);
    if (!FusedTensors::CanHold(dtype)) continue;
    for (const auto& dims : shapes) tensors.push_back(Random(dtype, dims, &random));
  }
  std::shuffle(tensors.begin(), tensors.end(), random);
  return tensors;
}

Tensor Fused(std::vector<Tensor> members) {
  Tensor tensor(tensorflow::cpu_allocator(), tensorflow::DT_VARIANT, {});
  tensor.scalar<Variant>()() = FusedTensors(std::move(members));
  return tensor;
}

void ExpectEqual(const std::vector<Tensor>& got, const std::vector<Tensor>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    SCOPED_TRACE(i);
    ASSERT_EQ(got[i].dtype(), want[i].dtype());
    ASSERT_TRUE(got[i].shape() == want[i].shape()) << got[i].shape().DebugString();
    if (want[i].dtype() == tensorflow::DT_STRING) {
      for (int j = 0; j < want[i].NumElements(); ++j) EXPECT_EQ(got[i].flat<tstring>()(j), want[i].flat<tstring>()(j));
    } else {
      EXPECT_EQ(std::string(got[i].tensor_data()), std::string(want[i].tensor_data()));
    }
  }
}

// Everything that one reply carries.
struct Wire {
  std::vector<uint8_t> meta;
  std::vector<uint8_t> payload;
  std::vector<sw_part> parts;  // as passed to the transport
};

Status Send(const Tensor& tensor, Wire* wire) {
  EncodedTensor encoded;
  Status status = encoded.Encode(tensor, false, 77);
  if (!status.ok()) return status;
  wire->meta.assign(encoded.meta().data, encoded.meta().data + encoded.meta().len);
  wire->payload.clear();
  wire->parts.clear();
  if (const sw_payload* payload = encoded.payload()) {
    wire->parts.assign(payload->parts, payload->parts + payload->n_parts);
    for (const sw_part& part : wire->parts) {
      const auto* data = static_cast<const uint8_t*>(part.data);
      wire->payload.insert(wire->payload.end(), data, data + part.len);
    }
    payload->release(payload->owner);
  }
  return status;
}

// Delivers the payload in `pieces` parts, cut anywhere.
Status Receive(const Wire& wire, size_t pieces, tensorflow::Allocator* allocator, TensorReceiver* receiver) {
  std::vector<uint64_t> lens;
  const size_t total = wire.payload.size();
  for (size_t i = 0; total != 0 && i < pieces; ++i) lens.push_back(total * (i + 1) / pieces - total * i / pieces);
  std::vector<void*> bufs(lens.size(), nullptr);
  Status status =
      receiver->Prepare({wire.meta.data(), wire.meta.size()}, lens.size(), lens.data(), allocator, bufs.data());
  if (!status.ok()) return status;
  size_t at = 0;
  for (size_t i = 0; i < lens.size(); at += lens[i++]) {
    if (lens[i] != 0) std::memcpy(bufs[i], wire.payload.data() + at, lens[i]);
  }
  return receiver->Finish(allocator);
}

const std::vector<Tensor>& Members(const Tensor& tensor) {
  static const std::vector<Tensor> kNone;
  const FusedTensors* fused = FusedTensors::In(tensor);
  EXPECT_NE(fused, nullptr);
  return fused == nullptr ? kNone : fused->tensors();
}

TEST(Slab, LivesUntilItsLastTensorIsGone) {
  CountingAllocator allocator;
  Slab* slab = Slab::New(&allocator, 192, 2);
  std::memset(slab->data(), 7, 192);
  Tensor second;
  {
    const Tensor first = slab->NewTensor(tensorflow::DT_UINT8, Shape({64}), 0, 64);
    second = slab->NewTensor(tensorflow::DT_UINT8, Shape({64}), 128, 64);
    slab->Unref();
    EXPECT_EQ(first.tensor_data().data() + 128, second.tensor_data().data());
    EXPECT_TRUE(first.RefCountIsOne()) << "its bytes are nobody else's: kernels may work in place";
    EXPECT_FALSE(first.SharesBufferWith(second));
    EXPECT_EQ(Slab::HeldBy(first.Slice(8, 16)), 192) << "as long as a part of a piece lives";
  }
  EXPECT_EQ(allocator.live, 1);
  EXPECT_EQ(second.flat<uint8_t>()(63), 7);
  second = Tensor();
  EXPECT_EQ(allocator.live, 0);
}

TEST(Slab, WithoutMemory) {
  CountingAllocator allocator;
  allocator.exhausted = true;
  EXPECT_EQ(Slab::New(&allocator, 64, 1), nullptr);
  EXPECT_EQ(Slab::New(&allocator, 64, ~size_t{0} / 2), nullptr);
  Slab* empty = Slab::New(&allocator, 0, 0);
  ASSERT_NE(empty, nullptr);
  empty->Unref();
}

TEST(Fused, EveryTypeOverStarwire) {
  const std::vector<Tensor> members = Mixture();
  ASSERT_GT(members.size(), 200u);
  Wire wire;
  ASSERT_TRUE(Send(Fused(members), &wire).ok());
  for (size_t pieces : {1, 3, 1000}) {
    CountingAllocator allocator;
    {
      TensorReceiver receiver;
      const Status status = Receive(wire, pieces, &allocator, &receiver);
      ASSERT_TRUE(status.ok()) << StatusMessage(status);
      EXPECT_EQ(receiver.header().send_start_micros, 77);
      ExpectEqual(Members(receiver.tensor()), members);
      for (const Tensor& tensor : Members(receiver.tensor())) {
        if (tensor.NumElements() == 0 || tensor.dtype() == tensorflow::DT_STRING) continue;
        EXPECT_EQ(reinterpret_cast<uintptr_t>(tensor.tensor_data().data()) % 64, 0u);
      }
    }
    EXPECT_EQ(allocator.live, 0);
  }
}

TEST(Fused, EveryTypeThroughAProto) {
  const std::vector<Tensor> members = Mixture();
  tensorflow::TensorProto proto;
  Fused(members).AsProtoField(&proto);
  Tensor back;
  ASSERT_TRUE(back.FromProto(tensorflow::cpu_allocator(), proto));
  ExpectEqual(Members(back), members);
}

TEST(Fused, LongMembersAreSentInPlace) {
  std::mt19937 random(1);
  const Tensor small = Random(tensorflow::DT_FLOAT, {100}, &random);
  const Tensor at_limit = Random(tensorflow::DT_FLOAT, {2048}, &random);
  const Tensor long_one = Random(tensorflow::DT_FLOAT, {5000}, &random);
  Wire wire;
  ASSERT_TRUE(Send(Fused({small, at_limit, small, long_one}), &wire).ok());
  ASSERT_EQ(wire.parts.size(), 4u);
  EXPECT_EQ(wire.parts[1].data, at_limit.tensor_data().data());
  EXPECT_EQ(wire.parts[1].len, 8192u);
  EXPECT_EQ(wire.parts[3].data, long_one.tensor_data().data());
  EXPECT_TRUE(at_limit.RefCountIsOne()) << "released with the payload";
}

TEST(Fused, MembersShareOneSlab) {
  std::mt19937 random(2);
  Wire wire;
  ASSERT_TRUE(Send(Fused({Random(tensorflow::DT_FLOAT, {3}, &random), Random(tensorflow::DT_BOOL, {}, &random),
                          Random(tensorflow::DT_DOUBLE, {4}, &random)}),
                   &wire)
                  .ok());
  EXPECT_EQ(wire.payload.size(), 64u + 64u + 32u);
  CountingAllocator allocator;
  TensorReceiver receiver;
  ASSERT_TRUE(Receive(wire, 1, &allocator, &receiver).ok());
  EXPECT_EQ(allocator.live, 1);
  const auto& members = Members(receiver.tensor());
  EXPECT_EQ(members[1].tensor_data().data() - members[0].tensor_data().data(), 64);
  receiver.Reset();
  EXPECT_EQ(allocator.live, 0);
}

TEST(Fused, OnlyEmptyMembers) {
  const std::vector<Tensor> members = {Tensor(tensorflow::DT_FLOAT, Shape({0, 3})),
                                       Tensor(tensorflow::DT_STRING, Shape({0}))};
  Wire wire;
  ASSERT_TRUE(Send(Fused(members), &wire).ok());
  EXPECT_TRUE(wire.parts.empty());
  TensorReceiver receiver;
  ASSERT_TRUE(Receive(wire, 0, tensorflow::cpu_allocator(), &receiver).ok());
  ExpectEqual(Members(receiver.tensor()), members);
}

TEST(Fused, AnOversizedTableTravelsAsAProto) {
  const std::vector<Tensor> members(70000, Tensor(1.5f));
  Wire wire;
  ASSERT_TRUE(Send(Fused(members), &wire).ok());
  EXPECT_EQ(wire.meta[4], static_cast<uint8_t>(TensorEncoding::kProto));
  TensorReceiver receiver;
  const Status status = Receive(wire, 2, tensorflow::cpu_allocator(), &receiver);
  ASSERT_TRUE(status.ok()) << StatusMessage(status);
  ExpectEqual(Members(receiver.tensor()), members);
}

TEST(Fused, UnsendableTensorsAreRefused) {
  CountingAllocator allocator;
  allocator.exhausted = true;
  const Tensor uninitialized(&allocator, tensorflow::DT_UINT8, Shape({100}));
  Wire wire;
  EXPECT_EQ(StatusNumber(Send(Fused({uninitialized}), &wire)), 3);
  EXPECT_EQ(StatusNumber(Send(Fused({Tensor(tensorflow::DT_VARIANT, Shape({2}))}), &wire)), 12);
}

TEST(Fused, NoMemoryLeftEndsInResourceExhausted) {
  Wire wire;
  ASSERT_TRUE(Send(Fused({Tensor(1.0f), Tensor(2.0)}), &wire).ok());
  CountingAllocator allocator;
  allocator.exhausted = true;
  TensorReceiver receiver;
  EXPECT_EQ(StatusNumber(Receive(wire, 1, &allocator, &receiver)), 8);
}

// ---- hostile peers ----

TEST(HostileFused, EveryFieldIsChecked) {
  Wire good;
  ASSERT_TRUE(
      Send(Fused({Tensor(1.0f), Tensor(tstring("abc")), Tensor(tensorflow::DT_INT32, Shape({0}))}), &good).ok());
  const auto refuses = [&good](size_t at, uint8_t value) {
    Wire wire = good;
    wire.meta[at] = value;
    TensorReceiver receiver;
    return !Receive(wire, 1, tensorflow::cpu_allocator(), &receiver).ok();
  };
  TensorReceiver receiver;
  ASSERT_TRUE(Receive(good, 1, tensorflow::cpu_allocator(), &receiver).ok());
  constexpr size_t kTable = EncodedTensor::kFixedMeta, kFirst = kTable + 8, kSecond = kFirst + 16;
  EXPECT_TRUE(refuses(1, 1)) << "dead";
  EXPECT_TRUE(refuses(2, tensorflow::DT_FLOAT)) << "no variant";
  EXPECT_TRUE(refuses(5, 1)) << "no scalar";
  EXPECT_TRUE(refuses(16, 1)) << "bytes of payload";
  EXPECT_TRUE(refuses(kTable, 2)) << "version";
  EXPECT_TRUE(refuses(kTable + 1, 1)) << "reserved";
  EXPECT_TRUE(refuses(kTable + 4, 0)) << "no members";
  EXPECT_TRUE(refuses(kTable + 4, 2)) << "fewer members";
  EXPECT_TRUE(refuses(kTable + 4, 4)) << "more members";
  EXPECT_TRUE(refuses(kTable + 7, 255)) << "very many members";
  EXPECT_TRUE(refuses(kFirst, tensorflow::DT_DOUBLE)) << "too few bytes";
  EXPECT_TRUE(refuses(kFirst, tensorflow::DT_VARIANT)) << "a type that cannot be a member";
  EXPECT_TRUE(refuses(kFirst, 0)) << "no type";
  EXPECT_TRUE(refuses(kFirst + 2, 0)) << "no payload";
  EXPECT_TRUE(refuses(kFirst + 2, 4)) << "a proto";
  EXPECT_TRUE(refuses(kFirst + 2, 5)) << "fused within fused";
  EXPECT_TRUE(refuses(kFirst + 3, 1)) << "dimensions";
  EXPECT_TRUE(refuses(kFirst + 3, 255)) << "too many dimensions";
  EXPECT_TRUE(refuses(kFirst + 4, 1)) << "reserved";
  EXPECT_TRUE(refuses(kFirst + 8, 5)) << "bytes";
  EXPECT_TRUE(refuses(kFirst + 15, 255)) << "more bytes than there can be";
  EXPECT_TRUE(refuses(kSecond + 8, 2)) << "too few bytes for the lengths";
  Wire wire = good;
  wire.meta.pop_back();
  EXPECT_FALSE(Receive(wire, 1, tensorflow::cpu_allocator(), &receiver).ok());
  wire.meta.resize(good.meta.size() + 8);
  EXPECT_FALSE(Receive(wire, 1, tensorflow::cpu_allocator(), &receiver).ok()) << "bytes after the table";
}

TEST(HostileFused, BytesThatOverflow) {
  Wire wire;
  ASSERT_TRUE(Send(Fused({Tensor(tstring("a")), Tensor(tstring("b"))}), &wire).ok());
  for (size_t member : {0, 1}) std::memset(&wire.meta[EncodedTensor::kFixedMeta + 8 + 16 * member + 8], 0xff, 8);
  TensorReceiver receiver;
  EXPECT_EQ(StatusNumber(Receive(wire, 1, tensorflow::cpu_allocator(), &receiver)), 15);
}

// Arbitrary bytes, in either format, yield an error or tensors, never a crash.
TEST(HostileFused, RandomMutations) {
  std::mt19937 random(815);
  const std::vector<Tensor> members = {
      Tensor(1.0f), Random(tensorflow::DT_STRING, {3}, &random), Tensor(tensorflow::DT_INT32, Shape({0, 2})),
      Random(tensorflow::DT_BFLOAT16, {5}, &random), Random(tensorflow::DT_STRING, {}, &random)};
  Wire seed;
  ASSERT_TRUE(Send(Fused(members), &seed).ok());
  tensorflow::VariantTensorData encoded;
  FusedTensors(members).Encode(&encoded);
  size_t accepted = 0, refused = 0;
  const auto mutate = [&random](auto* bytes) {
    (*bytes)[random() % bytes->size()] = static_cast<uint8_t>(random() % 4 == 0 ? random() : random() % 5);
  };
  for (int round = 0; round < 60000; ++round) {
    const int flips = 1 + static_cast<int>(random() % 3);
    if (round % 2 == 0) {
      Wire wire = seed;
      for (int i = 0; i < flips; ++i) {
        if (random() % 2 == 0) {
          mutate(&wire.meta);
        } else {
          mutate(&wire.payload);
        }
      }
      TensorReceiver receiver;
      ++(Receive(wire, 1, tensorflow::cpu_allocator(), &receiver).ok() ? accepted : refused);
    } else {
      tensorflow::VariantTensorData data = encoded;
      for (int i = 0; i < flips; ++i) mutate(&data.metadata_string());
      if (random() % 8 == 0) data.metadata_string().resize(random() % (encoded.metadata_string().size() + 70));
      FusedTensors fused;
      ++(fused.Decode(std::move(data)) ? accepted : refused);
    }
  }
  EXPECT_GT(accepted, 1000u);
  EXPECT_GT(refused, 1000u);
}

// ---- the operations ----

class FuseOps : public ::testing::Test {
 protected:
  FuseOps() {
    RegisterFuseOps();
    tensorflow::SessionOptions options;
    EXPECT_TRUE(tensorflow::DeviceFactory::GetFactory("CPU")
                    ->CreateDevices(options, "/job:worker/replica:0/task:0", &devices_)
                    .ok());
  }

  // Runs one kernel.
  Status Run(const char* op, const std::vector<DataType>& types, const std::vector<Tensor>& inputs,
             std::vector<Tensor>* outputs) {
    tensorflow::NodeDef def;
    std::vector<tensorflow::NodeDefBuilder::NodeOut> sources;
    tensorflow::NodeDefBuilder builder("node", op);
    if (op == kFuseOp) {
      for (size_t i = 0; i < inputs.size(); ++i) sources.emplace_back("in" + std::to_string(i), 0, inputs[i].dtype());
      builder.Input(sources);
    } else {
      builder.Input("in", 0, tensorflow::DT_VARIANT);
      builder.Attr("T", types);
    }
    Status status = builder.Finalize(&def);
    if (!status.ok()) return status;
    auto kernel = tensorflow::CreateOpKernel(tensorflow::DEVICE_CPU, devices_[0].get(), tensorflow::cpu_allocator(),
                                             def, TF_GRAPH_DEF_VERSION, &status);
    if (!status.ok()) return status;
    EXPECT_FALSE(kernel->IsExpensive());
    std::vector<Tensor> copies = inputs;
    std::vector<tensorflow::TensorValue> values;
    for (Tensor& tensor : copies) values.emplace_back(&tensor);
    tensorflow::OpKernelContext::Params params;
    params.device = devices_[0].get();
    params.op_kernel = kernel.get();
    params.inputs = values;
    const std::vector<tensorflow::AllocatorAttributes> attributes(kernel->num_outputs());
    params.output_attr_array = attributes.data();
    tensorflow::OpKernelContext context(&params);
    kernel->Compute(&context);
    for (int i = 0; context.status().ok() && i < kernel->num_outputs(); ++i) {
      outputs->push_back(*context.mutable_output(i));
    }
    return context.status();
  }

  std::vector<std::unique_ptr<tensorflow::Device>> devices_;
};

TEST_F(FuseOps, ThereAndBackWithoutACopy) {
  const std::vector<Tensor> members = Mixture();
  std::vector<Tensor> fused, back;
  ASSERT_TRUE(Run(kFuseOp, {}, members, &fused).ok());
  ASSERT_EQ(fused.size(), 1u);
  std::vector<DataType> types;
  for (const Tensor& member : members) types.push_back(member.dtype());
  const Status status = Run(kUnfuseOp, types, fused, &back);
  ASSERT_TRUE(status.ok()) << StatusMessage(status);
  ExpectEqual(back, members);
  for (size_t i = 0; i < members.size(); ++i) {
    EXPECT_TRUE(members[i].NumElements() == 0 || back[i].SharesBufferWith(members[i]));
  }
}

TEST_F(FuseOps, UnfuseTakesNothingElse) {
  const std::vector<DataType> types = {tensorflow::DT_FLOAT, tensorflow::DT_INT32};
  std::vector<Tensor> outputs;
  Tensor other(tensorflow::DT_VARIANT, Shape({}));
  other.scalar<Variant>()() = 42;
  for (const Tensor& input : {other, Fused({Tensor(1.0f)}), Fused({Tensor(1.0f), Tensor(2.0f)}),
                              Fused({Tensor(1.0f), Tensor(2), Tensor(3)})}) {
    EXPECT_EQ(StatusNumber(Run(kUnfuseOp, types, {input}, &outputs)), 3);
  }
  EXPECT_TRUE(Run(kUnfuseOp, types, {Fused({Tensor(1.0f), Tensor(2)})}, &outputs).ok());
}

TEST_F(FuseOps, AreRegisteredOnce) {
  EXPECT_FALSE(RegisterFuseOps());
  const tensorflow::OpRegistrationData* data = tensorflow::OpRegistry::Global()->LookUp(kFuseOp);
  ASSERT_NE(data, nullptr);
  EXPECT_FALSE(data->op_def.is_stateful());
}

}  // namespace
}  // namespace starwire
