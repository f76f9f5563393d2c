// The method numbers of sw_channel_call: one per method of TensorFlow's WorkerService, then our own. They are part of
// the wire format: never renumber.
#ifndef STARWIRE_CC_BASE_METHODS_H_
#define STARWIRE_CC_BASE_METHODS_H_

#include <cstdint>
#include <string>

namespace starwire {

// 0 names a rendezvous request in sw_handlers::on_cancel.
enum class Method : uint32_t {
  kGetStatus = 1,
  kCreateWorkerSession = 2,
  kDeleteWorkerSession = 3,
  kRegisterGraph = 4,
  kDeregisterGraph = 5,
  kRunGraph = 6,
  kCleanupGraph = 7,
  kCleanupAll = 8,
  kRecvTensor = 9,
  kLogging = 10,
  kTracing = 11,
  // 12 was RecvBuf with the bytes inside the reply's protocol buffer.
  kCompleteGroup = 13,
  kCompleteInstance = 14,
  kGetStepSequence = 15,
  // Not of the WorkerService: cc/star/call_codec.h. The transport serves them.
  kStarCall = 16,
  kStarRegister = 17,
  kStarEnd = 18,
  // The reply is the bytes, in one part, or empty.
  kRecvBuf = 19,
  // Of TensorFlow's EagerService.
  kEagerEnqueue = 20,
  kEagerRunComponentFunction = 21,
  // cc/star/peers.h. The transport serves it.
  kMeasure = 22,
  // cc/star/peers.h: whether star calls may name handles of eager contexts.
  kStarHandles = 23,
};

// The message, with Unimplemented, of a server that does not have a method. Clients compare it, so that they can tell
// it from an error of the method: part of the wire format.
inline std::string NoSuchMethod(uint32_t method) {
  return "this server has no worker method " + std::to_string(method);
}

}  // namespace starwire

#endif  // STARWIRE_CC_BASE_METHODS_H_
