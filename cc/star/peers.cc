#include "cc/star/peers.h"

#include <algorithm>
#include <array>
#include <condition_variable>
#include <map>
#include <mutex>
#include <utility>

#include "cc/base/compat.h"
#include "cc/base/guard.h"
#include "cc/base/methods.h"
#include "include/starwire.h"

namespace starwire {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::nanoseconds;

constexpr uint32_t kAnswerWithinMs = 2000;
constexpr auto kKeptFor = std::chrono::minutes(5);
// The first large one opens the connection's window. A busy machine delays some, so the best of each size counts.
constexpr uint32_t kBytes = 256 << 10;
constexpr std::array<uint32_t, 8> kRounds = {0, 0, 0, 0, kBytes, kBytes, kBytes, kBytes};

struct Known {
  StarPeers::Path path;
  Clock::time_point when;
};

struct Server {
  StarPeers::Open open;
  std::map<std::string, Known> known;
};

struct Servers {
  std::mutex mu;
  std::map<std::string, Server> by_task;  // guarded by mu
};

Servers* AllServers() {
  static auto* servers = new Servers;
  return servers;
}

// Questions that are asked at once; the last answer ends them.
struct Questions {
  std::mutex mu;
  std::condition_variable over;
  size_t waiting = 0;  // guarded by mu
};

struct Question {
  // Null: it is not asked.
  std::shared_ptr<Channel> channel;
  std::vector<uint8_t> payload;
  Questions* all = nullptr;
  Clock::time_point begun;
  // The answer.
  bool ok = false;
  bool elsewhere = false;
  nanoseconds took{0};

  // With a payload, only this sees the reply's metadata.
  static sw_code Alloc(void* op, sw_bytes meta, size_t n, const uint64_t* lens, void** bufs) {
    auto* question = static_cast<Question*>(op);
    if (n != 1 || lens[0] != question->payload.size()) return kInvalidArgument;
    question->Look(meta);
    bufs[0] = question->payload.data();
    return 0;
  }

  void Look(sw_bytes meta) { elsewhere = meta.len == 1 && meta.data[0] == 0; }

