// No exception crosses into Rust. The transport calls C++ through tables of C functions; each of them is given as
// Guarded<&Function>, and a test (tests/guards.rs) looks that none is forgotten. TensorFlow's thread pools have no use
// for exceptions either: what runs there and takes memory by a peer's wish is guarded as well.
#ifndef STARWIRE_CC_BASE_GUARD_H_
#define STARWIRE_CC_BASE_GUARD_H_

#include <cstddef>
#include <type_traits>

#include "cc/base/compat.h"
#include "include/starwire.h"

namespace starwire {

// Within a catch block: what was thrown. Memory and threads that cannot be had are ResourceExhausted, all else is
// Internal.
Status ThrownStatus(const char* where);
// The same for the log, where there is no one to tell.
void LogThrown(const char* where) noexcept;

// `work()`, or `fail(status)` if it throws. What `fail` throws is logged.
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

// What is returned to the transport when a function throws that cannot tell anybody else: null, or an error's number.
template <typename Result>
Result WhenThrown() {
  if constexpr (std::is_same_v<Result, sw_code>) {
    return kInternal;
  } else if constexpr (!std::is_void_v<Result>) {
    return Result{};
  }
}

// The C function that the transport is given for kFunction. What that throws goes to kFail, with the same arguments
// behind the status; without kFail it is logged.
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

// Releases what was handed to the transport as an owner.
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
