// Star calls on the wire, as a worker's session sees them: it writes the heads of calls and reads those of replies. The
// format is defined in docs/protocol.md, "Star calls", and implemented in crates/protocol/src/star.rs; the tensors are
// in cc/star/value_codec.h.
//
// A worker
//
//   1. serialises the GraphDef of each of its calls once. All nodes are placed on one device of the server; feed i is
//      the `_Arg` with index i, fetch i the `_Retval` with index i. PlanHashOf() of the bytes is the plan's name.
//   2. sends kStarCall: the metadata is EncodeStarCall() followed by the table of the feeds' ValueEncoder, the payload
//   is
//      the ValueEncoder's.
//   3. reads the reply's metadata with DecodeStarReply(). If StarReply::kRegister is set, the server does not know the
//      plan (or has evicted it) and has done nothing: the worker sends kStarRegister with the same session, hash and
//      incarnation and with the bytes as the payload's only part (the reply is empty), then the call again. This may
//      happen at any call and more than once. Several workers may do it at the same time.
//   4. otherwise gives the fetches to a ValueDecoder: Prepare() in the op's alloc, with the table behind the head,
//   Finish()
//      when the call is done.
//   5. if some call of a step kept fetches in slots: sets StarCall::kLast in the step's last call to that server, or
//      sends kStarEnd if the step has failed, was cancelled or does not reach its last call.
//
// A call that neither keeps nor takes values in slots may be sent again when its connection is lost, with its lane and
// number and the next attempt, until there is a reply: the server runs it once.
//
// Errors arrive as the reply's status. `Aborted` means that the server was restarted after the session was created: the
// session has to be created again.
#ifndef STARWIRE_CC_STAR_CALL_CODEC_H_
#define STARWIRE_CC_STAR_CALL_CODEC_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "cc/base/compat.h"
#include "include/starwire.h"

namespace starwire {

// SHA-256 of the plan's bytes.
using PlanHash = std::array<uint8_t, 32>;
PlanHash PlanHashOf(sw_bytes plan);

// The head of a call and the table behind it must fit into the metadata of a frame.
constexpr size_t kMaxStarMeta = 1 << 20;

// A fetch that stays on the server for a later call of the step.
using StarKeep = sw_star_keep;
constexpr uint32_t kAlsoReturned = 1;  // StarKeep::flags: the value is in the reply as well

// The head of a kStarCall.
struct StarCall {
  // No later call of this step needs a slot on this server.
  static constexpr uint8_t kLast = 1;
  // The reply carries the statistics of the kernels.
  static constexpr uint8_t kTrace = 2;

  uint8_t flags = 0;
  int64_t step_id = 0;
  // The incarnation of the plan's device (tensorflow.DeviceAttributes) as the session knows it; 0: any.
  uint64_t incarnation = 0;
  PlanHash plan{};
  // The session's handle, as the server knows it from CreateWorkerSession.
  sw_bytes session{nullptr, 0};
  // At most one per fetch.
  std::vector<StarKeep> keeps;
  // Of sw_channel_lane_take(), for a call that is sent again if its connection is lost; number 0: it is not.
  uint32_t lane = 0;
  uint32_t attempt = 0;
  uint64_t number = 0;
};

// Appends the head. Fails if it is too long.
Status EncodeStarCall(const StarCall& call, std::vector<uint8_t>* meta);

// The head of a reply to a kStarCall.
using StarReply = sw_star_reply_head;
constexpr uint8_t kRegister = 1;  // StarReply::flags: the plan is not known; nothing was done, nothing follows

Status DecodeStarReply(sw_bytes meta, StarReply* reply);

// The metadata of a kStarRegister.
Status EncodeStarRegister(uint64_t incarnation, const PlanHash& plan, sw_bytes session, std::vector<uint8_t>* meta);
// The metadata of a kStarEnd, which frees the values that the step's calls have kept. The reply is empty, and there is
// no need to wait for it.
Status EncodeStarEnd(int64_t step_id, sw_bytes session, std::vector<uint8_t>* meta);

}  // namespace starwire

#endif  // STARWIRE_CC_STAR_CALL_CODEC_H_
