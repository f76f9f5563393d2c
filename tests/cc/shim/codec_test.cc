// Round trips of every type and shape through the codec, and hostile metadata.
#include "cc/tensor/codec.h"

#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "cc/tensor/elements.h"
#include "tensorflow/core/framework/allocator.h"
#include "tensorflow/core/framework/resource_handle.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/framework/variant.h"
#include "tensorflow/core/framework/variant_encode_decode.h"
#include "tensorflow/core/platform/tstring.h"

namespace starwire {
namespace {

using tensorflow::DataType;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::tstring;

tensorflow::Allocator* Host() { return tensorflow::cpu_allocator(); }

// An allocator that always fails.
class NoMemory : public tensorflow::Allocator {
 public:
  std::string Name() override { return "none"; }
  void* AllocateRaw(size_t, size_t) override { return nullptr; }
  void DeallocateRaw(void*) override {}
};

TensorShape Shape(const std::vector<int64_t>& dims) {
  TensorShape shape;
  EXPECT_TRUE(TensorShape::BuildTensorShape(dims, &shape).ok());
  return shape;
}

std::vector<DataType> CopyableTypes() {
  std::vector<DataType> types;
  for (int number = 1; number < 64; ++number) {
    if (!tensorflow::DataType_IsValid(number)) continue;
    const auto type = static_cast<DataType>(number);
    if (tensorflow::DataTypeCanUseMemcpy(type)) types.push_back(type);
  }
  return types;
}

std::vector<std::vector<int64_t>> Shapes() {
  return {{}, {0}, {3, 0, 2}, {1}, {7}, {2, 3, 4}, {1000}, {70000}, std::vector<int64_t>(254, 1)};
}

// Everything that one reply carries, copied out of the encoded tensor.
struct Wire {
  std::vector<uint8_t> meta;
  std::vector<std::vector<uint8_t>> parts;
};

Status Send(const Tensor& tensor, bool is_dead, Wire* wire) {
  EncodedTensor encoded;
  Status status = encoded.Encode(tensor, is_dead, 1234567);
  if (!status.ok()) return status;
  const sw_bytes meta = encoded.meta();
  wire->meta.assign(meta.data, meta.data + meta.len);
  wire->parts.clear();
  if (const sw_payload* payload = encoded.payload()) {
    for (size_t i = 0; i < payload->n_parts; ++i) {
      const auto* data = static_cast<const uint8_t*>(payload->parts[i].data);
      wire->parts.emplace_back(data, data + payload->parts[i].len);
    }
    if (payload->release != nullptr) payload->release(payload->owner);
  }
  return status;
}

Status Receive(const Wire& wire, TensorReceiver* receiver) {
  std::vector<uint64_t> lens;
  for (const auto& part : wire.parts) lens.push_back(part.size());
  std::vector<void*> bufs(lens.size(), nullptr);
  Status status =
      receiver->Prepare({wire.meta.data(), wire.meta.size()}, lens.size(), lens.data(), Host(), bufs.data());
  if (!status.ok()) return status;
  for (size_t i = 0; i < bufs.size(); ++i) {
    if (!wire.parts[i].empty()) std::memcpy(bufs[i], wire.parts[i].data(), wire.parts[i].size());
  }
  return receiver->Finish(Host());
}

void ExpectRoundTrip(const Tensor& tensor) {
  Wire wire;
  ASSERT_TRUE(Send(tensor, false, &wire).ok());
  TensorReceiver receiver;
  const Status status = Receive(wire, &receiver);
  ASSERT_TRUE(status.ok()) << StatusMessage(status);
  EXPECT_FALSE(receiver.header().is_dead);
  EXPECT_EQ(receiver.header().send_start_micros, 1234567);
  EXPECT_EQ(receiver.tensor().dtype(), tensor.dtype());
  EXPECT_TRUE(receiver.tensor().shape() == tensor.shape());
  ASSERT_TRUE(receiver.tensor().IsInitialized() || tensor.NumElements() == 0);
  if (tensorflow::DataTypeCanUseMemcpy(tensor.dtype())) {
    EXPECT_EQ(std::string(receiver.tensor().tensor_data()), std::string(tensor.tensor_data()));
  }
}

template <typename T>
void Write(std::vector<uint8_t>* bytes, size_t at, T value) {
  for (size_t i = 0; i < sizeof(T); ++i)
    (*bytes)[at + i] = static_cast<uint8_t>(static_cast<uint64_t>(value) >> (8 * i));
}

// Arbitrary metadata, unchecked, as a hostile peer may send it.
std::vector<uint8_t> Meta(uint16_t dtype, TensorEncoding encoding, const std::vector<int64_t>& dims, uint64_t bytes) {
  std::vector<uint8_t> meta(EncodedTensor::kFixedMeta + 8 * dims.size(), 0);
  meta[0] = 1;
  Write<uint16_t>(&meta, 2, dtype);
  meta[4] = static_cast<uint8_t>(encoding);
  meta[5] = static_cast<uint8_t>(dims.size());
  Write<uint64_t>(&meta, 16, bytes);
  for (size_t i = 0; i < dims.size(); ++i) Write<int64_t>(&meta, EncodedTensor::kFixedMeta + 8 * i, dims[i]);
  return meta;
}

Status Decode(const std::vector<uint8_t>& meta) {
  TensorHeader header;
  FusedLayout fused;
  return DecodeTensorHeader({meta.data(), meta.size()}, &header, &fused);
}

TEST(Codec, EveryCopyableTypeAndShape) {
  std::mt19937 random(20240607);
  ASSERT_GE(CopyableTypes().size(), 22u);
  for (DataType type : CopyableTypes()) {
    for (const auto& dims : Shapes()) {
      SCOPED_TRACE(tensorflow::DataTypeString(type) + " " + Shape(dims).DebugString());
      Tensor tensor(Host(), type, Shape(dims));
      auto data = tensor.tensor_data();
      for (size_t i = 0; i < data.size(); ++i) const_cast<char*>(data.data())[i] = static_cast<char>(random() & 1);
      ExpectRoundTrip(tensor);
    }
  }
}

TEST(Codec, CopyableElementsAreSentInPlace) {
  Tensor tensor(Host(), tensorflow::DT_FLOAT, Shape({1000}));
  EncodedTensor encoded;
  ASSERT_TRUE(encoded.Encode(tensor, false, 0).ok());
  ASSERT_NE(encoded.payload(), nullptr);
  ASSERT_EQ(encoded.payload()->n_parts, 1u);
  EXPECT_EQ(encoded.payload()->parts[0].data, tensor.tensor_data().data());
  EXPECT_EQ(encoded.payload()->parts[0].len, 4000u);
  EXPECT_FALSE(tensor.RefCountIsOne());
  encoded.payload()->release(encoded.payload()->owner);
  EXPECT_TRUE(tensor.RefCountIsOne());
}

TEST(Codec, CopyableElementsAreReceivedInPlace) {
  const auto meta = Meta(tensorflow::DT_FLOAT, TensorEncoding::kRaw, {4}, 16);
  TensorReceiver receiver;
  const uint64_t lens[] = {8, 0, 8};
  void* bufs[3];
  ASSERT_TRUE(receiver.Prepare({meta.data(), meta.size()}, 3, lens, Host(), bufs).ok());
  const char* base = receiver.tensor().tensor_data().data();
  EXPECT_EQ(bufs[0], base);
  EXPECT_EQ(bufs[2], base + 8);
}

TEST(Codec, SliceOfALargerTensor) {
  Tensor whole(Host(), tensorflow::DT_INT32, Shape({10, 3}));
  for (int i = 0; i < 30; ++i) whole.flat<int32_t>()(i) = i;
  ExpectRoundTrip(whole.Slice(4, 7));
}

TEST(Codec, Strings) {
  for (const auto& dims : std::vector<std::vector<int64_t>>{{}, {0}, {5}, {2, 3}, {1000}}) {
    for (size_t length : {0, 1, 23, 24, 300, 20000}) {
      if (length == 20000 && dims.size() == 1 && dims[0] == 1000) continue;
      Tensor tensor(Host(), tensorflow::DT_STRING, Shape(dims));
      auto strings = tensor.flat<tstring>();
      for (int i = 0; i < strings.size(); ++i)
        strings(i) = std::string(length + i % 3, static_cast<char>('a' + i % 26));
      Wire wire;
      ASSERT_TRUE(Send(tensor, false, &wire).ok());
      if (length == 20000 && strings.size() > 0) {
        EXPECT_EQ(wire.parts.size(), 1u + strings.size()) << "long ones are not packed";
      }
      TensorReceiver receiver;
      ASSERT_TRUE(Receive(wire, &receiver).ok());
      ASSERT_TRUE(receiver.tensor().shape() == tensor.shape());
      for (int i = 0; i < strings.size(); ++i) EXPECT_EQ(receiver.tensor().flat<tstring>()(i), strings(i));
    }
  }
}

// As those of a reference variable, which another step assigns meanwhile.
TEST(Codec, StringsThatChangeAfterTheyWereMeasuredStayInTheirRoom) {
  for (const std::string& now : {std::string("longer"), std::string("l"), std::string(300, 'l')}) {
    Tensor tensor(Host(), tensorflow::DT_STRING, Shape({2}));
    tensor.flat<tstring>()(0) = "text";
    tensor.flat<tstring>()(1) = "text";
    const StringsSize size = MeasureStrings(tensor);
    std::vector<uint8_t> payload(size.total() + 16, 7);
    ASSERT_TRUE(WriteStrings(tensor, size.encoding, payload.data(), size.total()).ok());
    tensor.flat<tstring>()(0) = now;
    EXPECT_EQ(StatusNumber(WriteStrings(tensor, size.encoding, payload.data(), size.total())), kAborted);
    EXPECT_EQ(std::vector<uint8_t>(payload.end() - 16, payload.end()), std::vector<uint8_t>(16, 7));
  }
}

TEST(Codec, StringsThatOthersMayChangeArePacked) {
  Tensor tensor(Host(), tensorflow::DT_STRING, Shape({2}));
  tensor.flat<tstring>()(0) = std::string(20000, 'a');
  tensor.flat<tstring>()(1) = std::string(20000, 'b');
  const Tensor variable = tensor;
  for (const Tensor& sent : {tensor, tensor.Slice(0, 1), tensor.Slice(0, 2)}) {
    Wire wire;
    ASSERT_TRUE(Send(sent, false, &wire).ok());
    EXPECT_EQ(wire.parts.size(), 1u);
  }
}

TEST(Codec, StringsWithNulBytesAndOneLongAmongEmpty) {
  Tensor tensor(Host(), tensorflow::DT_STRING, Shape({4}));
  tensor.flat<tstring>()(1) = std::string("a\0b", 3);
  tensor.flat<tstring>()(2) = std::string(100000, '\xff');
  Wire wire;
  ASSERT_TRUE(Send(tensor, false, &wire).ok());
  TensorReceiver receiver;
  ASSERT_TRUE(Receive(wire, &receiver).ok());
  for (int i = 0; i < 4; ++i) EXPECT_EQ(receiver.tensor().flat<tstring>()(i), tensor.flat<tstring>()(i));
}

TEST(Codec, LengthsOfStringsTakeAByteIfTheyFit) {
  for (const size_t longest : {size_t{0}, size_t{1}, size_t{255}, size_t{256}, size_t{70000}}) {
    Tensor tensor(Host(), tensorflow::DT_STRING, Shape({3}));
    tensor.flat<tstring>()(1) = std::string(longest, 'x');
    tensor.flat<tstring>()(2) = "end";
    Wire wire;
    ASSERT_TRUE(Send(tensor, false, &wire).ok());
    const bool is_short = longest <= 255;
    EXPECT_EQ(wire.meta[4], static_cast<uint8_t>(is_short ? TensorEncoding::kShortStrings : TensorEncoding::kStrings));
    size_t bytes = 0;
    for (const auto& part : wire.parts) bytes += part.size();
    EXPECT_EQ(bytes, (is_short ? 3 : 12) + longest + 3);
    TensorReceiver receiver;
    ASSERT_TRUE(Receive(wire, &receiver).ok());
    for (int i = 0; i < 3; ++i) EXPECT_EQ(receiver.tensor().flat<tstring>()(i), tensor.flat<tstring>()(i));
  }
}

TEST(Codec, WideStrings) {
  Wire wire{Meta(tensorflow::DT_STRING, TensorEncoding::kWideStrings, {2}, 21), {std::vector<uint8_t>(21, 'x')}};
  Write<uint64_t>(&wire.parts[0], 0, 2);
  Write<uint64_t>(&wire.parts[0], 8, 3);
  TensorReceiver receiver;
  ASSERT_TRUE(Receive(wire, &receiver).ok());
  EXPECT_EQ(receiver.tensor().flat<tstring>()(0), "xx");
  EXPECT_EQ(receiver.tensor().flat<tstring>()(1), "xxx");
}

TEST(Codec, ResourceHandles) {
  Tensor tensor(Host(), tensorflow::DT_RESOURCE, Shape({2}));
  for (int i = 0; i < 2; ++i) {
    auto& handle = tensor.flat<tensorflow::ResourceHandle>()(i);
    handle.set_device("/job:ps/replica:0/task:0/device:CPU:0");
    handle.set_container("c");
    handle.set_name("variable" + std::to_string(i));
    handle.set_hash_code(77 + i);
    handle.set_maybe_type_name("type");
  }
  Wire wire;
  ASSERT_TRUE(Send(tensor, false, &wire).ok());
  TensorReceiver receiver;
  ASSERT_TRUE(Receive(wire, &receiver).ok());
  for (int i = 0; i < 2; ++i) {
    const auto& handle = receiver.tensor().flat<tensorflow::ResourceHandle>()(i);
    EXPECT_EQ(handle.name(), "variable" + std::to_string(i));
    EXPECT_EQ(handle.device(), "/job:ps/replica:0/task:0/device:CPU:0");
    EXPECT_EQ(handle.hash_code(), 77u + i);
  }
}

TEST(Codec, Variants) {
  Tensor tensor(Host(), tensorflow::DT_VARIANT, Shape({3}));
  tensor.flat<tensorflow::Variant>()(0) = 42;
  tensor.flat<tensorflow::Variant>()(1) = 0.5f;
  Tensor inner(Host(), tensorflow::DT_INT32, Shape({2}));
  inner.flat<int32_t>()(0) = 5;
  inner.flat<int32_t>()(1) = 6;
  tensor.flat<tensorflow::Variant>()(2) = inner;
  Wire wire;
  ASSERT_TRUE(Send(tensor, false, &wire).ok());
  TensorReceiver receiver;
  const Status status = Receive(wire, &receiver);
  ASSERT_TRUE(status.ok()) << StatusMessage(status);
  const auto variants = receiver.tensor().flat<tensorflow::Variant>();
  ASSERT_NE(variants(0).get<int>(), nullptr);
  EXPECT_EQ(*variants(0).get<int>(), 42);
  ASSERT_NE(variants(1).get<float>(), nullptr);
  EXPECT_EQ(*variants(1).get<float>(), 0.5f);
  ASSERT_NE(variants(2).get<Tensor>(), nullptr);
  EXPECT_EQ(variants(2).get<Tensor>()->flat<int32_t>()(1), 6);
}

struct Unencodable {
  std::string TypeName() const { return "Unencodable"; }
  std::string DebugString() const { return text; }
  bool Encode(tensorflow::VariantTensorData*) const { return false; }
  bool Decode(tensorflow::VariantTensorData) { return false; }
  std::string text;
};

// Up to 2.21 TensorFlow does not say whether it has encoded a value.
TEST(Codec, AVariantThatCannotBeEncoded) {
  constexpr bool kSaysSo = !std::is_void_v<decltype(std::declval<const Tensor&>().AsProtoField(nullptr))>;
  Tensor tensor(Host(), tensorflow::DT_VARIANT, Shape({1}));
  tensor.flat<tensorflow::Variant>()(0) = Unencodable();
  Wire wire;
  const Status status = Send(tensor, false, &wire);
  EXPECT_EQ(status.ok(), !kSaysSo);
  if (!kSaysSo) return;
  EXPECT_EQ(StatusMessage(status), "a tensor of type variant and shape [1] holds a value that cannot be encoded");
}

TEST(Codec, EmptyTensorsOfTypesWithObjects) {
  for (DataType type : {tensorflow::DT_STRING, tensorflow::DT_VARIANT, tensorflow::DT_RESOURCE}) {
    ExpectRoundTrip(Tensor(Host(), type, Shape({0, 5})));
  }
}

TEST(Codec, DeadTensors) {
  for (const Tensor& tensor :
       {Tensor(), Tensor(tensorflow::DT_FLOAT), Tensor(Host(), tensorflow::DT_STRING, Shape({3}))}) {
    Wire wire;
    ASSERT_TRUE(Send(tensor, true, &wire).ok());
    EXPECT_TRUE(wire.parts.empty());
    TensorReceiver receiver;
    ASSERT_TRUE(Receive(wire, &receiver).ok());
    EXPECT_TRUE(receiver.header().is_dead);
  }
}

TEST(Codec, MoreThanTwoGigabytes) {
  const int64_t size = (int64_t{5} << 29) + 3;  // slightly more than 2.5 GB; the pages are never touched
  Tensor tensor(Host(), tensorflow::DT_UINT8, Shape({size}));
  if (!tensor.IsInitialized()) GTEST_SKIP() << "not enough memory";
  EncodedTensor encoded;
  ASSERT_TRUE(encoded.Encode(tensor, false, 0).ok());
  ASSERT_EQ(encoded.payload()->parts[0].len, static_cast<size_t>(size));
  TensorReceiver receiver;
  const uint64_t lens[] = {static_cast<uint64_t>(size)};
  void* bufs[1] = {nullptr};
  const Status status = receiver.Prepare(encoded.meta(), 1, lens, Host(), bufs);
  encoded.payload()->release(encoded.payload()->owner);
  ASSERT_TRUE(status.ok()) << StatusMessage(status);
  EXPECT_EQ(receiver.tensor().NumElements(), size);
}

TEST(Codec, UninitializedTensorIsRefused) {
  NoMemory none;
  Tensor tensor(&none, tensorflow::DT_UINT8, Shape({100}));
  ASSERT_FALSE(tensor.IsInitialized());
  EncodedTensor encoded;
  const Status status = encoded.Encode(tensor, false, 0);
  EXPECT_EQ(StatusNumber(status), 3) << StatusMessage(status);
  EXPECT_EQ(encoded.payload(), nullptr);
}

TEST(Codec, NoMemoryLeftEndsInResourceExhausted) {
  NoMemory none;
  for (DataType type : {tensorflow::DT_DOUBLE, tensorflow::DT_STRING}) {
    Tensor tensor(Host(), type, Shape({3}));
    Wire wire;
    ASSERT_TRUE(Send(tensor, false, &wire).ok());
    TensorReceiver receiver;
    const uint64_t lens[] = {wire.parts[0].size()};
    void* bufs[1];
    Status status = receiver.Prepare({wire.meta.data(), wire.meta.size()}, 1, lens, &none, bufs);
    if (status.ok()) {
      std::memcpy(bufs[0], wire.parts[0].data(), wire.parts[0].size());
      status = receiver.Finish(&none);
    }
    EXPECT_EQ(StatusNumber(status), 8) << StatusMessage(status);
  }
}

TEST(Codec, MoreMemoryThanTheMachineHasEndsInResourceExhausted) {
  const int64_t elements = int64_t{1} << 58;
  const uint64_t lens[] = {static_cast<uint64_t>(elements) * 8};
  void* bufs[1];
  const auto doubles = Meta(tensorflow::DT_DOUBLE, TensorEncoding::kRaw, {elements}, lens[0]);
  const auto strings = Meta(tensorflow::DT_STRING, TensorEncoding::kStrings, {elements}, lens[0]);
  for (const auto& meta : {doubles, strings}) {
    TensorReceiver receiver;
    const Status status = receiver.Prepare({meta.data(), meta.size()}, 1, lens, Host(), bufs);
    EXPECT_EQ(StatusNumber(status), 8) << StatusMessage(status);
  }
}

TEST(HostileMeta, EveryFieldIsChecked) {
  const auto good = Meta(tensorflow::DT_FLOAT, TensorEncoding::kRaw, {2, 3}, 24);
  ASSERT_TRUE(Decode(good).ok());
  const auto with = [&good](size_t at, uint8_t value) {
    auto meta = good;
    meta[at] = value;
    return meta;
  };
  EXPECT_FALSE(Decode({}).ok());
  EXPECT_FALSE(Decode(std::vector<uint8_t>(good.begin(), good.begin() + 23)).ok());
  EXPECT_FALSE(Decode(std::vector<uint8_t>(good.begin(), good.end() - 1)).ok());
  EXPECT_FALSE(Decode(with(0, 2)).ok()) << "version";
  EXPECT_FALSE(Decode(with(1, 2)).ok()) << "flags";
  EXPECT_FALSE(Decode(with(1, 1)).ok()) << "dead with a payload";
  EXPECT_FALSE(Decode(with(2, 0)).ok()) << "DT_INVALID";
  EXPECT_FALSE(Decode(with(2, 101)).ok()) << "reference types do not travel";
  EXPECT_FALSE(Decode(with(2, 63)).ok()) << "unknown type";
  EXPECT_FALSE(Decode(with(3, 0xff)).ok()) << "type beyond all";
  EXPECT_FALSE(Decode(with(2, tensorflow::DT_STRING)).ok()) << "raw strings";
  EXPECT_FALSE(Decode(with(2, tensorflow::DT_DOUBLE)).ok()) << "too few bytes";
  EXPECT_FALSE(Decode(with(4, 0)).ok()) << "no payload for elements";
  EXPECT_FALSE(Decode(with(4, 2)).ok()) << "strings of floats";
  EXPECT_FALSE(Decode(with(4, 4)).ok()) << "proto of floats";
  EXPECT_FALSE(Decode(with(4, 9)).ok()) << "unknown encoding";
  EXPECT_FALSE(Decode(with(5, 1)).ok()) << "fewer dimensions than sizes";
  EXPECT_FALSE(Decode(with(5, 255)).ok()) << "too many dimensions";
  EXPECT_FALSE(Decode(with(6, 1)).ok()) << "reserved";
  EXPECT_FALSE(Decode(with(16, 25)).ok()) << "bytes";
  EXPECT_FALSE(Decode(with(24, 3)).ok()) << "shape and bytes disagree";
}

TEST(HostileMeta, ShapesThatOverflow) {
  const int64_t big = int64_t{1} << 62;
  EXPECT_FALSE(Decode(Meta(tensorflow::DT_FLOAT, TensorEncoding::kRaw, {-1}, 0)).ok());
  EXPECT_FALSE(Decode(Meta(tensorflow::DT_FLOAT, TensorEncoding::kRaw, {-2, -2}, 16)).ok());
  EXPECT_FALSE(Decode(Meta(tensorflow::DT_UINT8, TensorEncoding::kRaw, {big, 4}, 0)).ok());
  EXPECT_FALSE(Decode(Meta(tensorflow::DT_UINT8, TensorEncoding::kRaw, {big, big, big}, 0)).ok());
  // The number of elements fits; the number of bytes overflows.
  EXPECT_FALSE(Decode(Meta(tensorflow::DT_COMPLEX128, TensorEncoding::kRaw, {big}, 0)).ok());
  EXPECT_FALSE(Decode(Meta(tensorflow::DT_STRING, TensorEncoding::kStrings, {big}, 0)).ok());
  EXPECT_FALSE(Decode(Meta(tensorflow::DT_STRING, TensorEncoding::kWideStrings, {big, 2}, 16)).ok());
  EXPECT_FALSE(Decode(Meta(tensorflow::DT_VARIANT, TensorEncoding::kProto, {1}, uint64_t{1} << 31)).ok());
}

TEST(HostileMeta, PartsThatDoNotMatch) {
  const auto meta = Meta(tensorflow::DT_FLOAT, TensorEncoding::kRaw, {4}, 16);
  void* bufs[2];
  const uint64_t short_of[] = {15};
  const uint64_t wraps[] = {std::numeric_limits<uint64_t>::max(), 17};
  TensorReceiver receiver;
  EXPECT_FALSE(receiver.Prepare({meta.data(), meta.size()}, 1, short_of, Host(), bufs).ok());
  EXPECT_FALSE(receiver.Prepare({meta.data(), meta.size()}, 2, wraps, Host(), bufs).ok());
  EXPECT_FALSE(receiver.Prepare({meta.data(), meta.size()}, 0, nullptr, Host(), nullptr).ok());
  EXPECT_FALSE(receiver.prepared());
}

TEST(HostilePayload, StringLengths) {
  const auto receive = [](uint32_t first, uint32_t second, size_t text) {
    Wire wire{Meta(tensorflow::DT_STRING, TensorEncoding::kStrings, {2}, 8 + text),
              {std::vector<uint8_t>(8 + text, 'x')}};
    Write<uint32_t>(&wire.parts[0], 0, first);
    Write<uint32_t>(&wire.parts[0], 4, second);
    TensorReceiver receiver;
    return Receive(wire, &receiver);
  };
  EXPECT_TRUE(receive(2, 3, 5).ok());
  EXPECT_FALSE(receive(2, 4, 5).ok()) << "more than there is";
  EXPECT_FALSE(receive(2, 2, 5).ok()) << "a rest";
  EXPECT_FALSE(receive(0xffffffff, 6, 5).ok());
  EXPECT_FALSE(receive(0xffffffff, 0xffffffff, 5).ok());

  const auto receive_short = [](std::vector<uint8_t> payload) {
    Wire wire{Meta(tensorflow::DT_STRING, TensorEncoding::kShortStrings, {2}, payload.size()), {std::move(payload)}};
    TensorReceiver receiver;
    return Receive(wire, &receiver);
  };
  EXPECT_TRUE(receive_short({1, 2, 'a', 'b', 'c'}).ok());
  EXPECT_FALSE(receive_short({1, 3, 'a', 'b', 'c'}).ok()) << "more than there is";
  EXPECT_FALSE(receive_short({1, 1, 'a', 'b', 'c'}).ok()) << "a rest";
  EXPECT_FALSE(receive_short({1}).ok()) << "half a table";
  EXPECT_FALSE(receive_short({255, 255, 'a'}).ok());

  Wire wide{Meta(tensorflow::DT_STRING, TensorEncoding::kWideStrings, {2}, 16), {std::vector<uint8_t>(16, 0)}};
  Write<uint64_t>(&wide.parts[0], 0, std::numeric_limits<uint64_t>::max());
  Write<uint64_t>(&wide.parts[0], 8, 1);
  TensorReceiver receiver;
  EXPECT_FALSE(Receive(wide, &receiver).ok()) << "the sum wraps to 0";
}

Status ReceiveProto(DataType dtype, const std::vector<int64_t>& dims, const tensorflow::TensorProto& proto) {
  std::string bytes = proto.SerializeAsString();
  Wire wire{Meta(dtype, TensorEncoding::kProto, dims, bytes.size()),
            {std::vector<uint8_t>(bytes.begin(), bytes.end())}};
  TensorReceiver receiver;
  return Receive(wire, &receiver);
}

TEST(HostilePayload, Protos) {
  tensorflow::TensorProto good;
  good.set_dtype(tensorflow::DT_RESOURCE);
  good.mutable_tensor_shape()->add_dim()->set_size(1);
  good.add_resource_handle_val()->set_name("v");
  ASSERT_TRUE(ReceiveProto(tensorflow::DT_RESOURCE, {1}, good).ok());

  EXPECT_FALSE(ReceiveProto(tensorflow::DT_VARIANT, {1}, good).ok()) << "another type than announced";
  EXPECT_FALSE(ReceiveProto(tensorflow::DT_RESOURCE, {1, 1}, good).ok()) << "another shape than announced";
  tensorflow::TensorProto proto = good;
  proto.clear_resource_handle_val();
  EXPECT_FALSE(ReceiveProto(tensorflow::DT_RESOURCE, {1}, proto).ok()) << "no value";
  proto = good;
  proto.mutable_tensor_shape()->mutable_dim(0)->set_size(-7);
  EXPECT_FALSE(ReceiveProto(tensorflow::DT_RESOURCE, {1}, proto).ok()) << "negative size";
  proto = good;
  proto.set_tensor_content("xyz");
  EXPECT_FALSE(ReceiveProto(tensorflow::DT_RESOURCE, {1}, proto).ok()) << "opaque objects";
  proto = good;
  proto.mutable_resource_handle_val(0)->add_dtypes_and_shapes()->mutable_shape()->add_dim()->set_size(-9);
  EXPECT_FALSE(ReceiveProto(tensorflow::DT_RESOURCE, {1}, proto).ok()) << "invalid shape in a handle";

  tensorflow::TensorProto variant;
  variant.set_dtype(tensorflow::DT_VARIANT);
  variant.mutable_tensor_shape();
  variant.add_variant_val()->set_type_name("no such type");
  EXPECT_FALSE(ReceiveProto(tensorflow::DT_VARIANT, {}, variant).ok()) << "a type that is not registered here";
  variant.mutable_variant_val(0)->set_type_name("int");
  auto* nested = variant.mutable_variant_val(0)->add_tensors();
  nested->set_dtype(tensorflow::DT_FLOAT);
  nested->mutable_tensor_shape()->add_dim()->set_size(-3);
  EXPECT_FALSE(ReceiveProto(tensorflow::DT_VARIANT, {}, variant).ok()) << "invalid shape of a nested tensor";

  Wire garbage{Meta(tensorflow::DT_VARIANT, TensorEncoding::kProto, {}, 5), {{0xff, 0xff, 0xff, 0xff, 0xff}}};
  TensorReceiver receiver;
  EXPECT_FALSE(Receive(garbage, &receiver).ok());
}

// Arbitrary bytes yield an error or a consistent tensor, never a crash.
TEST(HostileMeta, RandomMutations) {
  std::mt19937 random(4711);
  const std::vector<Wire> seeds = [] {
    std::vector<Wire> wires(3);
    Tensor floats(Host(), tensorflow::DT_FLOAT, Shape({2, 3}));
    floats.flat<float>().setZero();
    EXPECT_TRUE(Send(floats, false, &wires[0]).ok());
    Tensor strings(Host(), tensorflow::DT_STRING, Shape({3}));
    strings.flat<tstring>()(1) = "hello";
    EXPECT_TRUE(Send(strings, false, &wires[1]).ok());
    Tensor handles(Host(), tensorflow::DT_RESOURCE, Shape({1}));
    handles.flat<tensorflow::ResourceHandle>()(0).set_name("v");
    EXPECT_TRUE(Send(handles, false, &wires[2]).ok());
    return wires;
  }();
  size_t accepted = 0;
  for (int round = 0; round < 60000; ++round) {
    Wire wire = seeds[round % seeds.size()];
    const int flips = 1 + static_cast<int>(random() % 3);
    for (int i = 0; i < flips; ++i) {
      const bool in_meta = wire.parts.empty() || wire.parts[0].empty() || random() % 2 == 0;
      auto& bytes = in_meta ? wire.meta : wire.parts[0];
      bytes[random() % bytes.size()] = static_cast<uint8_t>(random() % 4 == 0 ? random() : random() % 5);
    }
    TensorReceiver receiver;
    if (!Receive(wire, &receiver).ok()) continue;
    ++accepted;
    if (receiver.header().is_dead) continue;
    EXPECT_EQ(receiver.tensor().dtype(), receiver.header().dtype);
    EXPECT_TRUE(receiver.tensor().shape() == receiver.header().shape);
  }
  EXPECT_GT(accepted, 0u);
}

}  // namespace
}  // namespace starwire
