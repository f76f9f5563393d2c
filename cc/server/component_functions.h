// The parts of functions that a worker has other tasks run.
#ifndef STARWIRE_CC_SERVER_COMPONENT_FUNCTIONS_H_
#define STARWIRE_CC_SERVER_COMPONENT_FUNCTIONS_H_

#include <cstdint>

#include "tensorflow/core/distributed_runtime/eager/eager_service_impl.h"

namespace starwire {

// TensorFlow lists an eager context's component functions in a vector. A step reads its entry without the lock, while
// the first step of another function may move the entries to a larger vector. A coordinator of TensorFlow's own has one
// step at a time on a worker; starwire.coordinator(pipeline=1) has more. So the list gets room before any step runs.
// Call this before each request to the context. Nothing happens if there is no such context.
void ReserveComponentFunctions(tensorflow::eager::EagerServiceImpl* service, uint64_t context_id);

}  // namespace starwire

#endif  // STARWIRE_CC_SERVER_COMPONENT_FUNCTIONS_H_
