#include "cc/star/value_codec.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <new>
#include <utility>

#include "cc/base/compat_tensor.h"
#include "cc/base/guard.h"
#include "cc/star/call_codec.h"
#include "cc/tensor/codec.h"
#include "cc/tensor/nonblocking_allocator.h"
#include "tensorflow/core/common_runtime/dma_helper.h"
#include "tensorflow/core/framework/tensor.pb.h"
#include "tensorflow/core/framework/types.h"

namespace starwire {

using tensorflow::Allocator;
using tensorflow::Tensor;

namespace {

// Table: u32 number of values, u32 0, then for each value u16 type, u8 encoding, u8 dimensions, u32 slot, u64 bytes and
// one i64 per dimension. Encodings are those of tensors, kNarrow, and two others, whose other fields but the slot are
// 0.
constexpr size_t kTableFixed = 8;
constexpr size_t kEntryFixed = 16;
constexpr uint8_t kDeadEncoding = 16;
constexpr uint8_t kSlotEncoding = 17;

// Tensors of at least this size are sent from their own memory, up to the number of parts that a message may have.
constexpr uint64_t kScatterMinBytes = 8 << 10;
constexpr size_t kMaxScattered = 1 << 14;

// Ids of rows are int64 and small: they take half the bytes. Fewer save nothing, more are better sent in place.
constexpr int64_t kNarrowMin = 8;
constexpr int64_t kNarrowMax = 1 << 17;
constexpr uint64_t kMostNarrow = std::numeric_limits<uint32_t>::max();

Status Bad(const std::string& why) {
  return MakeStatus(kInvalidArgument, "starwire: malformed table of tensors in a star call: " + why);
}

Status OutOfMemory(uint64_t bytes) {
  return MakeStatus(kResourceExhausted,
                    "starwire: out of memory: " + std::to_string(bytes) + " bytes for the tensors of a star call");
}

// As CheckContent.
Status CheckNarrow(tensorflow::DataType dtype, const tensorflow::TensorShape& shape, uint64_t bytes) {
  const uint64_t elements = static_cast<uint64_t>(shape.num_elements());
  if (dtype == tensorflow::DT_INT64 && bytes % 4 == 0 && bytes != 0 && bytes / 4 == elements) return OkStatus();
  return Malformed(std::to_string(bytes) + " bytes of narrow numbers for type " + tensorflow::DataTypeString(dtype) +
                   ", shape " + shape.DebugString());
}

uint64_t Aligned(uint64_t offset) { return (offset + Slab::kAlignment - 1) & ~uint64_t{Slab::kAlignment - 1}; }

// How one tensor is sent.
struct Outgoing {
  TensorEncoding encoding = TensorEncoding::kNone;
  bool scattered = false;
  uint64_t bytes = 0;
  std::string objects;  // kProto and kNarrow: what is sent
};

// Returns false if the numbers are too few or too many, or one does not fit into 32 bits; else they are in `out`.
bool Narrow(const Tensor& tensor, std::string* out) {
  const int64_t n = tensor.NumElements();
  if (tensor.dtype() != tensorflow::DT_INT64 || n < kNarrowMin || n > kNarrowMax) return false;
  // Not `flat`, which aborts if a slice of another tensor is not aligned for vectors.
  const auto* numbers = reinterpret_cast<const Int64*>(tensor.tensor_data().data());
  std::string bytes(static_cast<size_t>(n) * 4, '\0');
  auto* at = reinterpret_cast<uint8_t*>(&bytes[0]);
  for (int64_t i = 0; i < n; ++i, at += 4) {
    // Once: a reference variable may change meanwhile, and what is sent must be what was looked at.
    const auto number = static_cast<uint64_t>(*static_cast<const volatile Int64*>(numbers + i));
    if (number > kMostNarrow) return false;
    Put(at, static_cast<uint32_t>(number));
  }
  *out = std::move(bytes);
  return true;
}

Status Measure(const Tensor& tensor, Outgoing* out) {
  if (!IsKnown(tensor.dtype())) {
    return MakeStatus(kUnimplemented,
                      "starwire: a tensor of type " + std::to_string(tensor.dtype()) + " cannot be sent");
  }
  if (tensor.NumElements() == 0) return OkStatus();
  if (!tensor.IsInitialized()) return Uninitialized(tensor);
  if (const size_t element = RawSize(tensor.dtype())) {
    const bool is_narrow = Narrow(tensor, &out->objects);
    out->encoding = is_narrow ? TensorEncoding::kNarrow : TensorEncoding::kRaw;
    out->bytes = is_narrow ? out->objects.size() : static_cast<uint64_t>(tensor.NumElements()) * element;
    return OkStatus();
  }
  switch (tensor.dtype()) {
    case tensorflow::DT_STRING: {
      const StringsSize size = MeasureStrings(tensor);
      out->encoding = size.encoding;
      out->bytes = size.total();
      return OkStatus();
    }
    case tensorflow::DT_VARIANT:
    case tensorflow::DT_RESOURCE:
      out->encoding = TensorEncoding::kProto;
      if (Status status = EncodeObjects(tensor, &out->objects); !status.ok()) return status;
      out->bytes = out->objects.size();
      return OkStatus();
    default:
      return MakeStatus(kUnimplemented, "starwire: a tensor of type " + tensorflow::DataTypeString(tensor.dtype()) +
                                            " cannot be sent in a star call");
  }
}

Status WriteContent(const Tensor& tensor, const Outgoing& out, uint8_t* at) {
  switch (out.encoding) {
    case TensorEncoding::kRaw:
      std::memcpy(at, tensorflow::DMAHelper::base(&tensor), out.bytes);
      break;
    case TensorEncoding::kShortStrings:
    case TensorEncoding::kStrings:
    case TensorEncoding::kWideStrings:
      return WriteStrings(tensor, out.encoding, at, out.bytes);
    case TensorEncoding::kNarrow:
    case TensorEncoding::kProto:
      std::memcpy(at, out.objects.data(), out.bytes);
      break;
    default:
      break;
  }
  return OkStatus();
}

uint8_t* WriteEntry(const StarValue& value, const Outgoing& out, uint8_t* at) {
  const bool is_tensor = value.kind == StarValue::Kind::kTensor;
  const int dims = is_tensor ? value.tensor.dims() : 0;
  const uint8_t encoding = is_tensor                              ? static_cast<uint8_t>(out.encoding)
                           : value.kind == StarValue::Kind::kDead ? kDeadEncoding
                                                                  : kSlotEncoding;
  Put<uint16_t>(at, is_tensor ? static_cast<uint16_t>(value.tensor.dtype()) : 0);
  Put<uint8_t>(at + 2, encoding);
  Put<uint8_t>(at + 3, static_cast<uint8_t>(dims));
  Put<uint32_t>(at + 4, value.kind == StarValue::Kind::kSlot ? value.slot : 0);
  Put<uint64_t>(at + 8, out.bytes);
  at += kEntryFixed;
  for (int i = 0; i < dims; ++i, at += 8) Put<int64_t>(at, value.tensor.dim_size(i));
  return at;
}

}  // namespace

StarValue StarValue::Dead() {
  StarValue value;
  value.kind = Kind::kDead;
  return value;
}

StarValue StarValue::Slot(uint32_t slot) {
  StarValue value;
  value.kind = Kind::kSlot;
  value.slot = slot;
  return value;
}

// ---- sending ----

// Memory that lives until the transport has sent it.
struct ValueEncoder::Owned {
  std::unique_ptr<uint8_t[]> packed;
  std::vector<Tensor> scattered;
  std::string extra;
};

ValueEncoder::ValueEncoder() = default;

ValueEncoder::~ValueEncoder() = default;

Status ValueEncoder::Pack(const StarValue* values, size_t n, std::vector<uint8_t>* meta) {
  owned_ = std::make_unique<Owned>();
  parts_.clear();
  bytes_ = 0;
  std::vector<Outgoing> all(n);
  size_t table = kTableFixed;
  size_t scattered = 0;
  uint64_t packed = 0;
  for (size_t i = 0; i < n; ++i) {
    table += kEntryFixed;
    if (values[i].kind != StarValue::Kind::kTensor) continue;
    Outgoing& out = all[i];
    Status status = Measure(values[i].tensor, &out);
    if (!status.ok()) return status;
    table += 8 * static_cast<size_t>(values[i].tensor.dims());
    out.scattered = out.encoding == TensorEncoding::kRaw && out.bytes >= kScatterMinBytes && scattered < kMaxScattered;
    scattered += out.scattered ? 1 : 0;
    if (__builtin_add_overflow(bytes_, out.bytes, &bytes_)) return OutOfMemory(std::numeric_limits<uint64_t>::max());
    if (!out.scattered) packed = Aligned(packed) + out.bytes;
  }
  // The head of a reply is written later.
  const size_t head = std::max<size_t>(meta->size(), SW_STAR_HEAD_BYTES);
  if (table > kMaxStarMeta || head > kMaxStarMeta - table) {
    return MakeStatus(kInvalidArgument, "starwire: " + std::to_string(n) +
                                            " tensors are too many for one star call: "
                                            "their table would take " +
                                            std::to_string(table) + " bytes");
  }
  const size_t begin = meta->size();
  meta->resize(begin + table);
  uint8_t* entry = meta->data() + begin;
  Put<uint32_t>(entry, static_cast<uint32_t>(n));
  Put<uint32_t>(entry + 4, 0);
  entry += kTableFixed;
  if (packed != 0) {
    owned_->packed.reset(new (std::nothrow) uint8_t[packed]);
    if (owned_->packed == nullptr) return OutOfMemory(packed);
  }
  owned_->scattered.reserve(scattered);
  // A part begins with a tensor; zero bytes separate the tensors of a part.
  uint8_t* const base = owned_->packed.get();
  uint64_t piece = 0, end = 0;  // of the tensors packed since the last scattered one
  for (size_t i = 0; i < n; ++i) {
    const Outgoing& out = all[i];
    entry = WriteEntry(values[i], out, entry);
    if (out.bytes == 0) continue;
    if (out.scattered) {
      if (end != piece) parts_.push_back({base + piece, static_cast<size_t>(end - piece)});
      piece = end;
      parts_.push_back({tensorflow::DMAHelper::base(&values[i].tensor), static_cast<size_t>(out.bytes)});
      owned_->scattered.push_back(values[i].tensor);
      continue;
    }
    const uint64_t at = end == piece ? end : piece + Aligned(end - piece);
    if (at != end) std::memset(base + end, 0, at - end);
    if (Status status = WriteContent(values[i].tensor, out, base + at); !status.ok()) return status;
    end = at + out.bytes;
  }
  if (end != piece) parts_.push_back({base + piece, static_cast<size_t>(end - piece)});
  return OkStatus();
}

void ValueEncoder::AddPart(std::string bytes) {
  if (owned_ == nullptr) owned_ = std::make_unique<Owned>();
  owned_->extra = std::move(bytes);
  bytes_ += owned_->extra.size();
  parts_.push_back({owned_->extra.data(), owned_->extra.size()});
}

const sw_payload* ValueEncoder::Take() {
  if (parts_.empty()) return nullptr;
  payload_ = {parts_.data(), parts_.size(), owned_.release(), Guarded<&DeleteOwner<Owned>>};
  return &payload_;
}

// ---- receiving ----

ValueDecoder::~ValueDecoder() { DropSlab(); }

void ValueDecoder::DropSlab() {
  if (slab_ != nullptr) slab_->Unref();
  slab_ = nullptr;
}

Status ValueDecoder::Parse(sw_bytes table) {
  members_.clear();
  own_.clear();
  extra_.clear();
  DropSlab();
  bytes_ = made_bytes_ = 0;
  if (table.data == nullptr || table.len < kTableFixed) return Bad(std::to_string(table.len) + " bytes");
  const size_t n = Get<uint32_t>(table.data);
  if (Get<uint32_t>(table.data + 4) != 0) return Bad("reserved bytes are not zero");
  size_t at = kTableFixed;
  if (n > (table.len - at) / kEntryFixed) {
    return Bad(std::to_string(n) + " values in " + std::to_string(table.len) + " bytes");
  }
  members_.resize(n);
  for (Member& member : members_) {
    if (table.len - at < kEntryFixed) return Bad("it ends early");
    const uint8_t* entry = table.data + at;
    const uint8_t encoding = entry[2];
    const size_t dims = entry[3];
    at += kEntryFixed;
    if ((table.len - at) / 8 < dims) return Bad("it ends early");
    member.slot = Get<uint32_t>(entry + 4);
    member.bytes = Get<uint64_t>(entry + 8);
    if (encoding == kDeadEncoding || encoding == kSlotEncoding) {
      const bool dead = encoding == kDeadEncoding;
      member.kind = dead ? StarValue::Kind::kDead : StarValue::Kind::kSlot;
      if (Get<uint16_t>(entry) != 0 || dims != 0 || member.bytes != 0 || (dead && member.slot != 0)) {
        return Bad("unused fields are not zero");
      }
      continue;
    }
    if (member.slot != 0) return Bad("unused fields are not zero");
    member.encoding = static_cast<TensorEncoding>(encoding);
    if (member.encoding == TensorEncoding::kFused) return Bad("unknown encoding 5");
    Status status = ReadDataType(entry, &member.dtype);
    if (status.ok()) status = ReadShape(entry + kEntryFixed, dims, &member.shape);
    at += 8 * dims;
    if (status.ok()) {
      status = member.encoding == TensorEncoding::kNarrow
                   ? CheckNarrow(member.dtype, member.shape, member.bytes)
                   : CheckContent(member.encoding, member.dtype, member.shape, false, member.bytes);
    }
    if (!status.ok()) return Bad(StatusMessage(status));
    if (__builtin_add_overflow(bytes_, member.bytes, &bytes_)) return Bad("the number of bytes overflows");
    if (member.encoding != TensorEncoding::kRaw) made_bytes_ += member.bytes;
  }
  if (at != table.len) return Bad(std::to_string(table.len - at) + " bytes after its end");
  return OkStatus();
}

template <typename Lens, typename PlacePart>
Status ValueDecoder::Split(size_t n, const Lens& lens, const PlacePart& place) {
  size_t next = 0;
  for (size_t part = 0; part < n; ++part) {
    const uint64_t len = lens(part);
    while (next < members_.size() && members_[next].bytes == 0) ++next;
    const size_t first = next;
    uint64_t end = 0;
    while (next < members_.size() && end < len) {
      Member& member = members_[next++];
      if (member.bytes == 0) continue;
      const uint64_t at = Aligned(end);
      if (at >= len || member.bytes > len - at) return Bad("part " + std::to_string(part) + " ends within a tensor");
      member.at = at;
      end = at + member.bytes;
    }
    if (end != len || len == 0) {
      return Bad("part " + std::to_string(part) + " has " + std::to_string(len) + " bytes, " + std::to_string(end) +
                 " announced");
    }
    Status status = place(part, first, next);
    if (!status.ok()) return status;
  }
  for (; next < members_.size(); ++next) {
    if (members_[next].bytes != 0) return Bad("no payload for tensor " + std::to_string(next));
  }
  return OkStatus();
}

Status ValueDecoder::Prepare(sw_bytes table, size_t n, const uint64_t* lens, uint32_t extra, Allocator* allocator,
                             void** bufs) {
  Status status = Parse(table);
  if (!status.ok()) return status;
  const size_t parts = n - (extra != 0 && n != 0 ? 1 : 0);
  if (extra != 0 && (n == 0 || lens[n - 1] != extra)) return Bad("the last part does not match the head");
  if (MoreThanTheMachineHas(bytes_)) return OutOfMemory(bytes_);

  uint64_t slab_bytes = 0;
  size_t pieces = 0;
  std::vector<uint64_t> begins(parts, std::numeric_limits<uint64_t>::max());
  status = Split(
      parts, [lens](size_t part) { return lens[part]; },
      [&](size_t part, size_t first, size_t end) {
        Member& member = members_[first];
        if (end == first + 1 && member.encoding == TensorEncoding::kRaw && member.bytes >= kScatterMinBytes) {
          const PromptAllocation attributes;
          Allocator* prompt = NonblockingAllocator(allocator, member.bytes);
          if (prompt == nullptr) return OutOfMemory(member.bytes);
          own_.emplace_back(prompt, member.dtype, member.shape, attributes);
          if (!own_.back().IsInitialized()) return OutOfMemory(member.bytes);
          member.own = static_cast<uint32_t>(own_.size() - 1);
          bufs[part] = tensorflow::DMAHelper::base(&own_.back());
          return OkStatus();
        }
        begins[part] = slab_bytes;
        for (size_t i = first; i < end; ++i) members_[i].at += slab_bytes;
        pieces += end - first;
        slab_bytes = Aligned(slab_bytes + lens[part]);
        return OkStatus();
      });
  if (!status.ok()) return status;
  if (slab_bytes != 0) {
    Allocator* prompt = NonblockingAllocator(allocator, slab_bytes);
    slab_ = prompt == nullptr ? nullptr : Slab::New(prompt, slab_bytes, pieces);
    if (slab_ == nullptr) return OutOfMemory(slab_bytes);
    for (size_t part = 0; part < parts; ++part) {
      if (begins[part] != std::numeric_limits<uint64_t>::max()) bufs[part] = slab_->data() + begins[part];
    }
  }
  if (extra != 0) {
    extra_.resize(extra);
    bufs[n - 1] = &extra_[0];
  }
  return OkStatus();
}

Status ValueDecoder::Adopt(sw_bytes table, const sw_part* parts, size_t n, void* body, void (*release)(void* body)) {
  uint8_t* const base = n == 0 ? nullptr : static_cast<uint8_t*>(const_cast<void*>(parts[0].data));
  Status status = Parse(table);
  if (status.ok()) {
    status = Split(
        n, [parts](size_t part) { return parts[part].len; },
        [&](size_t part, size_t first, size_t end) {
          // They are contiguous (sw_call_request).
          const uint64_t begin = static_cast<uint64_t>(static_cast<const uint8_t*>(parts[part].data) - base);
          for (size_t i = first; i < end; ++i) members_[i].at += begin;
          return OkStatus();
        });
  }
  if (status.ok()) {
    uint64_t bytes = 0;
    for (size_t part = 0; part < n; ++part) bytes += parts[part].len;
    slab_ = Slab::Around(base, bytes, members_.size(), body, release);
    if (slab_ == nullptr) status = OutOfMemory(0);
  }
  if (!status.ok()) release(body);
  return status;
}

Status ValueDecoder::Widen(const Member& member, Allocator* allocator, Tensor* tensor) const {
  Tensor wide(allocator, member.dtype, member.shape);
  if (!wide.IsInitialized()) return NoMemory(2 * member.bytes, member.dtype, member.shape);
  auto numbers = wide.flat<Int64>();
  const uint8_t* at = slab_->data() + member.at;
  for (int64_t i = 0; i < numbers.size(); ++i, at += 4) numbers(i) = Get<uint32_t>(at);
  *tensor = std::move(wide);
  return OkStatus();
}

Status ValueDecoder::MakeTensor(const Member& member, Allocator* allocator, Tensor* tensor) {
  if (member.own != kNoPlace) {
    *tensor = std::move(own_[member.own]);
    return OkStatus();
  }
  switch (member.encoding) {
    case TensorEncoding::kNone:
      *tensor = Tensor(allocator, member.dtype, member.shape);
      return OkStatus();
    case TensorEncoding::kRaw:
      *tensor = slab_->NewTensor(member.dtype, member.shape, member.at, member.bytes);
      return OkStatus();
    case TensorEncoding::kShortStrings:
    case TensorEncoding::kStrings:
    case TensorEncoding::kWideStrings:
      return ReadStrings(slab_->data() + member.at, member.bytes, member.encoding, member.shape, allocator, tensor);
    case TensorEncoding::kNarrow:
      return Widen(member, allocator, tensor);
    default: {
      tensorflow::TensorProto proto;
      Status status = DecodeObjects({slab_->data() + member.at, static_cast<size_t>(member.bytes)}, member.dtype,
                                    member.shape, &proto);
      return status.ok() ? MakeObjects(proto, allocator, tensor) : status;
    }
  }
}

std::vector<uint32_t> ValueDecoder::slots() const {
  std::vector<uint32_t> slots;
  for (const Member& member : members_) {
    if (member.kind == StarValue::Kind::kSlot) slots.push_back(member.slot);
  }
  return slots;
}

Status ValueDecoder::Finish(Allocator* allocator, std::vector<StarValue>* out) {
  out->clear();
  out->reserve(members_.size());
  for (const Member& member : members_) {
    out->emplace_back();
    StarValue& value = out->back();
    value.kind = member.kind;
    value.slot = member.slot;
    if (member.kind != StarValue::Kind::kTensor) continue;
    Status status = MakeTensor(member, allocator, &value.tensor);
    if (!status.ok()) {
      out->clear();
      return Bad(StatusMessage(status));
    }
  }
  DropSlab();
  return OkStatus();
}

}  // namespace starwire
