// The client's handle to a peer.
#ifndef STARWIRE_CC_BASE_CHANNEL_H_
#define STARWIRE_CC_BASE_CHANNEL_H_

#include <memory>
#include <string>
#include <utility>

#include "cc/base/compat.h"
#include "cc/base/handles.h"
#include "include/starwire.h"

namespace starwire {

// A counted reference. The engine's memory outlives its last channel, so calls on a channel that TensorFlow keeps after
// the server has gone fail instead of crashing.
class Channel {
 public:
  Channel(std::shared_ptr<sw_engine> engine, ChannelHandle handle)
      : engine_(std::move(engine)), handle_(std::move(handle)) {}

  sw_channel* handle() const { return handle_.get(); }

 private:
  const std::shared_ptr<sw_engine> engine_;
  const ChannelHandle handle_;
};

// Opens channels. Implemented by a server's engine (cc/server/engine.h).
class ChannelOpener {
 public:
  virtual ~ChannelOpener() = default;
  // Without an address: to a task that has joined, kNotFound if it has not.
  virtual Status OpenChannel(const std::string& task, const std::string& grpc_address,
                             std::shared_ptr<Channel>* out) = 0;
};

}  // namespace starwire

#endif  // STARWIRE_CC_BASE_CHANNEL_H_
