// A device for TensorFlow whose memory the host cannot touch. Its addresses lie in a mapping without access, and real
// memory is mapped at a fixed distance from them. Whoever takes a tensor of this device for host memory crashes at
// once.
#ifndef STARWIRE_TESTS_DEVICE_DEVICE_H_
#define STARWIRE_TESTS_DEVICE_DEVICE_H_

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "tensorflow/c/experimental/stream_executor/stream_executor.h"

constexpr char kDeviceType[] = "TESTDEV";

// The real memory behind an address of the device. Ends the process if this is another address.
void* Real(const void* address, uint64_t size);

// Runs what is enqueued on it in order, on a thread of its own: nothing is done when Enqueue() returns.
struct SP_Stream_st {
 public:
  SP_Stream_st();
  ~SP_Stream_st();
  void Enqueue(std::function<void()> work);
  // Returns once everything enqueued so far has run.
  void Wait();

 private:
  void Run();

  std::mutex mu_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  uint64_t enqueued_ = 0, done_ = 0;
  bool ends_ = false;
  std::thread thread_;
};

#endif  // STARWIRE_TESTS_DEVICE_DEVICE_H_
