// The devices of a server whose tensors travel over RDMA.
#ifndef STARWIRE_CC_SERVER_ARENA_DEVICES_H_
#define STARWIRE_CC_SERVER_ARENA_DEVICES_H_

#include <memory>
#include <string>

#include "cc/base/compat.h"
#include "tensorflow/core/common_runtime/device_mgr.h"
#include "tensorflow/core/protobuf/tensorflow_server.pb.h"

namespace starwire {

// The devices that TensorFlow would make for this server, but its CPUs take large tensors from the arena (except beside
// a GPU, whose runtime has its own memory for tensors that travel). `*out` stays null if there is no arena: then
// TensorFlow is to make them.
Status MakeArenaDevices(const std::string& protocol, const tensorflow::ServerDef& def,
                        std::unique_ptr<tensorflow::DeviceMgr>* out);

}  // namespace starwire

#endif  // STARWIRE_CC_SERVER_ARENA_DEVICES_H_
