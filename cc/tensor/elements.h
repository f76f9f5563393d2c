// The layout of a tensor's elements in a payload. The format is defined in docs/protocol.md, "Tensors".
#ifndef STARWIRE_CC_TENSOR_ELEMENTS_H_
#define STARWIRE_CC_TENSOR_ELEMENTS_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "cc/base/compat.h"
#include "tensorflow/core/framework/allocator.h"
#include "tensorflow/core/framework/tensor.h"

namespace starwire {

enum class TensorEncoding : uint8_t {
  kNone = 0,          // no payload: dead and empty tensors
  kRaw = 1,           // the elements as they lie in memory
  kStrings = 2,       // u32 length of every string, then their bytes
  kWideStrings = 3,   // the same with u64 lengths
  kProto = 4,         // a serialised TensorProto: variants and resource handles
  kFused = 5,         // several tensors as one: cc/tensor/fused.h
  kShortStrings = 6,  // as kStrings, with u8 lengths
  kNarrow = 7,        // int64 numbers as u32: only in star calls
};

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

Status Malformed(const std::string& what);
Status NoMemory(uint64_t bytes, tensorflow::DataType dtype, const tensorflow::TensorShape& shape);
Status Uninitialized(const tensorflow::Tensor& tensor);
// Of a value that it holds TensorFlow says only that encoding it failed.
Status NotEncodable(const tensorflow::Tensor& tensor);
// TensorFlow's CPU allocator waits ten seconds for memory to be freed before it gives up. A reactor must not wait for
// memory that can never be free.
bool MoreThanTheMachineHas(uint64_t bytes);

// DataTypeCanUseMemcpy shifts by its argument, so check the number first.
bool IsKnown(tensorflow::DataType dtype);
// The size of one element; 0 for types whose elements cannot be copied byte by byte.
size_t RawSize(tensorflow::DataType dtype);
// These read a type and dimension sizes that came from a peer.
Status ReadDataType(const uint8_t* at, tensorflow::DataType* dtype);
Status ReadShape(const uint8_t* at, size_t dims, tensorflow::TensorShape* shape);
// Whether such a tensor can have `bytes` bytes of content, as far as its metadata tells. All arguments came from a
// peer.
Status CheckContent(TensorEncoding encoding, tensorflow::DataType dtype, const tensorflow::TensorShape& shape,
                    bool is_dead, uint64_t bytes);

// Strings: a table of their lengths, then their bytes.
struct StringsSize {
  uint64_t table = 0;
  uint64_t text = 0;
  // The one with the smallest lengths that fit.
  TensorEncoding encoding = TensorEncoding::kStrings;

  uint64_t total() const { return table + text; }
};
StringsSize MeasureStrings(const tensorflow::Tensor& tensor);
// Returns the end of what it wrote.
uint8_t* WriteLengths(const tensorflow::Tensor& tensor, TensorEncoding encoding, uint8_t* at);
// Writes the lengths and the text, for which `bytes` were measured. Aborted if another step has assigned other strings
// meanwhile: a reference variable's memory is not locked.
Status WriteStrings(const tensorflow::Tensor& tensor, TensorEncoding encoding, uint8_t* at, uint64_t bytes);
// Creates a tensor from `bytes` bytes that came from a peer. CheckContent has accepted its metadata.
Status ReadStrings(const uint8_t* data, uint64_t bytes, TensorEncoding encoding, const tensorflow::TensorShape& shape,
                   tensorflow::Allocator* allocator, tensorflow::Tensor* out);

}  // namespace starwire

#endif  // STARWIRE_CC_TENSOR_ELEMENTS_H_
