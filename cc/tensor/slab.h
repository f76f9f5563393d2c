// One piece of memory that holds many tensors.
#ifndef STARWIRE_CC_TENSOR_SLAB_H_
#define STARWIRE_CC_TENSOR_SLAB_H_

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "tensorflow/core/framework/allocator.h"
#include "tensorflow/core/framework/tensor.h"

namespace starwire {

// Lives until its last tensor is freed, and costs two allocations however many there are. Its tensors do not overlap,
// so each counts as the only owner of its bytes: kernels may reuse them in place.
class Slab {
 public:
  // The alignment of each tensor, as TensorFlow's kernels expect of any buffer.
  static constexpr size_t kAlignment = 64;

  // Memory for `bytes` bytes, which may be 0, and at most `pieces` tensors. Null if there is not enough.
  static Slab* New(tensorflow::Allocator* allocator, uint64_t bytes, size_t pieces);
  // The same around existing memory that belongs to `owner`, until release(owner). On failure (out of memory) it still
  // belongs to the caller.
  static Slab* Around(uint8_t* data, uint64_t bytes, size_t pieces, void* owner, void (*release)(void* owner));
  // How much memory lives as long as this tensor: that of its slab, or of the tensor of which it is a part.
  static uint64_t HeldBy(const tensorflow::Tensor& tensor);

  uint8_t* data() const { return data_; }
  // The tensor whose elements are the `bytes` (not 0) bytes at `offset` (a multiple of kAlignment). Call it at most as
  // often as there are pieces, from one thread.
  tensorflow::Tensor NewTensor(tensorflow::DataType dtype, const tensorflow::TensorShape& shape, uint64_t offset,
                               uint64_t bytes);
  // Releases the reference that New() returned. Tensors keep theirs.
  void Unref();

 private:
  class Piece;
  struct Place;

  static Slab* Make(uint8_t* data, uint64_t bytes, size_t pieces, void* owner, void (*release)(void* owner));
  Slab(uint8_t* data, uint64_t bytes, void* owner, void (*release)(void* owner))
      : data_(data), bytes_(bytes), owner_(owner), release_(release) {}
  ~Slab() = default;

  uint8_t* const data_;
  const uint64_t bytes_;
  void* owner_;
  void (*release_)(void* owner);
  std::atomic<size_t> references_{1};
  size_t used_ = 0;
};

}  // namespace starwire

#endif  // STARWIRE_CC_TENSOR_SLAB_H_
