#include "cc/base/guard.h"

#include <exception>
#include <new>
#include <string>
#include <system_error>

#include "tensorflow/core/platform/logging.h"

namespace starwire {

namespace {

// A copy of an absl::Status takes no memory. Never freed: the last thread may need it.
const Status& out_of_memory = *new Status(MakeStatus(kResourceExhausted, "starwire: out of memory"));

Status Describe(const char* where) {
  const std::string begin = std::string("starwire: ") + where + " failed: ";
  try {
    throw;
  } catch (const std::bad_alloc&) {
    return MakeStatus(kResourceExhausted, begin + "out of memory");
  } catch (const std::system_error& error) {
    return MakeStatus(kResourceExhausted, begin + "out of threads or another system resource: " + error.what());
  } catch (const std::exception& error) {
    return MakeStatus(kInternal, begin + error.what());
  } catch (...) {
    return MakeStatus(kInternal, begin + "unknown exception");
  }
}

}  // namespace

Status ThrownStatus(const char* where) {
  try {
    return Describe(where);
  } catch (const std::bad_alloc&) {
    return out_of_memory;
  }
}

void LogThrown(const char* where) noexcept {
  try {
    LOG(ERROR) << StatusMessage(ThrownStatus(where));
  } catch (...) {
    // Logging failed, too.
  }
}

}  // namespace starwire
