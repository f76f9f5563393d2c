#include "cc/tensor/variants.h"

#include <cstddef>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "cc/tensor/elements.h"
#include "cc/tensor/fused.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/tensor_shape.pb.h"
#include "tensorflow/core/framework/types.h"

namespace starwire {
namespace {

using tensorflow::DataType;
using tensorflow::Tensor;
using tensorflow::TensorProto;
using tensorflow::TensorShape;
using tensorflow::VariantTensorDataProto;

Status Bad(const VariantTensorDataProto& variant, const std::string& why) {
  return Malformed("a variant of type \"" + variant.type_name() + "\" with " + why);
}

Status Unlike(const VariantTensorDataProto& variant) {
  return Bad(variant, std::to_string(variant.tensors_size()) + " tensors and " +
                          std::to_string(variant.metadata().size()) + " bytes of metadata");
}

bool HasOnlyMetadata(const VariantTensorDataProto& variant, size_t bytes) {
  return variant.tensors_size() == 0 && variant.metadata().size() == bytes;
}

// The checks below come after CheckTensor() of every tensor, so shapes are valid and small.
TensorShape ShapeOf(const TensorProto& proto) { return TensorShape(proto.tensor_shape()); }

bool TakeVarint(const std::string& bytes, size_t* at, uint64_t* value) {
  *value = 0;
  for (int shift = 0; shift < 64 && *at < bytes.size(); shift += 7) {
    const auto byte = static_cast<uint8_t>(bytes[(*at)++]);
    *value |= static_cast<uint64_t>(byte & 0x7f) << shift;
    if ((byte & 0x80) == 0) return true;
  }
  return false;
}

// Metadata: how many elements are unset, the index of each, the elements' type, the maximum length (-1: none), and the
// elements' shape as a TensorShapeProto.
Status CheckTensorList(const VariantTensorDataProto& variant) {
  const std::string& metadata = variant.metadata();
  size_t at = 0;
  uint64_t unset = 0, value = 0;
  // Each index takes at least a byte.
  if (!TakeVarint(metadata, &at, &unset) || unset > metadata.size() - at) {
    return Bad(variant,
               std::to_string(unset) + " unset elements in " + std::to_string(metadata.size()) + " bytes of metadata");
  }
  const uint64_t elements = unset + static_cast<uint64_t>(variant.tensors_size());
  uint64_t next = 0;
  for (uint64_t i = 0; i < unset; ++i) {
    if (!TakeVarint(metadata, &at, &value) || value < next || value >= elements) {
      return Bad(variant, "unset elements outside its " + std::to_string(elements));
    }
    next = value + 1;
  }
  if (!TakeVarint(metadata, &at, &value) || value >= 64 || !IsKnown(static_cast<DataType>(value))) {
    return Bad(variant, "elements of an unknown type");
  }
  const auto dtype = static_cast<DataType>(value);
  constexpr uint64_t kAny = std::numeric_limits<uint64_t>::max();
  if (!TakeVarint(metadata, &at, &value) || (value > static_cast<uint64_t>(INT32_MAX) && value != kAny)) {
    return Bad(variant, "an impossible length limit");
  }
  tensorflow::TensorShapeProto shape;
  const size_t rest = metadata.size() - at;
  if (rest > static_cast<size_t>(INT32_MAX) || !shape.ParseFromArray(metadata.data() + at, static_cast<int>(rest)) ||
      !tensorflow::PartialTensorShape::IsValid(shape)) {
    return Bad(variant, "an invalid shape of its elements");
  }
  const tensorflow::PartialTensorShape of_elements(shape);
  for (const TensorProto& tensor : variant.tensors()) {
    if (tensor.dtype() != dtype || !of_elements.IsCompatibleWith(ShapeOf(tensor))) {
      return Bad(variant, "an element of type " + tensorflow::DataTypeString(tensor.dtype()) + " and shape " +
                              ShapeOf(tensor).DebugString() + " among those of type " +
                              tensorflow::DataTypeString(dtype) + " and shape " + of_elements.DebugString());
    }
  }
  return OkStatus();
}

// Pairs of a key and a value. Keys are hashed and compared by their bytes, or as strings.
Status CheckTensorMap(const VariantTensorDataProto& variant) {
  if (variant.tensors_size() % 2 != 0 || !variant.metadata().empty()) return Unlike(variant);
  for (int i = 0; i < variant.tensors_size(); i += 2) {
    const DataType dtype = variant.tensors(i).dtype();
    if (RawSize(dtype) == 0 && dtype != tensorflow::DT_STRING) {
      return Bad(variant, "a key of type " + tensorflow::DataTypeString(dtype));
    }
  }
  return OkStatus();
}

// The integers of a tensor, which CheckTensor() has found to be small.
bool ReadIntegers(const TensorProto& proto, std::vector<int64_t>* out) {
  Tensor tensor;
  if (proto.dtype() != tensorflow::DT_INT32 && proto.dtype() != tensorflow::DT_INT64) return false;
  if (proto.tensor_shape().dim_size() != 1 || !tensor.FromProto(proto)) return false;
  const int64_t n = tensor.NumElements();
  out->resize(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) {
    (*out)[static_cast<size_t>(i)] =
        proto.dtype() == tensorflow::DT_INT32 ? tensor.flat<int32_t>()(i) : tensor.flat<Int64>()(i);
  }
  return true;
}

// Whether the offsets go from 0 to `end` and never decrease.
bool Ascends(const std::vector<int64_t>& offsets, size_t first, size_t n, int64_t end) {
  if (n == 0 || offsets.size() < first + n || offsets[first] != 0 || offsets[first + n - 1] != end) return false;
  for (size_t i = first + 1; i < first + n; ++i) {
    if (offsets[i] < offsets[i - 1]) return false;
  }
  return true;
}

// Row splits from the outside in, then the values: kernels use the splits as indices.
Status CheckRagged(const VariantTensorDataProto& variant) {
  if (variant.tensors_size() < 1 || !variant.metadata().empty()) return Unlike(variant);
  const int splits = variant.tensors_size() - 1;
  const TensorProto& values = variant.tensors(splits);
  if (splits > 0 && values.tensor_shape().dim_size() == 0) return Bad(variant, "row splits of a scalar");
  std::vector<int64_t> offsets;
  int64_t rows = splits > 0 ? values.tensor_shape().dim(0).size() : 0;
  for (int i = splits - 1; i >= 0; --i) {
    if (!ReadIntegers(variant.tensors(i), &offsets) || !Ascends(offsets, 0, offsets.size(), rows) ||
        variant.tensors(i).dtype() != variant.tensors(0).dtype()) {
      return Bad(variant, "row splits that do not match its values");
    }
    rows = static_cast<int64_t>(offsets.size()) - 1;
  }
  return OkStatus();
}

// Metadata: has_value, as a bool.
Status CheckOptional(const VariantTensorDataProto& variant) {
  if (variant.metadata().size() != sizeof(bool)) return Unlike(variant);
  return variant.metadata()[0] == 0 && variant.tensors_size() != 0 ? Unlike(variant) : OkStatus();
}

// Metadata: whether it was validated, and its type. Tensors: the dense shape, the batches' offsets, for each batch the
// rows' offsets, columns, values. Kernels use all of them as indices.
Status CheckSparseMatrix(const VariantTensorDataProto& variant) {
  struct Metadata {
    bool validated;
    DataType dtype;
  };
  static_assert(sizeof(Metadata) == 8, "as TensorFlow's");
  if (variant.tensors_size() != 5 || variant.metadata().size() != sizeof(Metadata) || variant.metadata()[0] != 1) {
    return Unlike(variant);
  }
  int32_t dtype = 0;
  std::memcpy(&dtype, variant.metadata().data() + offsetof(Metadata, dtype), sizeof(dtype));
  std::vector<int64_t> dense, batches, rows, columns;
  const TensorProto& values = variant.tensors(4);
  const bool types =
      variant.tensors(0).dtype() == tensorflow::DT_INT64 && variant.tensors(1).dtype() == tensorflow::DT_INT32 &&
      variant.tensors(2).dtype() == tensorflow::DT_INT32 && variant.tensors(3).dtype() == tensorflow::DT_INT32 &&
      values.dtype() == dtype && values.tensor_shape().dim_size() == 1;
  if (!types || !ReadIntegers(variant.tensors(0), &dense) || !ReadIntegers(variant.tensors(1), &batches) ||
      !ReadIntegers(variant.tensors(2), &rows) || !ReadIntegers(variant.tensors(3), &columns)) {
    return Bad(variant, "tensors that do not form a sparse matrix");
  }
  const Status lies = Bad(variant, "offsets that do not match its values");
  const auto nonzero = static_cast<int64_t>(columns.size());
  if (dense.size() < 2 || dense.size() > 3 || values.tensor_shape().dim(0).size() != nonzero) return lies;
  const int64_t height = dense[dense.size() - 2], width = dense.back();
  const int64_t depth = dense.size() == 3 ? dense[0] : 1;
  if (height < 0 || width < 0 || depth < 0 || batches.size() != static_cast<uint64_t>(depth) + 1 ||
      !Ascends(batches, 0, batches.size(), nonzero)) {
    return lies;
  }
  uint64_t all_rows = 0;
  if (__builtin_mul_overflow(static_cast<uint64_t>(height) + 1, static_cast<uint64_t>(depth), &all_rows) ||
      rows.size() != all_rows) {
    return lies;
  }
  const auto block = static_cast<size_t>(height) + 1;
  for (size_t batch = 0; batch + 1 < batches.size(); ++batch) {
    if (!Ascends(rows, batch * block, block, batches[batch + 1] - batches[batch])) return lies;
  }
  for (int64_t column : columns) {
    if (column < 0 || column >= width) return lies;
  }
  return OkStatus();
}

Status CheckFused(const VariantTensorDataProto& variant) {
  // FusedTensors::Decode() checks the metadata itself.
  return variant.tensors_size() == 0 ? OkStatus() : Unlike(variant);
}

using Check = Status (*)(const VariantTensorDataProto&);

struct Accepted {
  const char* type;
  Check check;
};

// TensorFlow's own tests put numbers into variants. Not accepted, although TensorFlow has decoders for them:
// "tensorflow::Iterator", whose decoder decompresses unchecked data; "tensorflow.data.CompressedElement", which
// UncompressElement decompresses into tensors of the sizes that it is told; and the wrappers of data sets, which
// TensorFlow itself cannot send.
constexpr Accepted kAccepted[] = {
    {"int", [](const VariantTensorDataProto& v) { return HasOnlyMetadata(v, sizeof(int)) ? OkStatus() : Unlike(v); }},
    {"bool", [](const VariantTensorDataProto& v) { return HasOnlyMetadata(v, sizeof(bool)) ? OkStatus() : Unlike(v); }},
    {"float",
     [](const VariantTensorDataProto& v) { return HasOnlyMetadata(v, sizeof(float)) ? OkStatus() : Unlike(v); }},
    {"double",
     [](const VariantTensorDataProto& v) { return HasOnlyMetadata(v, sizeof(double)) ? OkStatus() : Unlike(v); }},
    {"tensorflow::Tensor",
     [](const VariantTensorDataProto& v) { return v.tensors_size() == 1 ? OkStatus() : Unlike(v); }},
    {"tensorflow::TensorList", &CheckTensorList},
    {"tensorflow::TensorMap", &CheckTensorMap},
    {"RaggedTensorVariant", &CheckRagged},
    {"tensorflow::data::Optional", &CheckOptional},
    {"tensorflow::CSRSparseMatrix", &CheckSparseMatrix},
    // A protocol buffer and tensors.
    {"CompositeTensorVariant", [](const VariantTensorDataProto&) { return OkStatus(); }},
    {FusedTensors::kTypeName, &CheckFused},
};

}  // namespace

Status CheckVariant(const VariantTensorDataProto& variant, ObjectBudget* budget) {
  // An element that was never set.
  if (variant.type_name().empty()) return HasOnlyMetadata(variant, 0) ? OkStatus() : Unlike(variant);
  for (const Accepted& accepted : kAccepted) {
    if (variant.type_name() != accepted.type) continue;
    for (const TensorProto& tensor : variant.tensors()) {
      Status status = CheckTensor(tensor, budget);
      if (!status.ok()) return status;
    }
    return accepted.check(variant);
  }
  // No real type has a long or unprintable name.
  std::string name = variant.type_name().substr(0, 100);
  for (char& c : name) c = c >= ' ' && c <= '~' ? c : '?';
  return MakeStatus(kInvalidArgument, "a variant of type \"" + name + "\" is not accepted from other tasks");
}

}  // namespace starwire
