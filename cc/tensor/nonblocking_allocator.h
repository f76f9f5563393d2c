// Memory for received tensors without waiting, because reactors allocate it.
#ifndef STARWIRE_CC_TENSOR_NONBLOCKING_ALLOCATOR_H_
#define STARWIRE_CC_TENSOR_NONBLOCKING_ALLOCATOR_H_

#include <cstdint>

#include "tensorflow/core/framework/allocator.h"

namespace starwire {

// The allocator to use instead of `wanted` for `bytes`, with AllocationAttributes::retry_on_failure off; null if there
// is not enough memory. It is `wanted` unless that one might make the caller wait: TensorFlow's CPU allocator ignores
// the attribute, and waits ten seconds for memory to be freed, holding a lock that freeing needs. If it is not certain
// to have room, memory comes from the system.
tensorflow::Allocator* NonblockingAllocator(tensorflow::Allocator* wanted, uint64_t bytes);

}  // namespace starwire

#endif  // STARWIRE_CC_TENSOR_NONBLOCKING_ALLOCATOR_H_
