// LOG(INFO) << number: absl's header promises that the operators of numbers are compiled somewhere, but of
// TensorFlow 2.18 to 2.20 only some made it into the wheel. So they are compiled here, for us alone. Before 2.18
// TensorFlow's logging was its own, and from 2.21 on all of them are there.
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
