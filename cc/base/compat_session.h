// The differences between the sessions, passes and devices of TensorFlow 1.15, DeepRec and 2.12 to 2.22: see compat.h.
#ifndef STARWIRE_CC_BASE_COMPAT_SESSION_H_
#define STARWIRE_CC_BASE_COMPAT_SESSION_H_

#include <memory>
#include <string>
#include <utility>

#include "cc/base/compat.h"
#include "tensorflow/core/common_runtime/device.h"
#include "tensorflow/core/distributed_runtime/worker_cache.h"
#include "tensorflow/core/distributed_runtime/worker_session.h"

namespace starwire {

// ---- Worker sessions: methods, in 1.15 members ----

inline std::string SessionNameOf(::tensorflow::WorkerSession& session) {
  return Either(STARWIRE_IF_VALID((auto& s), std::string(s.session_name())),
                STARWIRE_IF_VALID((auto& s), std::string(s.session_name)))(session);
}
inline std::string WorkerNameOf(::tensorflow::WorkerSession& session) {
  return Either(STARWIRE_IF_VALID((auto& s), std::string(s.worker_name())),
                STARWIRE_IF_VALID((auto& s), std::string(s.worker_name)))(session);
}
inline ::tensorflow::WorkerCacheInterface* WorkerCacheOf(::tensorflow::WorkerSession& session) {
  return Either(STARWIRE_IF_VALID((auto& s), s.worker_cache()),
                STARWIRE_IF_VALID((auto& s), s.worker_cache.get()))(session);
}
// For those that may outlive the session's use of it. In 1.15 the session never gets another cache and owns it alone:
// there the result must not outlive the session.
inline std::shared_ptr<::tensorflow::WorkerCacheInterface> SharedWorkerCacheOf(::tensorflow::WorkerSession& session) {
  using Shared = std::shared_ptr<::tensorflow::WorkerCacheInterface>;
  return Either(STARWIRE_IF_VALID((auto& s), s.GetSharedWorkerCache()),
                STARWIRE_IF_VALID((auto& s), Shared(Shared(), s.worker_cache.get())))(session);
}
inline auto ClusterOf(::tensorflow::WorkerSession* session) {
  return Either(STARWIRE_IF_VALID((auto* s), s->cluster_flr()),
                STARWIRE_IF_VALID((auto* s), s->cluster_flr.get()))(session);
}

// ---- Passes: those of 1.15 never see functions ----

template <typename Options>
bool IsFunctionGraph(const Options& options) {
  return Either(STARWIRE_IF_VALID((const auto& o), bool(o.is_function_graph)), Otherwise(false))(options);
}
// May be null.
template <typename Options>
const ::tensorflow::Device* DefaultDeviceOf(const Options& options) {
  return Either(STARWIRE_IF_VALID((const auto& o), o.default_function_device), Otherwise(nullptr))(options);
}

// ---- Configuration ----

// DeepRec's own field, which is among the unknown fields elsewhere.
template <typename ConfigProto>
bool HasTensorFuse(const ConfigProto& config) {
  return Either(STARWIRE_IF_VALID((const auto& c), bool(c.tensor_fuse())), Otherwise(false))(config);
}

// ---- Devices ----

inline bool IsAccelerator(const ::tensorflow::Device& device) {
  return Either(STARWIRE_IF_VALID((const auto& d), d.tensorflow_accelerator_device_info() != nullptr),
                STARWIRE_IF_VALID((const auto& d), d.tensorflow_gpu_device_info() != nullptr))(device);
}

}  // namespace starwire

#endif  // STARWIRE_CC_BASE_COMPAT_SESSION_H_
