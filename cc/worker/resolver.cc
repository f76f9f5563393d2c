#include "cc/worker/resolver.h"

#include <netdb.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "cc/base/compat_server.h"
#include "cc/base/errands.h"
#include "cc/base/guard.h"
#include "cc/base/status_codec.h"
#include "cc/worker/advertisement.h"
#include "tensorflow/core/distributed_runtime/call_options.h"
#include "tensorflow/core/platform/env.h"
#include "tensorflow/core/platform/logging.h"
#include "tensorflow/core/protobuf/worker.pb.h"

namespace starwire {

namespace {

// What a client of HTTP/2 says first: who it is, and that it has no settings.
constexpr char kGreeting[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0";

// Whether nobody listens at "host:port", as far as the host itself says so at once.
bool RefusesConnections(const std::string& address) {
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos) return false;
  std::string host = address.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  addrinfo hints = {}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  if (getaddrinfo(host.c_str(), address.c_str() + colon + 1, &hints, &found) != 0) return false;
  bool refuses = true;
  for (const addrinfo* one = found; one != nullptr && refuses; one = one->ai_next) {
    const int fd = socket(one->ai_family, one->ai_socktype | SOCK_CLOEXEC, one->ai_protocol);
    const timeval patience = {1, 0};
    const bool waits = fd >= 0 && setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience)) == 0;
    const int result = waits ? connect(fd, one->ai_addr, one->ai_addrlen) : 0;
    refuses = result != 0 && errno == ECONNREFUSED;
    // gRPC servers of 1.15 keep a connection that ends without a greeting for minutes.
    if (waits && result == 0) (void)!send(fd, kGreeting, sizeof(kGreeting) - 1, MSG_NOSIGNAL);
    if (fd >= 0) close(fd);
  }
  freeaddrinfo(found);
  return refuses;
}

}  // namespace

struct Resolver::Query {
  std::shared_ptr<sw_engine> engine;
  uint64_t token = 0;
  std::string task;
  std::string address;
  std::shared_ptr<tensorflow::WorkerCacheInterface> stock;
  tensorflow::WorkerInterface* worker = nullptr;
  tensorflow::CallOptions opts;
  tensorflow::GetStatusRequest request;
  tensorflow::GetStatusResponse response;

  Task Key() const { return {task, address}; }
  std::string Who() const { return "task " + task + (address.empty() ? "" : " at " + address); }

  void Answer(const Status& status, const std::string& advertisement) {
    const std::string text = status.ok() ? advertisement : StatusMessage(status);
    sw_engine_resolved(engine.get(), token, StatusNumber(status), AsBytes(text));
  }
};

Resolver::Resolver(std::string protocol) : protocol_(std::move(protocol)) {}

Resolver::~Resolver() = default;

void Resolver::Register(const std::string& task, const std::string& address,
                        std::shared_ptr<tensorflow::WorkerCacheInterface> stock) {
  std::lock_guard<std::mutex> lock(mu_);
  // A replaced cache is destroyed here unless its session still holds it.
  if (!shut_down_) caches_[{task, address}].swap(stock);
}

void Resolver::Resolve(std::shared_ptr<sw_engine> engine, const std::string& task, const std::string& address,
                       uint64_t token) {
  auto query = std::make_shared<Query>();
  query->engine = std::move(engine);
  query->token = token;
  query->task = task;
  query->address = address;
  Status refused;
  {
    std::lock_guard<std::mutex> lock(mu_);
    auto found = caches_.find({task, address});
    if (shut_down_) {
      refused = MakeStatus(kUnavailable, "the server is stopping");
    } else if (found == caches_.end()) {
      refused = MakeStatus(kInternal, query->Who() + " is not in any cluster of this server");
    } else {
      query->stock = found->second;
      queries_.insert(query);
    }
  }
  if (!refused.ok()) {
    query->Answer(refused, "");
    return;
  }
  // gRPC may do DNS look-ups and take locks before the call is in progress: not on the calling thread, which is a
  // reactor.
  Guard(
      "asking a task for its data port",
      [&] { tensorflow::Env::Default()->SchedClosure([self = shared_from_this(), query] { self->Ask(query); }); },
      [&](const Status& thrown) { Answered(query, thrown); });
}

