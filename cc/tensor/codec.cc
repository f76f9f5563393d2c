#include "cc/tensor/codec.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <string>

#include "tensorflow/core/common_runtime/dma_helper.h"
#include "tensorflow/core/framework/resource_handle.pb.h"
#include "tensorflow/core/framework/tensor.pb.h"
#include "tensorflow/core/framework/tensor_shape.pb.h"
#include "tensorflow/core/framework/types.h"
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

// Strings that are long on average are sent from where they lie; the others are packed into one buffer.
constexpr size_t kScatterMeanLength = 8 << 10;
constexpr size_t kScatterMaxParts = 1 << 10;

constexpr int kInvalidArgument = 3;
constexpr int kResourceExhausted = 8;
constexpr int kUnimplemented = 12;
constexpr int kDataLoss = 15;

template <typename T>
void Put(uint8_t* at, T value) {
  for (size_t i = 0; i < sizeof(T); ++i) at[i] = static_cast<uint8_t>(static_cast<uint64_t>(value) >> (8 * i));
}

template <typename T>
T Get(const uint8_t* at) {
  uint64_t value = 0;
  for (size_t i = 0; i < sizeof(T); ++i) value |= static_cast<uint64_t>(at[i]) << (8 * i);
  return static_cast<T>(value);
}

Status Malformed(const std::string& what) { return MakeStatus(kDataLoss, "malformed tensor: " + what); }

Status NoMemory(uint64_t bytes, DataType dtype, const TensorShape& shape) {
  return MakeStatus(kResourceExhausted, "out of memory: " + std::to_string(bytes) +
                                            " bytes for a received tensor of type " +
                                            tensorflow::DataTypeString(dtype) + " and shape " + shape.DebugString());
}

// DataTypeCanUseMemcpy shifts by the number it is given, so the number must have been looked at before.
bool IsKnown(DataType dtype) {
  return dtype > tensorflow::DT_INVALID && dtype < 64 && tensorflow::DataType_IsValid(dtype);
}

// TensorFlow's CPU allocator waits ten seconds for memory that may come back before it gives up. A reactor must not
// wait for what cannot be.
bool MoreThanTheMachineHas(uint64_t bytes) {
  static const uint64_t all = [] {
    const long pages = sysconf(_SC_PHYS_PAGES);
    const long size = sysconf(_SC_PAGESIZE);
    return pages > 0 && size > 0 ? static_cast<uint64_t>(pages) * static_cast<uint64_t>(size)
                                 : std::numeric_limits<uint64_t>::max();
  }();
  return bytes > all;
}

// 0 for types whose elements cannot be copied byte by byte.
size_t RawSize(DataType dtype) {
  if (!IsKnown(dtype) || !tensorflow::DataTypeCanUseMemcpy(dtype)) return 0;
  const int size = tensorflow::DataTypeSize(dtype);
  return size > 0 ? static_cast<size_t>(size) : 0;
}

void UnrefBuffer(void* owner) { static_cast<const TensorBuffer*>(owner)->Unref(); }
void DeleteString(void* owner) { delete static_cast<std::string*>(owner); }
void DeleteBytes(void* owner) { delete[] static_cast<uint8_t*>(owner); }

// The owner of a scattered string payload: the packed lengths, and the tensor that the strings lie in.
struct ScatteredStrings {
  std::unique_ptr<uint8_t[]> lengths;
  Tensor tensor;
};
void DeleteScattered(void* owner) { delete static_cast<ScatteredStrings*>(owner); }

