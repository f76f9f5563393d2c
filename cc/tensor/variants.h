// The variants that are accepted from other tasks, and their required content.
#ifndef STARWIRE_CC_TENSOR_VARIANTS_H_
#define STARWIRE_CC_TENSOR_VARIANTS_H_

#include "cc/base/compat.h"
#include "cc/tensor/objects.h"
#include "tensorflow/core/framework/tensor.pb.h"

namespace starwire {

// Whether the decoder that TensorFlow has registered for this type can be trusted with it. Refuses types that are not
// on the list, and values that the type's own operations could not have created. The tensors in it are checked as by
// CheckTensor().
Status CheckVariant(const tensorflow::VariantTensorDataProto& variant, ObjectBudget* budget);

}  // namespace starwire

#endif  // STARWIRE_CC_TENSOR_VARIANTS_H_
