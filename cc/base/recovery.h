// For how long requests wait for a server that is down and will come back with its state.
#ifndef STARWIRE_CC_BASE_RECOVERY_H_
#define STARWIRE_CC_BASE_RECOVERY_H_

#include <cstdint>

namespace starwire {

// STARWIRE_RECOVER_S in milliseconds. 0: servers do not come back.
uint32_t RecoverMs();

}  // namespace starwire

#endif  // STARWIRE_CC_BASE_RECOVERY_H_
