#include "cc/executor/kernel_override.h"

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

namespace kernel_override_internal {
const char kLabel[] = "starwire";
}  // namespace kernel_override_internal

// TensorFlow chooses among the kernels of an operation by this attribute.
static constexpr char kLabelAttr[] = "_kernel";

KernelOverride::KernelOverride(OpKernelConstruction* context) : OpKernel(context) {
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

void KernelOverride::Compute(OpKernelContext* context) {
  if (!Handle(context)) stock_->Compute(context);
}

bool KernelOverridesAreOn() {
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

void SelectOverride(NodeDef* node) { (*node->mutable_attr())[kLabelAttr].set_s(kernel_override_internal::kLabel); }

bool SelectsOverride(const NodeDef& node) { return node.attr().count(kLabelAttr) != 0; }

KernelSource WithOverride(const KernelSource& source) {
  NodeDef labelled = DefOf(source);
  SelectOverride(&labelled);
  return WithDef(source, std::move(labelled));
}

}  // namespace starwire
