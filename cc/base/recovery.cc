#include "cc/base/recovery.h"

#include "cc/base/handles.h"
#include "include/starwire.h"

namespace starwire {

uint32_t RecoverMs() {
  static const uint32_t ms = [] {
    uint64_t seconds = 0;
    ErrorHandle error;
    // The server of this process has refused a wrong value.
    return sw_star_recover_s(&seconds, Into(&error)) == 0 ? static_cast<uint32_t>(seconds * 1000) : 0;
  }();
  return ms;
}

}  // namespace starwire
