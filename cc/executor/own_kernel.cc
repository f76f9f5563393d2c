#include "cc/executor/own_kernel.h"

#include <utility>

#include "cc/base/compat.h"
#include "cc/base/handles.h"
#include "include/starwire.h"
#include "tensorflow/core/framework/attr_value.pb.h"

namespace starwire {

using tensorflow::NodeDef;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;

namespace own_kernel_internal {
const char kLabel[] = "starwire";
}  // namespace own_kernel_internal

// TensorFlow chooses among the kernels of an operation by this attribute.
static constexpr char kLabelAttr[] = "_kernel";

OwnKernel::OwnKernel(OpKernelConstruction* context) : OpKernel(context) {
  NodeDef plain = def();
  plain.mutable_attr()->erase(kLabelAttr);
  KernelSource source;
  OP_REQUIRES_OK(context, MakeSource(std::move(plain), &source));
  OpKernel* stock = nullptr;
  OP_REQUIRES_OK(context, tensorflow::CreateOpKernel(context->device_type(), context->device(),
                                                     context->device()->GetAllocator({}), context->function_library(),
                                                     source, context->graph_def_version(), &stock));
  stock_.reset(stock);
}

void OwnKernel::Compute(OpKernelContext* context) {
  if (!Handle(context)) stock_->Compute(context);
}

bool OwnKernelsAreOn() {
  static const bool on = [] {
    uint32_t value = 0;
    ErrorHandle error;
    // A server does not start with an environment that is invalid.
    return sw_row_updates(&value, Into(&error)) == 0 && value != 0;
  }();
  return on;
}

bool TypeOf(const NodeDef& node, const char* attribute, tensorflow::DataType* type) {
  const auto found = node.attr().find(attribute);
  if (found == node.attr().end()) return false;
  *type = found->second.type();
  return true;
}

void SelectOwnKernel(NodeDef* node) { (*node->mutable_attr())[kLabelAttr].set_s(own_kernel_internal::kLabel); }

bool SelectsOwnKernel(const NodeDef& node) { return node.attr().count(kLabelAttr) != 0; }

KernelSource WithOwnKernel(const KernelSource& source) {
  NodeDef labelled = DefOf(source);
  SelectOwnKernel(&labelled);
  return WithDef(source, std::move(labelled));
}

}  // namespace starwire
