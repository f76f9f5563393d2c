// Who wants to know what becomes of a worker's sessions.
#ifndef STARWIRE_CC_WORKER_HOOKS_H_
#define STARWIRE_CC_WORKER_HOOKS_H_

#include <string>

namespace starwire {

class SessionObserver {
 public:
  virtual ~SessionObserver() = default;
  // The session's master deletes it.
  virtual void SessionClosed(const std::string& handle) = 0;
  // Resources of all sessions are being dropped (CleanupAll).
  virtual void AllCleanedUp() = 0;
};

}  // namespace starwire

#endif  // STARWIRE_CC_WORKER_HOOKS_H_
