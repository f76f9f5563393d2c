#include "cc/star/peers.h"

#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

#include "cc/base/compat.h"
#include "cc/base/guard.h"
#include "cc/base/methods.h"
#include "cc/base/status_codec.h"
#include "include/starwire.h"

namespace starwire {
namespace {

constexpr uint32_t kAnswerWithinMs = 2000;

struct Servers {
  std::mutex mu;
  std::map<std::string, StarPeers::Open> by_task;
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
  Questions* all;
  std::shared_ptr<Channel> channel;
  bool yes = false;

  static sw_code Alloc(void*, sw_bytes, size_t, const uint64_t*, void**) { return kInvalidArgument; }
  static void Done(void* op, const sw_result* result) {
    auto* question = static_cast<Question*>(op);
    Questions* all = question->all;
    std::lock_guard<std::mutex> lock(all->mu);
    question->yes = result->code == 0;
    // Under the lock: afterwards the questions may be gone.
    if (--all->waiting == 0) all->over.notify_all();
  }
};

}  // namespace

void StarPeers::Attach(const std::string& task, Open open) {
  Servers* servers = AllServers();
  std::lock_guard<std::mutex> lock(servers->mu);
  servers->by_task[task] = std::move(open);
}

void StarPeers::Detach(const std::string& task) {
  Servers* servers = AllServers();
  std::lock_guard<std::mutex> lock(servers->mu);
  servers->by_task.erase(task);
}

std::vector<bool> StarPeers::TakeHandles(const std::string& own, const std::vector<std::string>& tasks) {
  static const sw_op_vtable kVtable = {sizeof(sw_op_vtable), Guarded<&Question::Alloc>, Guarded<&Question::Done>};
  Questions all;
  std::vector<Question> questions(tasks.size(), Question{&all, nullptr});
  {
    Servers* servers = AllServers();
    std::lock_guard<std::mutex> lock(servers->mu);
    const auto found = servers->by_task.find(own);
    for (size_t i = 0; i < tasks.size() && found != servers->by_task.end(); ++i) {
      questions[i].channel = found->second(tasks[i]);
      if (questions[i].channel != nullptr) ++all.waiting;
    }
  }
  const bool any = all.waiting != 0;
  for (Question& question : questions) {
    if (question.channel == nullptr) continue;
    sw_channel_call(question.channel->handle(), static_cast<uint32_t>(Method::kStarHandles), {nullptr, 0}, nullptr,
                    kAnswerWithinMs, 0, &kVtable, &question);
  }
  std::unique_lock<std::mutex> lock(all.mu);
  if (any) all.over.wait(lock, [&all] { return all.waiting == 0; });
  std::vector<bool> answers;
  for (const Question& question : questions) answers.push_back(question.yes);
  return answers;
}

}  // namespace starwire
