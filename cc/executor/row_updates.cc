#include "cc/executor/row_updates.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <iterator>
#include <string>
#include <vector>

#include "cc/base/compat.h"
#include "cc/base/compat_executor.h"
#include "cc/executor/kernel_override.h"
#include "cc/executor/locked_variables.h"
#include "cc/executor/row_kernel_check.h"
#include "cc/executor/row_math.h"
#include "tensorflow/core/framework/node_def.pb.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/types.h"

namespace starwire {
namespace {

using tensorflow::DataType;
using tensorflow::NodeDef;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

bool Overlap(const Tensor& a, const Tensor& b) {
  const auto first = a.tensor_data(), second = b.tensor_data();
  const std::less<const char*> before;
  return before(first.data(), second.data() + second.size()) && before(second.data(), first.data() + first.size());
}

template <typename T>
bool IsScalar(const Tensor& tensor) {
  return tensor.dims() == 0 && tensor.dtype() == tensorflow::DataTypeToEnum<T>::value;
}

// An update whose arithmetic is ours and whose errors are TensorFlow's.
class RowUpdate : public KernelOverride {
 public:
  using KernelOverride::KernelOverride;

 protected:
  // Makes the update, or returns false and has done nothing.
  virtual bool Update(OpKernelContext* context) = 0;

  // What all updates have in common: tables of one shape, rows of that width for a list of valid ids. If that holds but
  // for the ids, `wrong` is the place of the first one that is not valid.
  template <typename T, typename Id>
  static bool ReadRows(const LockedVariables& tables, int count, const Tensor& rows, const Tensor& ids,
                       std::vector<Id>* checked, SparseRows<T, Id>* out, size_t* wrong = nullptr) {
    const Tensor& table = tables[0];
    for (int i = 0; i < count; ++i) {
      const Tensor& one = tables[i];
      if (!one.IsInitialized() || one.dtype() != tensorflow::DataTypeToEnum<T>::value) return false;
      if (!one.shape().IsSameSize(table.shape()) || Overlap(one, rows) || Overlap(one, ids)) return false;
      for (int other = 0; other < i; ++other) {
        if (Overlap(one, tables[other])) return false;
      }
    }
    if (table.dims() < 1 || rows.dims() != table.dims() || ids.dims() != 1) return false;
    if (rows.dtype() != table.dtype() || ids.dtype() != tensorflow::DataTypeToEnum<Id>::value) return false;
    if (rows.dim_size(0) != ids.dim_size(0)) return false;
    int64_t width = 1;
    for (int dim = 1; dim < table.dims(); ++dim) {
      if (rows.dim_size(dim) != table.dim_size(dim)) return false;
      width *= table.dim_size(dim);
    }
    if (width == 0) return false;
    // The ids may be a reference variable, whose next value nobody has checked.
    const Id* first = ids.flat<Id>().data();
    checked->assign(first, first + ids.dim_size(0));
    *out = {rows.flat<T>().data(), checked->data(), ids.dim_size(0), width};
    const int64_t limit = table.dim_size(0);
    const auto bad = std::find_if(checked->begin(), checked->end(),
                                  [limit](Id id) { return static_cast<uint64_t>(id) >= static_cast<uint64_t>(limit); });
    if (bad == checked->end()) return true;
    if (wrong != nullptr) *wrong = static_cast<size_t>(bad - checked->begin());
    return false;
  }

  // Calls `apply` with all rows, or with parts of them on several threads.
  template <typename Rows, typename Apply>
  static void InParts(OpKernelContext* context, const Rows& rows, Apply apply) {
    const int64_t parts = PartsFor(context, rows.count * rows.width);
    if (parts < 2) {
      apply(rows);
      return;
    }
    ForEachPart(Threads(context), parts, [&](int64_t begin, int64_t end) {
      for (Rows part = rows; begin < end; ++begin) {
        part.part = begin;
        part.parts = parts;
        apply(part);
      }
    });
  }

