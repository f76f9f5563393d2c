#include "cc/star/wire.h"

#include <cstring>

#include "cc/tensor/elements.h"

namespace starwire {
namespace {

constexpr uint8_t kVersion = 1;
constexpr size_t kKeepBytes = 12;

// Call:     u8 version, u8 flags, u16 number, u16 length of the session's handle, u16 0, u32 keeps, u32 0, i64 step,
//           u64 incarnation, 32 bytes hash, u64 0; the handle; u32 fetch, u32 slot, u32 flags of each keep.
// Reply:    u8 version, u8 flags, u16 0, u32 queue, u32 run, u32 bytes of stats, 16 bytes 0.
// Register: u8 version, u8 0, u16 length of the handle, u32 0, u64 incarnation, 32 bytes hash; the handle.
// End:      u8 version, u8 0, u16 length of the handle, u32 0, i64 step; the handle.

Status Bad(const char* what, const std::string& why) {
  return MakeStatus(kInvalidArgument, std::string("starwire: malformed ") + what + ": " + why);
}

Status CheckHead(sw_bytes meta, size_t fixed, const char* what) {
  if (meta.data == nullptr || meta.len < fixed) {
    return Bad(what, std::to_string(meta.len) + " bytes, at least " + std::to_string(fixed) + " expected");
  }
  if (meta.data[0] != kVersion) {
    return Bad(what, "version " + std::to_string(meta.data[0]) + ", expected " + std::to_string(kVersion));
  }
  return OkStatus();
}

bool AllZero(const uint8_t* at, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    if (at[i] != 0) return false;
  }
  return true;
}

// A handle at the end, of `len` bytes.
Status ReadSession(sw_bytes meta, size_t at, size_t len, const char* what, sw_bytes* session) {
  if (len > kMaxStarSession || meta.len - at < len) {
    return Bad(what, "a session handle of " + std::to_string(len) + " bytes");
  }
  *session = {meta.data + at, len};
  return OkStatus();
}

void Append(sw_bytes bytes, std::vector<uint8_t>* out) {
  if (bytes.len != 0) out->insert(out->end(), bytes.data, bytes.data + bytes.len);
}

// A handle that is too long is cut: no server knows such a session.
sw_bytes Cut(sw_bytes session) { return {session.data, session.len > kMaxStarSession ? kMaxStarSession : session.len}; }

}  // namespace

PlanHash PlanHashOf(sw_bytes plan) {
  PlanHash hash;
  sw_sha256(plan, hash.data());
  return hash;
}

Status EncodeStarCall(const StarCall& call, std::vector<uint8_t>* meta) {
  const size_t bytes = StarCall::kFixed + call.session.len + kKeepBytes * call.keeps.size();
  if (call.session.len > kMaxStarSession || bytes > kMaxStarMeta) {
    return MakeStatus(kInvalidArgument, "starwire: a star call with a session handle of " +
                                            std::to_string(call.session.len) + " bytes and " +
                                            std::to_string(call.keeps.size()) + " kept values is too long");
  }
  const size_t begin = meta->size();
  meta->reserve(begin + bytes);
  meta->resize(begin + StarCall::kFixed, 0);
  uint8_t* at = meta->data() + begin;
  Put<uint8_t>(at, kVersion);
  Put<uint8_t>(at + 1, call.flags);
  Put<uint16_t>(at + 2, call.number);
  Put<uint16_t>(at + 4, static_cast<uint16_t>(call.session.len));
  Put<uint32_t>(at + 8, static_cast<uint32_t>(call.keeps.size()));
  Put<int64_t>(at + 16, call.step_id);
  Put<uint64_t>(at + 24, call.incarnation);
  std::memcpy(at + 32, call.plan.data(), call.plan.size());
  Append(call.session, meta);
  for (const StarKeep& keep : call.keeps) {
    uint8_t entry[kKeepBytes];
    Put<uint32_t>(entry, keep.fetch);
    Put<uint32_t>(entry + 4, keep.slot);
    Put<uint32_t>(entry + 8, keep.flags);
    Append({entry, kKeepBytes}, meta);
  }
  return OkStatus();
}

