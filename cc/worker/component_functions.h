// The parts of functions that an eager context has other tasks run.
#ifndef STARWIRE_CC_WORKER_COMPONENT_FUNCTIONS_H_
#define STARWIRE_CC_WORKER_COMPONENT_FUNCTIONS_H_

#include <cstdint>

#include "tensorflow/core/distributed_runtime/eager/eager_service_impl.h"

namespace starwire {

// The service of a server in this process, which has the contexts that it serves and that of the server's own program.
// It must be removed before it is deleted. Removing another one does nothing.
void AddEagerService(tensorflow::eager::EagerServiceImpl* service);
void RemoveEagerService(tensorflow::eager::EagerServiceImpl* service);

// TensorFlow lists the component functions of an eager context in a vector. A step reads its entry without the lock,
// while the first step of another function, on another thread, may move the entries to a larger vector: on a worker
// with starwire.coordinator(pipeline=1), or on a chief that gets the first results of two workers. So the list
// gets room before the first entry is added. Call this before each.
void ReserveComponentFunctions(uint64_t context_id);

}  // namespace starwire

#endif  // STARWIRE_CC_WORKER_COMPONENT_FUNCTIONS_H_
