// Kernels of the test device. Each runs TensorFlow's kernel for the CPU on the memory behind the device's addresses, so
// that results have the CPU's bits, and stores the results on the device's stream: they are not there when it returns.
// Operations that only pass tensors on (Identity, Switch, _Send, VarHandleOp, ...) have kernels for any device.
// In C++: the C interface of kernels lacks the variables (TF_AssignVariable and others are not exported by the wheel).
#include "tensorflow/c/kernels.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "device.h"
#include "tensorflow/core/common_runtime/dma_helper.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/register_types.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"

namespace {

using namespace tensorflow;  // NOLINT: as kernels do

// The real memory of a tensor on the device, which it keeps alive.
class Alias : public TensorBuffer {
 public:
  explicit Alias(const Tensor& tensor)
      : TensorBuffer(Real(DMAHelper::base(&tensor), tensor.TotalBytes())), tensor_(tensor) {}
  size_t size() const override { return tensor_.TotalBytes(); }
  TensorBuffer* root_buffer() override { return this; }
  void FillAllocationDescription(AllocationDescription*) const override {}

 private:
  const Tensor tensor_;
};

Tensor OnHost(const Tensor& tensor) {
  if (tensor.TotalBytes() == 0) return Tensor(tensor.dtype(), tensor.shape());
  core::RefCountPtr<Alias> alias(new Alias(tensor));
  return Tensor(tensor.dtype(), tensor.shape(), alias.get());
}

SP_Stream StreamOf(OpKernelContext* context) {
  std::unique_ptr<TF_Status, void (*)(TF_Status*)> status(TF_NewStatus(), TF_DeleteStatus);
  return TF_GetStream(reinterpret_cast<TF_OpKernelContext*>(context), status.get());
}

// Stores `value` in `tensor` of the device, later.
void Store(SP_Stream stream, const Tensor& value, const Tensor& tensor) {
  if (value.TotalBytes() == 0) return;
  stream->Enqueue([value, tensor] {
    std::memcpy(Real(DMAHelper::base(&tensor), tensor.TotalBytes()), DMAHelper::base(&value), value.TotalBytes());
  });
}

// The CPU, with the threads of the device's task.
class Host : public DeviceBase {
 public:
  explicit Host(DeviceBase& device) : DeviceBase(device.env()) {
    set_tensorflow_cpu_worker_threads(const_cast<CpuWorkerThreads*>(device.tensorflow_cpu_worker_threads()));
    set_eigen_cpu_device(const_cast<Eigen::ThreadPoolDevice*>(device.eigen_cpu_device()));
    attributes_.set_name("/device:CPU:0");
    attributes_.set_device_type(DEVICE_CPU);
  }
  Allocator* GetAllocator(AllocatorAttributes) override { return cpu_allocator(); }
  const DeviceAttributes& attributes() const override { return attributes_; }
  const std::string& name() const override { return attributes_.name(); }

 private:
  DeviceAttributes attributes_;
};

class AsOnCpu : public OpKernel {
 public:
  explicit AsOnCpu(OpKernelConstruction* context) : OpKernel(context), host_(*context->device()) {
    absl::Status status;
    kernel_ = CreateOpKernel(DeviceType(DEVICE_CPU), &host_, cpu_allocator(), context->def(),
                             context->graph_def_version(), &status);
    OP_REQUIRES_OK(context, status);
  }

  void Compute(OpKernelContext* context) override {
    const SP_Stream stream = StreamOf(context);
    OP_REQUIRES(context, stream != nullptr, absl::InternalError("the test device's kernel has no stream"));
    stream->Wait();
    // Twice, so that the kernel does not write its result over an input that others may have.
    std::vector<Tensor> inputs, kept;
    for (int i = 0; i < context->num_inputs(); ++i) {
      const bool on_host = input_memory_types()[i] == HOST_MEMORY;
      inputs.push_back(on_host ? context->input(i) : OnHost(context->input(i)));
    }
    kept = inputs;
    std::vector<TensorValue> values;
    for (Tensor& input : inputs) values.emplace_back(&input);
    const std::vector<AllocatorAttributes> attributes(std::max(inputs.size(), static_cast<size_t>(num_outputs())));
    OpKernelContext::Params params;
    params.step_id = context->step_id();
    params.op_kernel = kernel_.get();
    params.device = &host_;
    params.inputs = values;
    params.input_alloc_attrs = absl::MakeSpan(attributes).first(inputs.size());
    params.output_attr_array = attributes.data();
    params.frame_iter = context->frame_iter();
    params.runner = context->runner();
    OpKernelContext on_host(&params, num_outputs());
    kernel_->Compute(&on_host);
    OP_REQUIRES_OK(context, on_host.status());
    inputs.clear();
    kept.clear();
    // Collectives require that the result takes the memory of the first input, if nobody else has it.
    const std::vector<int> candidates(context->num_inputs() == 0 ? 0 : 1);
    for (int i = 0; i < num_outputs(); ++i) {
      std::unique_ptr<Tensor> result(on_host.release_output(i).tensor);
      if (output_memory_types()[i] == HOST_MEMORY) {
        context->set_output(i, *result);
        continue;
      }
      Tensor* output = nullptr;
      OP_REQUIRES_OK(context, context->forward_input_or_allocate_output(candidates, i, result->shape(), &output));
      Store(stream, *result, *output);
    }
  }

