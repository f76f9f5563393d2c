#include "cc/worker/leftovers.h"

namespace starwire {

void Leftovers::PeerCame(uint64_t conn, const std::string& task, uint64_t incarnation) {
  std::vector<Life> ended;
  {
    std::lock_guard<std::mutex> lock(mu_);
    const Key key(task, incarnation);
    if (!connections_.emplace(conn, key).second) return;
    ++entries_[key].connections;
    Collect(task, &ended);
  }
  DropAll(task, std::move(ended));
}

void Leftovers::PeerGone(uint64_t conn) {
  std::vector<Life> ended;
  std::string task;
  {
    std::lock_guard<std::mutex> lock(mu_);
    auto found = connections_.find(conn);
    if (found == connections_.end()) return;
    const Key key = std::move(found->second);
    connections_.erase(found);
    auto entry = entries_.find(key);
    --entry->second.connections;
    // The same process may come back for its state.
    if (entry->second.connections == 0 && entry->second.life.empty()) entries_.erase(entry);
    task = key.first;
    Collect(task, &ended);
  }
  DropAll(task, std::move(ended));
}

void Leftovers::Collect(const std::string& task, std::vector<Life>* ended) {
  const auto first = entries_.lower_bound(Key(task, 0));
  bool connected = false;
  for (auto it = first; it != entries_.end() && it->first.first == task; ++it) {
    connected = connected || it->second.connections > 0;
  }
  if (!connected) return;
  for (auto it = first; it != entries_.end() && it->first.first == task;) {
    if (it->second.connections > 0) {
      ++it;
      continue;
    }
    ended->push_back(std::move(it->second.life));
    it = entries_.erase(it);
  }
}

void Leftovers::DropAll(const std::string& task, std::vector<Life> ended) {
  for (Life& life : ended) {
    if (!life.empty()) drop_(task, std::move(life));
  }
}

Status Leftovers::Named(const Status& status, uint64_t conn) {
  std::lock_guard<std::mutex> lock(mu_);
  const auto found = connections_.find(conn);
  if (status.ok() || found == connections_.end()) return status;
  return MakeStatus(StatusNumber(status), StatusMessage(status) + " (from " + found->second.first + ")");
}

Leftovers::Entry* Leftovers::Of(uint64_t conn) {
  auto found = connections_.find(conn);
  return found == connections_.end() ? nullptr : &entries_[found->second];
}

void Leftovers::GraphRegistered(uint64_t conn, const std::string& graph, const std::string& session, bool own_session) {
  std::lock_guard<std::mutex> lock(mu_);
  if (Entry* entry = Of(conn)) entry->life.graphs[graph] = {session, own_session};
}

void Leftovers::GraphDeregistered(uint64_t conn, const std::string& graph) {
  std::lock_guard<std::mutex> lock(mu_);
  if (Entry* entry = Of(conn)) entry->life.graphs.erase(graph);
}

void Leftovers::SessionCreated(uint64_t conn, const std::string& session) {
  std::lock_guard<std::mutex> lock(mu_);
  if (Entry* entry = Of(conn)) entry->life.sessions.insert(session);
}

void Leftovers::SessionDeleted(uint64_t conn, const std::string& session) {
  std::lock_guard<std::mutex> lock(mu_);
  if (Entry* entry = Of(conn)) entry->life.sessions.erase(session);
}

}  // namespace starwire
