// Faster kernels for gathering rows of embeddings: `ResourceGather`, and `GatherV2` along the first dimension.
//
//   return runtime->CreateKernel(WithRowGathers(source), kernel);
//
// The rows of a batch lie anywhere in a table, so a gather waits for memory at almost every row. TensorFlow's kernels
// fetch one row ahead; ours fetch many.
#ifndef STARWIRE_CC_EXECUTOR_ROW_GATHERS_H_
#define STARWIRE_CC_EXECUTOR_ROW_GATHERS_H_

#include "cc/base/compat_executor.h"

namespace starwire {

// Returns `source` itself unless we have a kernel for the node: else with a label that selects it.
KernelSource WithRowGathers(const KernelSource& source);

// Registers the kernels. At most once in a process, however many copies of the library it has.
void RegisterRowGathers();

}  // namespace starwire

#endif  // STARWIRE_CC_EXECUTOR_ROW_GATHERS_H_