 private:
  bool Handle(OpKernelContext* context) final {
    if (!Update(context)) return false;
    if (tensorflow::IsRefType(context->input_dtype(0))) context->forward_ref_input_to_ref_output(0, 0);
    return true;
  }
};

template <typename T, typename Id, bool kHasEpsilon>
class AdagradUpdate : public RowUpdate {
 public:
  explicit AdagradUpdate(OpKernelConstruction* context) : RowUpdate(context) {
    OP_REQUIRES_OK(context, context->GetAttr("use_locking", &is_exclusive_));
    OP_REQUIRES_OK(context, context->GetAttr("update_slots", &numbers_.updates_slot));
    numbers_.has_epsilon = kHasEpsilon;
    numbers_.epsilon = T(0);
  }

 private:
  bool Update(OpKernelContext* context) override {
    AdagradNumbers<T> numbers = numbers_;
    if (!IsScalar<T>(context->input(2))) return false;
    numbers.rate = context->input(2).scalar<T>()();
    if (kHasEpsilon) {
      if (!IsScalar<T>(context->input(3))) return false;
      numbers.epsilon = context->input(3).scalar<T>()();
    }
    LockedVariables tables;
    SparseRows<T, Id> rows;
    std::vector<Id> ids;
    constexpr int kRows = kHasEpsilon ? 4 : 3;
    if (!tables.Hold(context, 2, is_exclusive_)) return false;
    size_t wrong = SIZE_MAX;
    if (!ReadRows(tables, 2, context->input(kRows), context->input(kRows + 1), &ids, &rows, &wrong)) {
      if (wrong == SIZE_MAX) return false;
      // In TensorFlow's words. Its kernel reads the ids again after it has checked them.
      context->SetStatus(MakeStatus(kInvalidArgument, "Index " + std::to_string(ids[wrong]) + " at offset " +
                                                          std::to_string(wrong) + " in indices is out of range"));
      return true;
    }
    T* table = const_cast<T*>(tables[0].flat<T>().data());
    T* accumulator = const_cast<T*>(tables[1].flat<T>().data());
    InParts(context, rows, [&](const SparseRows<T, Id>& part) { ApplyAdagrad(part, numbers, table, accumulator); });
    return true;
  }

  bool is_exclusive_ = false;
  AdagradNumbers<T> numbers_;
};

template <typename T, typename Id, bool kIsOfKeras>
class MomentumUpdate : public RowUpdate {
 public:
  explicit MomentumUpdate(OpKernelConstruction* context) : RowUpdate(context) {
    OP_REQUIRES_OK(context, context->GetAttr("use_locking", &is_exclusive_));
    OP_REQUIRES_OK(context, context->GetAttr("use_nesterov", &nesterov_));
  }

 private:
  bool Update(OpKernelContext* context) override {
    const Tensor &rate = context->input(2), &momentum = context->input(5);
    if (!IsScalar<T>(rate) || !IsScalar<T>(momentum)) return false;
    const MomentumNumbers<T> numbers = {rate.scalar<T>()(), momentum.scalar<T>()(), nesterov_};
    LockedVariables tables;
    SparseRows<T, Id> rows;
    std::vector<Id> ids;
    if (!tables.Hold(context, 2, is_exclusive_)) return false;
    if (!ReadRows(tables, 2, context->input(3), context->input(4), &ids, &rows)) return false;
    T* table = const_cast<T*>(tables[0].flat<T>().data());
    T* accumulator = const_cast<T*>(tables[1].flat<T>().data());
    InParts(context, rows, [&](const SparseRows<T, Id>& part) {
      if (kIsOfKeras) {
        ApplyKerasMomentum(part, numbers, table, accumulator);
      } else {
        ApplyMomentum(part, numbers, table, accumulator);
      }
    });
    return true;
  }

