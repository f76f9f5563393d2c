// The differences between the memory, shapes and encodings of tensors of TensorFlow 1.15, DeepRec and 2.12 to 2.22: see
// compat.h.
#ifndef STARWIRE_CC_BASE_COMPAT_TENSOR_H_
#define STARWIRE_CC_BASE_COMPAT_TENSOR_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>

#include "cc/base/compat.h"
#include "tensorflow/core/framework/allocator.h"
#include "tensorflow/core/framework/tensor_shape.h"

namespace starwire {

namespace compat_internal {
template <typename Shape>
auto BuildShape(const Int64* sizes, size_t dims, Shape* shape, int)
    -> decltype(Shape::BuildTensorShape({sizes, dims}, shape)) {
  return Shape::BuildTensorShape({sizes, dims}, shape);
}
template <typename Shape>
Status BuildShape(const Int64* sizes, size_t dims, Shape* shape, long) {
  constexpr uint64_t kMost = uint64_t{1} << 62;
  uint64_t elements = 1;
  for (size_t i = 0; i < dims; ++i) {
    if (sizes[i] < 0) return MakeStatus(kInvalidArgument, "a dimension of size " + std::to_string(sizes[i]));
    if (elements != 0 && static_cast<uint64_t>(sizes[i]) > kMost / elements) {
      return MakeStatus(kInvalidArgument, "a shape with too many elements");
    }
    elements *= static_cast<uint64_t>(sizes[i]);
  }
  *shape = Shape();
  for (size_t i = 0; i < dims; ++i) shape->AddDim(sizes[i]);
  return OkStatus();
}
}  // namespace compat_internal

// The attributes of an allocation that fails instead of waiting for memory.
struct PromptAllocation : ::tensorflow::AllocationAttributes {
  PromptAllocation() {
    Either(STARWIRE_IF_VALID((auto* a), a->retry_on_failure = false),
           STARWIRE_IF_VALID((auto* a), a->no_retry_on_failure = true))(this);
  }
};

// Whether an object was encoded. Up to 2.21, TensorFlow's functions for that return nothing.
template <typename Encode>
bool Succeeds(const Encode& encode) {
  if constexpr (std::is_void_v<decltype(encode())>) {
    encode();
    return true;
  } else {
    return encode();
  }
}

// A shape of sizes that a peer sent. 1.15 ends the process when it is made a shape that is not one, so they are checked
// before.
inline Status BuildShape(const Int64* sizes, size_t dims, ::tensorflow::TensorShape* shape) {
  return compat_internal::BuildShape(sizes, dims, shape, 0);
}

// ---- Allocators of ours ----

namespace compat_internal {
template <typename A, typename = void>
class HostAllocator : public A {
 protected:
  explicit HostAllocator(A*) {}
};
template <typename A>
class HostAllocator<A, std::void_t<decltype(&A::GetMemoryType)>> : public A {
 public:
  decltype(std::declval<const A&>().GetMemoryType()) GetMemoryType() const override { return base_->GetMemoryType(); }

 protected:
  explicit HostAllocator(A* base) : base_(base) {}

 private:
  A* const base_;
};
template <typename A>
auto NewPieces(std::unique_ptr<::tensorflow::SubAllocator> supply, size_t bytes, const std::string& name, int)
    -> decltype(A(std::move(supply), bytes, name, typename A::Options())) {
  typename A::Options options;
  options.allow_growth = true;
  options.allow_retry_on_failure = false;
  return A(std::move(supply), bytes, name, options);
}
template <typename A>
A NewPieces(std::unique_ptr<::tensorflow::SubAllocator> supply, size_t bytes, const std::string& name, long) {
  return A(supply.release(), bytes, /*allow_growth=*/true, name);
}
}  // namespace compat_internal

// An allocator with the type of memory of another one. Allocators of 1.15 have none.
using HostAllocator = compat_internal::HostAllocator<::tensorflow::Allocator>;

// TensorFlow's best-fit allocator (BFCAllocator), which grows and fails at once.
template <typename Bfc>
Bfc NewPieces(std::unique_ptr<::tensorflow::SubAllocator> supply, size_t bytes, const std::string& name) {
  return compat_internal::NewPieces<Bfc>(std::move(supply), bytes, name, 0);
}

}  // namespace starwire

#endif  // STARWIRE_CC_BASE_COMPAT_TENSOR_H_
