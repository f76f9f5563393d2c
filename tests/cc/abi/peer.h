// An engine with handlers that answer calls, and client calls that a test can wait for, all through include/starwire.h.
#ifndef STARWIRE_TESTS_CC_ABI_PEER_H_
#define STARWIRE_TESTS_CC_ABI_PEER_H_

#include <gtest/gtest.h>
#include <stdlib.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "starwire.h"

inline sw_bytes Bytes(const std::string& s) { return {reinterpret_cast<const uint8_t*>(s.data()), s.size()}; }
inline std::string Text(sw_bytes b) {
  return b.len == 0 ? std::string() : std::string(reinterpret_cast<const char*>(b.data), b.len);
}

constexpr auto kPatience = std::chrono::seconds(30);

// Methods that a Peer serves.
enum : uint32_t { kEcho = 1, kFail = 2, kKeep = 3 };

// A payload of `parts` that counts its releases.
class Payload {
 public:
  Payload(std::vector<std::string> parts, std::atomic<int>* releases) {
    auto* owner = new Owner{std::move(parts), releases};
    for (const std::string& part : owner->parts) parts_.push_back({part.data(), part.size()});
    payload_ = {parts_.data(), parts_.size(), owner, [](void* p) {
                  auto* o = static_cast<Owner*>(p);
                  if (o->releases != nullptr) ++*o->releases;
                  delete o;
                }};
  }
  const sw_payload* get() const { return &payload_; }

 private:
  struct Owner {
    std::vector<std::string> parts;
    std::atomic<int>* releases;
  };
  std::vector<sw_part> parts_;
  sw_payload payload_;
};

// One outgoing call.
class Op {
 public:
  static const sw_op_vtable kVtable;

  bool Wait() {
    std::unique_lock<std::mutex> lock(mu_);
    return cv_.wait_for(lock, kPatience, [this] { return done_ > 0; });
  }
  int done() {
    std::lock_guard<std::mutex> lock(mu_);
    return done_;
  }

  // Valid after Wait().
  sw_code code = -1;
  std::string message;
  std::string meta;
  bool from_peer = false;
  std::vector<std::string> parts;
  // Set before the call: the code that alloc returns.
  sw_code refuse_with = 0;

 private:
  static sw_code Alloc(void* op, sw_bytes, size_t n, const uint64_t* lens, void** bufs) {
    auto* self = static_cast<Op*>(op);
    if (self->refuse_with != 0) return self->refuse_with;
    for (size_t i = 0; i < n; ++i) {
      self->parts.emplace_back(lens[i], '\0');
      bufs[i] = nullptr;
    }
    // Take addresses only now: growing the vector moves short strings.
    for (size_t i = 0; i < n; ++i) bufs[i] = lens[i] == 0 ? nullptr : &self->parts[i][0];
    return 0;
  }
  static void Done(void* op, const sw_result* result) {
    auto* self = static_cast<Op*>(op);
    std::lock_guard<std::mutex> lock(self->mu_);
    self->code = result->code;
    self->message = Text(result->message);
    self->meta = Text(result->meta);
    self->from_peer = result->from_peer != 0;
    ++self->done_;
    self->cv_.notify_all();
  }

  std::mutex mu_;
  std::condition_variable cv_;
  int done_ = 0;
};

class Peer {
 public:
  explicit Peer(const std::string& task) : task_(task) {
    const std::string job = task.substr(5, task.find('/', 5) - 5);
    const std::string address = "127.0.0.1:0";
    const sw_bytes addresses[] = {Bytes(address)};
    const sw_bytes names[] = {Bytes(task_)};
    sw_engine_options options = {};
    options.struct_size = sizeof(options);
    const std::string protocol = "grpc++";
    options.protocol = Bytes(protocol);
    options.task = Bytes(task_);
    options.job = Bytes(job);
    options.grpc_address = Bytes(address);
    options.grpc_gives_way = 1;
    options.incarnation = NextIncarnation();
    options.cluster_tasks = 1;
    options.cluster_addresses = addresses;
    options.cluster_names = names;
    sw_handlers handlers = Handlers();
    sw_error* error = nullptr;
    const sw_code code = sw_engine_new(&options, &handlers, this, &engine_, &error);
    EXPECT_EQ(code, 0) << (error != nullptr ? Text(sw_error_message(error)) : "");
    sw_error_free(error);
  }
  ~Peer() {
    for (sw_channel* channel : channels_) sw_channel_free(channel);
    Free();
  }
  void Free() {
    if (engine_ != nullptr) sw_engine_free(engine_);
    engine_ = nullptr;
  }
  void Stop() { sw_engine_stop(engine_); }

  // Where it listens, as its banner says.
  std::string Address() const {
    const std::string banner = Text(sw_engine_banner(engine_)), before = "data port ";
    const size_t begin = banner.find(before) + before.size();
    return banner.substr(begin, banner.find(',', begin) - begin);
  }
  sw_channel* Open(const std::string& task, const std::string& address) {
    sw_channel* channel = nullptr;
    sw_error* error = nullptr;
    EXPECT_EQ(sw_channel_open(engine_, Bytes(task), Bytes(address), &channel, &error), 0);
    sw_error_free(error);
    channels_.push_back(channel);
    return channel;
  }
  sw_engine* engine() const { return engine_; }
  const std::string& task() const { return task_; }

