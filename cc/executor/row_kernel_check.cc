#include "cc/executor/row_kernel_check.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "cc/base/compat.h"
#include "cc/base/compat_executor.h"
#include "cc/executor/kernel_override.h"
#include "tensorflow/core/framework/attr_value.pb.h"
#include "tensorflow/core/framework/node_def.pb.h"
#include "tensorflow/core/framework/node_def_util.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_def.pb.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/platform/logging.h"
#include "tensorflow/core/platform/mutex.h"
#include "tensorflow/core/public/version.h"

namespace starwire {
namespace {

using tensorflow::DataType;
using tensorflow::OpKernel;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::TensorValue;

constexpr int64_t kWidest = 35;

// Narrow rows are many, because powers differ from roots for few numbers.
int64_t Updates(int64_t width) { return std::max<int64_t>(5, 4096 / (width * width)); }
int64_t Rows(int64_t width) { return Updates(width) + 1; }

// The same numbers each time, of all magnitudes.
class Numbers {
 public:
  double Next() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    const double mantissa = static_cast<double>(state_ >> 40) / (1 << 24) + 1.0;
    const int exponent = static_cast<int>((state_ >> 20) % 40) - 20;
    switch ((state_ >> 30) % 37) {
      case 0:
        return 0.0;
      case 1:
        return -0.0;
      case 2:
        return 1e-40;  // not a normal number as float
      default:
        return std::ldexp((state_ >> 29) % 2 == 0 ? mantissa : -mantissa, exponent);
    }
  }

 private:
  uint64_t state_ = 20;
};

template <typename T>
void Fill(Numbers* numbers, bool positive, Tensor* tensor) {
  auto values = tensor->flat<T>();
  for (int64_t i = 0; i < values.size(); ++i) {
    const double number = numbers->Next();
    values(i) = static_cast<T>(positive ? std::fabs(number) : number);
  }
}

Tensor Filled(DataType type, const TensorShape& shape, bool positive, Numbers* numbers) {
  Tensor tensor(type, shape);
  if (type == tensorflow::DT_FLOAT) Fill<float>(numbers, positive, &tensor);
  if (type == tensorflow::DT_DOUBLE) Fill<double>(numbers, positive, &tensor);
  return tensor;
}

Tensor Scalar(DataType type, double value) {
  Tensor tensor(type, TensorShape({}));
  if (type == tensorflow::DT_FLOAT) tensor.scalar<float>()() = static_cast<float>(value);
  if (type == tensorflow::DT_DOUBLE) tensor.scalar<double>()() = value;
  return tensor;
}

// In no order, some of them twice.
Tensor Ids(int64_t width) {
  Tensor ids(tensorflow::DT_INT32, TensorShape({Updates(width)}));
  for (int64_t i = 0; i < Updates(width); ++i) {
    const int64_t place = i % 4 == 3 ? i - 2 : i;
    ids.flat<int32_t>()(i) = static_cast<int32_t>(place * 5 % Rows(width));
  }
  return ids;
}

// An operation with its inputs, by the names that TensorFlow's sparse updates have in common.
class Trial {
 public:
  using Attributes = std::map<std::string, bool>;

  Trial(const tensorflow::OpDef& op, DataType type, tensorflow::Device* device)
      : op_(op), type_(type), device_(device) {}

  // With every combination of the attributes that change the arithmetic.
  Status Run(bool* equal) const {
    std::vector<std::string> names;
    for (const auto& attribute : op_.attr()) {
      if (attribute.type() == "bool" && attribute.name() != "use_locking") names.push_back(attribute.name());
    }
    *equal = true;
    Status status;
    for (uint32_t settings = 0; settings < 1u << names.size(); ++settings) {
      Attributes attributes;
      for (size_t i = 0; i < names.size(); ++i) attributes[names[i]] = (settings >> i & 1) != 0;
      if (status.ok() && *equal) status = Run(attributes, equal);
    }
    return status;
  }

 private:
  using Argument = tensorflow::OpDef::ArgDef;

  static bool IsResource(const Argument& argument) { return argument.type() == tensorflow::DT_RESOURCE; }
  static bool IsTable(const Argument& argument) { return argument.is_ref() || IsResource(argument); }

  Status Run(const Attributes& attributes, bool* equal) const {
    std::unique_ptr<OpKernel> stock, ours;
    Status status = Create(attributes, false, &stock);
    if (status.ok()) status = Create(attributes, true, &ours);
    for (int64_t width = 1; status.ok() && *equal && width <= kWidest; ++width) {
      std::vector<Tensor> one, other;
      status = Apply(stock.get(), width, &one);
      if (status.ok()) status = Apply(ours.get(), width, &other);
      for (size_t i = 0; status.ok() && i < one.size(); ++i) {
        *equal = *equal && one[i].tensor_data() == other[i].tensor_data();
      }
    }
    return status;
  }