// Tensor::FromProto and the constructors behind it trust some parts of a proto with the process's life.
Status CheckProto(const TensorProto& proto) {
  if (!IsKnown(proto.dtype())) return Malformed("unknown type " + std::to_string(proto.dtype()) + " in a proto");
  if (!TensorShape::IsValid(proto.tensor_shape())) return Malformed("invalid shape in a proto");
  for (const auto& handle : proto.resource_handle_val()) {
    for (const auto& dtype_and_shape : handle.dtypes_and_shapes()) {
      if (!tensorflow::PartialTensorShape::IsValid(dtype_and_shape.shape())) {
        return Malformed("invalid shape in a resource handle");
      }
    }
  }
  for (const auto& variant : proto.variant_val()) {
    for (const auto& nested : variant.tensors()) {
      Status status = CheckProto(nested);
      if (!status.ok()) return status;
    }
  }
  const bool holds_objects = proto.dtype() == tensorflow::DT_VARIANT || proto.dtype() == tensorflow::DT_RESOURCE;
  if (holds_objects && !proto.tensor_content().empty()) {
    return Malformed("objects as opaque content");
  }
  return OkStatus();
}

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
  if (is_dead || tensor.NumElements() == 0) {
    const bool known = IsKnown(tensor.dtype());
    if (!known && !is_dead) {
      return MakeStatus(kUnimplemented, "a tensor of type " + std::to_string(tensor.dtype()) + " cannot be sent");
    }
    WriteMeta(known ? tensor : Tensor(), is_dead, TensorEncoding::kNone, 0, send_start_micros);
    return OkStatus();
  }
  if (!tensor.IsInitialized()) {
    return MakeStatus(kInvalidArgument, "an uninitialized tensor of type " +
                                            tensorflow::DataTypeString(tensor.dtype()) + " and shape " +
                                            tensor.shape().DebugString() + " was to be sent");
  }
  const size_t element = RawSize(tensor.dtype());
  if (element != 0) {
    const uint64_t bytes = static_cast<uint64_t>(tensor.NumElements()) * element;
    const TensorBuffer* buffer = tensorflow::DMAHelper::buffer(&tensor);
    buffer->Ref();
    part_ = {buffer->data(), bytes};
    payload_ = {&part_, 1, const_cast<TensorBuffer*>(buffer), UnrefBuffer};
    WriteMeta(tensor, false, TensorEncoding::kRaw, bytes, send_start_micros);
    return OkStatus();
  }
  switch (tensor.dtype()) {
    case tensorflow::DT_STRING:
      return EncodeStrings(tensor, send_start_micros);
    case tensorflow::DT_VARIANT:
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
  uint64_t text = 0;
  uint64_t longest = 0;
  for (size_t i = 0; i < n; ++i) {
    text += strings(i).size();
    longest = std::max<uint64_t>(longest, strings(i).size());
  }
  const bool wide = longest > std::numeric_limits<uint32_t>::max();
  const size_t table = n * (wide ? sizeof(uint64_t) : sizeof(uint32_t));
  const bool scatter = n <= kScatterMaxParts && text / n >= kScatterMeanLength;

  std::unique_ptr<uint8_t[]> buffer(new (std::nothrow) uint8_t[table + (scatter ? 0 : text)]);
  if (buffer == nullptr) return NoMemory(table + text, tensor.dtype(), tensor.shape());
  uint8_t* at = buffer.get();
  for (size_t i = 0; i < n; ++i) {
    if (wide) {
      Put<uint64_t>(at, strings(i).size());
      at += sizeof(uint64_t);
    } else {
      Put<uint32_t>(at, static_cast<uint32_t>(strings(i).size()));
      at += sizeof(uint32_t);
    }
  }
  if (scatter) {
    parts_.clear();
    parts_.reserve(n + 1);
    parts_.push_back({buffer.get(), table});
    for (size_t i = 0; i < n; ++i) {
      if (!strings(i).empty()) parts_.push_back({strings(i).data(), strings(i).size()});
    }
    payload_ = {parts_.data(), parts_.size(), new ScatteredStrings{std::move(buffer), tensor}, DeleteScattered};
  } else {
    for (size_t i = 0; i < n; ++i) {
      if (strings(i).empty()) continue;
      std::memcpy(at, strings(i).data(), strings(i).size());
      at += strings(i).size();
    }
    part_ = {buffer.get(), table + text};
    payload_ = {&part_, 1, buffer.release(), DeleteBytes};
  }
  WriteMeta(tensor, false, wide ? TensorEncoding::kWideStrings : TensorEncoding::kStrings, table + text,
            send_start_micros);
  return OkStatus();
}

