"""build/wheel/newer.cc, which replaces functions of newer C and C++ libraries in the wheel, does what they do."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEST = r"""
#include "build/wheel/newer.cc"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <future>
#include <memory>
#include <stdexcept>
#include <thread>

#define CHECK(condition) \
  if (!(condition)) { std::printf("line %d: %s\n", __LINE__, #condition); std::exit(1); }

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

static timespec After(long ms) {
  timespec until;
  clock_gettime(CLOCK_MONOTONIC, &until);
  until.tv_nsec += ms * 1000000;
  until.tv_sec += until.tv_nsec / 1000000000;
  until.tv_nsec %= 1000000000;
  return until;
}

struct Counted : std::runtime_error {
  using std::runtime_error::runtime_error;
  Counted(const Counted& other) : std::runtime_error(other) { ++living; }
  ~Counted() override { --living; }
  static inline int living = 1;
};

int main() {
  // Both ways of waiting for a condition end in time, not before.
  pthread_cond_t condition = PTHREAD_COND_INITIALIZER;
  pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
  for (auto wait : {pthread_cond_clockwait, TimedWait}) {
    for (long ms : {-700L, 30L, 900L}) {
      timespec until = After(ms < 0 ? 0 : ms);
      if (ms < 0) until.tv_sec -= 1;
      const auto begun = Clock::now();
      pthread_mutex_lock(&mutex);
      CHECK(wait(&condition, &mutex, CLOCK_MONOTONIC, &until) == ETIMEDOUT);
      pthread_mutex_unlock(&mutex);
      CHECK(Clock::now() - begun >= milliseconds(ms < 0 ? 0 : ms - 5));
    }
  }
  // A waiting thread is woken, through std::condition_variable::wait.
  std::mutex held;
  std::condition_variable changed;
  bool ready = false;
  std::thread waker([&] {
    std::lock_guard<std::mutex> lock(held);
    ready = true;
    changed.notify_one();
  });
  {
    std::unique_lock<std::mutex> lock(held);
    while (!ready) changed.wait(lock);
  }
  waker.join();
  // Futures: the futex.
  std::promise<int> promise;
  std::future<int> future = promise.get_future();
  const auto begun = Clock::now();
  CHECK(future.wait_until(begun + milliseconds(50)) == std::future_status::timeout);
  CHECK(Clock::now() - begun >= milliseconds(50));
  std::thread setter([&] { std::this_thread::sleep_for(milliseconds(50)); promise.set_value(7); });
  CHECK(future.wait_until(Clock::now() + std::chrono::seconds(60)) == std::future_status::ready);
  CHECK(future.get() == 7);
  CHECK(Clock::now() - begun < std::chrono::seconds(30));
  setter.join();
  // Exceptions are counted: not freed early, not leaked.
  {
    std::exception_ptr first;
    try { throw Counted("x"); } catch (...) { first = std::current_exception(); }
    const int with_one = Counted::living;
    std::exception_ptr second = first, third = std::move(second);
    first = nullptr;
    CHECK(Counted::living == with_one && third != nullptr);
    try { std::rethrow_exception(third); } catch (const Counted& caught) { CHECK(std::string(caught.what()) == "x"); }
    third = nullptr;
    CHECK(Counted::living == with_one - 1);
  }
  volatile long negative = -1;
  try { std::unique_ptr<int[]> none(new int[negative]); CHECK(false); } catch (const std::bad_array_new_length&) {}
  std::printf("ok\n");
}
"""


def test_newer_functions(tmp_path):
    source, program = tmp_path / "test.cc", tmp_path / "test"
    source.write_text(TEST)
    command = ["g++", "-std=c++17", "-O1", "-Wall", "-Werror", f"-I{ROOT}", source, "-o", program, "-pthread", "-ldl"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    undefined = subprocess.run(["nm", "--dynamic", "--undefined-only", program], check=True, capture_output=True, text=True).stdout
    for ours in ("_M_addref", "_M_release", "_M_futex_wait_until_steady", "__throw_bad_array_new_length", "pthread_cond_clockwait"):
        assert ours not in undefined, undefined
    result = subprocess.run([program], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (0, "ok\n"), result
