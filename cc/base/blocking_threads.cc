#include "cc/base/blocking_threads.h"

#include <pthread.h>

#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "cc/base/guard.h"

namespace starwire {

struct BlockingThreads::State {
  State(const char* thread_name, size_t most_threads, std::chrono::milliseconds idle_time)
      : name(thread_name), most(most_threads), patience(idle_time) {}

  // Another thread, if work would wait for one. The lock is held. One starts at a time, and starts the next when it has
  // taken its own work: a burst of work that is quickly done needs few.
  static void Grow(const std::shared_ptr<State>& self) {
    if (self->starting || self->waiting.size() <= self->idle || self->threads >= self->most) return;
    try {
      std::thread thread([self] { Serve(self); });
      pthread_setname_np(thread.native_handle(), self->name.c_str());
      thread.detach();
      ++self->threads;
      self->starting = true;
    } catch (const std::exception&) {
      // The process has no thread or memory left: the work waits for one of those that exist.
    }
  }

  static void Serve(const std::shared_ptr<State>& self) {
    std::unique_lock<std::mutex> lock(self->mu);
    self->starting = false;
    while (self->Next(&lock)) {
      Work work = std::move(self->waiting.front());
      self->waiting.pop_front();
      Grow(self);
      lock.unlock();
      Perform("a request that blocks", work);
      work = nullptr;  // release captured objects before Stop() can return
      lock.lock();
    }
    if (--self->threads == 0) self->over.notify_all();
  }

  // Waits for work. False: this thread ends.
  bool Next(std::unique_lock<std::mutex>* lock) {
    while (waiting.empty()) {
      if (stopping) return false;
      ++idle;
      const std::cv_status woken = changed.wait_for(*lock, patience);
      --idle;
      if (woken == std::cv_status::timeout && waiting.empty()) return false;
    }
    return true;
  }

  const std::string name;
  const size_t most;
  const std::chrono::milliseconds patience;
  std::mutex mu;
  std::condition_variable changed, over;
  // All guarded by mu.
  std::deque<Work> waiting;
  size_t threads = 0;
  size_t idle = 0;
  bool starting = false;  // a thread that has not taken work yet
  bool stopping = false;
};

BlockingThreads::BlockingThreads(const char* name, size_t most, std::chrono::milliseconds idle)
    : state_(std::make_shared<State>(name, most, idle)) {}

BlockingThreads::~BlockingThreads() { Stop(std::chrono::milliseconds(0)); }

bool BlockingThreads::Run(Work* work) {
  std::lock_guard<std::mutex> lock(state_->mu);
  if (state_->stopping) return false;
  state_->waiting.push_back(std::move(*work));
  State::Grow(state_);
  if (state_->threads == 0) {
    *work = std::move(state_->waiting.back());
    state_->waiting.pop_back();
    return false;
  }
  state_->changed.notify_one();
  return true;
}

bool BlockingThreads::Stop(std::chrono::milliseconds patience) {
  std::unique_lock<std::mutex> lock(state_->mu);
  state_->stopping = true;
  state_->changed.notify_all();
  return state_->over.wait_for(lock, patience, [this] { return state_->threads == 0; });
}

size_t BlockingThreads::threads() const {
  std::lock_guard<std::mutex> lock(state_->mu);
  return state_->threads;
}

}  // namespace starwire
