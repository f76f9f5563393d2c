// Hostile variants, resource handles and protocol buffers, and everything that TensorFlow's own operations send.
#include "cc/tensor/objects.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "cc/base/status_codec.h"
#include "cc/tensor/codec.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/framework/variant.h"
#include "tensorflow/core/framework/variant_encode_decode.h"
#include "tensorflow/core/protobuf/named_tensor.pb.h"
#include "tensorflow/core/protobuf/worker.pb.h"

namespace starwire {
namespace {

using tensorflow::DataType;
using tensorflow::Tensor;
using tensorflow::TensorProto;
using tensorflow::TensorShape;
using tensorflow::VariantTensorDataProto;

TensorProto Plain(DataType dtype, const std::vector<int64_t>& dims) {
  TensorProto proto;
  proto.set_dtype(dtype);
  proto.mutable_tensor_shape();
  for (int64_t size : dims) proto.mutable_tensor_shape()->add_dim()->set_size(size);
  return proto;
}

TensorProto Float(float value) {
  TensorProto proto = Plain(tensorflow::DT_FLOAT, {});
  proto.add_float_val(value);
  return proto;
}

TensorProto Longs(const std::vector<int64_t>& values) {
  TensorProto proto = Plain(tensorflow::DT_INT64, {static_cast<int64_t>(values.size())});
  for (int64_t value : values) proto.add_int64_val(value);
  return proto;
}

TensorProto Variant(const std::string& type, const std::vector<TensorProto>& tensors = {},
                    const std::string& metadata = "") {
  TensorProto proto = Plain(tensorflow::DT_VARIANT, {});
  VariantTensorDataProto* variant = proto.add_variant_val();
  variant->set_type_name(type);
  variant->set_metadata(metadata);
  for (const TensorProto& tensor : tensors) *variant->add_tensors() = tensor;
  return proto;
}

// Decodes as TensorReceiver and ValueDecoder do.
Status Receive(const TensorProto& proto) {
  const std::string bytes = proto.SerializeAsString();
  TensorProto parsed;
  Status status = DecodeObjects(AsBytes(bytes), proto.dtype(), TensorShape(proto.tensor_shape()), &parsed);
  Tensor tensor;
  return status.ok() ? MakeObjects(parsed, tensorflow::cpu_allocator(), &tensor) : status;
}

void ExpectRefused(const TensorProto& proto, const std::string& words) {
  const Status status = Receive(proto);
  ASSERT_FALSE(status.ok()) << words;
  EXPECT_NE(StatusMessage(status).find(words), std::string::npos) << StatusMessage(status);
}

std::string Varint(uint64_t value) {
  std::string bytes;
  for (; value > 0x7f; value >>= 7) bytes.push_back(static_cast<char>(value | 0x80));
  bytes.push_back(static_cast<char>(value));
  return bytes;
}

std::string ListOf(const std::vector<uint64_t>& unset, DataType dtype, const std::vector<int64_t>& dims) {
  std::string metadata = Varint(unset.size());
  for (uint64_t place : unset) metadata += Varint(place);
  return metadata + Varint(dtype) + Varint(~uint64_t{0}) +
         Plain(tensorflow::DT_FLOAT, dims).tensor_shape().SerializeAsString();
}

TEST(Variants, OnlyAcceptedTypes) {
  for (const char* type : {"no such type", "tensorflow::Iterator", "tensorflow.data.CompressedElement",
                           "tensorflow::DatasetVariantWrapper", "tensorflow::WrappedDatasetVariantWrapper"}) {
    ExpectRefused(Variant(type), std::string("a variant of type \"") + type + "\" is not accepted from other tasks");
  }
  ExpectRefused(Variant("bad\nname" + std::string(1000, 'x')), "a variant of type \"bad?namexxx");
  // Nested ones too.
  ExpectRefused(Variant("tensorflow::Tensor", {Variant("tensorflow::Iterator")}), "\"tensorflow::Iterator\"");
  EXPECT_TRUE(Receive(Variant("")).ok()) << "an element that was never set";
  ExpectRefused(Variant("", {Float(1)}), "1 tensors");
}

TEST(Variants, Numbers) {
  EXPECT_TRUE(Receive(Variant("int", {}, std::string(4, '\1'))).ok());
  EXPECT_TRUE(Receive(Variant("double", {}, std::string(8, '\1'))).ok());
  EXPECT_TRUE(Receive(Variant("bool", {}, std::string(1, '\1'))).ok());
  ExpectRefused(Variant("int", {}, "abc"), "3 bytes of metadata");
  ExpectRefused(Variant("float", {Float(1)}, std::string(4, '\1')), "1 tensors");
}

TEST(Variants, ATensorIsExactlyOne) {
  EXPECT_TRUE(Receive(Variant("tensorflow::Tensor", {Float(1)})).ok());
  ExpectRefused(Variant("tensorflow::Tensor"), "\"tensorflow::Tensor\" with 0 tensors");
  ExpectRefused(Variant("tensorflow::Tensor", {Float(1), Float(2)}), "with 2 tensors");
}

TEST(Variants, TensorLists) {
  constexpr char kList[] = "tensorflow::TensorList";
  const std::string floats = ListOf({}, tensorflow::DT_FLOAT, {});
  EXPECT_TRUE(Receive(Variant(kList, {Float(1), Float(2)}, floats)).ok());
  EXPECT_TRUE(Receive(Variant(kList, {}, floats)).ok());
  EXPECT_TRUE(Receive(Variant(kList, {Float(1)}, ListOf({0, 2}, tensorflow::DT_FLOAT, {}))).ok());
  EXPECT_TRUE(
      Receive(Variant(kList, {Variant(kList, {Float(1)}, floats)}, ListOf({}, tensorflow::DT_VARIANT, {}))).ok());
  ExpectRefused(Variant(kList, {}, Varint(1 << 28)), "268435456 unset elements in 5 bytes");
  ExpectRefused(Variant(kList, {}, Varint(~uint64_t{0}) + floats), "unset elements");
  ExpectRefused(Variant(kList, {Float(1)}, ListOf({2}, tensorflow::DT_FLOAT, {})), "unset elements");
  ExpectRefused(Variant(kList, {Float(1)}, ListOf({1, 1}, tensorflow::DT_FLOAT, {})), "unset elements");
  ExpectRefused(Variant(kList, {}, ListOf({}, static_cast<DataType>(1000), {})), "unknown type");
  ExpectRefused(Variant(kList, {}, ListOf({}, tensorflow::DT_FLOAT, {-9})), "invalid shape");
  ExpectRefused(Variant(kList, {}, ""), "bytes of metadata");
  ExpectRefused(Variant(kList, {Longs({1})}, ListOf({}, tensorflow::DT_FLOAT, {1})), "among those of type float");
  ExpectRefused(Variant(kList, {Float(1)}, ListOf({}, tensorflow::DT_FLOAT, {3})), "shape [3]");
}

TEST(Variants, Maps) {
  constexpr char kMap[] = "tensorflow::TensorMap";
  EXPECT_TRUE(Receive(Variant(kMap, {Longs({1}), Float(2)})).ok());
  ExpectRefused(Variant(kMap, {Float(1)}), "1 tensors");
  ExpectRefused(Variant(kMap, {Variant("int", {}, std::string(4, '\1')), Float(2)}), "a key of type variant");
}

TEST(Variants, RaggedTensors) {
  constexpr char kRagged[] = "RaggedTensorVariant";
  TensorProto values = Plain(tensorflow::DT_FLOAT, {3});
  for (float value : {1, 2, 3}) values.add_float_val(value);
  EXPECT_TRUE(Receive(Variant(kRagged, {values})).ok());
  EXPECT_TRUE(Receive(Variant(kRagged, {Longs({0, 2, 3}), values})).ok());
  EXPECT_TRUE(Receive(Variant(kRagged, {Longs({0, 2}), Longs({0, 2, 3}), values})).ok());
  EXPECT_TRUE(Receive(Variant(kRagged, {Longs({0}), Plain(tensorflow::DT_FLOAT, {0})})).ok());
  ExpectRefused(Variant(kRagged), "0 tensors");
  for (const auto& splits : std::vector<std::vector<int64_t>>{{0, 2, 4}, {0, 2}, {1, 3}, {0, 5, 3}, {}, {-1, 3}}) {
    ExpectRefused(Variant(kRagged, {Longs(splits), values}), "row splits that do not match");
  }
  ExpectRefused(Variant(kRagged, {Longs({0, 1}), Float(1)}), "row splits of a scalar");
  ExpectRefused(Variant(kRagged, {Float(0), values}), "row splits");
}

TEST(Variants, Optionals) {
  constexpr char kOptional[] = "tensorflow::data::Optional";
  EXPECT_TRUE(Receive(Variant(kOptional, {Float(1)}, "\1")).ok());
  EXPECT_TRUE(Receive(Variant(kOptional, {}, std::string(1, '\0'))).ok());
  ExpectRefused(Variant(kOptional, {Float(1)}, std::string(1, '\0')), "1 tensors");
  ExpectRefused(Variant(kOptional, {}, ""), "0 bytes of metadata");
}

TEST(Variants, SparseMatrices) {
  const auto ints = [](const std::vector<int>& values) {
    TensorProto proto = Plain(tensorflow::DT_INT32, {static_cast<int64_t>(values.size())});
    for (int value : values) proto.add_int_val(value);
    return proto;
  };
  std::string metadata(8, '\0');
  metadata[0] = 1;
  metadata[4] = tensorflow::DT_FLOAT;
  TensorProto values = Plain(tensorflow::DT_FLOAT, {2});
  values.add_float_val(1);
  values.add_float_val(2);
  const auto matrix = [&](const std::vector<int64_t>& dense, const std::vector<int>& batches,
                          const std::vector<int>& rows, const std::vector<int>& columns) {
    return Variant("tensorflow::CSRSparseMatrix", {Longs(dense), ints(batches), ints(rows), ints(columns), values},
                   metadata);
  };
  EXPECT_TRUE(Receive(matrix({2, 3}, {0, 2}, {0, 1, 2}, {0, 2})).ok());
  EXPECT_TRUE(Receive(matrix({2, 1, 3}, {0, 1, 2}, {0, 1, 0, 1}, {0, 2})).ok());
  constexpr char kLies[] = "offsets that do not match";
  ExpectRefused(matrix({2, 3}, {0, 3}, {0, 1, 2}, {0, 2}), kLies);
  ExpectRefused(matrix({2, 3}, {0, 2}, {0, 9, 2}, {0, 2}), kLies);
  ExpectRefused(matrix({2, 3}, {0, 2}, {0, 1, 2}, {0, 3}), kLies);
  ExpectRefused(matrix({2, 3}, {0, 2}, {0, 1, 2}, {0, -1}), kLies);
  ExpectRefused(matrix({int64_t{1} << 62, 3}, {0, 2}, {0, 1, 2}, {0, 2}), kLies);
  ExpectRefused(matrix({-1, 3}, {0, 2}, {}, {0, 2}), kLies);
}

TEST(Objects, MemoryIsAMultipleOfTheMessage) {
  TensorProto bomb = Plain(tensorflow::DT_FLOAT, {1 << 29});
  bomb.add_float_val(1);
  ExpectRefused(Variant("tensorflow::Tensor", {bomb}), "type float, shape [536870912], far more than the");
  TensorProto strings = Plain(tensorflow::DT_STRING, {1 << 26});
  strings.set_tensor_content(std::string(4, '\0'));
  ExpectRefused(Variant("tensorflow::Tensor", {strings}), "type string");
  // The last string stands for all that are missing.
  TensorProto copies = Plain(tensorflow::DT_STRING, {40000});
  copies.add_string_val("");
  copies.add_string_val(std::string(20000, 'x'));
  ExpectRefused(Variant("tensorflow::Tensor", {copies}), "a string that stands for 40000 ones");
  TensorProto few = Plain(tensorflow::DT_STRING, {1000});
  few.add_string_val(std::string(20, 'x'));
  EXPECT_TRUE(Receive(Variant("tensorflow::Tensor", {few})).ok()) << "a repeated string";
  // Each is small; together they are too large.
  TensorProto small = Plain(tensorflow::DT_FLOAT, {1 << 13});
  small.add_float_val(1);
  EXPECT_TRUE(Receive(Variant("tensorflow::Tensor", {small})).ok()) << "a repeated value";
  std::vector<TensorProto> many(1000, small);
  ExpectRefused(Variant("tensorflow::data::Optional", many, "\1"), "far more than");
  // Refused before parsing: two bytes per tensor.
  ExpectRefused(Variant("tensorflow::data::Optional", std::vector<TensorProto>(100000), "\1"), "too many objects");
}

TEST(Objects, LimitsAllowWhatTensorFlowSends) {
  // A long list of the smallest possible tensors.
  TensorProto tiny = Plain(tensorflow::DT_STRING, {});
  tiny.add_string_val("");
  const std::vector<TensorProto> many(100000, tiny);
  EXPECT_TRUE(Receive(Variant("tensorflow::TensorList", many, ListOf({}, tensorflow::DT_STRING, {}))).ok());
  TensorProto unset = Plain(tensorflow::DT_VARIANT, {100000});
  for (int i = 0; i < 100000; ++i) unset.add_variant_val();
  const Status status = Receive(unset);
  EXPECT_TRUE(status.ok()) << StatusMessage(status);
}

TEST(Objects, DepthIsBounded) {
  const auto nested = [](int depth) {
    TensorProto proto = Float(1);
    for (int i = 1; i < depth; ++i) proto = Variant("tensorflow::Tensor", {proto});
    return proto;
  };
  EXPECT_TRUE(Receive(nested(kMaxObjectDepth)).ok());
  ExpectRefused(nested(kMaxObjectDepth + 1), "more than 32 deep");
  ExpectRefused(nested(45), "more than 32 deep");
}

TEST(Objects, RunGraphRequests) {
  const auto check = [](const TensorProto& tensor) {
    tensorflow::RunGraphRequest request;
    auto* named = request.add_send();
    named->set_name("feed:0");
    *named->mutable_tensor() = tensor;
    const std::string bytes = request.SerializeAsString();
    Status status = CheckWire(AsBytes(bytes), TensorCarrier::kRunGraphRequest);
    return status.ok() ? CheckTensors(request.send(), bytes.size()) : status;
  };
  EXPECT_TRUE(check(Float(1)).ok());
  EXPECT_TRUE(check(Longs(std::vector<int64_t>(100000, 7))).ok());
  EXPECT_FALSE(check(Variant("tensorflow::Tensor")).ok());
  TensorProto bomb = Plain(tensorflow::DT_FLOAT, {1 << 29});
  bomb.add_float_val(1);
  const Status status = check(bomb);
  EXPECT_NE(StatusMessage(status).find("sent as feed:0"), std::string::npos) << StatusMessage(status);
  EXPECT_FALSE(CheckWire({reinterpret_cast<const uint8_t*>("\x1a\xff"), 2}, TensorCarrier::kRunGraphRequest).ok());
}

// TensorFlow's parser takes the last 32 bits of a longer tag.
TEST(Objects, TagsThatTensorFlowReadsAsOthersAreRefused) {
  const std::string many =
      Variant("tensorflow::data::Optional", std::vector<TensorProto>(100000), "\1").SerializeAsString();
  tensorflow::NamedTensorProto named;
  ASSERT_TRUE(named.mutable_tensor()->ParseFromString(many));
  const std::string content = named.SerializeAsString();
  for (const std::string& tag : {std::string("\x1a"), std::string("\x9a\x80\x80\x80\x10")}) {
    const std::string bytes = tag + Varint(content.size()) + content;
    tensorflow::RunGraphRequest request;
    ASSERT_TRUE(request.ParseFromString(bytes));
    ASSERT_EQ(request.send_size(), 1);
    EXPECT_FALSE(CheckWire(AsBytes(bytes), TensorCarrier::kRunGraphRequest).ok());
  }
}

TEST(Objects, ConstantsOfGraphs) {
  tensorflow::GraphDef graph;
  auto* node = graph.add_node();
  node->set_name("constant");
  TensorProto zeros = Plain(tensorflow::DT_FLOAT, {1 << 29});
  zeros.add_float_val(0);
  *(*node->mutable_attr())["value"].mutable_tensor() = zeros;
  EXPECT_TRUE(CheckConstants(graph).ok()) << "compressed as TensorFlow does it";
  auto* function = graph.mutable_library()->add_function()->add_node_def();
  function->set_name("within");
  *(*function->mutable_attr())["f"].mutable_func() = tensorflow::NameAttrList();
  auto& attributes = *(*function->mutable_attr())["f"].mutable_func()->mutable_attr();
  *attributes["value"].mutable_list()->add_tensor() = Variant("tensorflow::Tensor");
  const Status status = CheckConstants(graph);
  EXPECT_NE(StatusMessage(status).find("(in node within)"), std::string::npos) << StatusMessage(status);
}

}  // namespace
}  // namespace starwire
