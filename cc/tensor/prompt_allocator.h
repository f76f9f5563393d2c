// Memory for received tensors, without waiting: reactors ask for it.
#ifndef STARWIRE_CC_TENSOR_PROMPT_ALLOCATOR_H_
#define STARWIRE_CC_TENSOR_PROMPT_ALLOCATOR_H_

#include <cstdint>

#include "tensorflow/core/framework/allocator.h"

namespace starwire {

// The allocator to take `bytes` from instead of `wanted`, with AllocationAttributes::retry_on_failure off; null: there
// is not so much memory. It is `wanted` unless that one might make the caller wait: TensorFlow's allocator for CPUs
// ignores the attribute, and waits ten seconds for memory to be given back, with a lock that whoever gives it back
// needs. Where it is not sure to have room, memory comes from the system.
tensorflow::Allocator* PromptAllocator(tensorflow::Allocator* wanted, uint64_t bytes);

}  // namespace starwire

#endif  // STARWIRE_CC_TENSOR_PROMPT_ALLOCATOR_H_
