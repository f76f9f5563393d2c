#include "cc/worker/peer_sessions.h"

#include <iterator>

namespace starwire {

void PeerSessions::SetIdleLimit(std::chrono::seconds patience) {
  std::lock_guard<std::mutex> lock(mu_);
  idle_limit_ = patience;
}

void PeerSessions::PeerConnected(uint64_t conn, const std::string& task, uint64_t incarnation) {
  std::vector<Ended> ended;
  {
    std::lock_guard<std::mutex> lock(mu_);
    const Key key(task, incarnation);
    if (!connections_.emplace(conn, key).second) return;
    ++entries_[key].connections;
    ended = Collect(task);
  }
  DropAll(std::move(ended));
}

void PeerSessions::PeerDisconnected(uint64_t conn) {
  std::vector<Ended> ended;
  {
    std::lock_guard<std::mutex> lock(mu_);
    auto found = connections_.find(conn);
    if (found == connections_.end()) return;
    const Key key = std::move(found->second);
    connections_.erase(found);
    auto entry = entries_.find(key);
    --entry->second.connections;
    entry->second.gone = Clock::now();
    // The same process may come back for its state.
    if (entry->second.connections == 0 && entry->second.registered.empty()) entries_.erase(entry);
    ended = Collect(key.first);
  }
  DropAll(std::move(ended));
}

std::vector<PeerSessions::Ended> PeerSessions::Collect(const std::string& task) {
  bool connected = false;
  for (auto it = entries_.lower_bound(Key(task, 0)); it != entries_.end() && it->first.first == task; ++it) {
    connected = connected || it->second.connections > 0;
  }
  std::vector<Ended> ended;
  const auto now = Clock::now();
  for (auto it = entries_.begin(); it != entries_.end();) {
    const bool is_back = connected && it->first.first == task;
    if (it->second.connections > 0 || (!is_back && now - it->second.gone < idle_limit_)) {
      ++it;
      continue;
    }
    ended.push_back({it->first.first, is_back, std::move(it->second.registered)});
    it = entries_.erase(it);
  }
  return ended;
}

void PeerSessions::DropAll(std::vector<Ended> ended) {
  for (Ended& one : ended) {
    if (!one.registered.empty()) drop_(one.task, one.is_back, std::move(one.registered));
  }
}

Status PeerSessions::Named(const Status& status, uint64_t conn) {
  std::lock_guard<std::mutex> lock(mu_);
  const auto found = connections_.find(conn);
  if (status.ok() || found == connections_.end()) return status;
  return MakeStatus(StatusNumber(status), StatusMessage(status) + " (from " + found->second.first + ")");
}

PeerSessions::Entry* PeerSessions::Of(uint64_t conn) {
  auto found = connections_.find(conn);
  return found == connections_.end() ? nullptr : &entries_[found->second];
}

PeerSessions::Peer PeerSessions::PeerOf(uint64_t conn) {
  std::lock_guard<std::mutex> lock(mu_);
  const auto found = connections_.find(conn);
  return found == connections_.end() ? Peer() : found->second;
}

void PeerSessions::Add(const Peer& peer, const std::function<void(Registered* registered)>& add) {
  if (!peer.has_value()) return;
  std::vector<Ended> ended;
  {
    std::lock_guard<std::mutex> lock(mu_);
    const auto [entry, is_new] = entries_.emplace(*peer, Entry());
    add(&entry->second.registered);
    // The connection was lost meanwhile, and another incarnation may have come.
    if (is_new) entry->second.gone = Clock::now();
    if (entry->second.connections == 0) ended = Collect(peer->first);
  }
  DropAll(std::move(ended));
}

void PeerSessions::GraphRegistered(const Peer& peer, const std::string& graph, const std::string& session,
                                   bool own_session) {
  Add(peer, [&](Registered* registered) { registered->graphs[graph] = {session, own_session}; });
}

void PeerSessions::GraphDeregistered(uint64_t conn, const std::string& graph) {
  std::lock_guard<std::mutex> lock(mu_);
  if (Entry* entry = Of(conn)) entry->registered.graphs.erase(graph);
}

void PeerSessions::SessionCreated(const Peer& peer, const std::string& session) {
  Add(peer, [&](Registered* registered) { registered->sessions.insert(session); });
}

void PeerSessions::SessionDeleted(uint64_t conn, const std::string& session) {
  std::lock_guard<std::mutex> lock(mu_);
  Entry* entry = Of(conn);
  if (entry == nullptr) return;
  entry->registered.sessions.erase(session);
  // TensorFlow deletes the graphs of a worker session with it; no master deregisters them.
  Graphs* graphs = &entry->registered.graphs;
  for (auto graph = graphs->begin(); graph != graphs->end();) {
    graph = graph->second == std::make_pair(session, true) ? graphs->erase(graph) : std::next(graph);
  }
}

}  // namespace starwire
