// Functions that glibc 2.28 and gcc 8's libstdc++ do not have yet but that objects compiled with newer headers call.
// scripts/old-glibc compiles this file and links it into the libraries of wheels, where each replaces the reference to
// a newer symbol version.
#include <dlfcn.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <ctime>
#include <mutex>
#include <new>

#define HIDDEN __attribute__((visibility("hidden")))

// glibc 2.32. Headers of libstdc++ count references without atomic instructions while it is true.
extern "C" {
HIDDEN char __libc_single_threaded = 0;
}

// As libstdc++ did before glibc 2.30: for the same duration by the clock that pthread_cond_timedwait() knows. Callers
// look at their own clock afterwards.
static int TimedWait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock, const timespec* until) {
  timespec now;
  timespec real;
  clock_gettime(clock, &now);
  clock_gettime(CLOCK_REALTIME, &real);
  real.tv_sec += until->tv_sec - now.tv_sec;
  real.tv_nsec += until->tv_nsec - now.tv_nsec;
  if (real.tv_nsec < 0) {
    real.tv_nsec += 1000000000;
    --real.tv_sec;
  } else if (real.tv_nsec >= 1000000000) {
    real.tv_nsec -= 1000000000;
    ++real.tv_sec;
  }
  return pthread_cond_timedwait(condition, mutex, &real);
}

// glibc 2.30
extern "C" HIDDEN int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                                             const timespec* until) {
  using Function = int (*)(pthread_cond_t*, pthread_mutex_t*, clockid_t, const timespec*);
  static const auto newer = reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, "pthread_cond_clockwait"));
  return (newer != nullptr ? newer : TimedWait)(condition, mutex, clock, until);
}

// GLIBCXX_3.4.30: only noexcept is new.
extern "C" HIDDEN void starwire_condition_wait(
    std::condition_variable* condition,
    std::unique_lock<std::mutex>* lock) __asm__("_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE");
void starwire_condition_wait(std::condition_variable* condition, std::unique_lock<std::mutex>* lock) {
  pthread_cond_wait(condition->native_handle(), lock->mutex()->native_handle());
}

// GLIBCXX_3.4.29
extern "C" HIDDEN void starwire_bad_array_new_length() __asm__("_ZSt28__throw_bad_array_new_lengthv");
void starwire_bad_array_new_length() { throw std::bad_array_new_length(); }

// GLIBCXX_3.4.29: waits until the steady clock passes a time, which is false, or until the value changes.
extern "C" HIDDEN bool
starwire_futex_wait(void*, unsigned* address, unsigned value, bool has_time, long s, long ns) __asm__(
    "_ZNSt28__atomic_futex_unsigned_base26_M_futex_wait_until_steadyEPjjbNSt6chrono8durationIlSt5ratioILl1ELl1EEEENS2_"
    "IlS3_ILl1ELl1000000000EEEE");
bool starwire_futex_wait(void*, unsigned* address, unsigned value, bool has_time, long s, long ns) {
  const timespec until = {s, ns};
  // Not private, as the function that wakes.
  const long result = syscall(SYS_futex, address, FUTEX_WAIT_BITSET, value, has_time ? &until : nullptr, nullptr,
                              FUTEX_BITSET_MATCH_ANY);
  return result == 0 || errno != ETIMEDOUT;
}

// CXXABI_1.3.13: what the constructor and the destructor, of CXXABI_1.3.3, do to the count.
extern "C" void starwire_exception_copy(void** to,
                                        void* const* from) __asm__("_ZNSt15__exception_ptr13exception_ptrC1ERKS0_");
extern "C" void starwire_exception_destroy(void** pointer) __asm__("_ZNSt15__exception_ptr13exception_ptrD1Ev");

extern "C" HIDDEN void starwire_exception_add(void** pointer) __asm__(
    "_ZNSt15__exception_ptr13exception_ptr9_M_addrefEv");
void starwire_exception_add(void** pointer) {
  void* counted = nullptr;
  starwire_exception_copy(&counted, pointer);
}

extern "C" HIDDEN void starwire_exception_release(void** pointer) __asm__(
    "_ZNSt15__exception_ptr13exception_ptr10_M_releaseEv");
void starwire_exception_release(void** pointer) {
  starwire_exception_destroy(pointer);
  *pointer = nullptr;
}
