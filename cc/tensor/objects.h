// TensorProtos that came from a peer: variants and resource handles, and whatever else travels in a protocol buffer.
// TensorFlow's own decoders believe what they read. Nothing gets to them that was not checked here.
#ifndef STARWIRE_CC_TENSOR_OBJECTS_H_
#define STARWIRE_CC_TENSOR_OBJECTS_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "cc/base/compat.h"
#include "include/starwire.h"
#include "tensorflow/core/framework/graph.pb.h"
#include "tensorflow/core/framework/tensor.pb.h"

namespace starwire {

// How much memory a message may make this process use: a small multiple of its own length. What TensorFlow itself
// sends stays below it: a scalar of a TensorList, in 8 to 12 bytes, becomes an object of some 450.
class ObjectBudget {
 public:
  static constexpr uint64_t kPerByte = 64;
  static constexpr uint64_t kFree = 64 << 10;

  explicit ObjectBudget(uint64_t message_bytes)
      : message_bytes_(message_bytes), left_(message_bytes > kMost ? kMost * kPerByte : message_bytes * kPerByte) {
    left_ += kFree;
  }
  // False if that is too much.
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

// Nothing that TensorFlow's users build is nested more deeply.
constexpr int kMaxObjectDepth = 32;

// Messages with TensorProtos in them.
enum class TensorCarrier : uint8_t {
  kTensor,  // one TensorProto
  kRunGraphRequest,
  kRunGraphResponse,
  kRecvTensorResponse,
};

// Before the bytes are parsed: a parser makes hundreds of bytes out of two. Counts what it would make, and how deeply
// it is nested.
Status CheckWire(sw_bytes bytes, TensorCarrier carrier);

// After that: types, shapes and numbers agree with each other, every variant is of a type that is accepted and is what
// the decoder of that type expects, and no tensor is much larger than what came for it.
Status CheckTensor(const tensorflow::TensorProto& proto, ObjectBudget* budget);
Status CheckTensor(const tensorflow::TensorProto& proto, uint64_t message_bytes);

// Constants of a graph that are variants or resource handles. Others may be compressed as they like: their kernels
// check them.
Status CheckConstants(const tensorflow::GraphDef& graph);

// The tensors of a RunGraphRequest or RunGraphResponse.
template <typename NamedTensors>
Status CheckTensors(const NamedTensors& tensors, uint64_t message_bytes) {
  ObjectBudget budget(message_bytes);
  for (const auto& named : tensors) {
    Status status = CheckTensor(named.tensor(), &budget);
    if (!status.ok()) return MakeStatus(StatusNumber(status), StatusMessage(status) + ", sent as " + named.name());
  }
  return OkStatus();
}

}  // namespace starwire

#endif  // STARWIRE_CC_TENSOR_OBJECTS_H_
