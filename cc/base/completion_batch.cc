#include "cc/base/completion_batch.h"

#include <utility>
#include <vector>

#include "cc/base/background_queue.h"
#include "cc/base/guard.h"

namespace starwire {
namespace {

// Completions left over when a reactor ends (its last round found work after the last round_end) run at thread exit.
struct Pending {
  std::vector<std::function<void()>> completions;
  bool all_brief = true;
  ~Pending() {
    for (auto& completion : completions) BackgroundQueue::OfProcess()->Run(std::move(completion));
  }
};

// More would keep the reactor from its sockets, and would not be spread over the pool's threads.
constexpr size_t kFew = 2;

thread_local bool on_reactor = false;
thread_local int defer_depth = 0;
thread_local Pending pending;

}  // namespace

void CompletionBatch::Add(std::function<void()> completion, Kind kind) {
  if (on_reactor) {
    pending.all_brief &= kind == Kind::kBrief;
    pending.completions.push_back(std::move(completion));
  } else if (defer_depth > 0) {
    BackgroundQueue::OfProcess()->Run(std::move(completion));
  } else {
    Perform("a completion callback", completion);
  }
}

void CompletionBatch::Flush(tensorflow::thread::ThreadPool* pool) {
  on_reactor = true;
  std::vector<std::function<void()>>& completions = pending.completions;
  if (completions.empty()) return;
  if (std::exchange(pending.all_brief, true) && completions.size() <= kFew) {
    // Completions that these trigger go to the pool.
    std::vector<std::function<void()>> brief;
    brief.swap(completions);
    for (auto& completion : brief) Perform("a completion callback", completion);
    pending.all_brief = true;
    if (completions.empty()) return;
  }
  std::vector<std::function<void()>> here;
  here.swap(completions);
  try {
    auto batch = std::make_shared<std::vector<std::function<void()>>>();
    batch->swap(here);
    std::function<void()> run = [batch] {
      for (auto& completion : *batch) Perform("a completion callback", completion);
    };
    try {
      pool->Schedule(run);
    } catch (...) {
      batch->swap(here);
      throw;
    }
  } catch (...) {
    // Out of memory for the hand-over.
    for (auto& completion : here) Perform("a completion callback", completion);
  }
}

bool CompletionBatch::OnReactor() { return on_reactor; }

CompletionBatch::DeferScope::DeferScope() { ++defer_depth; }
CompletionBatch::DeferScope::~DeferScope() { --defer_depth; }

}  // namespace starwire
