// Which variants are accepted from other tasks, and what they have to consist of.
#ifndef STARWIRE_CC_TENSOR_VARIANTS_H_
#define STARWIRE_CC_TENSOR_VARIANTS_H_

#include "cc/base/compat.h"
#include "cc/tensor/objects.h"
#include "tensorflow/core/framework/tensor.pb.h"

namespace starwire {

// Whether the decoder that TensorFlow has registered for this type can be trusted with it. Types that are not on the
// list are refused, as is a value that its type's own operations could not have made. The tensors in it are checked as
// CheckTensor() does.
Status CheckVariant(const tensorflow::VariantTensorDataProto& variant, ObjectBudget* budget);

}  // namespace starwire

#endif  // STARWIRE_CC_TENSOR_VARIANTS_H_
