// Checks of TensorProtos that came from a peer: variants and resource handles, and whatever else travels in a protocol
// buffer. TensorFlow's own decoders trust their input, so nothing may reach them that was not checked here.
#ifndef STARWIRE_CC_TENSOR_OBJECTS_H_
#define STARWIRE_CC_TENSOR_OBJECTS_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "cc/base/compat.h"
#include "google/protobuf/map.h"
#include "include/starwire.h"
#include "tensorflow/core/framework/attr_value.pb.h"
#include "tensorflow/core/framework/function.pb.h"
#include "tensorflow/core/framework/graph.pb.h"
#include "tensorflow/core/framework/tensor.pb.h"

namespace starwire {

// How much memory a message may make this process use: a small multiple of its length. TensorFlow's own messages stay
// below it: a scalar of a TensorList, in 8 to 12 bytes, becomes an object of some 450.
class ObjectBudget {
 public:
  static constexpr uint64_t kPerByte = 64;
  static constexpr uint64_t kFree = 64 << 10;

  explicit ObjectBudget(uint64_t message_bytes)
      : message_bytes_(message_bytes), left_(message_bytes > kMost ? kMost * kPerByte : message_bytes * kPerByte) {
    left_ += kFree;
  }
  // False if that exceeds the budget.
  bool Spend(uint64_t bytes) {
    if (bytes > left_) return false;
    left_ -= bytes;
    return true;
  }
  uint64_t message_bytes() const { return message_bytes_; }

 private:
  static constexpr uint64_t kMost = uint64_t{1} << 48;
  const uint64_t message_bytes_;
  uint64_t left_;
};

// Real programs do not nest objects more deeply.
constexpr int kMaxObjectDepth = 32;

// Messages that contain TensorProtos.
enum class TensorCarrier : uint8_t {
  kTensor,  // one TensorProto
  kRunGraphRequest,
  kRunGraphResponse,
  kRecvTensorResponse,
  kEnqueueRequest,
  kEnqueueResponse,
  kRunComponentFunctionRequest,
  kRunComponentFunctionResponse,
};

// Call it before parsing, which can turn two bytes into hundreds: checks how much memory parsing would use, and how
// deeply the message is nested.
Status CheckWire(sw_bytes bytes, TensorCarrier carrier);

// Call it after parsing: checks that types, shapes and numbers agree, that every variant has an accepted type and is
// what the decoder of that type expects, and that no tensor is much larger than the bytes that arrived for it.
Status CheckTensor(const tensorflow::TensorProto& proto, ObjectBudget* budget);
Status CheckTensor(const tensorflow::TensorProto& proto, uint64_t message_bytes);

// Checks the constants of a graph that are variants or resource handles. Others may be compressed at will: their
// kernels check them.
Status CheckConstants(const tensorflow::GraphDef& graph);
Status CheckConstants(const tensorflow::FunctionDef& function);
Status CheckConstants(const tensorflow::FunctionDefLibrary& library);
// Of an operation of TensorFlow's eager runtime, or any other owner of attributes; `name` is for the message.
Status CheckConstants(const google::protobuf::Map<std::string, tensorflow::AttrValue>& attributes,
                      const std::string& name);

// Checks the tensors of a RunGraphRequest or RunGraphResponse.
template <typename NamedTensors>
Status CheckTensors(const NamedTensors& tensors, uint64_t message_bytes) {
  ObjectBudget budget(message_bytes);
  for (const auto& named : tensors) {
    Status status = CheckTensor(named.tensor(), &budget);
    if (!status.ok()) return MakeStatus(StatusNumber(status), StatusMessage(status) + ", sent as " + named.name());
  }
  return OkStatus();
}

// The numbers of the fields of TensorFlow's eager runtime that lead to tensors. TensorFlow 1 does not know all of them.
namespace eager_fields {
inline constexpr int kEnqueueQueue = 3;
inline constexpr int kItemOperation = 2;
inline constexpr int kItemSendTensor = 3;
inline constexpr int kItemSendPackedHandle = 7;
inline constexpr int kOperationAttributes = 5;
inline constexpr int kOperationInputs = 10;
inline constexpr int kInputTensor = 2;
inline constexpr int kSentTensors = 2;
inline constexpr int kPackedHandles = 2;
inline constexpr int kLocalHandle = 1;
inline constexpr int kLocalHandleTensor = 1;
inline constexpr int kEnqueueResponses = 1;
inline constexpr int kResponseTensor = 2;
inline constexpr int kComponentOperation = 2;
inline constexpr int kComponentTensor = 2;
}  // namespace eager_fields

}  // namespace starwire

#endif  // STARWIRE_CC_TENSOR_OBJECTS_H_
