// RecvBuf, with which collectives fetch a peer's buffer, without a copy: the bytes leave from the producer's tensor and
// arrive in the consumer's.
#ifndef STARWIRE_CC_WORKER_RECV_BUF_H_
#define STARWIRE_CC_WORKER_RECV_BUF_H_

#include "include/starwire.h"
#include "tensorflow/core/distributed_runtime/worker_env.h"
#include "tensorflow/core/distributed_runtime/worker_interface.h"
#include "tensorflow/core/protobuf/worker.pb.h"

namespace starwire {

// The answer to a RecvBuf: the bytes, and what must happen when they have been sent.
class OutgoingBuffer {
 public:
  OutgoingBuffer() = default;
  OutgoingBuffer(const OutgoingBuffer&) = delete;
  OutgoingBuffer& operator=(const OutgoingBuffer&) = delete;

  void Set(const void* bytes, size_t size, void* owner, void (*release)(void* owner)) {
    part_ = {bytes, size};
    payload_ = {&part_, 1, owner, release};
  }
  // To be passed to exactly one sw_engine_reply(), which then owns it.
  const sw_payload* payload() const { return payload_.n_parts == 0 ? nullptr : &payload_; }

 private:
  sw_part part_ = {nullptr, 0};
  sw_payload payload_ = {nullptr, 0, nullptr, nullptr};
};

// Waits for the buffer and fills in `out`. The producer may use its tensor again when the payload has been released.
// `request` and `out` must live until `done` has run.
void ServeRecvBuf(tensorflow::WorkerEnv* env, const tensorflow::RecvBufRequest* request, OutgoingBuffer* out,
                  tensorflow::StatusCallback done);

}  // namespace starwire

#endif  // STARWIRE_CC_WORKER_RECV_BUF_H_
