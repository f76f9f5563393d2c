// Background work that must not run on a reactor because it takes long or waits. It shares one thread, whatever peers
// do: a thread per cancelled request, as Env::SchedClosure() starts, can exceed a container's limit.
#ifndef STARWIRE_CC_BASE_BACKGROUND_QUEUE_H_
#define STARWIRE_CC_BASE_BACKGROUND_QUEUE_H_

#include <chrono>
#include <functional>
#include <memory>

#include "cc/base/blocking_threads.h"

namespace starwire {

// Runs work one item after another, in the order in which it is due. The first item starts the thread; if no thread can
// be started, due work runs on the caller's thread.
class BackgroundQueue {
 public:
  using Work = std::function<void()>;

  // `name`: of the thread, at most 15 characters.
  explicit BackgroundQueue(const char* name);
  // As Stop(), without waiting.
  ~BackgroundQueue();
  BackgroundQueue(const BackgroundQueue&) = delete;
  BackgroundQueue& operator=(const BackgroundQueue&) = delete;

  // The process-wide instance, for completions that cannot run on the thread that delivers them. Never stopped.
  static BackgroundQueue* OfProcess();

  // Callable from any thread. Exceptions from `work` are logged.
  void Run(Work work) { RunAfter(std::chrono::milliseconds(0), std::move(work)); }
  void RunAfter(std::chrono::milliseconds delay, Work work);

  // Runs all pending work, due or not, and ends the thread. Later work runs on the caller's thread. Returns false if
  // work is still running after `timeout`: the thread ends when it returns. Work must not call it.
  bool Stop(std::chrono::milliseconds timeout);

 private:
  struct Queue;
  const std::shared_ptr<Queue> queue_;  // shared with its thread
};

// A server's background work.
struct ServerQueues {
  // Cancellations and aborts, which others may be waiting for.
  BackgroundQueue urgent{"sw-cancel"};
  // The ends of sessions, plans and graphs, which may wait for steps to end.
  BackgroundQueue slow{"sw-ends"};
  // Requests of the eager runtime, each of which may be a whole function. A coordinator has one at each worker; the
  // number is a bound for what peers can do.
  BlockingThreads eager{"sw-eager", 128};
};

}  // namespace starwire

#endif  // STARWIRE_CC_BASE_BACKGROUND_QUEUE_H_
