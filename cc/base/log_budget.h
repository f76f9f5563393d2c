// Limits the lines logged about the same event: a peer that can cause one line can cause thousands.
#ifndef STARWIRE_CC_BASE_LOG_BUDGET_H_
#define STARWIRE_CC_BASE_LOG_BUDGET_H_

#include <chrono>
#include <mutex>

namespace starwire {

class LogBudget {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr int kLines = 10;
  static constexpr std::chrono::seconds kPeriod{60};

  enum class Say { kLine, kLastLine, kNothing };

  Say Take(Clock::time_point now = Clock::now()) {
    std::lock_guard<std::mutex> lock(mu_);
    if (said_ == 0 || now - since_ >= kPeriod) {
      since_ = now;
      said_ = 0;
    }
    if (said_ == kLines) return Say::kNothing;
    return ++said_ == kLines ? Say::kLastLine : Say::kLine;
  }

 private:
  std::mutex mu_;
  Clock::time_point since_;
  int said_ = 0;
};

}  // namespace starwire

#endif  // STARWIRE_CC_BASE_LOG_BUDGET_H_