  Status Create(const Attributes& attributes, bool labelled, std::unique_ptr<OpKernel>* out) const {
    tensorflow::NodeDef node;
    node.set_name("starwire_trial");
    node.set_op(op_.name());
    for (const auto& argument : op_.input_arg()) node.add_input(argument.name());
    tensorflow::AddNodeAttr("T", type_, &node);
    tensorflow::AddNodeAttr("Tindices", tensorflow::DT_INT32, &node);
    for (const auto& [name, value] : attributes) tensorflow::AddNodeAttr(name, value, &node);
    tensorflow::AddDefaultsToNodeDef(op_, &node);
    if (labelled) SelectOverride(&node);
    Status status;
    *out = tensorflow::CreateOpKernel(tensorflow::DeviceType(tensorflow::DEVICE_CPU), device_,
                                      device_->GetAllocator(tensorflow::AllocatorAttributes()), node,
                                      TF_GRAPH_DEF_VERSION, &status);
    return status;
  }

  Tensor Input(const Argument& argument, int64_t width, Numbers* numbers) const {
    const std::string& name = argument.name();
    if (name == "indices") return Ids(width);
    if (IsTable(argument)) return Filled(type_, TensorShape({Rows(width), width}), name == "accum", numbers);
    if (name == "grad" || name == "updates") {
      return Filled(type_, TensorShape({Updates(width), width}), false, numbers);
    }
    // The one power that we have.
    if (name == "lr_power") return Scalar(type_, -0.5);
    const double number = std::fabs(numbers->Next());
    // Regularization is often switched off; rates are not zero.
    const bool optional = name == "l1" || name == "l2" || name == "l2_shrinkage";
    return Scalar(type_, optional && width % 3 == 0 ? 0.0 : number + std::ldexp(1.0, -20));
  }

  // Runs a kernel; returns the tables afterwards.
  Status Apply(OpKernel* kernel, int64_t width, std::vector<Tensor>* tables) const {
    Numbers numbers;
    std::vector<Tensor> tensors;
    for (const auto& argument : op_.input_arg()) tensors.push_back(Input(argument, width, &numbers));
    std::vector<Tensor> handles(tensors.size());
    tensorflow::mutex mutex;
    std::vector<TensorValue> inputs;
    for (int i = 0; i < op_.input_arg_size(); ++i) {
      const auto at = static_cast<size_t>(i);
      Tensor* tensor = IsResource(op_.input_arg(i)) ? &handles[at] : &tensors[at];
      inputs.push_back(op_.input_arg(i).is_ref() ? TensorValue(&mutex, tensor) : TensorValue(tensor));
    }
    const std::vector<tensorflow::AllocatorAttributes> attributes(inputs.size());
    tensorflow::AllocatorAttributes output;
    tensorflow::ResourceMgr variables;
    OpKernelContext::Params params;
    params.device = device_;
    params.op_kernel = kernel;
    params.resource_manager = &variables;
    KernelInputs<OpKernelContext::Params> lists;
    lists.Set(&params, inputs.data(), attributes.data(), inputs.size());
    params.output_attr_array = &output;
    OpKernelContext context(&params, op_.output_arg_size());
    for (int i = 0; i < op_.input_arg_size(); ++i) {
      const auto at = static_cast<size_t>(i);
      if (!IsResource(op_.input_arg(i))) continue;
      handles[at] = Tensor(tensorflow::DT_RESOURCE, TensorShape({}));
      const Status status = MakeVariable(&context, op_.input_arg(i).name(), tensors[at], &handles[at]);
      if (!status.ok()) return status;
    }
    kernel->Compute(&context);
    for (int i = 0; i < op_.input_arg_size(); ++i) {
      if (IsTable(op_.input_arg(i))) tables->push_back(tensors[static_cast<size_t>(i)]);
    }
    return context.status();
  }

  // A resource variable with this memory, in the mode that sparse updates leave it in.
  Status MakeVariable(OpKernelContext* context, const std::string& name, const Tensor& value, Tensor* handle) const {
    auto* variable = new tensorflow::Var(type_);
    *variable->tensor() = value;
    variable->is_initialized = true;
    variable->copy_on_read_mode = true;
    const auto made = tensorflow::MakeResourceHandle<tensorflow::Var>(context, "starwire_trial", name);
    handle->scalar<tensorflow::ResourceHandle>()() = made;
    return tensorflow::CreateResource(context, made, variable);
  }

  const tensorflow::OpDef& op_;
  const DataType type_;
  tensorflow::Device* const device_;
};

bool Try(const std::string& op, DataType type, tensorflow::Device* device) {
  const tensorflow::OpDef* def = nullptr;
  bool equal = false;
  Status status = tensorflow::OpRegistry::Global()->LookUpOpDef(op, &def);
  if (status.ok()) status = Trial(*def, type, device).Run(&equal);
  const std::string what = "the sparse updates of " + op + " (" + tensorflow::DataTypeString(type) + ")";
  if (status.ok() && equal) {
    LOG(INFO) << "starwire: starwire's kernels make " << what;
  } else {
    LOG(INFO) << "starwire: TensorFlow's kernels make " << what << ": "
              << (status.ok() ? "starwire's would round differently" : StatusMessage(status));
  }
  return status.ok() && equal;
}

}  // namespace

bool HasSameBits(const std::string& op, DataType type, tensorflow::Device* device) {
  static std::mutex mu;
  static auto* known = new std::map<std::pair<std::string, DataType>, bool>;
  std::lock_guard<std::mutex> lock(mu);
  const auto key = std::make_pair(op, type);
  auto found = known->find(key);
  if (found == known->end()) found = known->emplace(key, Try(op, type, device)).first;
  return found->second;
}

}  // namespace starwire
