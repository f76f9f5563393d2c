#include "cc/tensor/elements.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "cc/base/compat_tensor.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/platform/tstring.h"

namespace starwire {

using tensorflow::Allocator;
using tensorflow::DataType;
using tensorflow::Tensor;
using tensorflow::TensorShape;

namespace {

constexpr size_t kMaxDims = 254;

size_t Width(bool wide) { return wide ? sizeof(uint64_t) : sizeof(uint32_t); }

uint64_t Length(const uint8_t* table, size_t i, bool wide) {
  return wide ? Get<uint64_t>(table + i * sizeof(uint64_t)) : Get<uint32_t>(table + i * sizeof(uint32_t));
}

}  // namespace

Status Malformed(const std::string& what) { return MakeStatus(kDataLoss, "malformed tensor: " + what); }

Status NoMemory(uint64_t bytes, DataType dtype, const TensorShape& shape) {
  return MakeStatus(kResourceExhausted, "out of memory: " + std::to_string(bytes) +
                                            " bytes for a received tensor of type " +
                                            tensorflow::DataTypeString(dtype) + " and shape " + shape.DebugString());
}

Status Uninitialized(const Tensor& tensor) {
  return MakeStatus(kInvalidArgument, "an uninitialized tensor of type " + tensorflow::DataTypeString(tensor.dtype()) +
                                          " and shape " + tensor.shape().DebugString() + " cannot be sent");
}

bool MoreThanTheMachineHas(uint64_t bytes) {
  static const uint64_t all = [] {
    const long pages = sysconf(_SC_PHYS_PAGES);
    const long size = sysconf(_SC_PAGESIZE);
    return pages > 0 && size > 0 ? static_cast<uint64_t>(pages) * static_cast<uint64_t>(size)
                                 : std::numeric_limits<uint64_t>::max();
  }();
  return bytes > all;
}

bool IsKnown(DataType dtype) {
  return dtype > tensorflow::DT_INVALID && dtype < 64 && tensorflow::DataType_IsValid(dtype);
}

size_t RawSize(DataType dtype) {
  if (!IsKnown(dtype) || !tensorflow::DataTypeCanUseMemcpy(dtype)) return 0;
  const int size = tensorflow::DataTypeSize(dtype);
  return size > 0 ? static_cast<size_t>(size) : 0;
}

Status ReadDataType(const uint8_t* at, DataType* dtype) {
  const uint16_t number = Get<uint16_t>(at);
  *dtype = static_cast<DataType>(number);
  if (number < 64 && IsKnown(*dtype)) return OkStatus();
  return Malformed("type " + std::to_string(number) + ", which this version of TensorFlow does not know");
}

Status ReadShape(const uint8_t* at, size_t dims, TensorShape* shape) {
  if (dims > kMaxDims) return Malformed(std::to_string(dims) + " dimensions");
  Int64 sizes[kMaxDims];
  for (size_t i = 0; i < dims; ++i) sizes[i] = Get<int64_t>(at + 8 * i);
  const Status status = BuildShape(sizes, dims, shape);
  return status.ok() ? OkStatus() : Malformed(StatusMessage(status));
}

Status CheckContent(TensorEncoding encoding, DataType dtype, const TensorShape& shape, bool is_dead, uint64_t bytes) {
  const uint64_t elements = static_cast<uint64_t>(shape.num_elements());
  uint64_t least = 0;
  bool exact = false;
  bool fits = false;
  bool overflow = false;
  switch (encoding) {
    case TensorEncoding::kNone:
      fits = is_dead || elements == 0;
      exact = true;
      break;
    case TensorEncoding::kRaw: {
      const size_t element = RawSize(dtype);
      fits = element != 0;
      exact = true;
      overflow = __builtin_mul_overflow(elements, static_cast<uint64_t>(element), &least);
      break;
    }
    case TensorEncoding::kStrings:
    case TensorEncoding::kWideStrings:
      fits = dtype == tensorflow::DT_STRING;
      overflow = __builtin_mul_overflow(elements, Width(encoding == TensorEncoding::kWideStrings), &least);
      break;
    case TensorEncoding::kProto:
      fits = dtype == tensorflow::DT_VARIANT || dtype == tensorflow::DT_RESOURCE;
      least = 1;
      overflow = bytes > static_cast<uint64_t>(std::numeric_limits<int32_t>::max());
      break;
    case TensorEncoding::kFused:
      fits = dtype == tensorflow::DT_VARIANT && shape.dims() == 0;
      break;
    default:
      return Malformed("unknown encoding " + std::to_string(static_cast<int>(encoding)));
  }
  if (!fits || (encoding != TensorEncoding::kNone && (is_dead || elements == 0))) {
    return Malformed("encoding " + std::to_string(static_cast<int>(encoding)) + " does not fit type " +
                     tensorflow::DataTypeString(dtype) + (is_dead ? ", dead" : "") + ", shape " + shape.DebugString());
  }
  if (overflow || bytes < least || (exact && bytes != least)) {
    return Malformed(std::to_string(bytes) + " bytes for type " + tensorflow::DataTypeString(dtype) + ", shape " +
                     shape.DebugString());
  }
  return OkStatus();
}

StringsSize MeasureStrings(const Tensor& tensor) {
  const auto strings = tensor.flat<tensorflow::tstring>();
  const size_t n = static_cast<size_t>(strings.size());
  StringsSize size;
  uint64_t longest = 0;
  for (size_t i = 0; i < n; ++i) {
    size.text += strings(i).size();
    longest = std::max<uint64_t>(longest, strings(i).size());
  }
  size.wide = longest > std::numeric_limits<uint32_t>::max();
  size.table = n * Width(size.wide);
  return size;
}

uint8_t* WriteLengths(const Tensor& tensor, bool wide, uint8_t* at) {
  const auto strings = tensor.flat<tensorflow::tstring>();
  const size_t n = static_cast<size_t>(strings.size());
  for (size_t i = 0; i < n; ++i) {
    if (wide) {
      Put<uint64_t>(at, strings(i).size());
    } else {
      Put<uint32_t>(at, static_cast<uint32_t>(strings(i).size()));
    }
    at += Width(wide);
  }
  return at;
}

uint8_t* WriteText(const Tensor& tensor, uint8_t* at) {
  const auto strings = tensor.flat<tensorflow::tstring>();
  const size_t n = static_cast<size_t>(strings.size());
  for (size_t i = 0; i < n; ++i) {
    if (strings(i).empty()) continue;
    std::memcpy(at, strings(i).data(), strings(i).size());
    at += strings(i).size();
  }
  return at;
}

Status ReadStrings(const uint8_t* data, uint64_t bytes, bool wide, const TensorShape& shape, Allocator* allocator,
                   Tensor* out) {
  const size_t n = static_cast<size_t>(shape.num_elements());
  const uint8_t* text = data + n * Width(wide);
  const uint64_t text_bytes = bytes - n * Width(wide);

  // All lengths are checked before the first string is created.
  uint64_t sum = 0;
  for (size_t i = 0; i < n; ++i) {
    if (__builtin_add_overflow(sum, Length(data, i, wide), &sum) || sum > text_bytes) {
      return Malformed("string " + std::to_string(i) + " of " + std::to_string(n) + " ends beyond the payload");
    }
  }
  if (sum != text_bytes) {
    return Malformed(std::to_string(text_bytes - sum) + " bytes after the last of " + std::to_string(n) + " strings");
  }
  Tensor tensor(allocator, tensorflow::DT_STRING, shape);
  if (!tensor.IsInitialized()) return NoMemory(n * sizeof(tensorflow::tstring), tensorflow::DT_STRING, shape);
  auto strings = tensor.flat<tensorflow::tstring>();
  for (size_t i = 0; i < n; ++i) {
    const size_t length = Length(data, i, wide);
    strings(i).assign(reinterpret_cast<const char*>(text), length);
    text += length;
  }
  *out = std::move(tensor);
  return OkStatus();
}

}  // namespace starwire
