// Tensors in the eager runtime's messages: hostile ones, and those that TensorFlow encodes opaquely.
#include "cc/worker/eager_messages.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "cc/base/status_codec.h"
#include "cc/tensor/objects.h"
#include "tensorflow/core/framework/resource_handle.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor.pb.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/framework/variant.h"
#include "tensorflow/core/framework/variant_encode_decode.h"

namespace starwire {
namespace {

using tensorflow::Tensor;
using tensorflow::TensorProto;
using tensorflow::TensorShape;
using namespace tensorflow::eager;  // NOLINT: the names of the messages

TensorProto Encoded(const Tensor& tensor) {
  TensorProto proto;
  tensor.AsProtoTensorContent(&proto);  // as TensorFlow encodes them for these messages
  return proto;
}

Tensor Float(float value) {
  Tensor tensor(tensorflow::DT_FLOAT, TensorShape({}));
  tensor.scalar<float>()() = value;
  return tensor;
}

Tensor Variant(float value) {
  Tensor tensor(tensorflow::DT_VARIANT, TensorShape({2}));
  tensor.vec<tensorflow::Variant>()(0) = Float(value);
  tensor.vec<tensorflow::Variant>()(1) = Float(-value);
  return tensor;
}

Tensor Handle() {
  Tensor tensor(tensorflow::DT_RESOURCE, TensorShape({}));
  tensorflow::ResourceHandle handle;
  handle.set_device("/job:ps/replica:0/task:0/device:CPU:0");
  handle.set_name("variable");
  tensor.scalar<tensorflow::ResourceHandle>()() = handle;
  return tensor;
}

TensorProto Bomb() {
  TensorProto proto;
  proto.set_dtype(tensorflow::DT_FLOAT);
  proto.mutable_tensor_shape()->add_dim()->set_size(1 << 29);
  proto.add_float_val(1);
  return proto;
}

// As a receiver does it.
template <typename Message>
Status Receive(const Message& message, TensorCarrier carrier) {
  const std::string bytes = message.SerializeAsString();
  const Status status = CheckWire(AsBytes(bytes), carrier);
  Message parsed;
  if (!status.ok()) return status;
  EXPECT_TRUE(parsed.ParseFromString(bytes));
  return CheckTensorsOf(parsed, bytes.size());
}

// Each puts a tensor somewhere into a message, and receives the message.
struct Place {
  const char* name;
  std::function<Status(const TensorProto&, bool spell_out)> receive;
};

template <typename Message, typename Put>
Status Send(TensorCarrier carrier, bool spell_out, const Put& put) {
  Message message;
  put(&message);
  if (spell_out) {
    EXPECT_TRUE(SpellOutObjects(&message).ok());
  }
  return Receive(message, carrier);
}

std::vector<Place> Places() {
  return {
      {"input of an operation",
       [](const TensorProto& tensor, bool spell_out) {
         return Send<EnqueueRequest>(TensorCarrier::kEnqueueRequest, spell_out, [&](EnqueueRequest* request) {
           *request->add_queue()->mutable_operation()->add_op_inputs()->mutable_tensor() = tensor;
         });
       }},
      {"sent tensor",
       [](const TensorProto& tensor, bool spell_out) {
         return Send<EnqueueRequest>(TensorCarrier::kEnqueueRequest, spell_out, [&](EnqueueRequest* request) {
           *request->add_queue()->mutable_send_tensor()->add_tensors() = tensor;
         });
       }},
      {"packed tensor",
       [](const TensorProto& tensor, bool spell_out) {
         return Send<EnqueueRequest>(TensorCarrier::kEnqueueRequest, spell_out, [&](EnqueueRequest* request) {
           auto* packed = request->add_queue()->mutable_send_packed_handle();
           *packed->add_handles()->mutable_local_handle()->mutable_tensor() = tensor;
         });
       }},
      {"input of a component function",
       [](const TensorProto& tensor, bool spell_out) {
         return Send<RunComponentFunctionRequest>(
             TensorCarrier::kRunComponentFunctionRequest, spell_out, [&](RunComponentFunctionRequest* request) {
               *request->mutable_operation()->add_op_inputs()->mutable_tensor() = tensor;
             });
       }},
      {"output of an operation",
       [](const TensorProto& tensor, bool spell_out) {
         return Send<EnqueueResponse>(TensorCarrier::kEnqueueResponse, spell_out, [&](EnqueueResponse* response) {
           *response->add_queue_response()->add_tensor() = tensor;
         });
       }},
      {"output of a component function",
       [](const TensorProto& tensor, bool spell_out) {
         return Send<RunComponentFunctionResponse>(
             TensorCarrier::kRunComponentFunctionResponse, spell_out,
             [&](RunComponentFunctionResponse* response) { *response->add_tensor() = tensor; });
       }},
  };
}

TEST(EagerMessages, TensorsAreChecked) {
  for (const Place& place : Places()) {
    SCOPED_TRACE(place.name);
    EXPECT_TRUE(place.receive(Encoded(Float(1)), false).ok());
    EXPECT_FALSE(place.receive(Bomb(), false).ok());
    TensorProto unknown = Encoded(Float(1));
    unknown.set_dtype(static_cast<tensorflow::DataType>(4711));
    EXPECT_FALSE(place.receive(unknown, false).ok());
  }
}

TEST(EagerMessages, ObjectsTravelInAFormThatCanBeChecked) {
  for (const Place& place : Places()) {
    SCOPED_TRACE(place.name);
    for (const Tensor& tensor : {Variant(3), Handle()}) {
      const TensorProto opaque = Encoded(tensor);
      ASSERT_FALSE(opaque.tensor_content().empty()) << "this version encodes objects differently";
      EXPECT_FALSE(place.receive(opaque, false).ok());
      const Status status = place.receive(opaque, true);
      EXPECT_TRUE(status.ok()) << StatusMessage(status);
    }
  }
}

TEST(EagerMessages, ObjectsKeepTheirValues) {
  RunComponentFunctionRequest request;
  *request.mutable_operation()->add_op_inputs()->mutable_tensor() = Encoded(Float(7));
  EXPECT_FALSE(HasOpaqueObjects(request));
  request.mutable_operation()->add_op_inputs()->mutable_remote_handle()->set_op_id(3);
  *request.mutable_operation()->add_op_inputs()->mutable_tensor() = Encoded(Variant(3));
  *request.mutable_operation()->add_op_inputs()->mutable_tensor() = Encoded(Handle());
  EXPECT_TRUE(HasOpaqueObjects(request));
  ASSERT_TRUE(SpellOutObjects(&request).ok());
  EXPECT_FALSE(HasOpaqueObjects(request));
  const auto& inputs = request.operation().op_inputs();
  Tensor number, variant, handle;
  ASSERT_TRUE(number.FromProto(inputs[0].tensor()));
  EXPECT_EQ(number.scalar<float>()(), 7);
  EXPECT_EQ(inputs[1].remote_handle().op_id(), 3);
  ASSERT_TRUE(variant.FromProto(inputs[2].tensor()));
  const Tensor* second = variant.vec<tensorflow::Variant>()(1).get<Tensor>();
  ASSERT_NE(second, nullptr);
  EXPECT_EQ(second->scalar<float>()(), -3);
  ASSERT_TRUE(handle.FromProto(inputs[3].tensor()));
  EXPECT_EQ(handle.scalar<tensorflow::ResourceHandle>()().name(), "variable");
}

TEST(EagerMessages, ConstantsOfOperationsAndFunctions) {
  TensorProto hostile;
  hostile.set_dtype(tensorflow::DT_VARIANT);
  hostile.mutable_tensor_shape();
  hostile.add_variant_val()->set_type_name("tensorflow::Tensor");
  const auto check = [](const EnqueueRequest& request) { return Receive(request, TensorCarrier::kEnqueueRequest); };
  EnqueueRequest request;
  auto* operation = request.add_queue()->mutable_operation();
  operation->set_name("Const");
  *(*operation->mutable_attrs())["value"].mutable_tensor() = Encoded(Float(1));
  EXPECT_TRUE(check(request).ok());
  *(*operation->mutable_attrs())["value"].mutable_tensor() = hostile;
  EXPECT_NE(StatusMessage(check(request)).find("(in node Const)"), std::string::npos);
  RunComponentFunctionRequest run;
  *run.mutable_operation() = *operation;
  EXPECT_FALSE(Receive(run, TensorCarrier::kRunComponentFunctionRequest).ok());

  for (const bool in_library : {false, true}) {
    request.Clear();
    auto* registered = request.add_queue()->mutable_register_function();
    auto* function = in_library ? registered->mutable_library()->add_function() : registered->mutable_function_def();
    auto* node = function->add_node_def();
    node->set_name("within");
    *(*node->mutable_attr())["value"].mutable_tensor() = hostile;
    EXPECT_NE(StatusMessage(check(request)).find("(in node within)"), std::string::npos);
  }
}

TEST(EagerMessages, FewBytesDoNotBecomeManyObjects) {
  std::string bytes;
  for (int i = 0; i < 100000; ++i) bytes += std::string("\x1a\x06\x12\x04\x52\x02\x12\x00", 8);  // a tensor each
  EnqueueRequest request;
  ASSERT_TRUE(request.ParseFromString(bytes));
  ASSERT_EQ(request.queue_size(), 100000);
  ASSERT_TRUE(request.queue(0).operation().op_inputs(0).has_tensor());
  EXPECT_FALSE(CheckWire(AsBytes(bytes), TensorCarrier::kEnqueueRequest).ok());
}

TEST(EagerMessages, TensorsOfAttributesAreCounted) {
  for (const bool in_function : {false, true}) {
    EnqueueRequest request;
    auto& attributes = *request.add_queue()->mutable_operation()->mutable_attrs();
    tensorflow::AttrValue* value = &attributes["value"];
    if (in_function) value = &(*value->mutable_list()->add_func()->mutable_attr())["within"];
    const auto check = [&] { return Receive(request, TensorCarrier::kEnqueueRequest); };
    value->mutable_list()->add_tensor()->set_dtype(tensorflow::DT_FLOAT);
    EXPECT_EQ(StatusMessage(check()).find("too many objects"), std::string::npos);
    for (int i = 0; i < 100000; ++i) value->mutable_list()->add_tensor();
    EXPECT_NE(StatusMessage(check()).find("too many objects"), std::string::npos) << StatusMessage(check());
  }
  // Functions in attributes of functions, which take the stack.
  EnqueueRequest request;
  auto* attributes = request.add_queue()->mutable_operation()->mutable_attrs();
  for (int depth = 0; depth < 40; ++depth) attributes = (*attributes)["f"].mutable_func()->mutable_attr();
  const std::string bytes = request.SerializeAsString();
  EXPECT_NE(StatusMessage(CheckWire(AsBytes(bytes), TensorCarrier::kEnqueueRequest)).find("deep"), std::string::npos);
}

}  // namespace
}  // namespace starwire
