// Completions found by one round of a reactor, run together on TensorFlow's pool.
#ifndef STARWIRE_CC_SERVER_COMPLETION_BATCH_H_
#define STARWIRE_CC_SERVER_COMPLETION_BATCH_H_

#include <functional>
#include <memory>

#include "tensorflow/core/lib/core/threadpool.h"

namespace starwire {

class CompletionBatch {
 public:
  // On a reactor thread: runs `completion` on the pool after this round. On any other thread: runs it here and now.
  static void Add(std::function<void()> completion);
  // The engine's round_end: hands what was added on this thread to the pool as one closure, and marks the thread as a
  // reactor.
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

#endif  // STARWIRE_CC_SERVER_COMPLETION_BATCH_H_
