#include "cc/executor/row_trial.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "cc/base/compat.h"
#include "cc/base/compat_executor.h"
#include "cc/executor/row_updates.h"
#include "tensorflow/core/framework/attr_value.pb.h"
#include "tensorflow/core/framework/node_def.pb.h"
#include "tensorflow/core/framework/node_def_util.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_def.pb.h"
#include "tensorflow/core/framework/op_kernel.h"
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

constexpr int64_t kRows = 6;
constexpr int64_t kUpdates = 5;
constexpr int64_t kWidest = 35;

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

// One of them twice.
Tensor Ids() {
  constexpr int32_t kIds[] = {4, 0, 5, 4, 2};
  static_assert(std::size(kIds) == kUpdates, "a row for each id");
  Tensor ids(tensorflow::DT_INT32, TensorShape({kUpdates}));
  std::copy(std::begin(kIds), std::end(kIds), ids.flat<int32_t>().data());
  return ids;
}

// An operation with its inputs, by the names that TensorFlow's sparse updates have in common.
class Trial {
 public:
  Trial(const tensorflow::OpDef& op, DataType type, tensorflow::Device* device)
      : op_(op), type_(type), device_(device) {}

  Status Run(bool* equal) {
    std::unique_ptr<OpKernel> stock, ours;
    Status status = Create(false, &stock);
    if (status.ok()) status = Create(true, &ours);
    *equal = true;
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

 private:
  Status Create(bool labelled, std::unique_ptr<OpKernel>* out) const {
    tensorflow::NodeDef node;
    node.set_name("starwire_trial");
    node.set_op(op_.name());
    for (const auto& argument : op_.input_arg()) node.add_input(argument.name());
    tensorflow::AddNodeAttr("T", type_, &node);
    tensorflow::AddNodeAttr("Tindices", tensorflow::DT_INT32, &node);
    tensorflow::AddDefaultsToNodeDef(op_, &node);
    if (labelled) SelectRowUpdate(&node);
    Status status;
    *out = tensorflow::CreateOpKernel(tensorflow::DeviceType(tensorflow::DEVICE_CPU), device_,
                                      device_->GetAllocator(tensorflow::AllocatorAttributes()), node,
                                      TF_GRAPH_DEF_VERSION, &status);
    return status;
  }

  // Runs a kernel; returns the tables afterwards.
  Status Apply(OpKernel* kernel, int64_t width, std::vector<Tensor>* tables) const {
    Numbers numbers;
    std::vector<Tensor> tensors;
    for (const auto& argument : op_.input_arg()) {
      if (argument.is_ref()) {
        tensors.push_back(Filled(type_, TensorShape({kRows, width}), true, &numbers));
      } else if (argument.name() == "indices") {
        tensors.push_back(Ids());
      } else if (argument.name() == "grad" || argument.name() == "updates") {
        tensors.push_back(Filled(type_, TensorShape({kUpdates, width}), false, &numbers));
      } else {
        tensors.push_back(Filled(type_, TensorShape({}), true, &numbers));
      }
    }
    tensorflow::mutex mutex;
    std::vector<TensorValue> inputs;
    for (int i = 0; i < op_.input_arg_size(); ++i) {
      Tensor* tensor = &tensors[static_cast<size_t>(i)];
      inputs.push_back(op_.input_arg(i).is_ref() ? TensorValue(&mutex, tensor) : TensorValue(tensor));
    }
    const std::vector<tensorflow::AllocatorAttributes> attributes(inputs.size());
    tensorflow::AllocatorAttributes output;
    OpKernelContext::Params params;
    params.device = device_;
    params.op_kernel = kernel;
    KernelInputs<OpKernelContext::Params> lists;
    lists.Set(&params, inputs.data(), attributes.data(), inputs.size());
    params.output_attr_array = &output;
    OpKernelContext context(&params, 1);
    kernel->Compute(&context);
    for (int i = 0; i < op_.input_arg_size(); ++i) {
      if (op_.input_arg(i).is_ref()) tables->push_back(tensors[static_cast<size_t>(i)]);
    }
    return context.status();
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
