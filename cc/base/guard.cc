#include "cc/base/guard.h"

#include <exception>
#include <new>
#include <string>
#include <system_error>

#include "tensorflow/core/platform/logging.h"

namespace starwire {

Status ThrownStatus(const char* where) {
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

void LogThrown(const char* where) noexcept {
  try {
    LOG(ERROR) << StatusMessage(ThrownStatus(where));
  } catch (...) {
    // Logging failed, too.
  }
}

}  // namespace starwire
