// Counted objects that the transport holds (sw_star_handlers).
#ifndef STARWIRE_CC_STAR_OBJECT_H_
#define STARWIRE_CC_STAR_OBJECT_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include "tensorflow/core/framework/tensor.h"

namespace starwire {

// Reference-counted; created with one reference.
class StarObject {
 public:
  StarObject() = default;
  StarObject(const StarObject&) = delete;
  StarObject& operator=(const StarObject&) = delete;

  void Ref() { references_.fetch_add(1, std::memory_order_relaxed); }
  // On any thread, including reactors.
  void Unref() {
    if (references_.fetch_sub(1, std::memory_order_acq_rel) == 1) Retire();
  }

 protected:
  virtual ~StarObject() = default;
  virtual void Retire() { delete this; }

 private:
  std::atomic<int64_t> references_{1};
};

struct UnrefStarObject {
  void operator()(StarObject* object) const { object->Unref(); }
};
// One reference.
template <typename T>
using StarObjectPtr = std::unique_ptr<T, UnrefStarObject>;

// Conversions to and from the transport's pointers.
inline void* InTable(StarObject* object) { return object; }
inline StarObject* StarObjectOf(void* object) { return static_cast<StarObject*>(object); }

// A value that is kept between two calls of a step.
class KeptValue : public StarObject {
 public:
  explicit KeptValue(tensorflow::Tensor t) : tensor(std::move(t)) {}
  const tensorflow::Tensor tensor;
};

}  // namespace starwire

#endif  // STARWIRE_CC_STAR_OBJECT_H_
