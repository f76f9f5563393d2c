#include "cc/star/row_ops.h"

#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "cc/base/compat.h"
#include "cc/base/register_kernel.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_def_builder.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/platform/denormal.h"

namespace starwire {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

// Numbers ids by their first appearance.
template <typename Id>
class Numbering {
 public:
  explicit Numbering(size_t ids) {
    size_t slots = 16;
    while (slots < ids * 2) slots *= 2;
    slots_.assign(slots, -1);
    unique_.reserve(ids);
  }

  int32_t NumberOf(Id id) {
    const size_t mask = slots_.size() - 1;
    // Ids are often consecutive or multiples of a number: Fibonacci hashing spreads both.
    size_t at = static_cast<size_t>((static_cast<uint64_t>(id) * 0x9E3779B97F4A7C15u) >> 32) & mask;
    while (slots_[at] >= 0) {
      if (unique_[static_cast<size_t>(slots_[at])] == id) return slots_[at];
      at = (at + 1) & mask;
    }
    slots_[at] = static_cast<int32_t>(unique_.size());
    unique_.push_back(id);
    return slots_[at];
  }

  const std::vector<Id>& unique() const { return unique_; }

 private:
  std::vector<int32_t> slots_;  // -1: free
  std::vector<Id> unique_;
};

template <typename Id>
class UniqueIds : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    const Tensor& ids = context->input(0);
    OP_REQUIRES(context, ids.NumElements() < std::numeric_limits<int32_t>::max() / 4,
                MakeStatus(kInvalidArgument, "starwire: " + name() + " got " + std::to_string(ids.NumElements()) +
                                                 " ids, which are too many"));
    Tensor* positions = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(1, ids.shape(), &positions));
    // A slice of other ids is not aligned as flat() demands.
    const auto* from = reinterpret_cast<const Id*>(ids.tensor_data().data());
    auto to = positions->flat<int32_t>();
    Numbering<Id> numbers(static_cast<size_t>(ids.NumElements()));
    for (int64_t i = 0; i < ids.NumElements(); ++i) to(i) = numbers.NumberOf(from[i]);
    const std::vector<Id>& unique = numbers.unique();
    Tensor* out = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({static_cast<int64_t>(unique.size())}), &out));
    if (!unique.empty()) std::memcpy(out->flat<Id>().data(), unique.data(), unique.size() * sizeof(Id));
  }
};

// The shape of as many rows as `first` has elements. TensorShape ends the process where the number of elements
// overflows, even if a dimension behind is 0, and where there are too many dimensions.
Status ShapeOfRows(const std::string& op, TensorShape first, const TensorShape& rows, TensorShape* out) {
  bool fits = first.dims() + rows.dims() - 1 <= TensorShape::MaxDimensions();
  int64_t elements = first.num_elements();
  for (int dim = 1; fits && dim < rows.dims(); ++dim) {
    fits = !__builtin_mul_overflow(elements, static_cast<int64_t>(rows.dim_size(dim)), &elements);
  }
  if (!fits) {
    return MakeStatus(kInvalidArgument, "starwire: " + op + " got rows of shape " + rows.DebugString() +
                                            " for positions of shape " + first.DebugString() +
                                            ", which are too many numbers");
  }
  for (int dim = 1; dim < rows.dims(); ++dim) first.AddDim(rows.dim_size(dim));
  *out = std::move(first);
  return OkStatus();
}

class CopyRows : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    const Tensor& rows = context->input(0);
    const Tensor& positions = context->input(1);
    OP_REQUIRES(context, rows.dims() >= 1,
                MakeStatus(kInvalidArgument, "starwire: " + name() + " got no rows, but " + rows.DebugString()));
    TensorShape shape;
    OP_REQUIRES_OK(context, ShapeOfRows(name(), positions.shape(), rows.shape(), &shape));
    Tensor* out = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, shape, &out));
    const int64_t count = rows.dim_size(0);
    const auto from = positions.flat<int32_t>();
    const size_t bytes = count == 0 ? 0 : rows.TotalBytes() / static_cast<size_t>(count);
    const char* source = rows.tensor_data().data();
    char* target = const_cast<char*>(out->tensor_data().data());
    for (int64_t i = 0; i < from.size(); ++i) {
      const int32_t row = from(i);
      OP_REQUIRES(context, row >= 0 && row < count,
                  MakeStatus(kInternal, "starwire: " + name() + " got " + std::to_string(count) +
                                            " rows, but needs row " + std::to_string(row)));
      if (bytes != 0)
        std::memcpy(target + static_cast<size_t>(i) * bytes, source + static_cast<size_t>(row) * bytes, bytes);
    }
  }
};