  // Tickets of kKeep calls and of recvs whose keys end with "later".
  std::vector<sw_ticket> Kept() {
    std::lock_guard<std::mutex> lock(mu_);
    return kept_;
  }
  bool WaitForKept(size_t n) {
    std::unique_lock<std::mutex> lock(mu_);
    return cv_.wait_for(lock, kPatience, [&] { return kept_.size() >= n; });
  }
  struct Cancelled {
    uint32_t method;
    int64_t tag;
    bool peer_gone;
  };
  bool WaitForCancelled(size_t n, std::vector<Cancelled>* out) {
    std::unique_lock<std::mutex> lock(mu_);
    const bool enough = cv_.wait_for(lock, kPatience, [&] { return cancelled_.size() >= n; });
    *out = cancelled_;
    return enough;
  }
  // Calls with payloads of at least this size arrive in memory from body_alloc.
  static constexpr size_t kOwnBodies = 1 << 20;
  // Bodies from body_alloc that are alive, across all peers.
  static inline std::atomic<int> own_bodies{0};
  std::atomic<int> live_keys{0};
  std::atomic<int> releases{0};
  std::atomic<int> rounds{0};

 private:
  static uint64_t NextIncarnation() {
    static std::atomic<uint64_t> next{1000};
    return ++next;
  }

  static sw_handlers Handlers() {
    sw_handlers h = {};
    h.struct_size = sizeof(h);
    h.on_recv = [](void* ctx, const sw_recv_request* requests, size_t n) {
      auto* self = static_cast<Peer*>(ctx);
      for (size_t i = 0; i < n; ++i) self->OnRecv(requests[i]);
    };
    h.on_call = [](void* ctx, const sw_call_request* call) { static_cast<Peer*>(ctx)->OnCall(*call); };
    h.body_alloc = [](void*, size_t len) -> void* {
      if (len < kOwnBodies) return nullptr;
      ++own_bodies;
      return aligned_alloc(64, len);
    };
    h.body_free = [](void* memory) {
      --own_bodies;
      free(memory);
    };
    h.on_cancel = [](void* ctx, sw_ticket, uint32_t method, int64_t tag, uint32_t peer_gone) {
      auto* self = static_cast<Peer*>(ctx);
      std::lock_guard<std::mutex> lock(self->mu_);
      self->cancelled_.push_back({method, tag, peer_gone != 0});
      self->cv_.notify_all();
    };
    h.key_new = [](void* ctx, sw_bytes prefix) -> void* {
      if (Text(prefix) == "malformed") return nullptr;
      ++static_cast<Peer*>(ctx)->live_keys;
      return new std::string(Text(prefix));
    };
    h.key_free = [](void* ctx, void* key) {
      --static_cast<Peer*>(ctx)->live_keys;
      delete static_cast<std::string*>(key);
    };
    h.round_end = [](void* ctx) { ++static_cast<Peer*>(ctx)->rounds; };
    h.log = [](void*, int32_t, sw_bytes) {};
    return h;
  }

  void OnRecv(const sw_recv_request& request) {
    const std::string key = *static_cast<std::string*>(request.key);
    if (key.size() >= 5 && key.compare(key.size() - 5, 5, "later") == 0) {
      Keep(request.ticket);
      return;
    }
    const std::string meta = key + "@" + std::to_string(request.step_id) + ";" + std::to_string(request.frame_id) +
                             ":" + std::to_string(request.iter_id);
    const size_t size = key.compare(0, 4, "size") == 0 ? std::stoull(key.substr(4)) : 0;
    if (size == 0) {
      sw_engine_reply(engine_, request.ticket, 0, Bytes(meta), nullptr);
      return;
    }
    Payload payload({std::string(size, static_cast<char>('a' + request.step_id % 26))}, &releases);
    sw_engine_reply(engine_, request.ticket, 0, Bytes(meta), payload.get());
  }

  void OnCall(const sw_call_request& call) {
    std::vector<std::string> parts;
    for (size_t i = 0; i < call.n_parts; ++i) {
      EXPECT_EQ(reinterpret_cast<uintptr_t>(call.parts[i].data) % 64, 0u);
      parts.emplace_back(static_cast<const char*>(call.parts[i].data), call.parts[i].len);
    }
    size_t bytes = 0;
    for (const std::string& part : parts) bytes += (part.size() + 63) & ~size_t{63};
    EXPECT_EQ(own_bodies, bytes >= kOwnBodies ? 1 : 0);
    const std::string meta = Text(call.meta);
    sw_body_free(call.body);
    EXPECT_EQ(own_bodies, 0);
    if (call.method == kEcho) {
      Payload payload(std::move(parts), &releases);
      sw_engine_reply(engine_, call.ticket, 0, Bytes(meta), payload.get());
    } else if (call.method == kFail) {
      Payload details({"the details"}, &releases);
      sw_engine_reply(engine_, call.ticket, 9, Bytes(meta), details.get());
    } else {
      Keep(call.ticket);
    }
  }

  void Keep(sw_ticket ticket) {
    std::lock_guard<std::mutex> lock(mu_);
    kept_.push_back(ticket);
    cv_.notify_all();
  }

  const std::string task_;
  sw_engine* engine_ = nullptr;
  std::vector<sw_channel*> channels_;
  std::mutex mu_;
  std::condition_variable cv_;
  std::vector<sw_ticket> kept_;
  std::vector<Cancelled> cancelled_;
};

#endif  // STARWIRE_TESTS_CC_ABI_PEER_H_
