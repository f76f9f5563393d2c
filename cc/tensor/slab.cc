#include "cc/tensor/slab.h"

#include <limits>
#include <new>

#include "cc/base/compat_tensor.h"
#include "tensorflow/core/common_runtime/dma_helper.h"
#include "tensorflow/core/framework/allocation_description.pb.h"

namespace starwire {

using tensorflow::DataType;
using tensorflow::Tensor;
using tensorflow::TensorBuffer;
using tensorflow::TensorShape;

// The buffer of one tensor. It lies in a Place of its slab and releases one reference to the slab when it ends.
class Slab::Piece : public TensorBuffer {
 public:
  Piece(uint8_t* data, uint64_t bytes) : TensorBuffer(data), bytes_(bytes) {}

  size_t size() const override { return bytes_; }
  TensorBuffer* root_buffer() override { return this; }
  void FillAllocationDescription(tensorflow::AllocationDescription* proto) const override {
    proto->set_requested_bytes(static_cast<int64_t>(bytes_));
    proto->set_allocator_name("starwire_slab");
    proto->set_ptr(reinterpret_cast<uintptr_t>(data()));
  }

  uint64_t slab_bytes() const;

  static void* operator new(size_t, void* place) { return place; }
  // Runs after every destructor, when nothing uses the object any more.
  static void operator delete(void* place);

 private:
  ~Piece() override = default;

  const uint64_t bytes_;
};

struct Slab::Place {
  Slab* slab;
  alignas(Piece) unsigned char piece[sizeof(Piece)];
};

void Slab::Piece::operator delete(void* place) {
  auto* bytes = static_cast<unsigned char*>(place) - offsetof(Place, piece);
  reinterpret_cast<Place*>(bytes)->slab->Unref();
}

uint64_t Slab::Piece::slab_bytes() const {
  const auto* bytes = reinterpret_cast<const unsigned char*>(this) - offsetof(Place, piece);
  return reinterpret_cast<const Place*>(bytes)->slab->bytes_;
}

uint64_t Slab::HeldBy(const Tensor& tensor) {
  const TensorBuffer* buffer = tensorflow::DMAHelper::buffer(&tensor);
  if (buffer == nullptr) return 0;
  const TensorBuffer* root = const_cast<TensorBuffer*>(buffer)->root_buffer();
  const auto* piece = dynamic_cast<const Piece*>(root);
  return piece != nullptr ? piece->slab_bytes() : root->size();
}

Slab* Slab::Make(uint8_t* data, uint64_t bytes, size_t pieces, void* owner, void (*release)(void* owner)) {
  static_assert(sizeof(Slab) % alignof(Place) == 0, "places follow the slab");
  if (pieces > (std::numeric_limits<size_t>::max() / 2 - sizeof(Slab)) / sizeof(Place)) return nullptr;
  void* memory = ::operator new(sizeof(Slab) + pieces * sizeof(Place), std::nothrow);
  return memory == nullptr ? nullptr : new (memory) Slab(data, bytes, owner, release);
}

Slab* Slab::New(tensorflow::Allocator* allocator, uint64_t bytes, size_t pieces) {
  if (bytes > std::numeric_limits<size_t>::max() / 2) return nullptr;
  uint8_t* data = nullptr;
  if (bytes != 0) {
    const PromptAllocation attributes;
    data = static_cast<uint8_t*>(allocator->AllocateRaw(kAlignment, bytes, attributes));
    if (data == nullptr) return nullptr;
  }
  Slab* slab = Make(data, bytes, pieces, allocator, nullptr);
  if (slab == nullptr && data != nullptr) allocator->DeallocateRaw(data);
  return slab;
}

Slab* Slab::Around(uint8_t* data, uint64_t bytes, size_t pieces, void* owner, void (*release)(void* owner)) {
  return Make(data, bytes, pieces, owner, release);
}

Tensor Slab::NewTensor(DataType dtype, const TensorShape& shape, uint64_t offset, uint64_t bytes) {
  Place* place = reinterpret_cast<Place*>(this + 1) + used_++;
  references_.fetch_add(1, std::memory_order_relaxed);
  place->slab = this;
  auto* piece = new (place->piece) Piece(data_ + offset, bytes);
  Tensor tensor(dtype, shape, piece);
  // The tensor holds the only reference from now on.
  piece->Unref();
  return tensor;
}

void Slab::Unref() {
  if (references_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  if (release_ != nullptr) {
    release_(owner_);
  } else if (data_ != nullptr) {
    static_cast<tensorflow::Allocator*>(owner_)->DeallocateRaw(data_);
  }
  this->~Slab();
  ::operator delete(static_cast<void*>(this));
}

}  // namespace starwire
