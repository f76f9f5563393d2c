#include "cc/base/background_queue.h"

#include <pthread.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "cc/base/guard.h"

namespace starwire {

using Clock = std::chrono::steady_clock;

namespace {

struct Item {
  Clock::time_point due;
  uint64_t number;
  BackgroundQueue::Work work;
};

// For a heap whose front is due first.
bool Later(const Item& a, const Item& b) { return a.due != b.due ? a.due > b.due : a.number > b.number; }

}  // namespace

struct BackgroundQueue::Queue {
  explicit Queue(const char* thread_name) : name(thread_name) {}

  void Serve() {
    std::unique_lock<std::mutex> lock(mu);
    for (;;) {
      if (waiting.empty()) {
        if (stopping) break;
        changed.wait(lock);
        continue;
      }
      const Clock::time_point due = waiting.front().due;
      if (!stopping && due > Clock::now()) {
        changed.wait_until(lock, due);
        continue;
      }
      std::pop_heap(waiting.begin(), waiting.end(), &Later);
      Work work = std::move(waiting.back().work);
      waiting.pop_back();
      lock.unlock();
      Perform("background work", work);
      work = nullptr;  // release captured objects before Stop() can return
      lock.lock();
    }
    ended = true;
    over.notify_all();
  }

  const std::string name;
  std::mutex mu;
  std::condition_variable changed, over;
  std::vector<Item> waiting;
  uint64_t given = 0;
  bool running = false;  // the thread exists
  bool stopping = false;
  bool ended = false;
  std::thread thread;
};

BackgroundQueue::BackgroundQueue(const char* name) : queue_(std::make_shared<Queue>(name)) {}

BackgroundQueue::~BackgroundQueue() { Stop(std::chrono::milliseconds(0)); }

BackgroundQueue* BackgroundQueue::OfProcess() {
  static auto* const queue = new BackgroundQueue("sw-completions");
  return queue;
}

void BackgroundQueue::RunAfter(std::chrono::milliseconds delay, Work work) {
  {
    std::lock_guard<std::mutex> lock(queue_->mu);
    if (!queue_->stopping && !queue_->running) {
      try {
        queue_->thread = std::thread([queue = queue_] { queue->Serve(); });
        pthread_setname_np(queue_->thread.native_handle(), queue_->name.c_str());
        queue_->running = true;
      } catch (const std::system_error&) {
        // No thread is available; the next item tries again.
      }
    }
    if (queue_->running && !queue_->stopping) {
      queue_->waiting.push_back({Clock::now() + delay, queue_->given++, std::move(work)});
      std::push_heap(queue_->waiting.begin(), queue_->waiting.end(), &Later);
      queue_->changed.notify_one();
      return;
    }
  }
  Perform("background work", work);
}

bool BackgroundQueue::Stop(std::chrono::milliseconds timeout) {
  std::thread thread;
  bool ended = true;
  {
    std::unique_lock<std::mutex> lock(queue_->mu);
    queue_->stopping = true;
    queue_->changed.notify_one();
    if (queue_->running) {
      ended = queue_->over.wait_for(lock, timeout, [this] { return queue_->ended; });
    }
    thread = std::move(queue_->thread);
  }
  if (!thread.joinable()) return ended;
  // The thread itself may release the last reference.
  if (ended && thread.get_id() != std::this_thread::get_id()) {
    thread.join();
  } else {
    thread.detach();
  }
  return ended;
}

}  // namespace starwire
