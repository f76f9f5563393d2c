#include "cc/work_queue/work_queue.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <sstream>

#include "cc/base/background_queue.h"
#include "cc/base/status_codec.h"
#include "tensorflow/core/platform/logging.h"

namespace starwire {

namespace {

constexpr char kStateHead[] = "starwire-work-queue-1";
constexpr int64_t kMostItems = std::numeric_limits<uint32_t>::max();
constexpr int64_t kMostEpochs = int64_t{1} << 24;

uint64_t Next(uint64_t* state) {
  *state += 0x9E3779B97F4A7C15u;
  uint64_t z = *state;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// Of the items and what decides their order.
std::string Digest(const std::vector<std::string>& items, const WorkQueue::Options& options) {
  uint64_t digest = 0xcbf29ce484222325u;
  const auto add = [&digest](unsigned char byte) { digest = (digest ^ byte) * 0x100000001b3u; };
  for (const std::string& item : items) {
    for (const char c : item) add(static_cast<unsigned char>(c));
    add(0);
  }
  std::ostringstream text;
  text << items.size() << ':' << digest << ':' << options.epochs << ':' << options.shuffle;
  return text.str();
}

Status Check(const std::vector<std::string>& items, const WorkQueue::Options& options) {
  if (items.empty() || static_cast<int64_t>(items.size()) > kMostItems) {
    return MakeStatus(kInvalidArgument,
                      "starwire: a work queue has 1 to 2^32 - 1 items, not " + std::to_string(items.size()));
  }
  if (options.epochs < 1 || options.epochs > kMostEpochs) {
    return MakeStatus(kInvalidArgument,
                      "starwire: a work queue has 1 to 2^24 epochs, not " + std::to_string(options.epochs));
  }
  return OkStatus();
}

Status Cancelled() { return AfterCancellation(MakeStatus(kCancelled, "starwire: a wait for work was cancelled")); }

}  // namespace

std::string WorkQueue::DebugString() const { return "a work queue, " + std::to_string(Left()) + " items left"; }

bool WorkQueue::is_created() const {
  const std::lock_guard<std::mutex> lock(mu_);
  return !items_.empty();
}

int64_t WorkQueue::Left() const {
  const std::lock_guard<std::mutex> lock(mu_);
  return total() - done_;
}

Status WorkQueue::Create(std::vector<std::string> items, const Options& options) {
  Status status = Check(items, options);
  if (!status.ok()) return status;
  const std::lock_guard<std::mutex> lock(mu_);
  if (!items_.empty()) return OkStatus();
  digest_ = Digest(items, options);
  items_ = std::move(items);
  options_ = options;
  return OkStatus();
}

Status WorkQueue::State(std::string* state) const {
  const std::lock_guard<std::mutex> lock(mu_);
  if (items_.empty()) return MakeStatus(kFailedPrecondition, "starwire: a work queue was saved before it had items");
  std::set<int64_t> again = returned_;
  for (const auto& holder : holders_) again.insert(holder.second.positions.begin(), holder.second.positions.end());
  std::ostringstream text;
  text << kStateHead << ' ' << digest_ << ' ' << options_.seed << ' ' << next_ << ' ' << again.size();
  for (const int64_t position : again) text << ' ' << position;
  *state = text.str();
  return OkStatus();
}

Status WorkQueue::Restore(std::vector<std::string> items, const Options& options, const std::string& state,
                          bool* is_other) {
  Status status = Check(items, options);
  if (!status.ok()) return status;
  const std::string digest = Digest(items, options);
  const int64_t all = static_cast<int64_t>(items.size()) * options.epochs;
  std::istringstream text(state);
  std::string head, of;
  Options restored = options;
  int64_t next = 0, again = 0;
  std::set<int64_t> returned;
  text >> head >> of >> restored.seed >> next >> again;
  bool is_valid = !text.fail() && head == kStateHead;
  *is_other = is_valid && of != digest;
  if (!*is_other) {
    is_valid = is_valid && 0 <= next && next <= all && 0 <= again && again <= next;
    for (int64_t position = -1; is_valid && again > 0; --again) {
      const int64_t before = position;
      is_valid = static_cast<bool>(text >> position) && before < position && position < next;
      returned.insert(position);
    }
    if (!is_valid || !(text >> std::ws).eof()) {
      return MakeStatus(kInvalidArgument,
                        "starwire: the state of a work queue in the checkpoint is damaged: " + state.substr(0, 100));
    }
  } else {
    restored = options;
    next = 0;
  }
  Calls calls;
  {
    const std::lock_guard<std::mutex> lock(mu_);
    digest_ = digest;
    items_ = std::move(items);
    options_ = restored;
    epoch_ = -1;
    next_ = next;
    done_ = next - static_cast<int64_t>(returned.size());
    returned_ = std::move(returned);
    holders_.clear();
    AnswerWaiters(Clock::now(), &calls);
  }
  for (const Call& call : calls) call();
  return OkStatus();
}

const std::string& WorkQueue::ItemAt(int64_t position) {
  const auto n = static_cast<int64_t>(items_.size());
  if (!options_.shuffle) return items_[static_cast<size_t>(position % n)];
  if (epoch_ != position / n) {
    epoch_ = position / n;
    order_.resize(items_.size());
    std::iota(order_.begin(), order_.end(), 0u);
    uint64_t random = options_.seed;
    random = Next(&random) + static_cast<uint64_t>(epoch_);
    for (size_t left = order_.size(); left > 1; --left) std::swap(order_[left - 1], order_[Next(&random) % left]);
  }
  return items_[order_[static_cast<size_t>(position % n)]];
}

void WorkQueue::Return(Holder* holder) {
  returned_.insert(holder->positions.begin(), holder->positions.end());
  holder->positions.clear();
}

void WorkQueue::Reclaim(Holder* holder) {
  std::deque<int64_t> own;
  for (const int64_t position : holder->late) {
    bool is_there = returned_.erase(position) > 0;
    for (auto& other : holders_) {
      auto& theirs = other.second.positions;
      const auto at = std::find(theirs.begin(), theirs.end(), position);
      if (at == theirs.end()) continue;
      theirs.erase(at);
      is_there = true;
    }
    if (is_there) own.push_back(position);
  }
  holder->late.clear();
  holder->positions.insert(holder->positions.begin(), own.begin(), own.end());
}

int64_t WorkQueue::Waiting(const std::string& name) const {
  return std::count_if(waiters_.begin(), waiters_.end(),
                       [&](const Waiter& waiter) { return waiter.worker.name == name; });
}

void WorkQueue::DropWaiters(const Worker& worker, Calls* calls) {
  for (auto at = waiters_.begin(); at != waiters_.end();) {
    if (at->worker.name != worker.name || at->worker.incarnation == worker.incarnation) {
      ++at;
      continue;
    }
    calls->push_back([taken = at->taken] { taken(Cancelled(), ""); });
    at = waiters_.erase(at);
  }
}

void WorkQueue::Expire(Clock::time_point now) {
  for (auto at = holders_.begin(); at != holders_.end();) {
    Holder& holder = at->second;
    if (holder.expires > now || Waiting(at->first) > 0) {
      ++at;
    } else if (holder.positions.empty() && holder.late.empty()) {
      at = holders_.erase(at);
    } else {
      if (!holder.positions.empty()) {
        LOG(WARNING) << "starwire: a work queue hands out " << holder.positions.size() << " items again: worker "
                     << at->first << " has asked for nothing for as long as its lease";
      }
      holder.late.insert(holder.late.end(), holder.positions.begin(), holder.positions.end());
      holder.ended = 0;
      Return(&holder);
      ++at;
    }
  }
}

bool WorkQueue::OthersHold(const Worker& worker) const {
  return std::any_of(holders_.begin(), holders_.end(), [&](const std::pair<const std::string, Holder>& holder) {
    // A step that takes two items would wait for itself.
    const bool is_own = holder.first == worker.name || (!worker.task.empty() && holder.second.task == worker.task);
    return !is_own && !holder.second.positions.empty();
  });
}

bool WorkQueue::Answer(const Worker& worker, const Taken& taken, Clock::time_point now, Calls* calls) {
  if (items_.empty()) {
    const Status status =
        MakeStatus(kFailedPrecondition, "starwire: a work queue has no items yet: run its initializer");
    calls->push_back([taken, status] { taken(status, ""); });
    return true;
  }
  if (!returned_.empty() || next_ < total()) {
    const int64_t position = returned_.empty() ? next_++ : *returned_.begin();
    returned_.erase(position);
    // Its lease begins when it has the item, however long it has waited.
    Holder* holder = &holders_[worker.name];
    holder->task = worker.task;
    holder->incarnation = worker.incarnation;
    holder->expires = now + worker.lease;
    holder->ended = 0;
    holder->positions.push_back(position);
    calls->push_back([taken, item = ItemAt(position)] { taken(OkStatus(), item); });
    return true;
  }
  if (worker.waits && OthersHold(worker)) return false;
  const auto holder = holders_.find(worker.name);
  if (holder != holders_.end()) ++holder->second.ended;
  const Status status = MakeStatus(kOutOfRange, "starwire: a work queue has no more items");
  calls->push_back([taken, status] { taken(status, ""); });
  return true;
}

void WorkQueue::AnswerWaiters(Clock::time_point now, Calls* calls) {
  for (auto at = waiters_.begin(); at != waiters_.end();) {
    at = Answer(at->worker, at->taken, now, calls) ? waiters_.erase(at) : std::next(at);
  }
}

int64_t WorkQueue::Take(const Worker& worker, Clock::time_point now, Taken taken) {
  Calls calls;
  int64_t number = 0;
  {
    const std::lock_guard<std::mutex> lock(mu_);
    number = ++numbers_;
    Holder* holder = &holders_[worker.name];
    holder->expires = now + worker.lease;  // late or not, it is there
    Expire(now);
    if (holder->incarnation != worker.incarnation) {
      Return(holder);
      holder->late.clear();
      holder->ended = 0;
      DropWaiters(worker, &calls);
    }
    Reclaim(holder);
    holder->incarnation = worker.incarnation;
    // A client that waits, or was told the end, works on nothing.
    const int64_t clients = std::max<int64_t>(worker.in_progress, 1) - Waiting(worker.name) - holder->ended;
    while (!holder->positions.empty() && static_cast<int64_t>(holder->positions.size()) >= clients) {
      holder->positions.pop_front();
      ++done_;
    }
    waiters_.push_back({number, worker, std::move(taken)});
    AnswerWaiters(now, &calls);
    Watch(now, &calls);
  }
  for (const Call& call : calls) call();
  return number;
}

void WorkQueue::Cancel(int64_t number) {
  Calls calls;
  {
    const std::lock_guard<std::mutex> lock(mu_);
    const auto is_it = [number](const Waiter& waiter) { return waiter.number == number; };
    const auto at = std::find_if(waiters_.begin(), waiters_.end(), is_it);
    if (at == waiters_.end()) return;
    calls.push_back([taken = at->taken] { taken(Cancelled(), ""); });
    waiters_.erase(at);
  }
  for (const Call& call : calls) call();
}

void WorkQueue::Tick(Clock::time_point now) {
  Calls calls;
  {
    const std::lock_guard<std::mutex> lock(mu_);
    is_watched_ = false;
    Expire(now);
    AnswerWaiters(now, &calls);
    Watch(now, &calls);
  }
  for (const Call& call : calls) call();
}

void WorkQueue::Watch(Clock::time_point now, Calls* calls) {
  if (waiters_.empty() || is_watched_) return;
  // Of those that hold something: somebody does, or nobody would wait.
  auto first = Clock::time_point::max();
  for (const auto& holder : holders_) {
    if (!holder.second.positions.empty()) first = std::min(first, holder.second.expires);
  }
  if (first == Clock::time_point::max()) return;
  first = std::max(first, now + std::chrono::milliseconds(100));
  is_watched_ = true;
  Ref();
  const auto wait = std::chrono::duration_cast<std::chrono::milliseconds>(first - now) + std::chrono::milliseconds(1);
  calls->push_back([this, wait] {
    const auto due = Clock::now() + wait;
    BackgroundQueue::OfProcess()->RunAfter(wait, [this, due] {
      if (Clock::now() >= due) {
        Tick(Clock::now());
      } else {  // at once: there is no thread for it, and whoever takes next looks again
        const std::lock_guard<std::mutex> lock(mu_);
        is_watched_ = false;
      }
      Unref();
    });
  });
}

}  // namespace starwire
