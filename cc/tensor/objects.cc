#include "cc/tensor/objects.h"

#include <algorithm>
#include <iterator>
#include <limits>

#include "cc/tensor/elements.h"
#include "cc/tensor/variants.h"
#include "tensorflow/core/framework/attr_value.pb.h"
#include "tensorflow/core/framework/function.pb.h"
#include "tensorflow/core/framework/node_def.pb.h"
#include "tensorflow/core/framework/resource_handle.h"
#include "tensorflow/core/framework/resource_handle.pb.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/tensor_shape.pb.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/framework/variant.h"
#include "tensorflow/core/platform/tstring.h"
#include "tensorflow/core/protobuf/named_tensor.pb.h"
#include "tensorflow/core/protobuf/worker.pb.h"

namespace starwire {

using tensorflow::AttrValue;
using tensorflow::TensorProto;
using tensorflow::TensorShape;

namespace {

// ---- the bytes ----

// Messages whose fields are inspected. All others cost at most a small multiple of their length.
enum class Kind : uint8_t {
  kTensor,
  kVariant,
  kHandle,
  kNamed,
  kRunRequest,
  kRunResponse,
  kRecvResponse,
  // Of the eager runtime.
  kEnqueueRequest,
  kQueueItem,
  kOperation,
  kInput,
  kAttribute,
  kAttributeValue,
  kAttributeList,
  kFunction,
  kSentTensors,
  kPackedHandle,
  kPackedItem,
  kLocalHandle,
  kEnqueueResponse,
  kQueueResponse,
  kComponentRequest,
  kComponentResponse,
};

// The memory that parsing one takes, besides its content.
uint64_t CostOf(Kind kind) {
  switch (kind) {
    case Kind::kTensor:
      return 448;
    case Kind::kHandle:
    case Kind::kNamed:
      return 128;
    case Kind::kVariant:
      return 96;
    case Kind::kOperation:
      return 256;
    case Kind::kQueueItem:
    case Kind::kQueueResponse:
    case Kind::kSentTensors:
    case Kind::kPackedHandle:
      return 128;
    case Kind::kInput:
    case Kind::kPackedItem:
    case Kind::kLocalHandle:
      return 48;
    default:
      return 0;
  }
}

// Of an entry of a map.
constexpr uint64_t kMapValue = 2;

struct Child {
  Kind parent;
  uint64_t field;
  Kind kind;
};

constexpr Child kChildren[] = {
    {Kind::kTensor, TensorProto::kVariantValFieldNumber, Kind::kVariant},
    {Kind::kTensor, TensorProto::kResourceHandleValFieldNumber, Kind::kHandle},
    {Kind::kVariant, tensorflow::VariantTensorDataProto::kTensorsFieldNumber, Kind::kTensor},
    {Kind::kNamed, tensorflow::NamedTensorProto::kTensorFieldNumber, Kind::kTensor},
    {Kind::kRunRequest, tensorflow::RunGraphRequest::kSendFieldNumber, Kind::kNamed},
    {Kind::kRunResponse, tensorflow::RunGraphResponse::kRecvFieldNumber, Kind::kNamed},
    {Kind::kRecvResponse, tensorflow::RecvTensorResponse::kTensorFieldNumber, Kind::kTensor},
    {Kind::kEnqueueRequest, eager_fields::kEnqueueQueue, Kind::kQueueItem},
    {Kind::kQueueItem, eager_fields::kItemOperation, Kind::kOperation},
    {Kind::kQueueItem, eager_fields::kItemSendTensor, Kind::kSentTensors},
    {Kind::kQueueItem, eager_fields::kItemSendPackedHandle, Kind::kPackedHandle},
    {Kind::kOperation, eager_fields::kOperationInputs, Kind::kInput},
    {Kind::kInput, eager_fields::kInputTensor, Kind::kTensor},
    {Kind::kOperation, eager_fields::kOperationAttributes, Kind::kAttribute},
    {Kind::kAttribute, kMapValue, Kind::kAttributeValue},
    {Kind::kAttributeValue, AttrValue::kTensorFieldNumber, Kind::kTensor},
    {Kind::kAttributeValue, AttrValue::kListFieldNumber, Kind::kAttributeList},
    {Kind::kAttributeValue, AttrValue::kFuncFieldNumber, Kind::kFunction},
    {Kind::kAttributeList, AttrValue::ListValue::kTensorFieldNumber, Kind::kTensor},
    {Kind::kAttributeList, AttrValue::ListValue::kFuncFieldNumber, Kind::kFunction},
    {Kind::kFunction, tensorflow::NameAttrList::kAttrFieldNumber, Kind::kAttribute},
    {Kind::kSentTensors, eager_fields::kSentTensors, Kind::kTensor},
    {Kind::kPackedHandle, eager_fields::kPackedHandles, Kind::kPackedItem},
    {Kind::kPackedItem, eager_fields::kLocalHandle, Kind::kLocalHandle},
    {Kind::kLocalHandle, eager_fields::kLocalHandleTensor, Kind::kTensor},
    {Kind::kEnqueueResponse, eager_fields::kEnqueueResponses, Kind::kQueueResponse},
    {Kind::kQueueResponse, eager_fields::kResponseTensor, Kind::kTensor},
    {Kind::kComponentRequest, eager_fields::kComponentOperation, Kind::kOperation},
    {Kind::kComponentResponse, eager_fields::kComponentTensor, Kind::kTensor},
};

const Child* ChildOf(Kind kind, uint64_t field) {
  const auto* found = std::find_if(std::begin(kChildren), std::end(kChildren),
                                   [=](const Child& one) { return one.parent == kind && one.field == field; });
  return found == std::end(kChildren) ? nullptr : found;
}

Kind KindOf(TensorCarrier carrier) {
  switch (carrier) {
    case TensorCarrier::kTensor:
      return Kind::kTensor;
    case TensorCarrier::kRunGraphRequest:
      return Kind::kRunRequest;
    case TensorCarrier::kRunGraphResponse:
      return Kind::kRunResponse;
    case TensorCarrier::kRecvTensorResponse:
      return Kind::kRecvResponse;
    case TensorCarrier::kEnqueueRequest:
      return Kind::kEnqueueRequest;
    case TensorCarrier::kEnqueueResponse:
      return Kind::kEnqueueResponse;
    case TensorCarrier::kRunComponentFunctionRequest:
      return Kind::kComponentRequest;
    case TensorCarrier::kRunComponentFunctionResponse:
      return Kind::kComponentResponse;
  }
  return Kind::kTensor;
}

bool TakeVarint(sw_bytes* in, uint64_t* value) {
  *value = 0;
  for (int shift = 0; shift < 64 && in->len > 0; shift += 7) {
    const uint8_t byte = *in->data++;
    --in->len;
    *value |= static_cast<uint64_t>(byte & 0x7f) << shift;
    if ((byte & 0x80) == 0) return true;
  }
  return false;
}

bool Skip(sw_bytes* in, uint64_t bytes) {
  if (bytes > in->len) return false;
  in->data += bytes;
  in->len -= static_cast<size_t>(bytes);
  return true;
}

Status TooMuch(const ObjectBudget& budget, const std::string& what) {
  return Malformed(what + ", far more than the " + std::to_string(budget.message_bytes()) +
                   " bytes of its message can hold");
}

Status NotAMessage() { return Malformed("the TensorProto cannot be parsed"); }

Status Walk(Kind kind, sw_bytes in, int depth, ObjectBudget* budget) {
  const bool is_nested = kind == Kind::kTensor || kind == Kind::kFunction;
  if (is_nested && ++depth > kMaxObjectDepth) {
    return Malformed("tensors nested more than " + std::to_string(kMaxObjectDepth) + " deep");
  }
  if (!budget->Spend(CostOf(kind))) return TooMuch(*budget, "too many objects");
  while (in.len > 0) {
    uint64_t tag = 0, value = 0;
    // Of a longer one, TensorFlow's parser would look at the last 32 bits only.
    if (!TakeVarint(&in, &tag) || tag > std::numeric_limits<uint32_t>::max()) return NotAMessage();
    const uint64_t field = tag >> 3;
    bool ok = field != 0;
    switch (tag & 7) {
      case 0:
        ok = ok && TakeVarint(&in, &value);
        break;
      case 1:
        ok = ok && Skip(&in, 8);
        break;
      case 5:
        ok = ok && Skip(&in, 4);
        break;
      case 2: {
        ok = ok && TakeVarint(&in, &value) && value <= in.len;
        if (!ok) break;
        if (const Child* child = ChildOf(kind, field)) {
          Status status = Walk(child->kind, {in.data, static_cast<size_t>(value)}, depth, budget);
          if (!status.ok()) return status;
        }
        ok = Skip(&in, value);
        break;
      }
      default:  // a group: none of these messages has ever had one
        ok = false;
    }
    if (!ok) return NotAMessage();
  }
  return OkStatus();
}

// ---- what was parsed ----

// The size of one element in memory; known types only.
uint64_t ElementSize(tensorflow::DataType dtype) {
  switch (dtype) {
    case tensorflow::DT_STRING:
      return sizeof(tensorflow::tstring);
    case tensorflow::DT_VARIANT:
      return sizeof(tensorflow::Variant);
    case tensorflow::DT_RESOURCE:
      return sizeof(tensorflow::ResourceHandle);
    default:
      return RawSize(dtype);
  }
}

Status CheckHandle(const tensorflow::ResourceHandleProto& handle) {
  for (const auto& dtype_and_shape : handle.dtypes_and_shapes()) {
    if (!tensorflow::PartialTensorShape::IsValid(dtype_and_shape.shape())) {
      return Malformed("invalid shape in a resource handle");
    }
  }
  return OkStatus();
}

Status CheckObjects(const TensorProto& proto, uint64_t elements, ObjectBudget* budget) {
  if (!proto.tensor_content().empty()) return Malformed("objects as opaque content");
  const bool is_variant = proto.dtype() == tensorflow::DT_VARIANT;
  const int given = is_variant ? proto.variant_val_size() : proto.resource_handle_val_size();
  if (static_cast<uint64_t>(given) != elements) {
    return Malformed(std::to_string(given) + " objects for the " + std::to_string(elements) + " elements of a " +
                     tensorflow::DataTypeString(proto.dtype()));
  }
  for (const auto& handle : proto.resource_handle_val()) {
    Status status = CheckHandle(handle);
    if (!status.ok()) return status;
  }
  for (const auto& variant : proto.variant_val()) {
    Status status = CheckVariant(variant, budget);
    if (!status.ok()) return status;
  }
  return OkStatus();
}

Status CheckAttribute(const tensorflow::AttrValue& value, int depth);

Status CheckConstant(const TensorProto& proto) {
  if (proto.dtype() != tensorflow::DT_VARIANT && proto.dtype() != tensorflow::DT_RESOURCE) return OkStatus();
  return CheckTensor(proto, proto.ByteSizeLong());
}

template <typename Attributes>
Status CheckAttributes(const Attributes& attributes, int depth) {
  for (const auto& attribute : attributes) {
    Status status = CheckAttribute(attribute.second, depth);
    if (!status.ok()) return status;
  }
  return OkStatus();
}

Status CheckAttribute(const tensorflow::AttrValue& value, int depth) {
  if (depth > kMaxObjectDepth) return Malformed("attributes nested too deep");
  Status status = OkStatus();
  if (value.has_tensor()) status = CheckConstant(value.tensor());
  if (status.ok() && value.has_func()) status = CheckAttributes(value.func().attr(), depth + 1);
  if (!status.ok() || !value.has_list()) return status;
  for (const TensorProto& tensor : value.list().tensor()) {
    status = CheckConstant(tensor);
    if (!status.ok()) return status;
  }
  for (const auto& function : value.list().func()) {
    status = CheckAttributes(function.attr(), depth + 1);
    if (!status.ok()) return status;
  }
  return status;
}

}  // namespace

Status CheckWire(sw_bytes bytes, TensorCarrier carrier) {
  ObjectBudget budget(bytes.len);
  return Walk(KindOf(carrier), bytes, 0, &budget);
}

Status CheckTensor(const TensorProto& proto, uint64_t message_bytes) {
  ObjectBudget budget(message_bytes);
  return CheckTensor(proto, &budget);
}

Status CheckTensor(const TensorProto& proto, ObjectBudget* budget) {
  if (!IsKnown(proto.dtype())) return Malformed("unknown type " + std::to_string(proto.dtype()) + " in a proto");
  if (!TensorShape::IsValid(proto.tensor_shape())) return Malformed("invalid shape in a proto");
  // The shape is valid, so this constructor cannot abort.
  const TensorShape shape(proto.tensor_shape());
  const auto elements = static_cast<uint64_t>(shape.num_elements());
  const uint64_t element = ElementSize(proto.dtype());
  uint64_t bytes = 0;
  if (__builtin_mul_overflow(elements, element, &bytes) || !budget->Spend(bytes)) {
    return TooMuch(*budget, "type " + tensorflow::DataTypeString(proto.dtype()) + ", shape " + shape.DebugString());
  }
  if (proto.dtype() == tensorflow::DT_VARIANT || proto.dtype() == tensorflow::DT_RESOURCE) {
    return CheckObjects(proto, elements, budget);
  }
  const uint64_t content = proto.tensor_content().size();
  // Strings are preceded by their lengths: at least a byte each.
  const bool agrees = proto.dtype() == tensorflow::DT_STRING ? content >= elements : content == bytes;
  if (content != 0 && !agrees) {
    return Malformed(std::to_string(content) + " bytes for type " + tensorflow::DataTypeString(proto.dtype()) +
                     ", shape " + shape.DebugString());
  }
  // The last string stands for all that are missing.
  const auto given = static_cast<uint64_t>(proto.string_val_size());
  if (proto.dtype() == tensorflow::DT_STRING && content == 0 && given != 0 && given < elements &&
      (__builtin_mul_overflow(elements - given, proto.string_val(proto.string_val_size() - 1).size(), &bytes) ||
       !budget->Spend(bytes))) {
    return TooMuch(*budget, "a string that stands for " + std::to_string(elements) + " ones");
  }
  return OkStatus();
}

Status CheckConstants(const google::protobuf::Map<std::string, tensorflow::AttrValue>& attributes,
                      const std::string& name) {
  Status status = CheckAttributes(attributes, 0);
  if (status.ok()) return status;
  return MakeStatus(StatusNumber(status), StatusMessage(status) + " (in node " + name + ")");
}

Status CheckConstants(const tensorflow::FunctionDef& function) {
  for (const auto& node : function.node_def()) {
    Status status = CheckConstants(node.attr(), node.name());
    if (!status.ok()) return status;
  }
  return OkStatus();
}

Status CheckConstants(const tensorflow::FunctionDefLibrary& library) {
  for (const auto& function : library.function()) {
    Status status = CheckConstants(function);
    if (!status.ok()) return status;
  }
  return OkStatus();
}

Status CheckConstants(const tensorflow::GraphDef& graph) {
  for (const auto& node : graph.node()) {
    Status status = CheckConstants(node.attr(), node.name());
    if (!status.ok()) return status;
  }
  return CheckConstants(graph.library());
}

}  // namespace starwire
