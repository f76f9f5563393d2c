// The operations of cc/star/rows.h. They run on the worker.
#ifndef STARWIRE_CC_STAR_ROW_OPS_H_
#define STARWIRE_CC_STAR_ROW_OPS_H_

#include "tensorflow/core/framework/types.h"

namespace starwire {

// (ids) -> each id once, in the order of its first appearance, and for each input its position there.
inline constexpr char kUniqueIdsOp[] = "StarwireUniqueIds";
// (rows, positions) -> the row at each position.
inline constexpr char kCopyRowsOp[] = "StarwireCopyRows";
// (ids, rows) -> each id once, as above, and the sum of its rows, added up in order.
inline constexpr char kSumRowsOp[] = "StarwireSumRows";

bool CanCopyRows(tensorflow::DataType type);

void RegisterRowOps();

}  // namespace starwire

#endif  // STARWIRE_CC_STAR_ROW_OPS_H_
