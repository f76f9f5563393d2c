// Keeps exceptions out of Rust. The transport calls C++ through tables of C functions, each of which is passed as
// Guarded<&Function>; a test (tests/guards.rs) checks that none is forgotten. TensorFlow's thread pools do not handle
// exceptions either, so work on them that allocates memory at a peer's request is guarded as well.
#ifndef STARWIRE_CC_BASE_GUARD_H_
#define STARWIRE_CC_BASE_GUARD_H_

#include <cstddef>
#include <functional>
#include <type_traits>

#include "cc/base/compat.h"
#include "include/starwire.h"

namespace starwire {

// Call it in a catch block: the current exception as a status. Failure to get memory or threads is ResourceExhausted,
// anything else is Internal.
Status ThrownStatus(const char* where);
// Logs the current exception, where there is no caller to return it to.
void LogThrown(const char* where) noexcept;

// `work()`, or `fail(status)` if it throws. Exceptions from `fail` are logged.
template <typename Work, typename Fail>
auto Guard(const char* where, Work&& work, Fail&& fail) noexcept -> decltype(work()) {
  try {
    return work();
  } catch (...) {
    try {
      return fail(ThrownStatus(where));
    } catch (...) {
      LogThrown(where);
    }
  }
  if constexpr (!std::is_void_v<decltype(work())>) return {};
}

// `work()`, where nobody waits for its end. Exceptions are logged.
inline void Perform(const char* where, const std::function<void()>& work) noexcept {
  try {
    work();
  } catch (...) {
    LogThrown(where);
  }
}

// The value to return to the transport when a function throws that cannot report the error otherwise: null, or an error
// code.
template <typename Result>
Result WhenThrown() {
  if constexpr (std::is_same_v<Result, sw_code>) {
    return kInternal;
  } else if constexpr (!std::is_void_v<Result>) {
    return Result{};
  }
}

// The C function to pass to the transport for kFunction. Exceptions go to kFail as a status, followed by the same
// arguments; without kFail they are logged.
template <auto kFunction, auto kFail = nullptr>
struct GuardedFunction;

template <typename Result, typename... Args, Result (*kFunction)(Args...), auto kFail>
struct GuardedFunction<kFunction, kFail> {
  static Result Call(Args... args) noexcept {
    try {
      return kFunction(args...);
    } catch (...) {
      try {
        if constexpr (!std::is_same_v<decltype(kFail), std::nullptr_t>) {
          return kFail(ThrownStatus("a callback"), args...);
        } else if constexpr (std::is_same_v<Result, sw_code>) {
          return StatusNumber(ThrownStatus("a callback"));
        } else {
          LogThrown("a callback");
        }
      } catch (...) {
        LogThrown("the error handler of a callback");
      }
    }
    return WhenThrown<Result>();
  }
};

template <auto kFunction, auto kFail = nullptr>
inline constexpr auto Guarded = &GuardedFunction<kFunction, kFail>::Call;

// Deletes an object that was passed to the transport as an owner.
template <typename T>
void DeleteOwner(void* owner) {
  delete static_cast<T*>(owner);
}
template <typename T>
void DeleteArray(void* owner) {
  delete[] static_cast<T*>(owner);
}

}  // namespace starwire

#endif  // STARWIRE_CC_BASE_GUARD_H_
