// Background work that must not run on a reactor because it takes long or waits. It shares one thread, whatever peers
// do: a thread per cancelled request, as Env::SchedClosure() starts, can exceed a container's limit.
#ifndef STARWIRE_CC_BASE_ERRANDS_H_
#define STARWIRE_CC_BASE_ERRANDS_H_

#include <chrono>
#include <functional>
#include <memory>

#include "cc/base/blocking_threads.h"

namespace starwire {

// Runs errands one after another, in the order in which they are due. The first errand starts the thread; if none can
// be started, due errands run on the caller's thread.
class Errands {
 public:
  using Work = std::function<void()>;

  // `name`: of the thread, at most 15 characters.
  explicit Errands(const char* name);
  // As Stop(), without waiting.
  ~Errands();
  Errands(const Errands&) = delete;
  Errands& operator=(const Errands&) = delete;

  // The process-wide instance, for completions that cannot run on the thread that delivers them. Never stopped.
  static Errands* OfProcess();

  // Callable from any thread. Exceptions from `work` are logged.
  void Run(Work work) { RunAfter(std::chrono::milliseconds(0), std::move(work)); }
  void RunAfter(std::chrono::milliseconds delay, Work work);

  // Runs all pending errands, due or not, and ends the thread. Later errands run on the caller's thread. False if an
  // errand is still running after `patience`: the thread ends when it returns. Do not call it from an errand.
  bool Stop(std::chrono::milliseconds patience);

 private:
  struct Queue;
  const std::shared_ptr<Queue> queue_;  // shared with its thread
};

// The errands of a server.
struct ServerErrands {
  // Cancellations and aborts, which others may be waiting for.
  Errands urgent{"sw-cancel"};
  // The ends of sessions, plans and graphs, which may wait for steps to end.
  Errands slow{"sw-ends"};
  // Requests of the eager runtime, each of which may be a whole function. A coordinator has one at each worker; the
  // number is a bound for what peers can do.
  BlockingThreads eager{"sw-eager", 128};
};

}  // namespace starwire

#endif  // STARWIRE_CC_BASE_ERRANDS_H_
