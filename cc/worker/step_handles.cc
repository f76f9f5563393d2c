#include "cc/worker/step_handles.h"

#include "cc/base/background_queue.h"
#include "cc/base/status_codec.h"

namespace starwire {

using tensorflow::CancellationManager;
using tensorflow::CancellationToken;

const char kHandlesOfAttr[] = "_starwire_handles_of";

std::string EagerSessionOf(uint64_t context_id) { return "eager_" + std::to_string(context_id); }

void HandleBoard::Get(const std::string& session, int64_t step_id, const std::string& device,
                      const std::string& function, CancellationManager* cancellation, Callback callback) {
  Found found;
  {
    std::lock_guard<std::mutex> lock(mu_);
    const Key key{session, step_id, device, function};
    const auto entry = entries_.find(key);
    if (entry != entries_.end()) found = entry->second.found;
    if (found == nullptr) {
      const uint64_t number = next_++;
      const CancellationToken token = cancellation == nullptr ? 0 : cancellation->get_cancellation_token();
      // Under the lock: whoever answers finds the callback registered.
      if (cancellation == nullptr ||
          cancellation->RegisterCallback(token, [this, key, number] { Cancel(key, number); })) {
        entries_[key].waiting[number] = {cancellation, token, std::move(callback)};
        return;
      }
    }
  }
  if (found != nullptr) {
    callback(OkStatus(), std::move(found));
  } else {
    callback(AfterCancellation(MakeStatus(kCancelled, "the step was already cancelled")), nullptr);
  }
}

void HandleBoard::Drop(uint64_t context_id, int64_t step_id, const std::string& target) {
  const std::string session = EagerSessionOf(context_id);
  std::map<uint64_t, Waiting> waiting;
  {
    std::lock_guard<std::mutex> lock(mu_);
    auto entry = entries_.lower_bound({session, step_id, target, std::string()});
    while (entry != entries_.end()) {
      const auto& [of_session, of_step, device, function] = entry->first;
      if (of_session != session || of_step != step_id || device.compare(0, target.size(), target) != 0) break;
      if (device.size() > target.size() && device[target.size()] != '/') {
        ++entry;
        continue;
      }
      waiting.merge(entry->second.waiting);
      entry = entries_.erase(entry);
    }
  }
  const Status status =
      AfterCancellation(MakeStatus(kCancelled, "the step was cleaned up before " + target + " was asked to run it"));
  for (auto& one : waiting) Answer(std::move(one.second), status, nullptr);
}

void HandleBoard::Cancel(const Key& key, uint64_t number) {
  Waiting waiting;
  {
    std::lock_guard<std::mutex> lock(mu_);
    const auto entry = entries_.find(key);
    if (entry == entries_.end()) return;
    const auto found = entry->second.waiting.find(number);
    if (found == entry->second.waiting.end()) return;
    waiting = std::move(found->second);
    entry->second.waiting.erase(found);
    if (entry->second.waiting.empty() && entry->second.found == nullptr) entries_.erase(entry);
  }
  // This thread is cancelling, and the answer may end the step, which waits for that.
  BackgroundQueue::OfProcess()->Run([waiting = std::move(waiting)] {
    Answer(waiting, AfterCancellation(MakeStatus(kCancelled, "the step was cancelled")), nullptr);
  });
}

void HandleBoard::Answer(Waiting waiting, const Status& status, const Found& found) {
  if (waiting.cancellation != nullptr) waiting.cancellation->DeregisterCallback(waiting.token);
  waiting.callback(status, found);
}

size_t HandleBoard::size() const {
  std::lock_guard<std::mutex> lock(mu_);
  return entries_.size();
}

}  // namespace starwire
