// What must not run on a reactor and may take a while or wait for others: one thread for it, whatever peers do. A
// thread for each cancelled request, which Env::SchedClosure() starts, is more than a container may have.
#ifndef STARWIRE_CC_BASE_ERRANDS_H_
#define STARWIRE_CC_BASE_ERRANDS_H_

#include <chrono>
#include <functional>
#include <memory>

namespace starwire {

// Runs one errand after the other, in the order in which they are due. The thread is started by the first errand; if
// there is none to be had, errands that are due run at once where they are given.
class Errands {
 public:
  using Work = std::function<void()>;

  // `name`: of its thread, for people. At most 15 letters.
  explicit Errands(const char* name);
  // As Stop(), without patience.
  ~Errands();
  Errands(const Errands&) = delete;
  Errands& operator=(const Errands&) = delete;

  // Of the process: completions that cannot run where they come. Never stopped.
  static Errands* OfProcess();

  // Any thread. What `work` throws is logged.
  void Run(Work work) { RunAfter(std::chrono::milliseconds(0), std::move(work)); }
  void RunAfter(std::chrono::milliseconds delay, Work work);

  // Runs what is waiting, due or not, and ends the thread. Later errands run where they are given. False if an errand
  // still runs after `patience`: the thread ends with it. Not from an errand.
  bool Stop(std::chrono::milliseconds patience);

 private:
  struct Queue;
  const std::shared_ptr<Queue> queue_;  // its thread has it too
};

// Those of a server.
struct ServerErrands {
  // Cancellations and aborts: what others may be waiting for.
  Errands urgent{"sw-cancel"};
  // The ends of sessions, plans and graphs, which may wait for steps to be over.
  Errands slow{"sw-ends"};
};

}  // namespace starwire

#endif  // STARWIRE_CC_BASE_ERRANDS_H_