template <typename T>
class SumRows : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    const Tensor& ids = context->input(0);
    const Tensor& rows = context->input(1);
    const Tensor& unique = context->input(2);
    const Tensor& positions = context->input(3);
    OP_REQUIRES(context, ids.dims() == 1,
                MakeStatus(kInvalidArgument, "unique expects a 1D vector. (" + name() + " got ids of shape " +
                                                 ids.shape().DebugString() + ")"));
    OP_REQUIRES(context, rows.dims() >= 1 && rows.dim_size(0) == ids.dim_size(0),
                MakeStatus(kInvalidArgument, "data.shape = " + rows.shape().DebugString() +
                                                 " does not start with segment_ids.shape = " +
                                                 ids.shape().DebugString() + " (" + name() + ")"));
    const int64_t count = rows.dim_size(0), different = unique.NumElements();
    OP_REQUIRES(context, positions.NumElements() == count,
                MakeStatus(kInternal, "starwire: " + name() + " got " + std::to_string(count) + " rows, but " +
                                          std::to_string(positions.NumElements()) + " positions"));
    TensorShape shape;
    OP_REQUIRES_OK(context, ShapeOfRows(name(), TensorShape({different}), rows.shape(), &shape));
    Tensor* sums = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, shape, &sums));
    const int64_t width = count == 0 ? 0 : rows.NumElements() / count;
    const auto at = positions.flat<int32_t>();
    const T* __restrict from = reinterpret_cast<const T*>(rows.tensor_data().data());
    T* __restrict to = sums->flat<T>().data();
    // As UnsortedSegmentSum: begins with zeros, adds in the order of the rows, and flushes denormal numbers, as
    // TensorFlow's kernels do on every thread that they run on.
    const tensorflow::port::ScopedFlushDenormal flush;
    for (int64_t i = 0; i < sums->NumElements(); ++i) to[i] = T(0);
    for (int64_t row = 0; row < count; ++row) {
      OP_REQUIRES(context, at(row) >= 0 && at(row) < different,
                  MakeStatus(kInternal, "starwire: " + name() + " got " + std::to_string(different) +
                                            " ids, but needs id " + std::to_string(at(row))));
      T* __restrict sum = to + at(row) * width;
      for (int64_t i = 0; i < width; ++i) sum[i] += from[row * width + i];
    }
  }
};

Status UniqueShapes(InferenceContext* context) {
  context->set_output(0, context->Vector(InferenceContext::kUnknownDim));
  context->set_output(1, context->input(0));
  return OkStatus();
}

Status CopiedShape(InferenceContext* context) {
  ShapeHandle row, out;
  Status status = context->Subshape(context->input(0), 1, &row);
  if (status.ok()) status = context->Concatenate(context->input(1), row, &out);
  if (status.ok()) context->set_output(0, out);
  return status;
}

Status SummedShape(InferenceContext* context) {
  ShapeHandle row, out;
  Status status = context->Subshape(context->input(1), 1, &row);
  if (status.ok()) status = context->Concatenate(context->Vector(InferenceContext::kUnknownDim), row, &out);
  if (status.ok()) context->set_output(0, out);
  return status;
}

template <typename Id>
void RegisterUniqueIds() {
  tensorflow::KernelDefBuilder unique(kUniqueIdsOp);
  unique.TypeConstraint<Id>("Tids");
  RegisterCpuKernel<UniqueIds<Id>>(&unique, "starwire::UniqueIds");
}

template <typename T>
void RegisterSumRows() {
  tensorflow::KernelDefBuilder sums(kSumRowsOp);
  sums.TypeConstraint<T>("T");
  RegisterCpuKernel<SumRows<T>>(&sums, "starwire::SumRows");
}

}  // namespace

bool CanCopyRows(tensorflow::DataType type) {
  switch (type) {
    case tensorflow::DT_FLOAT:
    case tensorflow::DT_DOUBLE:
    case tensorflow::DT_HALF:
    case tensorflow::DT_BFLOAT16:
    case tensorflow::DT_INT32:
    case tensorflow::DT_INT64:
      return true;
    default:
      return false;
  }
}

void RegisterRowOps() {
  auto* ops = tensorflow::OpRegistry::Global();
  ops->Register([](tensorflow::OpRegistrationData* data) -> Status {
    return tensorflow::OpDefBuilder(kUniqueIdsOp)
        .Input("ids: Tids")
        .Output("unique: Tids")
        .Output("positions: int32")
        .Attr("Tids: {int32, int64}")
        .SetShapeFn(UniqueShapes)
        .Doc("Each id once, in the order of its first appearance, and where each input went.")
        .Finalize(data);
  });
  ops->Register([](tensorflow::OpRegistrationData* data) -> Status {
    return tensorflow::OpDefBuilder(kCopyRowsOp)
        .Input("rows: T")
        .Input("positions: int32")
        .Output("copies: T")
        .Attr("T: {float, double, half, bfloat16, int32, int64}")
        .SetShapeFn(CopiedShape)
        .Doc("The row at each position.")
        .Finalize(data);
  });
  ops->Register([](tensorflow::OpRegistrationData* data) -> Status {
    return tensorflow::OpDefBuilder(kSumRowsOp)
        .Input("ids: Tids")
        .Input("rows: T")
        .Input("unique: Tids")
        .Input("positions: int32")
        .Output("sums: T")
        .Attr("Tids: {int32, int64}")
        .Attr("T: {float, double}")
        .SetShapeFn(SummedShape)
        .Doc("The sum of the rows of each unique id, by the positions of the ids among them.")
        .Finalize(data);
  });
  RegisterUniqueIds<int32_t>();
  RegisterUniqueIds<Int64>();
  RegisterSumRows<float>();
  RegisterSumRows<double>();
  tensorflow::KernelDefBuilder copies(kCopyRowsOp);
  RegisterCpuKernel<CopyRows>(&copies, "starwire::CopyRows");
}

}  // namespace starwire
