// The budget for log lines: ten a minute.
#include "cc/base/log_budget.h"

#include <gtest/gtest.h>

namespace starwire {
namespace {

using Say = LogBudget::Say;

TEST(LogBudget, TenLinesAMinuteThenANotice) {
  LogBudget budget;
  LogBudget::Clock::time_point now{};
  for (int minute = 0; minute < 3; ++minute) {
    for (int line = 1; line < LogBudget::kLines; ++line) EXPECT_EQ(budget.Take(now), Say::kLine);
    EXPECT_EQ(budget.Take(now), Say::kLastLine);
    for (int line = 0; line < 1000; ++line) EXPECT_EQ(budget.Take(now), Say::kNothing);
    EXPECT_EQ(budget.Take(now + LogBudget::kPeriod - std::chrono::seconds(1)), Say::kNothing);
    now += LogBudget::kPeriod;
  }
}

}  // namespace
}  // namespace starwire