  bool is_exclusive_ = false;
  bool nesterov_ = false;
};

template <typename T, typename Id, bool kHasShrinkage>
class FtrlUpdate : public RowUpdate {
 public:
  explicit FtrlUpdate(OpKernelConstruction* context) : RowUpdate(context) {
    OP_REQUIRES_OK(context, context->GetAttr("use_locking", &is_exclusive_));
    // 1.15 does not have it.
    if (context->HasAttr("multiply_linear_by_lr")) {
      OP_REQUIRES_OK(context, context->GetAttr("multiply_linear_by_lr", &scales_linear_));
    }
  }

 private:
  bool Update(OpKernelContext* context) override {
    constexpr int kNumbers = 5, kPower = kHasShrinkage ? 9 : 8;
    for (int i = kNumbers; i <= kPower; ++i) {
      if (!IsScalar<T>(context->input(i))) return false;
    }
    const auto number = [context](int input) { return context->input(input).scalar<T>()(); };
    FtrlNumbers<T> numbers;
    numbers.rate = number(kNumbers);
    numbers.l1 = number(kNumbers + 1);
    numbers.l2 = number(kNumbers + 2);
    numbers.shrinkage = kHasShrinkage ? number(kPower - 1) : T(0);
    numbers.power = -number(kPower);
    numbers.has_shrinkage = kHasShrinkage;
    numbers.scales_linear = scales_linear_;
    // Everything else is an error, or another power.
    const bool usual = numbers.rate > T(0) && numbers.l1 >= T(0) && numbers.l2 >= T(0) && numbers.shrinkage >= T(0);
    if (!usual || numbers.power != T(0.5)) return false;
    LockedVariables tables;
    SparseRows<T, Id> rows;
    std::vector<Id> ids;
    if (!tables.Hold(context, 3, is_exclusive_)) return false;
    if (!ReadRows(tables, 3, context->input(3), context->input(4), &ids, &rows)) return false;
    T* table = const_cast<T*>(tables[0].flat<T>().data());
    T* accumulator = const_cast<T*>(tables[1].flat<T>().data());
    T* linear = const_cast<T*>(tables[2].flat<T>().data());
    InParts(context, rows,
            [&](const SparseRows<T, Id>& part) { ApplyFtrl(part, numbers, table, accumulator, linear); });
    return true;
  }

  bool is_exclusive_ = false;
  bool scales_linear_ = false;
};

template <typename T, typename Id, Sign kSign>
class ScatterUpdate : public RowUpdate {
 public:
  explicit ScatterUpdate(OpKernelConstruction* context) : RowUpdate(context) {
    // TensorFlow always holds a resource variable's lock here.
    is_exclusive_ = context->input_type(0) == tensorflow::DT_RESOURCE;
    if (!is_exclusive_) OP_REQUIRES_OK(context, context->GetAttr("use_locking", &is_exclusive_));
  }

 private:
  bool Update(OpKernelContext* context) override {
    LockedVariables tables;
    SparseRows<T, Id> rows;
    std::vector<Id> ids;
    if (!tables.Hold(context, 1, is_exclusive_)) return false;
    if (!ReadRows(tables, 1, context->input(2), context->input(1), &ids, &rows)) return false;
    T* table = const_cast<T*>(tables[0].flat<T>().data());
    InParts(context, rows, [&](const SparseRows<T, Id>& part) { ScatterRows(part, kSign, table); });
    return true;
  }

