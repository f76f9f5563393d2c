#include "cc/tensor/codec.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <string>

#include "cc/base/compat_tensor.h"
#include "cc/base/guard.h"
#include "cc/tensor/nonblocking_allocator.h"
#include "cc/tensor/objects.h"
#include "tensorflow/core/common_runtime/dma_helper.h"
#include "tensorflow/core/framework/tensor.pb.h"
#include "tensorflow/core/framework/tensor_shape.pb.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/framework/variant.h"
#include "tensorflow/core/platform/tstring.h"

namespace starwire {
namespace {

using tensorflow::Allocator;
using tensorflow::DataType;
using tensorflow::Tensor;
using tensorflow::TensorBuffer;
using tensorflow::TensorProto;
using tensorflow::TensorShape;

// Metadata: u8 version, u8 flags, u16 dtype, u8 encoding, u8 dims, u16 zero, i64 send start, u64 payload bytes, then
// i64 per dimension.
constexpr uint8_t kVersion = 1;
constexpr uint8_t kFlagDead = 1;
constexpr size_t kFixedMeta = EncodedTensor::kFixedMeta;

// Strings that are long on average are sent in place; others are packed into one buffer.
constexpr size_t kScatterMeanLength = 8 << 10;
constexpr size_t kScatterMaxParts = 1 << 10;

// A longer table of fused tensors does not fit into the metadata of a frame.
constexpr size_t kMaxTable = (1 << 20) - kFixedMeta;
// Fused tensors of at least this size are sent in place; others are packed into one buffer.
constexpr uint64_t kScatterMinBytes = 8 << 10;
constexpr size_t kFusedMaxParts = 1 << 16;

void UnrefBuffer(void* owner) { static_cast<const TensorBuffer*>(owner)->Unref(); }

// The owner of a scattered payload: the bytes written for it, and the tensor whose content is sent in place.
struct Scattered {
  std::unique_ptr<uint8_t[]> written;
  Tensor tensor;
};

}  // namespace

// ---- sending ----

void EncodedTensor::WriteMeta(const Tensor& tensor, bool is_dead, TensorEncoding encoding, uint64_t payload_bytes,
                              int64_t send_start_micros) {
  const int dims = is_dead ? 0 : tensor.dims();
  Put<uint8_t>(meta_, kVersion);
  Put<uint8_t>(meta_ + 1, is_dead ? kFlagDead : 0);
  Put<uint16_t>(meta_ + 2, static_cast<uint16_t>(tensor.dtype()));
  Put<uint8_t>(meta_ + 4, static_cast<uint8_t>(encoding));
  Put<uint8_t>(meta_ + 5, static_cast<uint8_t>(dims));
  Put<uint16_t>(meta_ + 6, 0);
  Put<int64_t>(meta_ + 8, send_start_micros);
  Put<uint64_t>(meta_ + 16, payload_bytes);
  for (int i = 0; i < dims; ++i) Put<int64_t>(meta_ + kFixedMeta + 8 * i, tensor.dim_size(i));
  meta_size_ = kFixedMeta + 8 * static_cast<size_t>(dims);
}

Status EncodedTensor::Encode(const Tensor& tensor, bool is_dead, int64_t send_start_micros) {
  payload_ = {nullptr, 0, nullptr, nullptr};
  long_meta_.clear();
  fused_tensors_ = 0;
  if (is_dead || tensor.NumElements() == 0) {
    const bool known = IsKnown(tensor.dtype());
    if (!known && !is_dead) {
      return MakeStatus(kUnimplemented, "a tensor of type " + std::to_string(tensor.dtype()) + " cannot be sent");
    }
    WriteMeta(known ? tensor : Tensor(), is_dead, TensorEncoding::kNone, 0, send_start_micros);
    return OkStatus();
  }
  if (!tensor.IsInitialized()) return Uninitialized(tensor);
  const size_t element = RawSize(tensor.dtype());
  if (element != 0) {
    const uint64_t bytes = static_cast<uint64_t>(tensor.NumElements()) * element;
    const TensorBuffer* buffer = tensorflow::DMAHelper::buffer(&tensor);
    buffer->Ref();
    part_ = {buffer->data(), bytes};
    payload_ = {&part_, 1, const_cast<TensorBuffer*>(buffer), Guarded<&UnrefBuffer>};
    WriteMeta(tensor, false, TensorEncoding::kRaw, bytes, send_start_micros);
    return OkStatus();
  }
  switch (tensor.dtype()) {
    case tensorflow::DT_STRING:
      return EncodeStrings(tensor, send_start_micros);
    case tensorflow::DT_VARIANT:
      if (const FusedTensors* fused = FusedTensors::In(tensor)) return EncodeFused(tensor, *fused, send_start_micros);
      return EncodeProto(tensor, send_start_micros);
    case tensorflow::DT_RESOURCE:
      return EncodeProto(tensor, send_start_micros);
    default:
      return MakeStatus(kUnimplemented,
                        "a tensor of type " + tensorflow::DataTypeString(tensor.dtype()) + " cannot be sent");
  }
}

Status EncodedTensor::EncodeStrings(const Tensor& tensor, int64_t send_start_micros) {
  const auto strings = tensor.flat<tensorflow::tstring>();
  const size_t n = static_cast<size_t>(strings.size());
  const StringsSize size = MeasureStrings(tensor);
  // Another step may assign the strings of a variable, of which this may be a slice, while they are sent.
  const TensorBuffer* memory = tensorflow::DMAHelper::buffer(&tensor);
  const bool is_own = memory->RefCountIsOne() && const_cast<TensorBuffer*>(memory)->root_buffer()->RefCountIsOne();
  const bool scatter = is_own && n <= kScatterMaxParts && size.text / n >= kScatterMeanLength;

  std::unique_ptr<uint8_t[]> buffer(new (std::nothrow) uint8_t[scatter ? size.table : size.total()]);
  if (buffer == nullptr) return NoMemory(size.total(), tensor.dtype(), tensor.shape());
  if (scatter) {
    WriteLengths(tensor, size.encoding, buffer.get());
    parts_.clear();
    parts_.reserve(n + 1);
    parts_.push_back({buffer.get(), size.table});
    for (size_t i = 0; i < n; ++i) {
      if (!strings(i).empty()) parts_.push_back({strings(i).data(), strings(i).size()});
    }
    payload_ = {parts_.data(), parts_.size(), new Scattered{std::move(buffer), tensor},
                Guarded<&DeleteOwner<Scattered>>};
  } else {
    if (Status status = WriteStrings(tensor, size.encoding, buffer.get(), size.total()); !status.ok()) return status;
    part_ = {buffer.get(), size.total()};
    payload_ = {&part_, 1, buffer.release(), Guarded<&DeleteArray<uint8_t>>};
  }
  WriteMeta(tensor, false, size.encoding, size.total(), send_start_micros);
  return OkStatus();
}

Status EncodedTensor::EncodeFused(const Tensor& tensor, const FusedTensors& fused, int64_t send_start_micros) {
  const std::vector<Tensor>& tensors = fused.tensors();
  FusedLayout layout;
  Status status = layout.Measure(tensors);
  if (!status.ok()) return status;
  if (layout.table_bytes() > kMaxTable || tensors.empty()) return EncodeProto(tensor, send_start_micros);
  WriteMeta(tensor, false, TensorEncoding::kFused, layout.payload_bytes(), send_start_micros);
  fused_tensors_ = tensors.size();
  long_meta_.resize(kFixedMeta + layout.table_bytes());
  std::memcpy(long_meta_.data(), meta_, kFixedMeta);
  layout.WriteTable(long_meta_.data() + kFixedMeta);
  if (layout.payload_bytes() == 0) return OkStatus();

  const std::vector<FusedLayout::Member>& members = layout.members();
  // Each member that is sent in place has at most one packed piece before it.
  const bool may_scatter = 2 * members.size() + 1 <= kFusedMaxParts;
  const auto scattered = [may_scatter](const FusedLayout::Member& member) {
    return may_scatter && member.encoding == TensorEncoding::kRaw && member.bytes >= kScatterMinBytes;
  };
  uint64_t packed = layout.payload_bytes();
  for (const auto& member : members) packed -= scattered(member) ? member.bytes : 0;
  std::unique_ptr<uint8_t[]> buffer(new (std::nothrow) uint8_t[packed]);
  if (buffer == nullptr) return NoMemory(packed, tensor.dtype(), tensor.shape());

  parts_.clear();
  uint8_t* piece = buffer.get();  // start of the packed piece, and its end
  uint8_t* at = piece;
  uint64_t end = 0;  // of the payload so far
  for (size_t i = 0; i < members.size(); ++i) {
    const FusedLayout::Member& member = members[i];
    std::memset(at, 0, member.offset - end);
    at += member.offset - end;
    end = member.offset + member.bytes;
    if (!scattered(member)) {
      if (status = FusedLayout::WriteMember(member, tensors[i], at); !status.ok()) return status;
      at += member.bytes;
      continue;
    }
    if (at != piece) parts_.push_back({piece, static_cast<size_t>(at - piece)});
    parts_.push_back({tensorflow::DMAHelper::base(&tensors[i]), member.bytes});
    piece = at;
  }
  if (at != piece) parts_.push_back({piece, static_cast<size_t>(at - piece)});
  payload_ = {parts_.data(), parts_.size(), new Scattered{std::move(buffer), tensor}, Guarded<&DeleteOwner<Scattered>>};
  return OkStatus();
}

Status EncodedTensor::EncodeProto(const Tensor& tensor, int64_t send_start_micros) {
  auto bytes = std::make_unique<std::string>();
  Status status = EncodeObjects(tensor, bytes.get());
  if (!status.ok()) return status;
  part_ = {bytes->data(), bytes->size()};
  WriteMeta(tensor, false, TensorEncoding::kProto, bytes->size(), send_start_micros);
  payload_ = {&part_, 1, bytes.release(), Guarded<&DeleteOwner<std::string>>};
  return OkStatus();
}

Status EncodeObjects(const Tensor& tensor, std::string* bytes) {
  TensorProto proto;
  if (!Succeeds([&] { return tensor.AsProtoField(&proto); })) return NotEncodable(tensor);
  // A proto over 2 GB cannot be serialised.
  if (proto.ByteSizeLong() > static_cast<size_t>(std::numeric_limits<int32_t>::max()) ||
      !proto.SerializeToString(bytes)) {
    return MakeStatus(kInvalidArgument, "a tensor of type " + tensorflow::DataTypeString(tensor.dtype()) +
                                            " and shape " + tensor.shape().DebugString() + " is too large to send");
  }
  return OkStatus();
}

// ---- receiving ----

Status DecodeTensorHeader(sw_bytes meta, TensorHeader* header, FusedLayout* fused) {
  if (meta.data == nullptr || meta.len < kFixedMeta) {
    return Malformed(std::to_string(meta.len) + " bytes of metadata, at least " + std::to_string(kFixedMeta) +
                     " expected");
  }
  const uint8_t version = meta.data[0];
  if (version != kVersion) {
    return Malformed("metadata of version " + std::to_string(version) + ", expected " + std::to_string(kVersion));
  }
  const uint8_t flags = meta.data[1];
  if ((flags & ~kFlagDead) != 0) return Malformed("unknown flags " + std::to_string(flags));
  if (Get<uint16_t>(meta.data + 6) != 0) return Malformed("reserved bytes are not zero");
  header->is_dead = (flags & kFlagDead) != 0;

  Status status = ReadDataType(meta.data + 2, &header->dtype);
  if (!status.ok()) return status;

  header->send_start_micros = Get<int64_t>(meta.data + 8);
  header->payload_bytes = Get<uint64_t>(meta.data + 16);
  header->encoding = static_cast<TensorEncoding>(meta.data[4]);
  const size_t dims = meta.data[5];
  const size_t fixed = kFixedMeta + 8 * dims;
  const bool is_fused = header->encoding == TensorEncoding::kFused;
  if (meta.len < fixed || (!is_fused && meta.len != fixed)) {
    return Malformed(std::to_string(meta.len) + " bytes of metadata for " + std::to_string(dims) + " dimensions");
  }
  status = ReadShape(meta.data + kFixedMeta, dims, &header->shape);
  if (status.ok()) {
    status = CheckContent(header->encoding, header->dtype, header->shape, header->is_dead, header->payload_bytes);
  }
  if (!status.ok() || !is_fused) return status;

  size_t table = 0;
  status = fused->Parse({meta.data + fixed, meta.len - fixed}, &table);
  if (!status.ok()) return status;
  if (table != meta.len - fixed || fused->payload_bytes() != header->payload_bytes) {
    return Malformed(std::to_string(header->payload_bytes) + " bytes for fused tensors of " +
                     std::to_string(fused->payload_bytes()) + ", " + std::to_string(meta.len - fixed - table) +
                     " bytes after their table");
  }
  return OkStatus();
}

Status TensorReceiver::Prepare(sw_bytes meta, size_t n, const uint64_t* lens, Allocator* allocator, void** bufs) {
  Status status = DecodeTensorHeader(meta, &header_, &layout_);
  if (!status.ok()) return status;
  uint64_t total = 0;
  for (size_t i = 0; i < n; ++i) {
    if (__builtin_add_overflow(total, lens[i], &total)) return Malformed("the payload's length overflows");
  }
  if (total != header_.payload_bytes) {
    return Malformed(std::to_string(total) + " bytes of payload, " + std::to_string(header_.payload_bytes) +
                     " announced");
  }
  if (MoreThanTheMachineHas(total)) return NoMemory(total, header_.dtype, header_.shape);
  allocator = NonblockingAllocator(allocator, total);
  if (allocator == nullptr) return NoMemory(total, header_.dtype, header_.shape);
  uint8_t* base = nullptr;
  if (header_.encoding == TensorEncoding::kNone) {
    if (header_.is_dead) {
      tensor_ = Tensor();
    } else {
      tensor_ = Tensor(allocator, header_.dtype, header_.shape);
    }
  } else if (header_.encoding == TensorEncoding::kRaw) {
    const PromptAllocation attributes;
    tensor_ = Tensor(allocator, header_.dtype, header_.shape, attributes);
    if (!tensor_.IsInitialized()) return NoMemory(total, header_.dtype, header_.shape);
    base = static_cast<uint8_t*>(tensorflow::DMAHelper::base(&tensor_));
  } else if (header_.encoding == TensorEncoding::kFused) {
    DropSlab();
    slab_ = Slab::New(allocator, total, layout_.members().size());
    if (slab_ == nullptr) return NoMemory(total, header_.dtype, header_.shape);
    base = slab_->data();
  } else {
    staging_.reset(new (std::nothrow) uint8_t[total]);
    if (staging_ == nullptr) return NoMemory(total, header_.dtype, header_.shape);
    base = staging_.get();
  }
  for (size_t i = 0; i < n; ++i) {
    bufs[i] = base;
    if (base != nullptr) base += lens[i];
  }
  prepared_ = true;
  return OkStatus();
}

Status TensorReceiver::Finish(Allocator* allocator) {
  switch (header_.encoding) {
    case TensorEncoding::kNone:
    case TensorEncoding::kRaw:
      return OkStatus();
    case TensorEncoding::kShortStrings:
    case TensorEncoding::kStrings:
    case TensorEncoding::kWideStrings:
      return FinishStrings(allocator);
    case TensorEncoding::kFused:
      return FinishFused(allocator);
    case TensorEncoding::kProto:
      return FinishProto(allocator);
    case TensorEncoding::kNarrow:
      break;  // CheckContent refuses it
  }
  return Malformed("encoding " + std::to_string(static_cast<int>(header_.encoding)) + " of a tensor");
}

Status TensorReceiver::FinishStrings(Allocator* allocator) {
  Status status =
      ReadStrings(staging_.get(), header_.payload_bytes, header_.encoding, header_.shape, allocator, &tensor_);
  if (status.ok()) staging_.reset();
  return status;
}

Status TensorReceiver::FinishFused(Allocator* allocator) {
  std::vector<Tensor> tensors;
  Status status = layout_.MakeTensors(slab_, allocator, &tensors);
  if (!status.ok()) return status;
  DropSlab();
  // In host memory: the variant is an object, and its tensors already have their memory.
  tensor_ = Tensor(tensorflow::cpu_allocator(), tensorflow::DT_VARIANT, {});
  tensor_.scalar<tensorflow::Variant>()() = FusedTensors(std::move(tensors));
  return OkStatus();
}

void TensorReceiver::DropSlab() {
  if (slab_ != nullptr) slab_->Unref();
  slab_ = nullptr;
}

Status TensorReceiver::ParseProto(TensorProto* proto) {
  if (header_.encoding != TensorEncoding::kProto || staging_ == nullptr) return Malformed("not a proto");
  Status status =
      DecodeObjects({staging_.get(), static_cast<size_t>(header_.payload_bytes)}, header_.dtype, header_.shape, proto);
  staging_.reset();
  return status;
}

Status DecodeObjects(sw_bytes bytes, DataType dtype, const TensorShape& shape, TensorProto* proto) {
  Status status = CheckWire(bytes, TensorCarrier::kTensor);
  if (!status.ok()) return status;
  if (bytes.len > static_cast<size_t>(std::numeric_limits<int32_t>::max()) ||
      !proto->ParseFromArray(bytes.data, static_cast<int>(bytes.len))) {
    return Malformed("the TensorProto cannot be parsed");
  }
  status = CheckTensor(*proto, bytes.len);
  if (!status.ok()) return status;
  // The shape is known to be valid, so this constructor cannot abort.
  const bool agrees = proto->dtype() == dtype && TensorShape(proto->tensor_shape()) == shape;
  const int values = dtype == tensorflow::DT_VARIANT ? proto->variant_val_size() : proto->resource_handle_val_size();
  if (!agrees || values != shape.num_elements()) {
    return Malformed("the TensorProto does not match type " + tensorflow::DataTypeString(dtype) + ", shape " +
                     shape.DebugString());
  }
  return OkStatus();
}

Status TensorReceiver::FinishProto(Allocator* allocator) {
  TensorProto proto;
  Status status = ParseProto(&proto);
  return status.ok() ? MakeObjects(proto, allocator, &tensor_) : status;
}

Status MakeObjects(const TensorProto& proto, Allocator* allocator, Tensor* tensor) {
  if (tensor->FromProto(allocator, proto)) return OkStatus();
  return Malformed("the objects of a tensor of type " + tensorflow::DataTypeString(proto.dtype()) + ", shape " +
                   TensorShape(proto.tensor_shape()).DebugString() + " cannot be decoded here");
}

void TensorReceiver::Reset() {
  header_ = TensorHeader();
  tensor_ = Tensor();
  staging_.reset();
  DropSlab();
  prepared_ = false;
}

}  // namespace starwire
