#include "cc/fuse/ops.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cc/base/compat.h"
#include "cc/base/register_kernel.h"
#include "cc/tensor/fused.h"
#include "tensorflow/core/framework/allocator.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_def_builder.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/variant.h"
#include "tensorflow/core/framework/variant_op_registry.h"
#include "tensorflow/core/framework/variant_tensor_data.h"

namespace starwire {

const char kFuseOp[] = "StarwireFuse";
const char kUnfuseOp[] = "StarwireUnfuse";
const char kMembersAttr[] = "members";

namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::Variant;

class FuseOp : public OpKernel {
 public:
  explicit FuseOp(OpKernelConstruction* context) : OpKernel(context) {}

  void Compute(OpKernelContext* context) override {
    std::vector<Tensor> members;
    members.reserve(context->num_inputs());
    for (int i = 0; i < context->num_inputs(); ++i) members.push_back(context->input(i));
    Tensor* output = nullptr;
    tensorflow::AllocatorAttributes attributes;
    attributes.set_on_host(true);
    OP_REQUIRES_OK(context, context->allocate_output(0, {}, &output, attributes));
    output->scalar<Variant>()() = FusedTensors(std::move(members));
  }

  // No element is touched.
  bool IsExpensive() override { return false; }
};

class UnfuseOp : public OpKernel {
 public:
  explicit UnfuseOp(OpKernelConstruction* context) : OpKernel(context) {}

  void Compute(OpKernelContext* context) override {
    const FusedTensors* fused = FusedTensors::In(context->input(0));
    OP_REQUIRES(context, fused != nullptr,
                MakeStatus(kInvalidArgument, "starwire: " + name() + " got an input that is not fused tensors: " +
                                                 context->input(0).DebugString()));
    const std::vector<Tensor>& members = fused->tensors();
    bool agree = static_cast<int>(members.size()) == num_outputs();
    for (int i = 0; agree && i < num_outputs(); ++i) agree = members[i].dtype() == output_type(i);
    OP_REQUIRES(context, agree,
                MakeStatus(kInvalidArgument, "starwire: " + name() + " got " + std::to_string(members.size()) +
                                                 " fused tensors, which do not match its " +
                                                 std::to_string(num_outputs()) + " outputs"));
    for (int i = 0; i < num_outputs(); ++i) context->set_output(i, members[i]);
  }

  bool IsExpensive() override { return false; }
};

bool DecodeFused(Variant* variant) {
  auto* proto = variant->get<tensorflow::VariantTensorDataProto>();
  if (proto == nullptr) return false;
  FusedTensors fused;
  if (!fused.Decode(tensorflow::VariantTensorData(std::move(*proto)))) return false;
  *variant = std::move(fused);
  return true;
}

}  // namespace

bool RegisterFuseOps() {
  auto* variants = tensorflow::UnaryVariantOpRegistry::Global();
  if (variants->GetDecodeFn(FusedTensors::kTypeName) != nullptr) return false;
  variants->RegisterDecodeFn(FusedTensors::kTypeName, &DecodeFused);

  auto* ops = tensorflow::OpRegistry::Global();
  ops->Register([](tensorflow::OpRegistrationData* data) -> Status {
    return tensorflow::OpDefBuilder(kFuseOp)
        .Input("tensors: T")
        .Output("fused: variant")
        .Attr("T: list(type) >= 1")
        .Attr("members: list(string) = []")
        .SetShapeFn(tensorflow::shape_inference::ScalarShape)
        .Doc("Packs several tensors into one scalar, which travels to another task in one message.")
        .Finalize(data);
  });
  ops->Register([](tensorflow::OpRegistrationData* data) -> Status {
    return tensorflow::OpDefBuilder(kUnfuseOp)
        .Input("fused: variant")
        .Output("tensors: T")
        .Attr("T: list(type) >= 1")
        .Attr("members: list(string) = []")
        .SetShapeFn(tensorflow::shape_inference::UnknownShape)
        .Doc("Unpacks the tensors that a StarwireFuse op on another task packed.")
        .Finalize(data);
  });
  tensorflow::KernelDefBuilder fuse(kFuseOp);
  RegisterCpuKernel<FuseOp>(&fuse, "starwire::FuseOp");
  tensorflow::KernelDefBuilder unfuse(kUnfuseOp);
  RegisterCpuKernel<UnfuseOp>(&unfuse, "starwire::UnfuseOp");
  return true;
}

}  // namespace starwire
