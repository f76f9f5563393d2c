// The messages of TensorFlow's eager runtime on the data port: their tensors, before TensorFlow decodes them.
#ifndef STARWIRE_CC_WORKER_EAGER_MESSAGES_H_
#define STARWIRE_CC_WORKER_EAGER_MESSAGES_H_

#include <cstdint>

#include "cc/base/compat.h"
#include "tensorflow/core/protobuf/eager_service.pb.h"

namespace starwire {

// Call it after CheckWire() and parsing: checks every tensor of a message of `bytes` (cc/tensor/objects.h).
Status CheckTensorsOf(const tensorflow::eager::EnqueueRequest& request, uint64_t bytes);
Status CheckTensorsOf(const tensorflow::eager::RunComponentFunctionRequest& request, uint64_t bytes);
Status CheckTensorsOf(const tensorflow::eager::EnqueueResponse& response, uint64_t bytes);
Status CheckTensorsOf(const tensorflow::eager::RunComponentFunctionResponse& response, uint64_t bytes);

// TensorFlow puts the variants and resource handles of these messages into opaque content, which a receiver refuses.
// Whether a request has such tensors.
bool HasOpaqueObjects(const tensorflow::eager::EnqueueRequest& request);
bool HasOpaqueObjects(const tensorflow::eager::RunComponentFunctionRequest& request);
// Gives them the form that can be checked. For messages of this process only.
Status SpellOutObjects(tensorflow::eager::EnqueueRequest* request);
Status SpellOutObjects(tensorflow::eager::RunComponentFunctionRequest* request);
Status SpellOutObjects(tensorflow::eager::EnqueueResponse* response);
Status SpellOutObjects(tensorflow::eager::RunComponentFunctionResponse* response);

}  // namespace starwire

#endif  // STARWIRE_CC_WORKER_EAGER_MESSAGES_H_