  bool is_exclusive_ = false;
};

// An operation that we have kernels for.
struct Known {
  const char* op;
  // The operation with the same arithmetic that is tried: on reference variables, where there is one.
  const char* tried;
  // The attribute with the type of the rows.
  const char* type;
};

constexpr Known kKnown[] = {
    {"SparseApplyAdagrad", "SparseApplyAdagrad", "T"},
    {"ResourceSparseApplyAdagrad", "SparseApplyAdagrad", "T"},
    {"SparseApplyAdagradV2", "SparseApplyAdagradV2", "T"},
    {"ResourceSparseApplyAdagradV2", "SparseApplyAdagradV2", "T"},
    {"SparseApplyMomentum", "SparseApplyMomentum", "T"},
    {"ResourceSparseApplyMomentum", "SparseApplyMomentum", "T"},
    {"ResourceSparseApplyKerasMomentum", "ResourceSparseApplyKerasMomentum", "T"},
    {"SparseApplyFtrl", "SparseApplyFtrl", "T"},
    {"ResourceSparseApplyFtrl", "SparseApplyFtrl", "T"},
    {"SparseApplyFtrlV2", "SparseApplyFtrlV2", "T"},
    {"ResourceSparseApplyFtrlV2", "SparseApplyFtrlV2", "T"},
    {"ScatterAdd", "ScatterAdd", "T"},
    {"ResourceScatterAdd", "ScatterAdd", "dtype"},
    {"ScatterSub", "ScatterSub", "T"},
    {"ResourceScatterSub", "ScatterSub", "dtype"},
};

const Known* FindKnown(const std::string& op) {
  const auto* found =
      std::find_if(std::begin(kKnown), std::end(kKnown), [&op](const Known& one) { return op == one.op; });
  return found == std::end(kKnown) ? nullptr : found;
}

// Registers a kernel for all operations that are tried as `tried`.
template <typename Kernel, typename T, typename Id>
void RegisterFor(const char* tried, const char* name) {
  for (const Known& known : kKnown) {
    if (std::strcmp(known.tried, tried) != 0) continue;
    tensorflow::KernelDefBuilder kernel(known.op);
    kernel.TypeConstraint<T>(known.type).template TypeConstraint<Id>("Tindices");
    RegisterOverride<Kernel>(&kernel, name);
  }
}

template <typename T, typename Id>
void RegisterAll() {
  RegisterFor<AdagradUpdate<T, Id, false>, T, Id>("SparseApplyAdagrad", "starwire::AdagradUpdate");
  RegisterFor<AdagradUpdate<T, Id, true>, T, Id>("SparseApplyAdagradV2", "starwire::AdagradUpdate");
  RegisterFor<MomentumUpdate<T, Id, false>, T, Id>("SparseApplyMomentum", "starwire::MomentumUpdate");
  RegisterFor<MomentumUpdate<T, Id, true>, T, Id>("ResourceSparseApplyKerasMomentum", "starwire::MomentumUpdate");
  RegisterFor<FtrlUpdate<T, Id, false>, T, Id>("SparseApplyFtrl", "starwire::FtrlUpdate");
  RegisterFor<FtrlUpdate<T, Id, true>, T, Id>("SparseApplyFtrlV2", "starwire::FtrlUpdate");
  RegisterFor<ScatterUpdate<T, Id, Sign::kAdd>, T, Id>("ScatterAdd", "starwire::ScatterUpdate");
  RegisterFor<ScatterUpdate<T, Id, Sign::kSubtract>, T, Id>("ScatterSub", "starwire::ScatterUpdate");
}

}  // namespace

KernelSource WithRowUpdates(const KernelSource& source, tensorflow::Device* device) {
  const NodeDef& node = DefOf(source);
  const Known* known = FindKnown(node.op());
  if (known == nullptr || SelectsOverride(node)) return source;
  DataType type, id_type;
  if (!TypeOf(node, known->type, &type)) return source;
  if (type != tensorflow::DT_FLOAT && type != tensorflow::DT_DOUBLE) return source;
  if (!TypeOf(node, "Tindices", &id_type)) return source;
  static const bool possible = HasRowMath() && KernelOverridesAreOn();
  if (!possible || !HasSameBits(known->tried, type, device)) return source;
  return WithOverride(source);
}

void RegisterRowUpdates() {
  RegisterAll<float, int32_t>();
  RegisterAll<float, Int64>();
  RegisterAll<double, int32_t>();
  RegisterAll<double, Int64>();
}

}  // namespace starwire