  static void Done(void* op, const sw_result* result) {
    auto* question = static_cast<Question*>(op);
    Questions* all = question->all;
    std::lock_guard<std::mutex> lock(all->mu);
    question->took = Clock::now() - question->begun;
    question->ok = result->code == 0;
    if (question->payload.empty()) question->Look(result->meta);
    // Under the lock: afterwards the questions may be gone.
    if (--all->waiting == 0) all->over.notify_all();
  }
};

std::vector<Question> QuestionsFor(const std::string& own, const std::vector<std::string>& tasks) {
  std::vector<Question> questions(tasks.size());
  Servers* servers = AllServers();
  std::lock_guard<std::mutex> lock(servers->mu);
  const auto found = servers->by_task.find(own);
  for (size_t i = 0; i < tasks.size() && found != servers->by_task.end(); ++i) {
    questions[i].channel = found->second.open(tasks[i]);
  }
  return questions;
}

// Asks for answers with this many bytes.
void Ask(Method method, sw_bytes meta, uint32_t bytes, std::vector<Question>* questions) {
  static const sw_op_vtable kVtable = {sizeof(sw_op_vtable), Guarded<&Question::Alloc>, Guarded<&Question::Done>};
  Questions all;
  std::vector<Question*> asked;
  for (Question& question : *questions) {
    if (question.channel != nullptr) asked.push_back(&question);
  }
  all.waiting = asked.size();
  for (Question* question : asked) {
    question->payload.resize(bytes);
    question->all = &all;
    question->elsewhere = false;
    question->begun = Clock::now();
    sw_channel_call(question->channel->handle(), static_cast<uint32_t>(method), meta, nullptr, kAnswerWithinMs, 0,
                    &kVtable, question);
  }
  std::unique_lock<std::mutex> lock(all.mu);
  all.over.wait(lock, [&all] { return all.waiting == 0; });
}

uint64_t Worthwhile(const StarPeers::Path& path) {
  return sw_star_worthwhile_bytes(path.bytes_per_s, static_cast<uint64_t>(path.round_trip.count()));
}

// Those of `tasks` that answer.
std::map<std::string, Known> Measure(const std::string& own, const std::vector<std::string>& tasks) {
  std::vector<Question> questions = QuestionsFor(own, tasks);
  std::map<std::string, Known> found;
  std::vector<std::array<nanoseconds, 2>> best(tasks.size(), {nanoseconds::max(), nanoseconds::max()});
  for (size_t i = 0; i < tasks.size(); ++i) {
    if (questions[i].channel != nullptr) found[tasks[i]].when = Clock::now();
  }
  for (const uint32_t bytes : kRounds) {
    std::array<uint8_t, 4> meta;
    for (size_t i = 0; i < meta.size(); ++i) meta[i] = static_cast<uint8_t>(bytes >> (8 * i));
    Ask(Method::kMeasure, {meta.data(), meta.size()}, bytes, &questions);
    for (size_t i = 0; i < tasks.size(); ++i) {
      Question& question = questions[i];
      if (question.channel == nullptr) continue;
      nanoseconds& least = best[i][bytes != 0];
      least = std::min(least, question.took);
      if (question.ok && question.elsewhere) continue;
      // It may answer next time.
      if (!question.ok) found.erase(tasks[i]);
      question.channel.reset();
    }
  }
  for (size_t i = 0; i < tasks.size(); ++i) {
    if (questions[i].channel == nullptr) continue;
    const auto [empty, full] = best[i];
    const std::chrono::duration<double> took = std::max(full - empty, nanoseconds(std::chrono::microseconds(1)));
    found[tasks[i]].path = {static_cast<uint64_t>(kBytes / took.count()), empty};
  }
  return found;
}

}  // namespace

void StarPeers::Attach(const std::string& task, Open open) {
  Servers* servers = AllServers();
  std::lock_guard<std::mutex> lock(servers->mu);
  servers->by_task[task] = {std::move(open), {}};
}

void StarPeers::Detach(const std::string& task) {
  Servers* servers = AllServers();
  std::lock_guard<std::mutex> lock(servers->mu);
  servers->by_task.erase(task);
}

std::vector<bool> StarPeers::TakeHandles(const std::string& own, const std::vector<std::string>& tasks) {
  std::vector<Question> questions = QuestionsFor(own, tasks);
  Ask(Method::kStarHandles, {nullptr, 0}, 0, &questions);
  std::vector<bool> answers;
  for (const Question& question : questions) answers.push_back(question.ok);
  return answers;
}

StarPeers::Path StarPeers::Narrowest(const std::string& own, const std::vector<std::string>& tasks) {
  // Measurements at once would disturb each other.
  static std::mutex measuring;
  std::lock_guard<std::mutex> one(measuring);
  Servers* servers = AllServers();
  std::unique_lock<std::mutex> lock(servers->mu);
  const auto server = [&] {
    const auto found = servers->by_task.find(own);
    return found == servers->by_task.end() ? nullptr : &found->second;
  };
  if (server() == nullptr) return {};
  std::vector<std::string> unknown;
  for (const std::string& task : tasks) {
    const auto found = server()->known.find(task);
    if (found == server()->known.end() || Clock::now() - found->second.when >= kKeptFor) unknown.push_back(task);
  }
  lock.unlock();
  std::map<std::string, Known> measured = Measure(own, unknown);
  lock.lock();
  if (server() == nullptr) return {};
  std::map<std::string, Known>& known = server()->known;
  for (auto& [task, found] : measured) known[task] = found;
  Path narrowest;
  for (const std::string& task : tasks) {
    const auto found = known.find(task);
    if (found != known.end() && Worthwhile(found->second.path) < Worthwhile(narrowest)) narrowest = found->second.path;
  }
  return narrowest;
}

}  // namespace starwire
