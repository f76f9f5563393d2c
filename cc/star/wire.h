// Star calls on the wire: the metadata of the three methods between a worker's session and a parameter server. The
// format is defined in docs/protocol.md, "Star calls"; the tensors are in cc/star/cargo.h.
//
// What a worker does:
//
//   1. It serialises the GraphDef of each of its calls once. All nodes are placed on one device of the server; feed i
//   is
//      the `_Arg` with index i, fetch i the `_Retval` with index i. PlanHashOf() of the bytes is the plan's name.
//   2. kStarCall: the metadata is EncodeStarCall() with the CargoOut of the feeds behind it, the payload the
//   CargoOut's.
//   3. The reply's metadata is read by DecodeStarReply(). If StarReply::kRegister is set, the server does not know the
//      plan (any more) and has done nothing: kStarRegister with the same session, hash and incarnation and the bytes as
//      the payload's only part (the reply is empty), then the call again. This may happen at any call, and more than
//      once. Several workers may do it at the same time.
//   4. Else a CargoIn gets the fetches out of it: Prepare() in the op's alloc, with what is behind the head, Finish()
//      when the call is done.
//   5. If some call of a step kept fetches in slots, the step's last call to that server has StarCall::kLast, or
//   kStarEnd
//      follows when the step has failed or does not come to its last call. After a cancellation too.
//
// Errors come as the reply's status. `Aborted` says that the server was restarted since the session was created: the
// session has to be created again.
#ifndef STARWIRE_CC_STAR_WIRE_H_
#define STARWIRE_CC_STAR_WIRE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cc/base/compat.h"
#include "include/starwire.h"

namespace starwire {

// SHA-256 of the plan's bytes.
using PlanHash = std::array<uint8_t, 32>;
PlanHash PlanHashOf(sw_bytes plan);

// More does not fit into the metadata of a frame.
constexpr size_t kMaxStarMeta = 1 << 20;
constexpr size_t kMaxStarSession = 4096;

// A fetch that stays on the server, for a later call of the step.
struct StarKeep {
  // It is in the reply as well.
  static constexpr uint32_t kAlsoReturned = 1;

  uint32_t fetch = 0;
  uint32_t slot = 0;
  uint32_t flags = 0;
};

// The head of a kStarCall.
struct StarCall {
  // No later call of this step needs a slot on this server: they are freed when the call ends.
  static constexpr uint8_t kLast = 1;
  // Collect what the kernels took.
  static constexpr uint8_t kTrace = 2;
  static constexpr size_t kFixed = 72;

  uint8_t flags = 0;
  // Which of the step's calls it is, for messages and traces.
  uint16_t number = 0;
  int64_t step_id = 0;
  // What the worker believes to be the incarnation of the plan's device (tensorflow.DeviceAttributes), as its session's
  // devices say; 0: any.
  uint64_t incarnation = 0;
  PlanHash plan{};
  // The handle of the session, as the server knows it from CreateWorkerSession. Borrowed when decoded.
  sw_bytes session{nullptr, 0};
  // At most one for each fetch.
  std::vector<StarKeep> keeps;
};

// Appends the head. Fails if it is too long.
Status EncodeStarCall(const StarCall& call, std::vector<uint8_t>* meta);
// `consumed`: where the feeds' table begins.
Status DecodeStarCall(sw_bytes meta, StarCall* call, size_t* consumed);

// The head of a reply to a kStarCall.
struct StarReply {
  // The plan is not known: nothing was done, nothing follows.
  static constexpr uint8_t kRegister = 1;
  static constexpr size_t kFixed = 32;

  uint8_t flags = 0;
  // From the arrival of the call's last byte to the first kernel, and from there to the reply.
  uint32_t queue_micros = 0;
  uint32_t run_micros = 0;
  // The payload's last part, if this is not 0: a serialised StepStats of that many bytes.
  uint32_t stats_bytes = 0;
};

void EncodeStarReply(const StarReply& reply, std::vector<uint8_t>* meta);
// `consumed`: where the fetches' table begins.
Status DecodeStarReply(sw_bytes meta, StarReply* reply, size_t* consumed);

// The metadata of a kStarRegister.
struct StarRegister {
  static constexpr size_t kFixed = 48;

  uint64_t incarnation = 0;
  PlanHash plan{};
  sw_bytes session{nullptr, 0};
};

std::vector<uint8_t> EncodeStarRegister(const StarRegister& registration);
Status DecodeStarRegister(sw_bytes meta, StarRegister* registration);

// The metadata of a kStarEnd: frees what the step's calls have kept. The reply is empty; nobody has to wait for it.
struct StarEnd {
  static constexpr size_t kFixed = 16;

  int64_t step_id = 0;
  sw_bytes session{nullptr, 0};
};

std::vector<uint8_t> EncodeStarEnd(const StarEnd& end);
Status DecodeStarEnd(sw_bytes meta, StarEnd* end);

}  // namespace starwire

#endif  // STARWIRE_CC_STAR_WIRE_H_
