#include "cc/worker/eager_messages.h"

#include <string>

#include "cc/base/compat_tensor.h"
#include "cc/tensor/elements.h"
#include "cc/tensor/objects.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor.pb.h"
#include "tensorflow/core/framework/types.pb.h"

namespace starwire {

using tensorflow::TensorProto;
using tensorflow::eager::EnqueueRequest;
using tensorflow::eager::EnqueueResponse;
using tensorflow::eager::Operation;
using tensorflow::eager::RunComponentFunctionRequest;
using tensorflow::eager::RunComponentFunctionResponse;

namespace {

using tensorflow::eager::QueueItem;
using tensorflow::eager::SendPackedHandleOp;
static_assert(EnqueueRequest::kQueueFieldNumber == eager_fields::kEnqueueQueue);
static_assert(QueueItem::kOperationFieldNumber == eager_fields::kItemOperation);
static_assert(QueueItem::kSendTensorFieldNumber == eager_fields::kItemSendTensor);
static_assert(QueueItem::kSendPackedHandleFieldNumber == eager_fields::kItemSendPackedHandle);
static_assert(Operation::kAttrsFieldNumber == eager_fields::kOperationAttributes);
static_assert(Operation::kOpInputsFieldNumber == eager_fields::kOperationInputs);
static_assert(Operation::Input::kTensorFieldNumber == eager_fields::kInputTensor);
static_assert(tensorflow::eager::SendTensorOp::kTensorsFieldNumber == eager_fields::kSentTensors);
static_assert(SendPackedHandleOp::kHandlesFieldNumber == eager_fields::kPackedHandles);
static_assert(SendPackedHandleOp::Handle::kLocalHandleFieldNumber == eager_fields::kLocalHandle);
static_assert(SendPackedHandleOp::LocalTensorHandle::kTensorFieldNumber == eager_fields::kLocalHandleTensor);
static_assert(EnqueueResponse::kQueueResponseFieldNumber == eager_fields::kEnqueueResponses);
static_assert(tensorflow::eager::QueueResponse::kTensorFieldNumber == eager_fields::kResponseTensor);
static_assert(RunComponentFunctionRequest::kOperationFieldNumber == eager_fields::kComponentOperation);
static_assert(RunComponentFunctionResponse::kTensorFieldNumber == eager_fields::kComponentTensor);

// Each calls `visit(tensor)` for every tensor of the message, until it returns false; false if one did.
template <typename Visit>
bool ForEachTensor(const Operation& operation, const Visit& visit) {
  for (const auto& input : operation.op_inputs()) {
    if (input.has_tensor() && !visit(input.tensor())) return false;
  }
  return true;
}

template <typename Visit>
bool ForEachTensor(const EnqueueRequest& request, const Visit& visit) {
  for (const auto& item : request.queue()) {
    if (item.has_operation() && !ForEachTensor(item.operation(), visit)) return false;
    if (item.has_send_tensor()) {
      for (const TensorProto& tensor : item.send_tensor().tensors()) {
        if (!visit(tensor)) return false;
      }
    }
    if (item.has_send_packed_handle()) {
      for (const auto& handle : item.send_packed_handle().handles()) {
        if (handle.has_local_handle() && !visit(handle.local_handle().tensor())) return false;
      }
    }
  }
  return true;
}

template <typename Visit>
bool ForEachTensor(const RunComponentFunctionRequest& request, const Visit& visit) {
  return ForEachTensor(request.operation(), visit);
}

template <typename Visit>
bool ForEachTensor(const EnqueueResponse& response, const Visit& visit) {
  for (const auto& item : response.queue_response()) {
    for (const TensorProto& tensor : item.tensor()) {
      if (!visit(tensor)) return false;
    }
  }
  return true;
}

template <typename Visit>
bool ForEachTensor(const RunComponentFunctionResponse& response, const Visit& visit) {
  for (const TensorProto& tensor : response.tensor()) {
    if (!visit(tensor)) return false;
  }
  return true;
}

template <typename Message>
Status CheckEach(const Message& message, uint64_t bytes) {
  ObjectBudget budget(bytes);
  Status status;
  ForEachTensor(message, [&](const TensorProto& tensor) {
    status = CheckTensor(tensor, &budget);
    return status.ok();
  });
  return status;
}

Status CheckOperation(const Operation& operation) { return CheckConstants(operation.attrs(), operation.name()); }

bool IsOpaque(const TensorProto& tensor) {
  return (tensor.dtype() == tensorflow::DT_VARIANT || tensor.dtype() == tensorflow::DT_RESOURCE) &&
         !tensor.tensor_content().empty();
}

template <typename Message>
bool AnyOpaque(const Message& message) {
  return !ForEachTensor(message, [](const TensorProto& tensor) { return !IsOpaque(tensor); });
}

// The message is not constant, so neither are its tensors.
template <typename Message>
Status SpellOutEach(Message* message) {
  Status status;
  ForEachTensor(*message, [&status](const TensorProto& tensor) {
    tensorflow::Tensor decoded;
    if (IsOpaque(tensor) && decoded.FromProto(tensor)) {
      TensorProto spelt;
      if (!Succeeds([&] { return decoded.AsProtoField(&spelt); })) status = NotEncodable(decoded);
      const_cast<TensorProto&>(tensor).Swap(&spelt);
    }
    return status.ok();
  });
  return status;
}

}  // namespace

Status CheckTensorsOf(const EnqueueRequest& request, uint64_t bytes) {
  Status status = CheckEach(request, bytes);
  for (const auto& item : request.queue()) {
    if (status.ok() && item.has_operation()) status = CheckOperation(item.operation());
    if (status.ok() && item.has_register_function()) {
      status = CheckConstants(item.register_function().function_def());
      if (status.ok()) status = CheckConstants(item.register_function().library());
    }
  }
  return status;
}

Status CheckTensorsOf(const RunComponentFunctionRequest& request, uint64_t bytes) {
  Status status = CheckEach(request, bytes);
  return status.ok() ? CheckOperation(request.operation()) : status;
}

Status CheckTensorsOf(const EnqueueResponse& response, uint64_t bytes) { return CheckEach(response, bytes); }
Status CheckTensorsOf(const RunComponentFunctionResponse& response, uint64_t bytes) {
  return CheckEach(response, bytes);
}

bool HasOpaqueObjects(const EnqueueRequest& request) { return AnyOpaque(request); }
bool HasOpaqueObjects(const RunComponentFunctionRequest& request) { return AnyOpaque(request); }

Status SpellOutObjects(EnqueueRequest* request) { return SpellOutEach(request); }
Status SpellOutObjects(RunComponentFunctionRequest* request) { return SpellOutEach(request); }
Status SpellOutObjects(EnqueueResponse* response) { return SpellOutEach(response); }
Status SpellOutObjects(RunComponentFunctionResponse* response) { return SpellOutEach(response); }

}  // namespace starwire