Status EncodedTensor::EncodeProto(const Tensor& tensor, int64_t send_start_micros) {
  TensorProto proto;
  tensor.AsProtoField(&proto);
  auto bytes = std::make_unique<std::string>();
  // A proto over 2 GB cannot be serialised.
  if (proto.ByteSizeLong() > static_cast<size_t>(std::numeric_limits<int32_t>::max()) ||
      !proto.SerializeToString(bytes.get())) {
    return MakeStatus(kInvalidArgument, "a tensor of type " + tensorflow::DataTypeString(tensor.dtype()) +
                                            " and shape " + tensor.shape().DebugString() + " is too large to be sent");
  }
  part_ = {bytes->data(), bytes->size()};
  WriteMeta(tensor, false, TensorEncoding::kProto, bytes->size(), send_start_micros);
  payload_ = {&part_, 1, bytes.release(), DeleteString};
  return OkStatus();
}

// ---- receiving ----

Status DecodeTensorHeader(sw_bytes meta, TensorHeader* header) {
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

  const uint16_t dtype = Get<uint16_t>(meta.data + 2);
  header->dtype = static_cast<DataType>(dtype);
  if (dtype >= 64 || !IsKnown(header->dtype)) {
    return Malformed("type " + std::to_string(dtype) + ", which this version of TensorFlow does not know");
  }

  const size_t dims = meta.data[5];
  if (dims > EncodedTensor::kMaxDims) return Malformed(std::to_string(dims) + " dimensions");
  if (meta.len != kFixedMeta + 8 * dims) {
    return Malformed(std::to_string(meta.len) + " bytes of metadata for " + std::to_string(dims) + " dimensions");
  }
  int64_t sizes[EncodedTensor::kMaxDims];
  for (size_t i = 0; i < dims; ++i) sizes[i] = Get<int64_t>(meta.data + kFixedMeta + 8 * i);
  Status status = TensorShape::BuildTensorShape({sizes, dims}, &header->shape);
  if (!status.ok()) return Malformed(StatusMessage(status));

  header->send_start_micros = Get<int64_t>(meta.data + 8);
  header->payload_bytes = Get<uint64_t>(meta.data + 16);
  const uint8_t encoding = meta.data[4];
  header->encoding = static_cast<TensorEncoding>(encoding);
  const uint64_t elements = static_cast<uint64_t>(header->shape.num_elements());

  uint64_t least = 0;
  bool exact = false;
  bool fits = false;
  bool overflow = false;
  switch (header->encoding) {
    case TensorEncoding::kNone:
      fits = header->is_dead || elements == 0;
      exact = true;
      break;
    case TensorEncoding::kRaw: {
      const size_t element = RawSize(header->dtype);
      fits = element != 0;
      exact = true;
      overflow = __builtin_mul_overflow(elements, static_cast<uint64_t>(element), &least);
      break;
    }
    case TensorEncoding::kStrings:
    case TensorEncoding::kWideStrings:
      fits = header->dtype == tensorflow::DT_STRING;
      overflow = __builtin_mul_overflow(
          elements, header->encoding == TensorEncoding::kWideStrings ? sizeof(uint64_t) : sizeof(uint32_t), &least);
      break;
    case TensorEncoding::kProto:
      fits = header->dtype == tensorflow::DT_VARIANT || header->dtype == tensorflow::DT_RESOURCE;
      least = 1;
      overflow = header->payload_bytes > static_cast<uint64_t>(std::numeric_limits<int32_t>::max());
      break;
    default:
      return Malformed("unknown encoding " + std::to_string(encoding));
  }
  if (!fits || (header->encoding != TensorEncoding::kNone && (header->is_dead || elements == 0))) {
    return Malformed("encoding " + std::to_string(encoding) + " does not fit type " +
                     tensorflow::DataTypeString(header->dtype) + (header->is_dead ? ", dead" : "") + ", shape " +
                     header->shape.DebugString());
  }
  if (overflow || header->payload_bytes < least || (exact && header->payload_bytes != least)) {
    return Malformed(std::to_string(header->payload_bytes) + " bytes for type " +
                     tensorflow::DataTypeString(header->dtype) + ", shape " + header->shape.DebugString());
  }
  return OkStatus();
}

