// Whether our kernels for sparse updates have the bits of TensorFlow's in this process.
#ifndef STARWIRE_CC_EXECUTOR_ROW_KERNEL_CHECK_H_
#define STARWIRE_CC_EXECUTOR_ROW_KERNEL_CHECK_H_

#include <string>

#include "tensorflow/core/common_runtime/device.h"
#include "tensorflow/core/framework/types.pb.h"

namespace starwire {

// TensorFlow's kernels depend on the instructions that it was compiled for: fused operations round once, and the
// width of vectors decides which elements of a row are approximated. This runs both kernels of `op`, an operation with
// types T and Tindices, on rows of every width up to a few vectors and with all its settings, once in a process.
bool HasSameBits(const std::string& op, tensorflow::DataType type, tensorflow::Device* device);

}  // namespace starwire

#endif  // STARWIRE_CC_EXECUTOR_ROW_KERNEL_CHECK_H_
