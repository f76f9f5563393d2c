// The graphs and worker sessions that masters in other tasks have registered with this worker. A master that is killed
// deregisters nothing; once another incarnation of its task is connected, nothing can use them any more. If none comes,
// they go when the master has had no connection for long: should it come back after all, TensorFlow tells it that its
// session is gone.
#ifndef STARWIRE_CC_WORKER_PEER_SESSIONS_H_
#define STARWIRE_CC_WORKER_PEER_SESSIONS_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cc/base/compat.h"

namespace starwire {

class PeerSessions {
 public:
  // By graph handle: the session it was registered for, and whether that has its own worker session.
  using Graphs = std::map<std::string, std::pair<std::string, bool>>;
  struct Registered {
    Graphs graphs;
    std::set<std::string> sessions;
    bool empty() const { return graphs.empty() && sessions.empty(); }
  };
  // Gets the state that an ended incarnation of a task left, if any. `is_back`: another one is connected. Called on
  // reactor threads, and where a registration ends.
  using Drop = std::function<void(const std::string& task, bool is_back, Registered registered)>;

  explicit PeerSessions(Drop drop) : drop_(std::move(drop)) {}
  PeerSessions(const PeerSessions&) = delete;
  PeerSessions& operator=(const PeerSessions&) = delete;

  // How long a master may have no connection. It is looked for when others connect or disconnect.
  void SetIdleLimit(std::chrono::seconds patience);

  void PeerConnected(uint64_t conn, const std::string& task, uint64_t incarnation);
  void PeerDisconnected(uint64_t conn);

  // Adds the name of the task that caused it to an error.
  Status Named(const Status& status, uint64_t conn);

  // An incarnation of a task; none: unknown.
  using Key = std::pair<std::string, uint64_t>;
  using Peer = std::optional<Key>;
  // Whose connection it is. To be asked when a request arrives, which may outlive the connection.
  Peer PeerOf(uint64_t conn);

  // What requests have done.
  void GraphRegistered(const Peer& peer, const std::string& graph, const std::string& session, bool own_session);
  void GraphDeregistered(uint64_t conn, const std::string& graph);
  void SessionCreated(const Peer& peer, const std::string& session);
  void SessionDeleted(uint64_t conn, const std::string& session);

 private:
  using Clock = std::chrono::steady_clock;
  struct Entry {
    int connections = 0;
    Clock::time_point gone;  // since when there is none
    Registered registered;
  };
  struct Ended {
    std::string task;
    bool is_back;
    Registered registered;
  };

  Entry* Of(uint64_t conn);
  void Add(const Peer& peer, const std::function<void(Registered* registered)>& add);
  // An incarnation has ended if it has no connection and another one of the task has one, or if it has had none for
  // long. `task`: it has connected or disconnected.
  std::vector<Ended> Collect(const std::string& task);
  void DropAll(std::vector<Ended> ended);

  const Drop drop_;
  std::mutex mu_;
  std::chrono::seconds idle_limit_ = std::chrono::hours(24);
  std::map<Key, Entry> entries_;
  std::unordered_map<uint64_t, Key> connections_;
};

}  // namespace starwire

#endif  // STARWIRE_CC_WORKER_PEER_SESSIONS_H_
