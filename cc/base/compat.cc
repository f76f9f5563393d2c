// LOG(INFO) << number: absl's header declares the operators for numbers as compiled elsewhere, but the wheels of
// TensorFlow 2.18 to 2.20 contain only some of them, so this file compiles them for this library alone. Before 2.18
// TensorFlow has its own logging; from 2.21 on the wheel contains all of them.
#if STARWIRE_TF_MINOR >= 218 && STARWIRE_TF_MINOR <= 220

#include "absl/log/internal/log_message.h"

#define STARWIRE_LOGS(type) \
  template absl::log_internal::LogMessage& absl::log_internal::LogMessage::operator<< <type>(const type& v)
STARWIRE_LOGS(char);
STARWIRE_LOGS(signed char);
STARWIRE_LOGS(unsigned char);
STARWIRE_LOGS(short);
STARWIRE_LOGS(unsigned short);
STARWIRE_LOGS(int);
STARWIRE_LOGS(unsigned int);
STARWIRE_LOGS(long);
STARWIRE_LOGS(unsigned long);
STARWIRE_LOGS(long long);
STARWIRE_LOGS(unsigned long long);
STARWIRE_LOGS(float);
STARWIRE_LOGS(double);
STARWIRE_LOGS(bool);
#undef STARWIRE_LOGS

#endif
