// Faster kernels for sparse updates of variables, with the results of TensorFlow's, bit by bit.
//
//   return runtime->CreateKernel(WithRowUpdates(source, device), kernel);
//
// Most of a parameter server's time in a step with embeddings goes into these updates. TensorFlow's kernels evaluate
// two tensor expressions per row and wait for memory at each; ours make one pass, and fetch the next rows meanwhile.
//
// They leave to TensorFlow's kernels (`kernel_override.h`) whatever is not an ordinary update: every error, tables and
// rows that overlap, and the first update of a resource variable, which changes its mode. Whether the arithmetic has
// the same bits depends on how TensorFlow was compiled, and is tried with a few numbers before the first use
// (`row_kernel_check.h`).
#ifndef STARWIRE_CC_EXECUTOR_ROW_UPDATES_H_
#define STARWIRE_CC_EXECUTOR_ROW_UPDATES_H_

#include "cc/base/compat_executor.h"
#include "tensorflow/core/common_runtime/device.h"

namespace starwire {

// Returns `source` itself unless we have a kernel for the node: else with a label that selects it.
KernelSource WithRowUpdates(const KernelSource& source, tensorflow::Device* device);

// Registers the kernels. At most once in a process, however many copies of the library it has.
void RegisterRowUpdates();

}  // namespace starwire

#endif  // STARWIRE_CC_EXECUTOR_ROW_UPDATES_H_
