// The completions of one reactor round, run together on TensorFlow's pool, or in place if they are few and brief.
#ifndef STARWIRE_CC_BASE_COMPLETION_BATCH_H_
#define STARWIRE_CC_BASE_COMPLETION_BATCH_H_

#include <functional>
#include <memory>

#include "tensorflow/core/lib/core/threadpool.h"

namespace starwire {

class CompletionBatch {
 public:
  enum class Kind {
    kAny,    // may take any time
    kBrief,  // a few microseconds: decrements a counter, passes kernels to a pool
  };

  // On a reactor thread: runs `completion` after this round. On any other thread: runs it at once.
  static void Add(std::function<void()> completion, Kind kind = Kind::kAny);
  // The engine's round_end: passes the completions added on this thread to the pool as one closure, and marks the
  // thread as a reactor. A step with few tensors consists mostly of waiting for threads to wake up, so a round with few
  // and brief completions runs them on the reactor.
  static void Flush(tensorflow::thread::ThreadPool* pool);
  // True on threads that call round_end.
  static bool OnReactor();

  // While one exists on a thread that is not a reactor, Add() passes completions to another thread instead of running
  // them in place. For callers that hold a lock that completions take, such as cancellations.
  class DeferScope {
   public:
    DeferScope();
    ~DeferScope();
    DeferScope(const DeferScope&) = delete;
    DeferScope& operator=(const DeferScope&) = delete;
  };
};

}  // namespace starwire

#endif  // STARWIRE_CC_BASE_COMPLETION_BATCH_H_
