// How one tensor travels: a few bytes of metadata and a payload of raw bytes. The format is defined in
// docs/protocol.md, "Tensors".
#ifndef STARWIRE_CC_TENSOR_CODEC_H_
#define STARWIRE_CC_TENSOR_CODEC_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cc/base/compat.h"
#include "cc/tensor/elements.h"
#include "cc/tensor/fused.h"
#include "cc/tensor/slab.h"
#include "include/starwire.h"
#include "tensorflow/core/framework/allocator.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor.pb.h"

namespace starwire {

// The metadata of a tensor. All of it has been checked.
struct TensorHeader {
  tensorflow::DataType dtype = tensorflow::DT_INVALID;
  tensorflow::TensorShape shape;
  TensorEncoding encoding = TensorEncoding::kNone;
  bool is_dead = false;
  uint64_t payload_bytes = 0;
  int64_t send_start_micros = 0;  // when the sender had the tensor, by the sender's clock
};

// A tensor, encoded for sending. Holds no reference: the payload does, until its `release` is called.
class EncodedTensor {
 public:
  static constexpr size_t kFixedMeta = 24;
  static constexpr size_t kMaxDims = 254;

  // Elements that can be copied are not touched: the payload points at the tensor's buffer and holds a reference to it.
  // Anything else is serialised into a buffer that the payload owns. Fails for an uninitialised tensor and for types
  // that cannot travel. The tensor must be in memory that the CPU can read.
  Status Encode(const tensorflow::Tensor& tensor, bool is_dead, int64_t send_start_micros);

  sw_bytes meta() const {
    return long_meta_.empty() ? sw_bytes{meta_, meta_size_} : sw_bytes{long_meta_.data(), long_meta_.size()};
  }
  // How many tensors are fused into this one; 0 if it is an ordinary one.
  size_t fused_tensors() const { return fused_tensors_; }
  // To be passed to exactly one sw_engine_reply() or sw_channel_call(), which then owns it. NULL if there is nothing to
  // send besides the metadata.
  const sw_payload* payload() const { return payload_.n_parts == 0 ? nullptr : &payload_; }

 private:
  void WriteMeta(const tensorflow::Tensor& tensor, bool is_dead, TensorEncoding encoding, uint64_t payload_bytes,
                 int64_t send_start_micros);
  Status EncodeStrings(const tensorflow::Tensor& tensor, int64_t send_start_micros);
  Status EncodeFused(const tensorflow::Tensor& tensor, const FusedTensors& fused, int64_t send_start_micros);
  Status EncodeProto(const tensorflow::Tensor& tensor, int64_t send_start_micros);

  uint8_t meta_[kFixedMeta + 8 * kMaxDims];
  size_t meta_size_ = 0;
  size_t fused_tensors_ = 0;
  std::vector<uint8_t> long_meta_;  // instead, if it does not fit
  sw_part part_ = {nullptr, 0};
  std::vector<sw_part> parts_;  // only if there is more than one
  sw_payload payload_ = {nullptr, 0, nullptr, nullptr};
};

// Parses metadata from a peer and checks that it is consistent. The error says what is wrong; the caller adds the peer.
// `fused` is the layout if the encoding is kFused.
Status DecodeTensorHeader(sw_bytes meta, TensorHeader* header, FusedLayout* fused);

// The payload of encoding kProto.
Status EncodeObjects(const tensorflow::Tensor& tensor, std::string* bytes);
// Decodes it: `bytes` came from a peer, which claims that it is a tensor of this type and shape.
Status DecodeObjects(sw_bytes bytes, tensorflow::DataType dtype, const tensorflow::TensorShape& shape,
                     tensorflow::TensorProto* proto);
Status MakeObjects(const tensorflow::TensorProto& proto, tensorflow::Allocator* allocator, tensorflow::Tensor* tensor);

// Receives one tensor: Prepare() when the metadata has arrived, Finish() when the payload has.
class TensorReceiver {
 public:
  TensorReceiver() = default;
  ~TensorReceiver() { DropSlab(); }
  TensorReceiver(const TensorReceiver&) = delete;
  TensorReceiver& operator=(const TensorReceiver&) = delete;

  // Allocates the destination from `allocator` and sets bufs[i] to the destination of each of the `n` parts of lens[i]
  // bytes. Fails with ResourceExhausted if there is not enough memory. With n == 0 only the metadata is checked and the
  // tensor is complete after Finish().
  Status Prepare(sw_bytes meta, size_t n, const uint64_t* lens, tensorflow::Allocator* allocator, void** bufs);
  // Builds the tensor from the payload. `allocator` as above.
  Status Finish(tensorflow::Allocator* allocator);
  // Instead of Finish() if the encoding is kProto and the caller creates the objects.
  Status ParseProto(tensorflow::TensorProto* proto);
  // Returns to the initial state and frees all memory.
  void Reset();

  bool prepared() const { return prepared_; }
  const TensorHeader& header() const { return header_; }
  // How many tensors are fused into this one; 0 if it is an ordinary one.
  size_t fused_tensors() const {
    return prepared_ && header_.encoding == TensorEncoding::kFused ? layout_.members().size() : 0;
  }
  const tensorflow::Tensor& tensor() const { return tensor_; }
  tensorflow::Tensor* mutable_tensor() { return &tensor_; }

 private:
  Status FinishStrings(tensorflow::Allocator* allocator);
  Status FinishFused(tensorflow::Allocator* allocator);
  Status FinishProto(tensorflow::Allocator* allocator);
  void DropSlab();

  TensorHeader header_;
  tensorflow::Tensor tensor_;
  std::unique_ptr<uint8_t[]> staging_;  // strings and protos: their bytes until Finish()
  FusedLayout layout_;                  // kFused only, as is the next
  Slab* slab_ = nullptr;
  bool prepared_ = false;
};

}  // namespace starwire

#endif  // STARWIRE_CC_TENSOR_CODEC_H_