void Resolver::Ask(std::shared_ptr<Query> query) {
  query->worker = query->stock->GetOrCreateWorker(query->task);
  if (query->worker == nullptr) {
    Answered(query, MakeStatus(kInternal, query->Who() + " has no gRPC channel"));
    return;
  }
  if (!kStatusCallsEnd) {
    if (!IsFirst(query)) return;
    if (RefusesConnections(query->address)) {
      Answered(query, MakeStatus(kUnavailable, "it refuses connections"));
      return;
    }
  }
  query->opts.SetTimeout(kTimeoutMs);
  AskStatus(query->worker, &query->opts, &query->request, &query->response,
            [self = shared_from_this(), query](const Status& status) { self->Answered(query, status); });
}

bool Resolver::IsFirst(const std::shared_ptr<Query>& query) {
  Errands::OfProcess()->RunAfter(std::chrono::milliseconds(kTimeoutMs), [self = shared_from_this(), query] {
    self->GiveUp(query, "no answer within " + std::to_string(kTimeoutMs) + " ms");
  });
  std::lock_guard<std::mutex> lock(mu_);
  const bool is_first = sharing_.count(query->Key()) == 0;
  sharing_[query->Key()].insert(query);
  return is_first;
}

void Resolver::GiveUp(const std::shared_ptr<Query>& query, const std::string& reason) {
  {
    std::lock_guard<std::mutex> lock(mu_);
    const auto sharing = sharing_.find(query->Key());
    if (sharing == sharing_.end() || sharing->second.erase(query) == 0) return;
  }
  Answer(query, *query, MakeStatus(kUnavailable, reason));
}

void Resolver::Answered(const std::shared_ptr<Query>& query, const Status& status) {
  std::set<std::shared_ptr<Query>> sharing = {query};
  if (query->worker != nullptr) {
    if (!kStatusCallsEnd) {
      std::lock_guard<std::mutex> lock(mu_);
      sharing = std::move(sharing_[query->Key()]);
      sharing_.erase(query->Key());
    }
    query->stock->ReleaseWorker(query->task, query->worker);
  }
  if (kStatusCallsEnd) {
    query->stock.reset();
  } else {
    // The last user of a cache of 1.15 waits for the cache's threads, and this is one of them.
    Errands::OfProcess()->Run([stock = std::move(query->stock)] {});
  }
  for (const auto& one : sharing) Answer(one, *query, status);
}

void Resolver::Answer(const std::shared_ptr<Query>& query, const Query& asked, const Status& status) {
  const std::string advertisement = status.ok() ? FindAdvertisement(asked.response) : "";
  if (!status.ok()) {
    const int code = StatusNumber(status) == kDeadlineExceeded ? kUnavailable : StatusNumber(status);
    query->Answer(
        MakeStatus(code, query->Who() + " does not answer GetStatus on its gRPC port: " + StatusMessage(status)), "");
  } else if (advertisement.empty()) {
    query->Answer(
        MakeStatus(kFailedPrecondition,
                   query->Who() + " does not offer protocol " + protocol_ +
                       " (it answered TensorFlow's gRPC without a starwire data port): start it with protocol=\"" +
                       protocol_ + "\""),
        "");
  } else {
    query->Answer(OkStatus(), advertisement);
  }
  std::lock_guard<std::mutex> lock(mu_);
  queries_.erase(query);
  idle_.notify_all();
}

void Resolver::Shutdown() {
  std::vector<std::shared_ptr<Query>> under_way;
  std::map<Task, std::shared_ptr<tensorflow::WorkerCacheInterface>> caches;
  {
    std::lock_guard<std::mutex> lock(mu_);
    shut_down_ = true;
    under_way.assign(queries_.begin(), queries_.end());
    caches.swap(caches_);
  }
  for (const auto& query : under_way) {
    query->opts.StartCancel();
    GiveUp(query, "the server is stopping");
  }
  std::unique_lock<std::mutex> lock(mu_);
  // gRPC ends a call at its deadline; the rest allows for scheduling.
  const auto bound = std::chrono::milliseconds(kTimeoutMs + 5000);
  if (!idle_.wait_for(lock, bound, [this] { return queries_.empty(); })) {
    LOG(ERROR) << "starwire: " << std::to_string(queries_.size()) << " GetStatus calls outlived their deadline";
  }
}

}  // namespace starwire
