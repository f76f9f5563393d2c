#include "cc/worker/leftovers.h"

namespace starwire {

void Leftovers::SetPatience(std::chrono::seconds patience) {
  std::lock_guard<std::mutex> lock(mu_);
  patience_ = patience;
}

void Leftovers::PeerCame(uint64_t conn, const std::string& task, uint64_t incarnation) {
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

void Leftovers::PeerGone(uint64_t conn) {
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
    if (entry->second.connections == 0 && entry->second.life.empty()) entries_.erase(entry);
    ended = Collect(key.first);
  }
  DropAll(std::move(ended));
}

std::vector<Leftovers::Ended> Leftovers::Collect(const std::string& task) {
  bool connected = false;
  for (auto it = entries_.lower_bound(Key(task, 0)); it != entries_.end() && it->first.first == task; ++it) {
    connected = connected || it->second.connections > 0;
  }
  std::vector<Ended> ended;
  const auto now = Clock::now();
  for (auto it = entries_.begin(); it != entries_.end();) {
    const bool is_back = connected && it->first.first == task;
    if (it->second.connections > 0 || (!is_back && now - it->second.gone < patience_)) {
      ++it;
      continue;
    }
    ended.push_back({it->first.first, is_back, std::move(it->second.life)});
    it = entries_.erase(it);
  }
  return ended;
}

void Leftovers::DropAll(std::vector<Ended> ended) {
  for (Ended& one : ended) {
    if (!one.life.empty()) drop_(one.task, one.is_back, std::move(one.life));
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
