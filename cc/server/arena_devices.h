// The devices of a server whose tensors travel over RDMA.
#ifndef STARWIRE_CC_SERVER_ARENA_DEVICES_H_
#define STARWIRE_CC_SERVER_ARENA_DEVICES_H_

#include <memory>
#include <string>

#include "cc/base/compat.h"
#include "tensorflow/core/common_runtime/device_mgr.h"
#include "tensorflow/core/protobuf/tensorflow_server.pb.h"

namespace starwire {

// Creates the devices that TensorFlow would create for this server, except that CPUs take large tensors from the arena
// (not beside a GPU, whose runtime has its own memory for tensors that travel). Without an arena `*out` stays null, and
// TensorFlow creates the devices.
Status MakeArenaDevices(const std::string& protocol, const tensorflow::ServerDef& def,
                        std::unique_ptr<tensorflow::DeviceMgr>* out);

}  // namespace starwire

#endif  // STARWIRE_CC_SERVER_ARENA_DEVICES_H_
