// The handles of eager contexts that star calls name.
#ifndef STARWIRE_CC_STAR_HANDLES_H_
#define STARWIRE_CC_STAR_HANDLES_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "cc/base/compat.h"
#include "tensorflow/core/framework/tensor.h"

namespace starwire {

// Implemented by the server that has the contexts (cc/server/eager_handles.h).
class HandleSource {
 public:
  virtual ~HandleSource() = default;
  // `names`: an operation and one of its outputs for each handle that is wanted. Appends their tensors. Without
  // `may_wait`, *would_wait says that some are not there yet; then nothing is appended.
  virtual Status Find(uint64_t context_id, const std::vector<std::pair<int64_t, int32_t>>& names, bool may_wait,
                      bool* would_wait, std::vector<tensorflow::Tensor>* handles) = 0;
};

}  // namespace starwire

#endif  // STARWIRE_CC_STAR_HANDLES_H_
