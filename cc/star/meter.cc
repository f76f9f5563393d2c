#include "cc/star/meter.h"

#include <algorithm>
#include <array>
#include <condition_variable>
#include <utility>

#include "cc/base/compat.h"
#include "cc/base/guard.h"
#include "cc/base/methods.h"
#include "cc/base/status_codec.h"
#include "include/starwire.h"
#include "tensorflow/core/common_runtime/device.h"

namespace starwire {
namespace {

using Clock = std::chrono::steady_clock;

constexpr char kContainer[] = "starwire";
constexpr char kName[] = "paths";
constexpr auto kKeptFor = std::chrono::minutes(5);
constexpr uint32_t kDeadlineMs = 2000;
// The first large one opens the connection's window. A busy machine delays some, so the best of each size counts.
constexpr uint32_t kBytes = 256 << 10;
constexpr std::array<uint32_t, 8> kRounds = {0, 0, 0, 0, kBytes, kBytes, kBytes, kBytes};

// What one server has answered so far.
struct Probed {
  std::shared_ptr<Channel> channel;
  bool usable = true;
  // It did not answer; it may do so next time.
  bool failed = false;
  std::chrono::nanoseconds empty = std::chrono::nanoseconds::max();
  std::chrono::nanoseconds full = std::chrono::nanoseconds::max();
};

// The calls of a round, which the last of their answers ends.
struct Round {
  std::mutex mu;
  std::condition_variable over;
  size_t waiting = 0;  // guarded by mu
};

struct Probe {
  Probed* to;
  Round* round;
  Clock::time_point begun;
  std::vector<uint8_t> bytes;
  bool elsewhere = false;

  // With a payload, only this sees the reply's metadata.
  static sw_code Alloc(void* op, sw_bytes meta, size_t n, const uint64_t* lens, void** bufs) {
    auto* probe = static_cast<Probe*>(op);
    if (n != 1 || lens[0] != probe->bytes.size()) return kInvalidArgument;
    probe->Look(meta);
    bufs[0] = probe->bytes.data();
    return 0;
  }

  void Look(sw_bytes meta) { elsewhere = meta.len == 1 && meta.data[0] == 0; }

  static void Done(void* op, const sw_result* result) {
    auto* probe = static_cast<Probe*>(op);
    const std::chrono::nanoseconds took = Clock::now() - probe->begun;
    Round* round = probe->round;
    std::lock_guard<std::mutex> lock(round->mu);
    Probed* to = probe->to;
    if (probe->bytes.empty()) probe->Look(result->meta);
    to->failed = to->failed || result->code != 0;
    to->usable = to->usable && result->code == 0 && probe->elsewhere;
    std::chrono::nanoseconds* best = probe->bytes.empty() ? &to->empty : &to->full;
    *best = std::min(*best, took);
    // Under the lock: afterwards the round may be gone.
    if (--round->waiting == 0) round->over.notify_all();
  }
};

void Run(uint32_t bytes, std::vector<Probed>* all) {
  static const sw_op_vtable kVtable = {sizeof(sw_op_vtable), Guarded<&Probe::Alloc>, Guarded<&Probe::Done>};
  std::array<uint8_t, 4> meta;
  for (size_t i = 0; i < meta.size(); ++i) meta[i] = static_cast<uint8_t>(bytes >> (8 * i));
  Round round;
  std::vector<Probe> probes;
  for (Probed& one : *all) {
    if (one.usable) probes.push_back({&one, &round, {}, std::vector<uint8_t>(bytes), false});
  }
  round.waiting = probes.size();
  for (Probe& probe : probes) {
    probe.begun = Clock::now();
    sw_channel_call(probe.to->channel->handle(), static_cast<uint32_t>(Method::kMeasure), {meta.data(), meta.size()},
                    nullptr, kDeadlineMs, 0, &kVtable, &probe);
  }
  std::unique_lock<std::mutex> lock(round.mu);
  round.over.wait(lock, [&round] { return round.waiting == 0; });
}

PathMeter::Path PathOf(const Probed& one) {
  PathMeter::Path path;
  if (!one.usable) return path;
  path.round_trip = one.empty;
  const auto took = std::max(one.full - one.empty, std::chrono::nanoseconds(std::chrono::microseconds(1)));
  path.bytes_per_s = static_cast<uint64_t>(kBytes / std::chrono::duration<double>(took).count());
  return path;
}

uint64_t Worthwhile(const PathMeter::Path& path) {
  return sw_star_worthwhile_bytes(path.bytes_per_s, static_cast<uint64_t>(path.round_trip.count()));
}

}  // namespace

PathMeter::PathMeter(std::weak_ptr<ChannelOpener> channels, TaskAddresses addresses)
    : channels_(std::move(channels)), addresses_(std::move(addresses)) {}

void PathMeter::Attach(tensorflow::DeviceMgr* devices, const std::weak_ptr<ChannelOpener>& channels,
                       const TaskAddresses& addresses) {
  for (tensorflow::Device* device : devices->ListDevices()) {
    tensorflow::ResourceMgr* resources = device->resource_manager();
    // Several servers may share a device; the last one counts.
    resources->Delete<PathMeter>(kContainer, kName).IgnoreError();
    resources->Create(kContainer, kName, new PathMeter(channels, addresses)).IgnoreError();
  }
}

PathMeter::Path PathMeter::Narrowest(tensorflow::DeviceBase* client, const std::vector<std::string>& tasks) {
  auto* device = dynamic_cast<tensorflow::Device*>(client);
  if (device == nullptr || !device->IsLocal()) return {};
  PathMeter* found = nullptr;
  if (!device->resource_manager()->Lookup(kContainer, kName, &found).ok()) return {};
  const tensorflow::core::ScopedUnref owner(found);
  Path narrowest;
  for (const Path& path : found->Measure(tasks)) {
    if (Worthwhile(path) < Worthwhile(narrowest)) narrowest = path;
  }
  return narrowest;
}

std::vector<PathMeter::Path> PathMeter::Measure(const std::vector<std::string>& tasks) {
  std::lock_guard<std::mutex> lock(mu_);
  const Clock::time_point now = Clock::now();
  const std::shared_ptr<ChannelOpener> channels = channels_.lock();
  std::vector<std::string> unknown;
  std::vector<Probed> probed;
  for (const std::string& task : tasks) {
    const auto known = known_.find(task);
    if (known != known_.end() && now - known->second.when < kKeptFor) continue;
    const auto address = addresses_.find(task);
    Probed one;
    if (channels == nullptr || address == addresses_.end()) continue;
    if (!channels->OpenChannel(task, address->second, &one.channel).ok()) continue;
    unknown.push_back(task);
    probed.push_back(std::move(one));
  }
  for (const uint32_t bytes : kRounds) Run(bytes, &probed);
  for (size_t i = 0; i < unknown.size(); ++i) {
    if (!probed[i].failed) known_[unknown[i]] = {PathOf(probed[i]), now};
  }
  std::vector<Path> paths;
  for (const std::string& task : tasks) {
    const auto known = known_.find(task);
    if (known != known_.end()) paths.push_back(known->second.path);
  }
  return paths;
}

}  // namespace starwire
