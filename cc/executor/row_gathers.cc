#include "cc/executor/row_gathers.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "cc/base/compat.h"
#include "cc/executor/kernel_override.h"
#include "cc/executor/locked_variables.h"
#include "tensorflow/core/framework/node_def.pb.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"

namespace starwire {
namespace {

using tensorflow::DataType;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

// Rows that are fetched while earlier ones are copied, and how much of each.
constexpr int64_t kRowsAhead = 32;
constexpr size_t kFetchedLine = 64;
constexpr size_t kMostFetched = 4 * kFetchedLine;
constexpr int kMostDimensions = 8;
constexpr int64_t kMostElements = int64_t{1} << 40;

void Fetch(const char* row, size_t bytes) {
  for (size_t line = 0; line < std::min(bytes, kMostFetched); line += kFetchedLine) __builtin_prefetch(row + line);
}

// The rows of a table, and the ids of those to copy.
template <typename Id>
struct Lookup {
  const char* table;
  int64_t rows;
  size_t bytes;  // of a row
  const Id* ids;

  const char* Row(int64_t at) const { return table + static_cast<size_t>(ids[at]) * bytes; }

  // Ids have been checked. But those of a reference variable may change meanwhile, and then must not lead elsewhere.
  const char* CheckedRow(int64_t at) const {
    const auto id = static_cast<uint64_t>(*static_cast<const volatile Id*>(ids + at));
    return table + (id < static_cast<uint64_t>(rows) ? id : 0) * bytes;
  }
};

// Copies the rows of the ids at [begin, end). `kBytes` is the length of a row, or 0 if it is any other.
template <size_t kBytes, typename Id>
void CopyEach(const Lookup<Id>& lookup, int64_t begin, int64_t end, char* to) {
  const size_t bytes = kBytes != 0 ? kBytes : lookup.bytes;
  for (int64_t at = begin; at < std::min(begin + kRowsAhead, end); ++at) Fetch(lookup.Row(at), bytes);
  for (int64_t at = begin; at < end; ++at) {
    if (at + kRowsAhead < end) Fetch(lookup.Row(at + kRowsAhead), bytes);
    std::memcpy(to + static_cast<size_t>(at) * bytes, lookup.CheckedRow(at), bytes);
  }
}

template <typename Id>
void CopyAll(const Lookup<Id>& lookup, int64_t begin, int64_t end, char* to) {
  switch (lookup.bytes) {
    case 4:
      return CopyEach<4>(lookup, begin, end, to);
    case 8:
      return CopyEach<8>(lookup, begin, end, to);
    case 16:
      return CopyEach<16>(lookup, begin, end, to);
    case 32:
      return CopyEach<32>(lookup, begin, end, to);
    case 64:
      return CopyEach<64>(lookup, begin, end, to);
    case 128:
      return CopyEach<128>(lookup, begin, end, to);
    default:
      return CopyEach<0>(lookup, begin, end, to);
  }
}

template <typename T, typename Id>
class RowGather : public KernelOverride {
 public:
  explicit RowGather(OpKernelConstruction* context) : KernelOverride(context) {
    is_variable_ = context->input_type(0) == tensorflow::DT_RESOURCE;
    OP_REQUIRES_OK(context, context->GetAttr("batch_dims", &batch_dims_));
  }

 private:
  bool Handle(OpKernelContext* context) override {
    if (batch_dims_ != 0) return false;
    if (!is_variable_) return IsZero(context->input(2)) && Gather(context, context->input(0));
    LockedVariables variable;
    return variable.Hold(context, 1, false) && Gather(context, variable[0]);
  }

  // Whether it is a scalar, the first dimension.
  static bool IsZero(const Tensor& axis) {
    if (axis.dims() != 0) return false;
    if (axis.dtype() == tensorflow::DT_INT32) return axis.scalar<int32_t>()() == 0;
    return axis.dtype() == tensorflow::DT_INT64 && axis.scalar<Int64>()() == 0;
  }

  bool Gather(OpKernelContext* context, const Tensor& table) {
    const Tensor& ids = context->input(1);
    if (!table.IsInitialized() || table.dtype() != tensorflow::DataTypeToEnum<T>::value) return false;
    if (ids.dtype() != tensorflow::DataTypeToEnum<Id>::value) return false;
    if (table.dims() < 1 || ids.dims() + table.dims() > kMostDimensions) return false;
    int64_t width = 1;
    for (int dim = 1; dim < table.dims(); ++dim) {
      // Of a table without rows.
      if (__builtin_mul_overflow(width, static_cast<int64_t>(table.dim_size(dim)), &width)) return false;
    }
    const int64_t rows = table.dim_size(0), count = ids.NumElements();
    if (width == 0 || rows > std::numeric_limits<Id>::max() || count > kMostElements / width) return false;
    // Not `flat`, which insists on aligned memory.
    const Lookup<Id> lookup = {table.tensor_data().data(), rows, static_cast<size_t>(width) * sizeof(T),
                               reinterpret_cast<const Id*>(ids.tensor_data().data())};
    const auto valid = [rows](Id id) { return static_cast<uint64_t>(id) < static_cast<uint64_t>(rows); };
    if (!std::all_of(lookup.ids, lookup.ids + count, valid)) return false;
    TensorShape shape = ids.shape();
    for (int dim = 1; dim < table.dims(); ++dim) shape.AddDim(table.dim_size(dim));
    Tensor* out = nullptr;
    // TensorFlow's kernel says what is wrong.
    if (!context->allocate_output(0, shape, &out).ok()) return false;
    if (count == 0) return true;
    auto* to = reinterpret_cast<char*>(out->flat<T>().data());
    const int64_t parts = PartsFor(context, count * width);
    if (parts < 2) {
      CopyAll(lookup, 0, count, to);
      return true;
    }
    ForEachPart(Threads(context), parts,
                [&](int64_t first, int64_t last) { CopyAll(lookup, count * first / parts, count * last / parts, to); });
    return true;
  }

  bool is_variable_ = false;
  int32_t batch_dims_ = 0;
};

template <typename T, typename Id>
void RegisterFor() {
  tensorflow::KernelDefBuilder variables("ResourceGather");
  variables.TypeConstraint<T>("dtype").template TypeConstraint<Id>("Tindices");
  RegisterOverride<RowGather<T, Id>>(&variables, "starwire::RowGather");
  tensorflow::KernelDefBuilder tensors("GatherV2");
  tensors.TypeConstraint<T>("Tparams").template TypeConstraint<Id>("Tindices").HostMemory("axis");
  RegisterOverride<RowGather<T, Id>>(&tensors, "starwire::RowGather");
}

}  // namespace

KernelSource WithRowGathers(const KernelSource& source) {
  const tensorflow::NodeDef& node = DefOf(source);
  const bool is_variable = node.op() == "ResourceGather";
  if ((!is_variable && node.op() != "GatherV2") || SelectsOverride(node) || !KernelOverridesAreOn()) return source;
  DataType type, id_type;
  if (!TypeOf(node, is_variable ? "dtype" : "Tparams", &type) || !TypeOf(node, "Tindices", &id_type)) return source;
  const bool has_kernel = (type == tensorflow::DT_FLOAT || type == tensorflow::DT_DOUBLE) &&
                          (id_type == tensorflow::DT_INT32 || id_type == tensorflow::DT_INT64);
  return has_kernel ? WithOverride(source) : source;
}

void RegisterRowGathers() {
  RegisterFor<float, int32_t>();
  RegisterFor<float, Int64>();
  RegisterFor<double, int32_t>();
  RegisterFor<double, Int64>();
}

}  // namespace starwire
