// Measures the paths from a server to others, because how a step's star calls are best split depends on them.
#ifndef STARWIRE_CC_STAR_METER_H_
#define STARWIRE_CC_STAR_METER_H_

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cc/base/channel.h"
#include "cc/worker/worker_cache.h"
#include "tensorflow/core/common_runtime/device_mgr.h"
#include "tensorflow/core/framework/device_base.h"
#include "tensorflow/core/framework/resource_mgr.h"

namespace starwire {

// A resource of the server's devices, where the passes that plan its sessions' graphs find it.
class PathMeter : public tensorflow::ResourceBase {
 public:
  struct Path {
    // 0: not measured, or within this host.
    uint64_t bytes_per_s = 0;
    std::chrono::nanoseconds round_trip{0};
  };

  PathMeter(std::weak_ptr<ChannelOpener> channels, TaskAddresses addresses);

  static void Attach(tensorflow::DeviceMgr* devices, const std::weak_ptr<ChannelOpener>& channels,
                     const TaskAddresses& addresses);
  // The path to that one of `tasks` whose parts should be smallest; that takes some round trips, unless they were
  // measured lately. `client` is the device of a session's master; nothing is measured if its server is not one of
  // ours.
  static Path Narrowest(tensorflow::DeviceBase* client, const std::vector<std::string>& tasks);

  std::string DebugString() const override { return "starwire::PathMeter"; }

 private:
  struct Known {
    Path path;
    std::chrono::steady_clock::time_point when;
  };

  std::vector<Path> Measure(const std::vector<std::string>& tasks);

  const std::weak_ptr<ChannelOpener> channels_;
  const TaskAddresses addresses_;
  std::mutex mu_;
  std::map<std::string, Known> known_;  // guarded by mu_
};

}  // namespace starwire

#endif  // STARWIRE_CC_STAR_METER_H_
