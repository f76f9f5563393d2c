// What the passes that plan graphs ask the other tasks of a server: whether they take handles, and how fast the path to
// them is, because how a step's star calls are best split depends on it.
#ifndef STARWIRE_CC_STAR_PEERS_H_
#define STARWIRE_CC_STAR_PEERS_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cc/base/channel.h"

namespace starwire {

class StarPeers {
 public:
  // Opens a channel to a task; null if there is none.
  using Open = std::function<std::shared_ptr<Channel>(const std::string& task)>;
  struct Path {
    // 0: not measured, or within this host.
    uint64_t bytes_per_s = 0;
    std::chrono::nanoseconds round_trip{0};
  };

  // For the server of `task` in this process; another one of that name replaces it.
  static void Attach(const std::string& task, Open open);
  static void Detach(const std::string& task);
  // By task: whether the star calls of `own` may name handles of eager contexts there. Asks all of them at once; one
  // that does not answer within two seconds, or is older than the method, may not.
  static std::vector<bool> TakeHandles(const std::string& own, const std::vector<std::string>& tasks);
  // The path from `own` to that one of `tasks` whose parts should be smallest; that takes some round trips, unless they
  // were measured lately.
  static Path Narrowest(const std::string& own, const std::vector<std::string>& tasks);
};

}  // namespace starwire

#endif  // STARWIRE_CC_STAR_PEERS_H_
