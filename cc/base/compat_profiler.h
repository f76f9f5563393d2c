// What TensorFlow's profiler (TensorBoard) shows of us: activities, which may end on another thread than they began on.
// TensorFlow 1.15 has none of this.
#ifndef STARWIRE_CC_BASE_COMPAT_PROFILER_H_
#define STARWIRE_CC_BASE_COMPAT_PROFILER_H_

#include <cstdint>
#include <string>

#include "cc/base/compat.h"

#if __has_include("tsl/profiler/lib/traceme.h")
#include "tsl/profiler/lib/traceme.h"
#define STARWIRE_PROFILER 1
#elif __has_include("tensorflow/tsl/profiler/lib/traceme.h")
#include "tensorflow/tsl/profiler/lib/traceme.h"
#define STARWIRE_PROFILER 1
#else
#define STARWIRE_PROFILER 0
#endif

namespace starwire {

// When an activity begins: the time, if a profile is being taken, otherwise 0.
inline int64_t BeginActivity() {
#if STARWIRE_PROFILER
  if (::tsl::profiler::TraceMeRecorder::Active()) return ::tsl::profiler::GetCurrentTimeNanos();
#endif
  return 0;
}

// Records an activity that began then, on the thread on which it ends. `name()` is called only while a profile is
// taken; `name#key=value,key=value#` adds metadata.
template <typename Name>
void EndActivity(int64_t begun, const Name& name) {
#if STARWIRE_PROFILER
  if (begun == 0 || !::tsl::profiler::TraceMeRecorder::Active()) return;
  ::tsl::profiler::TraceMeRecorder::Record({name(), begun, ::tsl::profiler::GetCurrentTimeNanos()});
#else
  (void)begun;
  (void)name;
#endif
}

}  // namespace starwire

#endif  // STARWIRE_CC_BASE_COMPAT_PROFILER_H_
