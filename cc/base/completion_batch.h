// Completions found by one round of a reactor, run together on TensorFlow's pool, or in place if they are few and
// brief.
#ifndef STARWIRE_CC_BASE_COMPLETION_BATCH_H_
#define STARWIRE_CC_BASE_COMPLETION_BATCH_H_

#include <functional>
#include <memory>

#include "tensorflow/core/lib/core/threadpool.h"

namespace starwire {

class CompletionBatch {
 public:
  enum class Kind {
    kAny,    // takes as long as it takes
    kBrief,  // some microseconds: counts something down, hands kernels to a pool
  };

  // On a reactor thread: runs `completion` after this round. On any other thread: runs it here and now.
  static void Add(std::function<void()> completion, Kind kind = Kind::kAny);
  // The engine's round_end: hands what was added on this thread to the pool as one closure, and marks the thread as a
  // reactor. A step of few tensors consists of waiting for threads to wake up: a round of few and brief completions
  // therefore does without one, and runs them on the reactor.
  static void Flush(tensorflow::thread::ThreadPool* pool);
  // True on threads that call round_end.
  static bool OnReactor();

  // While one lives on a thread that is no reactor, Add() hands over to another thread instead of running in place. For
  // callers that hold a lock which completions take, as a cancellation does.
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
