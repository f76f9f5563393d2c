// Recycles objects that are created and released thousands of times per step, on different threads, so that they need
// no allocation.
#ifndef STARWIRE_CC_BASE_RECYCLER_H_
#define STARWIRE_CC_BASE_RECYCLER_H_

#include <atomic>

namespace starwire {

// T has a member `T* next_free`. Returned objects go onto one list shared by all threads. A thread that needs an object
// takes the whole list: nodes are never popped one by one, so there is no ABA problem.
template <typename T>
class Recycler {
 public:
  static T* Take() {
    Local& local = ThreadLocal();
    if (local.head == nullptr) local.head = Shared().exchange(nullptr, std::memory_order_acquire);
    if (local.head == nullptr) return new T;
    T* object = local.head;
    local.head = object->next_free;
    return object;
  }

  static void Give(T* object) { Push(object, object); }

 private:
  struct Local {
    T* head = nullptr;
    // A thread that ends returns the objects that it holds.
    ~Local() {
      if (head == nullptr) return;
      T* last = head;
      while (last->next_free != nullptr) last = last->next_free;
      Push(head, last);
      head = nullptr;
    }
  };

  static void Push(T* first, T* last) {
    std::atomic<T*>& shared = Shared();
    T* head = shared.load(std::memory_order_relaxed);
    do {
      last->next_free = head;
    } while (!shared.compare_exchange_weak(head, first, std::memory_order_release, std::memory_order_relaxed));
  }

  // Never destroyed: threads may outlive main().
  static std::atomic<T*>& Shared() {
    static std::atomic<T*>* shared = new std::atomic<T*>(nullptr);
    return *shared;
  }
  static Local& ThreadLocal() {
    static thread_local Local local;
    return local;
  }
};

}  // namespace starwire

#endif  // STARWIRE_CC_BASE_RECYCLER_H_
