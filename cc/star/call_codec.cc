#include "cc/star/call_codec.h"

#include "cc/base/handles.h"
#include "cc/base/status_codec.h"

namespace starwire {
namespace {

// Appends what `write(out, len, error)` writes, at most `room` bytes.
template <typename Write>
Status Append(size_t room, std::vector<uint8_t>* meta, const Write& write) {
  const size_t begin = meta->size();
  meta->resize(begin + room);
  ErrorHandle error;
  const sw_code code = write(meta->data() + begin, &room, Into(&error));
  meta->resize(code == 0 ? begin + room : begin);
  return code == 0 ? OkStatus() : StatusFromError(code, error);
}

}  // namespace

PlanHash PlanHashOf(sw_bytes plan) {
  PlanHash hash;
  sw_sha256(plan, hash.data());
  return hash;
}

Status EncodeStarCall(const StarCall& call, std::vector<uint8_t>* meta) {
  sw_star_call_head head = {};
  head.struct_size = sizeof(head);
  head.flags = call.flags;
  head.step_id = call.step_id;
  head.incarnation = call.incarnation;
  head.plan = call.plan.data();
  head.session = call.session;
  head.keeps = call.keeps.data();
  head.n_keeps = call.keeps.size();
  head.lane = call.lane;
  head.attempt = call.attempt;
  head.number = call.number;
  const size_t room = SW_STAR_HEAD_BYTES + call.session.len + call.keeps.size() * sizeof(sw_star_keep);
  return Append(room, meta, [&head](uint8_t* out, size_t* len, sw_error** error) {
    return sw_star_call_head_write(&head, out, len, error);
  });
}

Status DecodeStarReply(sw_bytes meta, StarReply* reply) {
  ErrorHandle error;
  const sw_code code = sw_star_reply_head_read(meta, reply, Into(&error));
  return code == 0 ? OkStatus() : StatusFromError(code, error);
}

Status EncodeStarRegister(uint64_t incarnation, const PlanHash& plan, sw_bytes session, std::vector<uint8_t>* meta) {
  return Append(SW_STAR_HEAD_BYTES + session.len, meta, [&](uint8_t* out, size_t* len, sw_error** error) {
    return sw_star_register_head_write(incarnation, plan.data(), session, out, len, error);
  });
}

Status EncodeStarEnd(int64_t step_id, sw_bytes session, std::vector<uint8_t>* meta) {
  return Append(SW_STAR_HEAD_BYTES + session.len, meta, [&](uint8_t* out, size_t* len, sw_error** error) {
    return sw_star_end_head_write(step_id, session, out, len, error);
  });
}

}  // namespace starwire