Status DecodeStarCall(sw_bytes meta, StarCall* call, size_t* consumed) {
  constexpr const char* kWhat = "star call";
  Status status = CheckHead(meta, StarCall::kFixed, kWhat);
  if (!status.ok()) return status;
  const uint8_t* at = meta.data;
  call->flags = at[1];
  if ((call->flags & ~(StarCall::kLast | StarCall::kTrace)) != 0) {
    return Bad(kWhat, "unknown flags " + std::to_string(call->flags));
  }
  if (!AllZero(at + 6, 2) || !AllZero(at + 12, 4) || !AllZero(at + 64, 8)) {
    return Bad(kWhat, "reserved bytes are not zero");
  }
  call->number = Get<uint16_t>(at + 2);
  call->step_id = Get<int64_t>(at + 16);
  call->incarnation = Get<uint64_t>(at + 24);
  std::memcpy(call->plan.data(), at + 32, call->plan.size());
  const size_t session = Get<uint16_t>(at + 4);
  status = ReadSession(meta, StarCall::kFixed, session, kWhat, &call->session);
  if (!status.ok()) return status;
  const size_t first = StarCall::kFixed + session;
  const size_t keeps = Get<uint32_t>(at + 8);
  if (keeps > (meta.len - first) / kKeepBytes) {
    return Bad(kWhat, std::to_string(keeps) + " kept values in " + std::to_string(meta.len) + " bytes");
  }
  call->keeps.clear();
  call->keeps.reserve(keeps);
  for (size_t i = 0; i < keeps; ++i) {
    const uint8_t* entry = at + first + i * kKeepBytes;
    StarKeep keep;
    keep.fetch = Get<uint32_t>(entry);
    keep.slot = Get<uint32_t>(entry + 4);
    keep.flags = Get<uint32_t>(entry + 8);
    if ((keep.flags & ~StarKeep::kAlsoReturned) != 0) {
      return Bad(kWhat, "unknown flags " + std::to_string(keep.flags) + " of a kept value");
    }
    call->keeps.push_back(keep);
  }
  *consumed = first + keeps * kKeepBytes;
  return OkStatus();
}

void EncodeStarReply(const StarReply& reply, std::vector<uint8_t>* meta) {
  const size_t begin = meta->size();
  meta->resize(begin + StarReply::kFixed, 0);
  uint8_t* at = meta->data() + begin;
  Put<uint8_t>(at, kVersion);
  Put<uint8_t>(at + 1, reply.flags);
  Put<uint32_t>(at + 4, reply.queue_micros);
  Put<uint32_t>(at + 8, reply.run_micros);
  Put<uint32_t>(at + 12, reply.stats_bytes);
}

Status DecodeStarReply(sw_bytes meta, StarReply* reply, size_t* consumed) {
  constexpr const char* kWhat = "star call reply";
  Status status = CheckHead(meta, StarReply::kFixed, kWhat);
  if (!status.ok()) return status;
  reply->flags = meta.data[1];
  if ((reply->flags & ~StarReply::kRegister) != 0) {
    return Bad(kWhat, "unknown flags " + std::to_string(reply->flags));
  }
  if (!AllZero(meta.data + 2, 2) || !AllZero(meta.data + 16, 16)) return Bad(kWhat, "reserved bytes are not zero");
  reply->queue_micros = Get<uint32_t>(meta.data + 4);
  reply->run_micros = Get<uint32_t>(meta.data + 8);
  reply->stats_bytes = Get<uint32_t>(meta.data + 12);
  *consumed = StarReply::kFixed;
  return OkStatus();
}

std::vector<uint8_t> EncodeStarRegister(const StarRegister& registration) {
  const sw_bytes session = Cut(registration.session);
  std::vector<uint8_t> meta(StarRegister::kFixed, 0);
  Put<uint8_t>(meta.data(), kVersion);
  Put<uint16_t>(meta.data() + 2, static_cast<uint16_t>(session.len));
  Put<uint64_t>(meta.data() + 8, registration.incarnation);
  std::memcpy(meta.data() + 16, registration.plan.data(), registration.plan.size());
  Append(session, &meta);
  return meta;
}

Status DecodeStarRegister(sw_bytes meta, StarRegister* registration) {
  constexpr const char* kWhat = "plan registration";
  Status status = CheckHead(meta, StarRegister::kFixed, kWhat);
  if (!status.ok()) return status;
  if (meta.data[1] != 0 || !AllZero(meta.data + 4, 4)) return Bad(kWhat, "reserved bytes are not zero");
  registration->incarnation = Get<uint64_t>(meta.data + 8);
  std::memcpy(registration->plan.data(), meta.data + 16, registration->plan.size());
  const size_t session = Get<uint16_t>(meta.data + 2);
  status = ReadSession(meta, StarRegister::kFixed, session, kWhat, &registration->session);
  if (status.ok() && meta.len != StarRegister::kFixed + session) status = Bad(kWhat, "bytes after its end");
  return status;
}

std::vector<uint8_t> EncodeStarEnd(const StarEnd& end) {
  const sw_bytes session = Cut(end.session);
  std::vector<uint8_t> meta(StarEnd::kFixed, 0);
  Put<uint8_t>(meta.data(), kVersion);
  Put<uint16_t>(meta.data() + 2, static_cast<uint16_t>(session.len));
  Put<int64_t>(meta.data() + 8, end.step_id);
  Append(session, &meta);
  return meta;
}

Status DecodeStarEnd(sw_bytes meta, StarEnd* end) {
  constexpr const char* kWhat = "step end";
  Status status = CheckHead(meta, StarEnd::kFixed, kWhat);
  if (!status.ok()) return status;
  if (meta.data[1] != 0 || !AllZero(meta.data + 4, 4)) return Bad(kWhat, "reserved bytes are not zero");
  end->step_id = Get<int64_t>(meta.data + 8);
  const size_t session = Get<uint16_t>(meta.data + 2);
  status = ReadSession(meta, StarEnd::kFixed, session, kWhat, &end->session);
  if (status.ok() && meta.len != StarEnd::kFixed + session) status = Bad(kWhat, "bytes after its end");
  return status;
}

}  // namespace starwire
