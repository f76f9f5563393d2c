#include "cc/tensor/fused.h"

#include <cstring>
#include <limits>
#include <utility>

#include "tensorflow/core/common_runtime/dma_helper.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/framework/variant.h"
#include "tensorflow/core/platform/logging.h"

namespace starwire {

using tensorflow::Allocator;
using tensorflow::Tensor;
using tensorflow::VariantTensorData;

namespace {

// Table: u8 version, three bytes 0, u32 members, then for each member u16 type, u8 encoding, u8 dimensions, u32 0, u64
// bytes and i64 per dimension.
constexpr uint8_t kTableVersion = 1;
constexpr size_t kTableFixed = 8;
constexpr size_t kMemberFixed = 16;

uint64_t Aligned(uint64_t offset) { return (offset + Slab::kAlignment - 1) & ~uint64_t{Slab::kAlignment - 1}; }

}  // namespace

// ---- the variant ----

constexpr char FusedTensors::kTypeName[];

const FusedTensors* FusedTensors::In(const Tensor& tensor) {
  if (tensor.dtype() != tensorflow::DT_VARIANT || tensor.dims() != 0 || !tensor.IsInitialized()) return nullptr;
  return tensor.scalar<tensorflow::Variant>()().get<FusedTensors>();
}

bool FusedTensors::CanHold(tensorflow::DataType dtype) { return RawSize(dtype) != 0 || dtype == tensorflow::DT_STRING; }

std::string FusedTensors::DebugString() const {
  return std::string(kTypeName) + " of " + std::to_string(tensors_.size());
}

// The table, and the payload at the next multiple of Slab::kAlignment.
bool FusedTensors::Encode(VariantTensorData* data) const {
  data->set_type_name(TypeName());
  FusedLayout layout;
  std::string& bytes = data->metadata_string();
  Status status = layout.Measure(tensors_);
  if (status.ok()) {
    const uint64_t begin = Aligned(layout.table_bytes());
    bytes.assign(begin + layout.payload_bytes(), '\0');
    auto* base = reinterpret_cast<uint8_t*>(&bytes[0]);
    layout.WriteTable(base);
    for (size_t i = 0; i < tensors_.size() && status.ok(); ++i) {
      const FusedLayout::Member& member = layout.members()[i];
      status = FusedLayout::WriteMember(member, tensors_[i], base + begin + member.offset);
    }
  }
  if (status.ok()) return true;
  // Up to 2.21 TensorFlow ignores the result: the receiver will report that it cannot decode this.
  LOG(ERROR) << "starwire: fused tensors cannot be sent: " << StatusMessage(status);
  bytes.clear();
  return false;
}

bool FusedTensors::Decode(VariantTensorData data) {
  const std::string& bytes = data.metadata_string();
  const auto* base = reinterpret_cast<const uint8_t*>(bytes.data());
  FusedLayout layout;
  size_t table = 0;
  Status status = layout.Parse({base, bytes.size()}, &table);
  const uint64_t begin = Aligned(table);
  if (status.ok() && (bytes.size() < begin || bytes.size() - begin != layout.payload_bytes())) {
    status = Malformed(std::to_string(bytes.size()) + " bytes for a table of " + std::to_string(table) + " and " +
                       std::to_string(layout.payload_bytes()) + " bytes of payload");
  }
  if (status.ok()) {
    Allocator* allocator = tensorflow::cpu_allocator();
    Slab* slab = Slab::New(allocator, layout.payload_bytes(), layout.members().size());
    if (slab == nullptr) {
      status = NoMemory(layout.payload_bytes(), tensorflow::DT_VARIANT, {});
    } else {
      if (layout.payload_bytes() != 0) std::memcpy(slab->data(), base + begin, layout.payload_bytes());
      status = layout.MakeTensors(slab, allocator, &tensors_);
      slab->Unref();
    }
  }
  if (!status.ok()) LOG(ERROR) << "starwire: fused tensors cannot be received: " << StatusMessage(status);
  return status.ok();
}

// ---- the layout ----

Status FusedLayout::Place(Member* member) {
  member->offset = Aligned(payload_bytes_);
  if (member->offset < payload_bytes_ || __builtin_add_overflow(member->offset, member->bytes, &payload_bytes_)) {
    return Malformed("the bytes of " + std::to_string(members_.size()) + " fused tensors overflow");
  }
  return OkStatus();
}

Status FusedLayout::Measure(const std::vector<Tensor>& tensors) {
  members_.clear();
  members_.reserve(tensors.size());
  payload_bytes_ = 0;
  table_bytes_ = kTableFixed;
  for (const Tensor& tensor : tensors) {
    if (!FusedTensors::CanHold(tensor.dtype())) {
      return MakeStatus(kUnimplemented, "a tensor of type " + tensorflow::DataTypeString(tensor.dtype()) +
                                            " cannot be sent fused with others");
    }
    Member member;
    member.dtype = tensor.dtype();
    member.shape = tensor.shape();
    if (tensor.NumElements() == 0) {
      member.encoding = TensorEncoding::kNone;
    } else if (!tensor.IsInitialized()) {
      return Uninitialized(tensor);
    } else if (tensor.dtype() == tensorflow::DT_STRING) {
      const StringsSize size = MeasureStrings(tensor);
      member.encoding = size.encoding;
      member.bytes = size.total();
    } else {
      member.encoding = TensorEncoding::kRaw;
      member.bytes = static_cast<uint64_t>(tensor.NumElements()) * RawSize(tensor.dtype());
    }
    Status status = Place(&member);
    if (!status.ok()) return status;
    table_bytes_ += kMemberFixed + 8 * static_cast<size_t>(tensor.dims());
    members_.push_back(std::move(member));
  }
  return OkStatus();
}

Status FusedLayout::Parse(sw_bytes table, size_t* consumed) {
  members_.clear();
  payload_bytes_ = 0;
  if (table.data == nullptr || table.len < kTableFixed) return Malformed("a table of fused tensors without a header");
  if (table.data[0] != kTableVersion) {
    return Malformed("a table of fused tensors of version " + std::to_string(table.data[0]) + ", expected " +
                     std::to_string(kTableVersion));
  }
  if (table.data[1] != 0 || Get<uint16_t>(table.data + 2) != 0) return Malformed("reserved bytes are not zero");
  const size_t n = Get<uint32_t>(table.data + 4);
  size_t at = kTableFixed;
  if (n == 0 || n > (table.len - at) / kMemberFixed) {
    return Malformed(std::to_string(n) + " fused tensors in a table of " + std::to_string(table.len) + " bytes");
  }
  members_.reserve(n);
  for (size_t i = 0; i < n; ++i) {
    if (table.len - at < kMemberFixed) return Malformed("a table of fused tensors that ends early");
    const uint8_t* entry = table.data + at;
    const size_t dims = entry[3];
    at += kMemberFixed;
    if ((table.len - at) / 8 < dims) return Malformed("a table of fused tensors that ends early");
    if (Get<uint32_t>(entry + 4) != 0) return Malformed("reserved bytes are not zero");
    Member member;
    Status status = ReadDataType(entry, &member.dtype);
    if (status.ok()) status = ReadShape(entry + kMemberFixed, dims, &member.shape);
    at += 8 * dims;
    member.encoding = static_cast<TensorEncoding>(entry[2]);
    member.bytes = Get<uint64_t>(entry + 8);
    if (status.ok()) status = CheckContent(member.encoding, member.dtype, member.shape, false, member.bytes);
    if (status.ok() && (!FusedTensors::CanHold(member.dtype))) {
      status = Malformed("type " + tensorflow::DataTypeString(member.dtype) + " among fused tensors");
    }
    if (status.ok()) status = Place(&member);
    if (!status.ok()) return status;
    members_.push_back(std::move(member));
  }
  table_bytes_ = at;
  *consumed = at;
  return OkStatus();
}

void FusedLayout::WriteTable(uint8_t* at) const {
  Put<uint32_t>(at, kTableVersion);
  Put<uint32_t>(at + 4, static_cast<uint32_t>(members_.size()));
  at += kTableFixed;
  for (const Member& member : members_) {
    const int dims = member.shape.dims();
    Put<uint16_t>(at, static_cast<uint16_t>(member.dtype));
    Put<uint8_t>(at + 2, static_cast<uint8_t>(member.encoding));
    Put<uint8_t>(at + 3, static_cast<uint8_t>(dims));
    Put<uint32_t>(at + 4, 0);
    Put<uint64_t>(at + 8, member.bytes);
    at += kMemberFixed;
    for (int i = 0; i < dims; ++i, at += 8) Put<int64_t>(at, member.shape.dim_size(i));
  }
}

Status FusedLayout::WriteMember(const Member& member, const Tensor& tensor, uint8_t* at) {
  switch (member.encoding) {
    case TensorEncoding::kRaw:
      std::memcpy(at, tensorflow::DMAHelper::base(&tensor), member.bytes);
      break;
    case TensorEncoding::kShortStrings:
    case TensorEncoding::kStrings:
    case TensorEncoding::kWideStrings:
      return WriteStrings(tensor, member.encoding, at, member.bytes);
    default:
      break;
  }
  return OkStatus();
}

Status FusedLayout::MakeTensors(Slab* slab, Allocator* allocator, std::vector<Tensor>* out) const {
  std::vector<Tensor> tensors;
  tensors.reserve(members_.size());
  for (const Member& member : members_) {
    if (member.encoding == TensorEncoding::kRaw) {
      tensors.push_back(slab->NewTensor(member.dtype, member.shape, member.offset, member.bytes));
    } else if (member.encoding == TensorEncoding::kNone) {
      tensors.emplace_back(allocator, member.dtype, member.shape);
    } else {
      tensors.emplace_back();
      Status status = ReadStrings(slab->data() + member.offset, member.bytes, member.encoding, member.shape, allocator,
                                  &tensors.back());
      if (!status.ok()) return status;
    }
  }
  *out = std::move(tensors);
  return OkStatus();
}

}  // namespace starwire
