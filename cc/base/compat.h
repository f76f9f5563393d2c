// The differences between TensorFlow 1.15, which DeepRec is made from, and 2.12 to 2.22. Types are deduced and members
// detected from TensorFlow's own declarations where possible: a new version usually needs no change here, and DeepRec,
// which is 1.15 with parts of later versions, is served by what it has. Only cc/base/compat* may test the version.
//
// This file has what everybody needs; the others have an area each: compat_executor.h, compat_profiler.h,
// compat_server.h, compat_session.h, compat_tensor.h.
//
// Passed by the build: STARWIRE_TF_VERSION, the exact version as a string literal ("2.21.0"), and STARWIRE_TF_MINOR,
// major * 100 + minor (221). Headers of 2.20 and later no longer define TF_MINOR_VERSION.
#ifndef STARWIRE_CC_BASE_COMPAT_H_
#define STARWIRE_CC_BASE_COMPAT_H_

#ifndef NDEBUG
#error \
    "compile with -DNDEBUG: TensorFlow's wheels are built with it, and some of its classes have a different layout without it"
#endif
#if !defined(STARWIRE_TF_VERSION) || !defined(STARWIRE_TF_MINOR)
#error "pass -DSTARWIRE_TF_VERSION=\"x.y.z\" and -DSTARWIRE_TF_MINOR=xyy for the TensorFlow that the headers belong to"
#endif
// `make watch` tries newer ones.
#if STARWIRE_TF_MINOR != 115 && (STARWIRE_TF_MINOR < 212 || STARWIRE_TF_MINOR > 222) && !defined(STARWIRE_TF_UNTRIED)
#error "starwire supports TensorFlow 1.15 and 2.12 to 2.22"
#endif

// Whether functions run on other tasks (TensorFlow 2): the data port then serves the eager runtime as well. Without it,
// build/tensorflow.rs leaves files of cc/ out.
#define STARWIRE_EAGER_PORT (STARWIRE_TF_MINOR >= 200)

#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>

#if __has_include("absl/strings/cord.h")
#include "absl/strings/cord.h"
#endif
#include "absl/strings/string_view.h"
#include "tensorflow/core/distributed_runtime/base_rendezvous_mgr.h"
#include "tensorflow/core/distributed_runtime/rendezvous_mgr_interface.h"
#include "tensorflow/core/distributed_runtime/rpc/grpc_server_lib.h"
#include "tensorflow/core/distributed_runtime/server_lib.h"
#include "tensorflow/core/lib/core/errors.h"
#include "tensorflow/core/lib/core/status.h"

