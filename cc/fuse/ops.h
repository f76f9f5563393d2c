// The two operations that send several tensors as one.
#ifndef STARWIRE_CC_FUSE_OPS_H_
#define STARWIRE_CC_FUSE_OPS_H_

namespace starwire {

// Packs tensors into one scalar variant; attribute `T`: their types.
extern const char kFuseOp[];
// The reverse, on another task.
extern const char kUnfuseOp[];
// An attribute of both: the tensors' names in the original graph.
extern const char kMembersAttr[];

// Registers the operations, their kernels and the variant with TensorFlow. False if another copy of this library has
// already done so.
bool RegisterFuseOps();

}  // namespace starwire

#endif  // STARWIRE_CC_FUSE_OPS_H_
