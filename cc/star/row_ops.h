// The operations of cc/star/rows.h. They run on the worker.
#ifndef STARWIRE_CC_STAR_ROW_OPS_H_
#define STARWIRE_CC_STAR_ROW_OPS_H_

#include "tensorflow/core/framework/types.h"

namespace starwire {

// (ids) -> each id once, in the order of its first appearance, and for each input its position there.
inline constexpr char kUniqueIdsOp[] = "StarwireUniqueIds";
// (rows, positions) -> the row at each position.
inline constexpr char kCopyRowsOp[] = "StarwireCopyRows";
// (ids, rows, unique, positions) -> the sum of the rows of each unique id, added up in order. `ids` must have one
// dimension; the others are of kUniqueIdsOp, for the same ids in any shape.
inline constexpr char kSumRowsOp[] = "StarwireSumRows";

bool CanCopyRows(tensorflow::DataType type);

void RegisterRowOps();

}  // namespace starwire

#endif  // STARWIRE_CC_STAR_ROW_OPS_H_
