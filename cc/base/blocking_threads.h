// Threads for requests that block while they run, such as whole functions of TensorFlow's eager runtime. On the compute
// pool, as many of them as it has threads would leave none for the work that they wait for.
#ifndef STARWIRE_CC_BASE_BLOCKING_THREADS_H_
#define STARWIRE_CC_BASE_BLOCKING_THREADS_H_

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>

namespace starwire {

// Each piece of work gets an idle thread, or a new one; beyond `most` threads work waits for one, in its order. A
// thread that stays idle ends.
class BlockingThreads {
 public:
  using Work = std::function<void()>;

  // `name`: of the threads, at most 15 characters.
  BlockingThreads(const char* name, size_t most, std::chrono::milliseconds idle = std::chrono::seconds(10));
  // As Stop(), without waiting.
  ~BlockingThreads();
  BlockingThreads(const BlockingThreads&) = delete;
  BlockingThreads& operator=(const BlockingThreads&) = delete;

  // Callable from any thread; does not block. Exceptions from `work` are logged. False, and `work` is still the
  // caller's, if there is no thread and none can be started, or after Stop().
  bool Run(Work* work);

  // Runs what is waiting, then ends the threads. False if some are still running after `patience`: they end when their
  // work returns. Do not call it from one of them.
  bool Stop(std::chrono::milliseconds patience);

  // For tests.
  size_t threads() const;

 private:
  struct State;
  const std::shared_ptr<State> state_;  // shared with the threads
};

}  // namespace starwire

#endif  // STARWIRE_CC_BASE_BLOCKING_THREADS_H_
