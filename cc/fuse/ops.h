// The two operations between which several tensors travel as one.
#ifndef STARWIRE_CC_FUSE_OPS_H_
#define STARWIRE_CC_FUSE_OPS_H_

namespace starwire {

// Takes tensors and gives one scalar variant that holds them; attribute `T`: their types.
extern const char kFuseOp[];
// The reverse, on another task.
extern const char kUnfuseOp[];
// On both: what the tensors are called in the graph that they come from.
extern const char kMembersAttr[];

// Makes TensorFlow know the operations, their kernels and the variant. False if it knows them already, from another
// copy of this library.
bool RegisterFuseOps();

}  // namespace starwire

#endif  // STARWIRE_CC_FUSE_OPS_H_
