// The differences between the sessions, passes and devices of TensorFlow 1.15, DeepRec and 2.12 to 2.21: see compat.h.
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

namespace compat_internal {
template <typename S>
auto SessionNameOf(S& session, int) -> decltype(std::string(session.session_name())) {
  return session.session_name();
}
template <typename S>
auto SessionNameOf(S& session, long) -> decltype(std::string(session.session_name)) {
  return session.session_name;
}
template <typename S>
auto WorkerNameOf(S& session, int) -> decltype(std::string(session.worker_name())) {
  return session.worker_name();
}
template <typename S>
auto WorkerNameOf(S& session, long) -> decltype(std::string(session.worker_name)) {
  return session.worker_name;
}
template <typename S>
auto WorkerCacheOf(S& session, int) -> decltype(session.worker_cache()) {
  return session.worker_cache();
}
template <typename S>
auto WorkerCacheOf(S& session, long) -> decltype(session.worker_cache.get()) {
  return session.worker_cache.get();
}
template <typename S>
auto SharedWorkerCacheOf(S& session, int) -> decltype(session.GetSharedWorkerCache()) {
  return session.GetSharedWorkerCache();
}
template <typename S>
auto SharedWorkerCacheOf(S& session, long)
    -> std::shared_ptr<std::remove_pointer_t<decltype(session.worker_cache.get())>> {
  using Cache = std::remove_pointer_t<decltype(session.worker_cache.get())>;
  return std::shared_ptr<Cache>(std::shared_ptr<Cache>(), session.worker_cache.get());
}
template <typename S>
auto ClusterOf(S* session, int) -> decltype(session->cluster_flr()) {
  return session->cluster_flr();
}
template <typename S>
auto ClusterOf(S* session, long) -> decltype(session->cluster_flr.get()) {
  return session->cluster_flr.get();
}
}  // namespace compat_internal

inline std::string SessionNameOf(::tensorflow::WorkerSession& session) {
  return compat_internal::SessionNameOf(session, 0);
}
inline std::string WorkerNameOf(::tensorflow::WorkerSession& session) {
  return compat_internal::WorkerNameOf(session, 0);
}
inline ::tensorflow::WorkerCacheInterface* WorkerCacheOf(::tensorflow::WorkerSession& session) {
  return compat_internal::WorkerCacheOf(session, 0);
}
// For those that may outlive the session's use of it. In 1.15 the session never gets another cache and owns it alone:
// there the result must not outlive the session.
inline std::shared_ptr<::tensorflow::WorkerCacheInterface> SharedWorkerCacheOf(::tensorflow::WorkerSession& session) {
  return compat_internal::SharedWorkerCacheOf(session, 0);
}
inline auto ClusterOf(::tensorflow::WorkerSession* session) { return compat_internal::ClusterOf(session, 0); }

// ---- Passes: those of 1.15 never see functions ----

namespace compat_internal {
template <typename O>
auto IsFunctionGraph(const O& options, int) -> decltype(bool(options.is_function_graph)) {
  return options.is_function_graph;
}
template <typename O>
bool IsFunctionGraph(const O&, long) {
  return false;
}
template <typename O>
auto DefaultDeviceOf(const O& options, int) -> decltype(options.default_function_device) {
  return options.default_function_device;
}
template <typename O>
const ::tensorflow::Device* DefaultDeviceOf(const O&, long) {
  return nullptr;
}
}  // namespace compat_internal

template <typename Options>
bool IsFunctionGraph(const Options& options) {
  return compat_internal::IsFunctionGraph(options, 0);
}
// May be null.
template <typename Options>
auto DefaultDeviceOf(const Options& options) {
  return compat_internal::DefaultDeviceOf(options, 0);
}

// ---- Configuration ----

namespace compat_internal {
template <typename C>
auto HasTensorFuse(const C& config, int) -> decltype(bool(config.tensor_fuse())) {
  return config.tensor_fuse();
}
template <typename C>
bool HasTensorFuse(const C&, long) {
  return false;
}
}  // namespace compat_internal

// DeepRec's own field, which is among the unknown fields elsewhere.
template <typename ConfigProto>
bool HasTensorFuse(const ConfigProto& config) {
  return compat_internal::HasTensorFuse(config, 0);
}

// ---- Devices ----

namespace compat_internal {
template <typename D>
auto IsAccelerator(const D& device, int) -> decltype(device.tensorflow_accelerator_device_info() != nullptr) {
  return device.tensorflow_accelerator_device_info() != nullptr;
}
template <typename D>
auto IsAccelerator(const D& device, long) -> decltype(device.tensorflow_gpu_device_info() != nullptr) {
  return device.tensorflow_gpu_device_info() != nullptr;
}
}  // namespace compat_internal

inline bool IsAccelerator(const ::tensorflow::Device& device) { return compat_internal::IsAccelerator(device, 0); }

}  // namespace starwire

#endif  // STARWIRE_CC_BASE_COMPAT_SESSION_H_
