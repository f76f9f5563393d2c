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

// Calls `with` with a number of the type that the encoding has for the length of a string.
template <typename With>
auto WithLength(TensorEncoding encoding, With with) {
  switch (encoding) {
    case TensorEncoding::kShortStrings:
      return with(uint8_t{});
    case TensorEncoding::kWideStrings:
      return with(uint64_t{});
    default:
      return with(uint32_t{});
  }
}

uint64_t Width(TensorEncoding encoding) {
  return WithLength(encoding, [](auto length) -> uint64_t { return sizeof(length); });
}

template <typename T>
uint64_t Length(const uint8_t* table, size_t i) {
  return Get<T>(table + i * sizeof(T));
}

template <typename T>
Status ReadTable(const uint8_t* data, uint64_t bytes, const TensorShape& shape, Allocator* allocator, Tensor* out) {
  const size_t n = static_cast<size_t>(shape.num_elements());
  const uint8_t* text = data + n * sizeof(T);
  const uint64_t text_bytes = bytes - n * sizeof(T);

  // All lengths are checked before the first string is created.
  uint64_t sum = 0;
  for (size_t i = 0; i < n; ++i) {
    if (__builtin_add_overflow(sum, Length<T>(data, i), &sum) || sum > text_bytes) {
      return Malformed("string " + std::to_string(i) + " of " + std::to_string(n) + " ends beyond the payload");
    }
  }
  if (sum != text_bytes) {
    return Malformed(std::to_string(text_bytes - sum) + " bytes after the last of " + std::to_string(n) + " strings");
  }
  const uint64_t memory = n * sizeof(tensorflow::tstring);
  if (MoreThanTheMachineHas(memory)) return NoMemory(memory, tensorflow::DT_STRING, shape);
  Tensor tensor(allocator, tensorflow::DT_STRING, shape);
  if (!tensor.IsInitialized()) return NoMemory(memory, tensorflow::DT_STRING, shape);
  auto strings = tensor.flat<tensorflow::tstring>();
  for (size_t i = 0; i < n; ++i) {
    const size_t length = Length<T>(data, i);
    strings(i).assign(reinterpret_cast<const char*>(text), length);
    text += length;
  }
  *out = std::move(tensor);
  return OkStatus();
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

Status NotEncodable(const Tensor& tensor) {
  return MakeStatus(kInvalidArgument, "a tensor of type " + tensorflow::DataTypeString(tensor.dtype()) + " and shape " +
                                          tensor.shape().DebugString() + " holds a value that cannot be encoded");
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
    case TensorEncoding::kShortStrings:
    case TensorEncoding::kStrings:
    case TensorEncoding::kWideStrings:
      fits = dtype == tensorflow::DT_STRING;
      overflow = __builtin_mul_overflow(elements, Width(encoding), &least);
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
  if (longest <= std::numeric_limits<uint8_t>::max()) size.encoding = TensorEncoding::kShortStrings;
  if (longest > std::numeric_limits<uint32_t>::max()) size.encoding = TensorEncoding::kWideStrings;
  size.table = n * Width(size.encoding);
  return size;
}

uint8_t* WriteLengths(const Tensor& tensor, TensorEncoding encoding, uint8_t* at) {
  const auto strings = tensor.flat<tensorflow::tstring>();
  return WithLength(encoding, [&](auto width) {
    for (int64_t i = 0; i < strings.size(); ++i, at += sizeof(width)) {
      Put(at, static_cast<decltype(width)>(strings(i).size()));
    }
    return at;
  });
}

Status WriteStrings(const Tensor& tensor, TensorEncoding encoding, uint8_t* at, uint64_t bytes) {
  const auto strings = tensor.flat<tensorflow::tstring>();
  const size_t table = static_cast<size_t>(strings.size()) * Width(encoding);
  uint8_t* text = at + table;
  uint8_t* const end = at + bytes;
  const bool fits = WithLength(encoding, [&](auto width) {
    uint8_t* length = at;
    for (int64_t i = 0; i < strings.size(); ++i, length += sizeof(width)) {
      const tensorflow::tstring& string = strings(i);
      const size_t size = string.size();
      if (size > static_cast<size_t>(end - text) || size > std::numeric_limits<decltype(width)>::max()) return false;
      Put(length, static_cast<decltype(width)>(size));
      if (size > 0) std::memcpy(text, string.data(), size);
      text += size;
    }
    return text == end;
  });
  return fits ? OkStatus() : MakeStatus(kAborted, "starwire: a variable of strings was assigned while it was sent");
}

Status ReadStrings(const uint8_t* data, uint64_t bytes, TensorEncoding encoding, const TensorShape& shape,
                   Allocator* allocator, Tensor* out) {
  return WithLength(encoding,
                    [&](auto length) { return ReadTable<decltype(length)>(data, bytes, shape, allocator, out); });
}

}  // namespace starwire
