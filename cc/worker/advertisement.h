// How tasks find each other's data port without a file: in the answer to TensorFlow's own gRPC GetStatus.
#ifndef STARWIRE_CC_WORKER_ADVERTISEMENT_H_
#define STARWIRE_CC_WORKER_ADVERTISEMENT_H_

#include <string>

#include "tensorflow/core/protobuf/worker.pb.h"

namespace starwire {

// Adds `starwire{advertisement}` to the description of the first CPU device in the reply, where it is harmless: peers
// with another protocol ignore it, and our own masters ask over the data port, whose replies stay unchanged.
void AddAdvertisement(const std::string& advertisement, tensorflow::GetStatusResponse* response);
// The advertisement in a reply; empty if there is none.
std::string FindAdvertisement(const tensorflow::GetStatusResponse& response);

}  // namespace starwire

#endif  // STARWIRE_CC_WORKER_ADVERTISEMENT_H_
