#include "cc/partition/registration.h"

#include <atomic>
#include <utility>

namespace starwire {
namespace {

thread_local Registration* current = nullptr;

}  // namespace

Registration::Registration(const tensorflow::RegisterGraphRequest& request, int threads)
    : request_(request), threads_(threads), outer_(std::exchange(current, this)) {}

Registration::~Registration() { current = outer_; }

Registration* Registration::Current() { return current; }

int64_t Registration::Leave(std::unique_ptr<tensorflow::Graph> partition) {
  static std::atomic<int64_t> count{0};
  const int64_t number = count.fetch_add(1);
  left_[number] = std::move(partition);
  return number;
}

std::unique_ptr<tensorflow::Graph> Registration::Take(int64_t number) {
  auto found = left_.find(number);
  if (found == left_.end()) return nullptr;
  std::unique_ptr<tensorflow::Graph> partition = std::move(found->second);
  left_.erase(found);
  return partition;
}

}  // namespace starwire
