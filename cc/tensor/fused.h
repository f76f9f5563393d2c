// Several tensors that travel as one: the value that a StarwireFuse op sends to its StarwireUnfuse, and its wire format
// (docs/protocol.md, "Tensors").
#ifndef STARWIRE_CC_TENSOR_FUSED_H_
#define STARWIRE_CC_TENSOR_FUSED_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cc/base/compat.h"
#include "cc/tensor/elements.h"
#include "cc/tensor/slab.h"
#include "include/starwire.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/variant_tensor_data.h"

namespace starwire {

// The content of a scalar of type DT_VARIANT. It encodes itself, so that TensorFlow's own transport can carry it.
class FusedTensors {
 public:
  static constexpr char kTypeName[] = "starwire::FusedTensors";

  FusedTensors() = default;
  explicit FusedTensors(std::vector<tensorflow::Tensor> tensors) : tensors_(std::move(tensors)) {}

  // Null if `tensor` holds anything else.
  static const FusedTensors* In(const tensorflow::Tensor& tensor);
  // Whether tensors of this type can be members: types whose elements can be copied, and strings.
  static bool CanHold(tensorflow::DataType dtype);

  const std::vector<tensorflow::Tensor>& tensors() const { return tensors_; }

  // The interface that TensorFlow requires of a variant's content.
  std::string TypeName() const { return kTypeName; }
  std::string DebugString() const;
  bool Encode(tensorflow::VariantTensorData* data) const;
  bool Decode(tensorflow::VariantTensorData data);

 private:
  std::vector<tensorflow::Tensor> tensors_;
};

// The layout of the members in the payload: one after another, each at a multiple of Slab::kAlignment.
class FusedLayout {
 public:
  struct Member {
    tensorflow::DataType dtype = tensorflow::DT_INVALID;
    tensorflow::TensorShape shape;
    TensorEncoding encoding = TensorEncoding::kNone;
    uint64_t offset = 0;
    uint64_t bytes = 0;
  };

  // Fails for an uninitialised tensor and for types that cannot travel.
  Status Measure(const std::vector<tensorflow::Tensor>& tensors);
  // Parses and checks a table at the start of `table`, which came from a peer. `consumed` is its length.
  Status Parse(sw_bytes table, size_t* consumed);

  size_t table_bytes() const { return table_bytes_; }
  uint64_t payload_bytes() const { return payload_bytes_; }
  const std::vector<Member>& members() const { return members_; }

  // Writes table_bytes() bytes.
  void WriteTable(uint8_t* at) const;
  // Writes the member's content, member.bytes bytes.
  static Status WriteMember(const Member& member, const tensorflow::Tensor& tensor, uint8_t* at);
  // Creates the tensors of a slab that holds the payload and has room for members().size() pieces.
  Status MakeTensors(Slab* slab, tensorflow::Allocator* allocator, std::vector<tensorflow::Tensor>* out) const;

 private:
  Status Place(Member* member);

  std::vector<Member> members_;
  size_t table_bytes_ = 0;
  uint64_t payload_bytes_ = 0;
};

}  // namespace starwire

#endif  // STARWIRE_CC_TENSOR_FUSED_H_