Status TensorReceiver::Prepare(sw_bytes meta, size_t n, const uint64_t* lens, Allocator* allocator, void** bufs) {
  Status status = DecodeTensorHeader(meta, &header_);
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
  uint8_t* base = nullptr;
  if (header_.encoding == TensorEncoding::kNone) {
    if (header_.is_dead) {
      tensor_ = Tensor();
    } else {
      tensor_ = Tensor(allocator, header_.dtype, header_.shape);
    }
  } else if (header_.encoding == TensorEncoding::kRaw) {
    tensorflow::AllocationAttributes attributes;
    attributes.retry_on_failure = false;
    tensor_ = Tensor(allocator, header_.dtype, header_.shape, attributes);
    if (!tensor_.IsInitialized()) return NoMemory(total, header_.dtype, header_.shape);
    base = static_cast<uint8_t*>(tensorflow::DMAHelper::base(&tensor_));
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
    case TensorEncoding::kStrings:
    case TensorEncoding::kWideStrings:
      return FinishStrings(allocator);
    case TensorEncoding::kProto:
      return FinishProto(allocator);
  }
  return OkStatus();
}

Status TensorReceiver::FinishStrings(Allocator* allocator) {
  const bool wide = header_.encoding == TensorEncoding::kWideStrings;
  const size_t width = wide ? sizeof(uint64_t) : sizeof(uint32_t);
  const size_t n = static_cast<size_t>(header_.shape.num_elements());
  const uint8_t* lengths = staging_.get();
  const uint8_t* text = lengths + n * width;
  const uint64_t text_bytes = header_.payload_bytes - n * width;

  // All lengths are checked before the first string is made.
  uint64_t sum = 0;
  for (size_t i = 0; i < n; ++i) {
    const uint64_t length = wide ? Get<uint64_t>(lengths + i * width) : Get<uint32_t>(lengths + i * width);
    if (__builtin_add_overflow(sum, length, &sum) || sum > text_bytes) {
      return Malformed("string " + std::to_string(i) + " of " + std::to_string(n) + " ends behind the payload");
    }
  }
  if (sum != text_bytes) {
    return Malformed(std::to_string(text_bytes - sum) + " bytes behind the last of " + std::to_string(n) + " strings");
  }
  Tensor tensor(allocator, tensorflow::DT_STRING, header_.shape);
  if (!tensor.IsInitialized()) {
    return NoMemory(n * sizeof(tensorflow::tstring), header_.dtype, header_.shape);
  }
  auto strings = tensor.flat<tensorflow::tstring>();
  for (size_t i = 0; i < n; ++i) {
    const size_t length = wide ? Get<uint64_t>(lengths + i * width) : Get<uint32_t>(lengths + i * width);
    strings(i).assign(reinterpret_cast<const char*>(text), length);
    text += length;
  }
  tensor_ = std::move(tensor);
  staging_.reset();
  return OkStatus();
}

Status TensorReceiver::ParseProto(TensorProto* proto) {
  if (header_.encoding != TensorEncoding::kProto || staging_ == nullptr) return Malformed("not a proto");
  if (!proto->ParseFromArray(staging_.get(), static_cast<int>(header_.payload_bytes))) {
    return Malformed("the TensorProto cannot be parsed");
  }
  staging_.reset();
  Status status = CheckProto(*proto);
  if (!status.ok()) return status;
  // CheckProto found the shape valid, so this constructor cannot abort.
  const bool agrees = proto->dtype() == header_.dtype && TensorShape(proto->tensor_shape()) == header_.shape;
  const int values =
      header_.dtype == tensorflow::DT_VARIANT ? proto->variant_val_size() : proto->resource_handle_val_size();
  if (!agrees || values != header_.shape.num_elements()) {
    return Malformed("the TensorProto does not agree with type " + tensorflow::DataTypeString(header_.dtype) +
                     ", shape " + header_.shape.DebugString());
  }
  return OkStatus();
}

Status TensorReceiver::FinishProto(Allocator* allocator) {
  TensorProto proto;
  Status status = ParseProto(&proto);
  if (!status.ok()) return status;
  if (!tensor_.FromProto(allocator, proto)) {
    return Malformed("the objects of a tensor of type " + tensorflow::DataTypeString(header_.dtype) + ", shape " +
                     header_.shape.DebugString() + " cannot be decoded here");
  }
  return OkStatus();
}

void TensorReceiver::Reset() {
  header_ = TensorHeader();
  tensor_ = Tensor();
  staging_.reset();
  prepared_ = false;
}

}  // namespace starwire