namespace starwire {

// ---- What only some versions have ----

// A function that can be called only with arguments for which the expression compiles.
#define STARWIRE_IF_VALID(parameters, ...) [] parameters -> decltype(__VA_ARGS__) { return __VA_ARGS__; }

// A function that calls `first` if the arguments suit it, otherwise `second`.
template <typename First, typename Second>
auto Either(First first, Second second) {
  return [first, second](auto&&... arguments) -> decltype(auto) {
    if constexpr (std::is_invocable_v<const First&, decltype(arguments)...>) {
      return first(std::forward<decltype(arguments)>(arguments)...);
    } else {
      return second(std::forward<decltype(arguments)>(arguments)...);
    }
  };
}

// The last resort: returns `value`, whatever the arguments.
template <typename Value>
auto Otherwise(Value value) {
  return [value](auto&&...) { return value; };
}
inline auto OtherwiseNothing() {
  return [](auto&&...) {};
}

// ---- Status ----

// tsl::Status in 2.12, absl::Status from 2.13 on.
using Status = decltype(std::declval<::tensorflow::ServerInterface&>().Start());
using StatusCode = std::decay_t<decltype(std::declval<const Status&>().code())>;

inline Status OkStatus() { return Status(); }

namespace compat_internal {
// Details are cords from 2.13 on, strings before, and unknown to 1.15, whose absl has no cords either.
#if __has_include("absl/strings/cord.h")
using Detail = absl::Cord;
#else
using Detail = std::string;
#endif
}  // namespace compat_internal

inline std::string StatusMessage(const Status& status) {
  return Either(STARWIRE_IF_VALID((const auto& s), std::string(s.message())),
                STARWIRE_IF_VALID((const auto& s), std::string(s.error_message())))(status);
}

inline void SetStatusPayload(Status* status, absl::string_view url, absl::string_view value) {
  Either(STARWIRE_IF_VALID((auto* s, auto url, auto value), s->SetPayload(url, compat_internal::Detail(value))),
         Either(STARWIRE_IF_VALID((auto* s, auto url, auto value), s->SetPayload(url, value)), OtherwiseNothing()))(
      status, url, value);
}

// Calls visit(url, value) for each detail.
template <typename Visit>
void ForEachPayload(const Status& status, Visit visit) {
  Either(STARWIRE_IF_VALID((const auto& s, const auto& visit), s.ForEachPayload(visit)), OtherwiseNothing())(status,
                                                                                                             visit);
}

// The code as it is sent: the same number in tensorflow::error::Code, absl::StatusCode and sw_code.
inline int StatusNumber(const Status& status) { return static_cast<int>(status.code()); }

inline constexpr int kCancelled = 1;
inline constexpr int kUnknown = 2;
inline constexpr int kInvalidArgument = 3;
inline constexpr int kDeadlineExceeded = 4;
inline constexpr int kNotFound = 5;
inline constexpr int kResourceExhausted = 8;
inline constexpr int kFailedPrecondition = 9;
inline constexpr int kAborted = 10;
inline constexpr int kOutOfRange = 11;
inline constexpr int kUnimplemented = 12;
inline constexpr int kInternal = 13;
inline constexpr int kUnavailable = 14;
inline constexpr int kDataLoss = 15;
inline constexpr int kLastStatusNumber = 16;

// Codes that no version of TensorFlow knows become Unknown, so that a peer cannot create a status that cannot be
// printed.
inline Status MakeStatus(int code, const std::string& message) {
  if (code == 0) return Status();
  return Status(static_cast<StatusCode>(code < 0 || code > kLastStatusNumber ? kUnknown : code), message);
}

// The same with another message.
inline Status WithMessage(const Status& status, const std::string& message) {
  Status changed = MakeStatus(StatusNumber(status), message);
  ForEachPayload(status, [&changed](absl::string_view url, const auto& value) {
    SetStatusPayload(&changed, url, std::string(value));
  });
  return changed;
}

// ---- Rendezvous ----

namespace compat_internal {
template <typename M>
struct Method;
template <typename C, typename R, typename A>
struct Method<R (C::*)(A)> {
  using Argument = A;
  using Result = R;
};
template <typename C, typename R, typename A, typename B>
struct Method<R (C::*)(A, B)> {
  using Argument = A;
};
template <typename Pointer, typename To>
struct Rebind;
template <typename From, typename To>
struct Rebind<From*, To> {
  using Type = To*;
};
template <template <typename...> class Smart, typename From, typename... Rest, typename To>
struct Rebind<Smart<From, Rest...>, To> {
  using Type = Smart<To>;
};
}  // namespace compat_internal

using StepId = compat_internal::Method<decltype(&::tensorflow::RendezvousMgrInterface::Find)>::Argument;
// An owned reference: a raw pointer in 2.12, RefCountPtr from 2.13 on.
using FoundRendezvous = compat_internal::Method<decltype(&::tensorflow::RendezvousMgrInterface::Find)>::Result;
// The return type of BaseRendezvousMgr::Create.
using CreatedRendezvous = compat_internal::Rebind<FoundRendezvous, ::tensorflow::BaseRemoteRendezvous>::Type;

// Takes over the reference that Find() returned; the caller calls Unref().
inline ::tensorflow::RemoteRendezvous* TakeReference(::tensorflow::RemoteRendezvous* found) { return found; }
template <typename Smart>
auto TakeReference(Smart found) -> decltype(found.release()) {
  return found.release();
}

// TensorFlow's 64 bits: `long long` in 1.15, int64_t (`long`) later. Attributes, tensors' elements and overrides need
// the right one.
using Int64 = StepId;

}  // namespace starwire

#endif  // STARWIRE_CC_BASE_COMPAT_H_
