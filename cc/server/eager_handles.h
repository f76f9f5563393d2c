// Finds the handles of a server's eager contexts for star calls.
#ifndef STARWIRE_CC_SERVER_EAGER_HANDLES_H_
#define STARWIRE_CC_SERVER_EAGER_HANDLES_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "cc/base/compat.h"
#include "cc/star/handles.h"
#include "tensorflow/core/distributed_runtime/eager/eager_service_impl.h"

namespace starwire {

class EagerHandles : public HandleSource {
 public:
  // `service` outlives this object. `device`: where the resources must be.
  EagerHandles(tensorflow::eager::EagerServiceImpl* service, std::string device)
      : service_(service), device_(std::move(device)) {}

  Status Find(uint64_t context_id, const std::vector<std::pair<int64_t, int32_t>>& names, bool may_wait,
              bool* would_wait, std::vector<tensorflow::Tensor>* handles) override;

 private:
  tensorflow::eager::EagerServiceImpl* const service_;
  const std::string device_;
};

}  // namespace starwire

#endif  // STARWIRE_CC_SERVER_EAGER_HANDLES_H_