 private:
  Host host_;
  std::unique_ptr<OpKernel> kernel_;
};

// AssignAdd, AssignSub and gradient descent: variable += sign * rate * value.
template <int kSign>
class UpdateVariable : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    core::RefCountPtr<Var> variable;
    OP_REQUIRES_OK(context, LookupResource(context, HandleFromInput(context, 0), &variable));
    const SP_Stream stream = StreamOf(context);
    OP_REQUIRES(context, stream != nullptr, absl::InternalError("the test device's kernel has no stream"));
    mutex_lock lock(*variable->mu());
    const Tensor old = *variable->tensor(), change = context->input(context->num_inputs() - 1);
    OP_REQUIRES(context, old.shape() == change.shape(),
                absl::InvalidArgumentError("another shape than the variable's"));
    Tensor updated;
    OP_REQUIRES_OK(context, context->allocate_temp(DT_FLOAT, old.shape(), &updated));
    const bool has_rate = context->num_inputs() == 3;
    const Tensor rate = has_rate ? context->input(1) : Tensor();
    stream->Enqueue([old, change, has_rate, rate, updated] {
      const Tensor from = OnHost(old), by = OnHost(change);
      Tensor to = OnHost(updated);
      const float factor = has_rate ? OnHost(rate).scalar<float>()() : 1.0f;
      for (int64_t i = 0; i < from.NumElements(); ++i) {
        to.flat<float>()(i) = from.flat<float>()(i) + kSign * (by.flat<float>()(i) * factor);
      }
    });
    // Others may have the old value.
    *variable->tensor() = updated;
  }
};

#define ON(name) Name(name).Device(kDeviceType)
#define FLOAT(name) REGISTER_KERNEL_BUILDER(ON(name).TypeConstraint<float>("T"), AsOnCpu)
#define FLOAT_WITH_HOST(name, input) \
  REGISTER_KERNEL_BUILDER(ON(name).TypeConstraint<float>("T").HostMemory(input), AsOnCpu)

FLOAT("Add");
FLOAT("AddN");
FLOAT("AddV2");
FLOAT("BiasAdd");
FLOAT("BiasAddGrad");
FLOAT("Div");
FLOAT("DivNoNan");
FLOAT("MatMul");
FLOAT("Maximum");
FLOAT("Mul");
FLOAT("Neg");
FLOAT("RealDiv");
FLOAT("Relu");
FLOAT("ReluGrad");
FLOAT("Square");
FLOAT("SquaredDifference");
FLOAT("Sub");
FLOAT("Tanh");
FLOAT("TanhGrad");
FLOAT("ZerosLike");
FLOAT_WITH_HOST("ConcatV2", "axis");
FLOAT_WITH_HOST("BroadcastTo", "shape");
FLOAT_WITH_HOST("Fill", "dims");
FLOAT_WITH_HOST("Mean", "reduction_indices");
FLOAT_WITH_HOST("Sum", "reduction_indices");
FLOAT_WITH_HOST("Tile", "multiples");
REGISTER_KERNEL_BUILDER(ON("Cast"), AsOnCpu);
REGISTER_KERNEL_BUILDER(ON("Slice").TypeConstraint<float>("T").HostMemory("begin").HostMemory("size"), AsOnCpu);
REGISTER_KERNEL_BUILDER(ON("Greater").TypeConstraint<float>("T"), AsOnCpu);
REGISTER_KERNEL_BUILDER(
    ON("StatelessRandomUniform").TypeConstraint<float>("dtype").HostMemory("shape").HostMemory("seed"), AsOnCpu);
REGISTER_KERNEL_BUILDER(ON("AssignAddVariableOp").TypeConstraint<float>("dtype").HostMemory("resource"),
                        UpdateVariable<1>);
REGISTER_KERNEL_BUILDER(ON("AssignSubVariableOp").TypeConstraint<float>("dtype").HostMemory("resource"),
                        UpdateVariable<-1>);
REGISTER_KERNEL_BUILDER(ON("ResourceApplyGradientDescent").TypeConstraint<float>("T").HostMemory("var"),
                        UpdateVariable<-1>);

}  // namespace
