// The transport through the C ABI: two engines in one process, without TensorFlow.
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <thread>

#include "peer.h"

const sw_op_vtable Op::kVtable = {sizeof(sw_op_vtable), &Op::Alloc, &Op::Done};

namespace {

constexpr char kPs[] = "/job:ps/replica:0/task:0";
constexpr char kWorker[] = "/job:worker/replica:0/task:0";

class Abi : public testing::Test {
 protected:
  Abi() : ps_(kPs), worker_(kWorker) { channel_ = worker_.Open(kPs, ps_.Address()); }

  uint64_t Call(uint32_t method, const std::string& meta, const sw_payload* payload, Op* op, uint32_t deadline_ms = 0) {
    return sw_channel_call(channel_, method, Bytes(meta), payload, deadline_ms, 0, &Op::kVtable, op);
  }
  uint64_t Recv(int64_t step, const std::string& prefix, Op* op, uint64_t frame = 0, uint64_t iter = 0) {
    return sw_channel_recv(channel_, step, Bytes(prefix), frame, iter, &Op::kVtable, op);
  }

  Peer ps_;
  Peer worker_;
  sw_channel* channel_ = nullptr;
};

TEST(AbiAlone, Version) { EXPECT_EQ(sw_abi_version(), static_cast<uint32_t>(SW_ABI_VERSION)); }

TEST_F(Abi, SaysWhatItIs) {
  const std::string banner = Text(sw_engine_banner(ps_.engine()));
  EXPECT_NE(banner.find("grpc++"), std::string::npos) << banner;
  EXPECT_EQ(ps_.Address().find("127.0.0.1:"), 0u) << banner;
}

TEST_F(Abi, CallsWithPartsOfEverySize) {
  for (size_t size : {size_t{0}, size_t{1}, size_t{63}, size_t{8191}, size_t{8192}, size_t{100001}, size_t{3 << 20}}) {
    std::atomic<int> released{0};
    Payload payload({std::string(size, 'x'), "", std::string(7, 'y')}, &released);
    Op op;
    Call(kEcho, "meta " + std::to_string(size), payload.get(), &op);
    ASSERT_TRUE(op.Wait());
    EXPECT_EQ(op.code, 0) << op.message;
    EXPECT_TRUE(op.from_peer);
    EXPECT_EQ(op.meta, "meta " + std::to_string(size));
    ASSERT_EQ(op.parts.size(), 3u);
    EXPECT_EQ(op.parts[0], std::string(size, 'x'));
    EXPECT_EQ(op.parts[1], "");
    EXPECT_EQ(op.parts[2], "yyyyyyy");
    EXPECT_EQ(released, 1);
  }
}

TEST_F(Abi, LargePayloadsArriveInMemoryOfTheOwner) {
  for (size_t size : {Peer::kOwnBodies / 2, Peer::kOwnBodies, 5 * Peer::kOwnBodies}) {
    Op op;
    Payload payload({std::string(size - 64, 'x'), "end"}, nullptr);
    Call(kEcho, "", payload.get(), &op);
    ASSERT_TRUE(op.Wait());
    EXPECT_EQ(op.code, 0) << op.message;
    ASSERT_EQ(op.parts.size(), 2u);
    EXPECT_EQ(op.parts[0], std::string(size - 64, 'x'));
    EXPECT_EQ(op.parts[1], "end");
  }
  // A body that is lost in flight is freed as well.
  Op lost;
  Payload payload({std::string(64 * Peer::kOwnBodies, 'x')}, nullptr);
  Call(kEcho, "", payload.get(), &lost);
  worker_.Stop();
  ASSERT_TRUE(lost.Wait());
  ps_.Stop();
  EXPECT_EQ(Peer::own_bodies, 0);
}

TEST_F(Abi, CallWithoutPayload) {
  Op op;
  Call(kEcho, "just meta", nullptr, &op);
  ASSERT_TRUE(op.Wait());
  EXPECT_EQ(op.code, 0) << op.message;
  EXPECT_EQ(op.meta, "just meta");
  EXPECT_TRUE(op.parts.empty());
}

TEST_F(Abi, ErrorsCarryCodeMessageAndDetails) {
  Op op;
  Call(kFail, "why it failed", nullptr, &op);
  ASSERT_TRUE(op.Wait());
  EXPECT_EQ(op.code, 9);
  EXPECT_EQ(op.message, "why it failed");
  EXPECT_EQ(op.meta, "the details");
  EXPECT_TRUE(op.from_peer);
}

TEST_F(Abi, RendezvousRequests) {
  constexpr int kRequests = 3000;
  std::vector<std::unique_ptr<Op>> ops;
  for (int i = 0; i < kRequests; ++i) {
    ops.push_back(std::make_unique<Op>());
    Recv(i, "size" + std::to_string(1 + i % 7 * 3000), ops.back().get(), i % 3, i % 5);
  }
  for (int i = 0; i < kRequests; ++i) {
    ASSERT_TRUE(ops[i]->Wait());
    ASSERT_EQ(ops[i]->code, 0) << ops[i]->message;
    const std::string key = "size" + std::to_string(1 + i % 7 * 3000);
    EXPECT_EQ(ops[i]->meta, key + "@" + std::to_string(i) + ";" + std::to_string(i % 3) + ":" + std::to_string(i % 5));
    ASSERT_EQ(ops[i]->parts.size(), 1u);
    EXPECT_EQ(ops[i]->parts[0], std::string(1 + i % 7 * 3000, static_cast<char>('a' + i % 26)));
    EXPECT_EQ(ops[i]->done(), 1);
  }
  EXPECT_EQ(ps_.live_keys, 7) << "each key is interned once";
  EXPECT_GT(worker_.rounds, 0);
}

TEST_F(Abi, MalformedKeyIsRefused) {
  Op bad, good;
  Recv(1, "malformed", &bad);
  Recv(1, "size5", &good);
  ASSERT_TRUE(bad.Wait());
  EXPECT_EQ(bad.code, 3) << bad.message;
  ASSERT_TRUE(good.Wait());
  EXPECT_EQ(good.code, 0) << good.message;
}

TEST_F(Abi, LatePayloadFromAnotherThread) {
  Op op;
  Recv(5, "later", &op);
  ASSERT_TRUE(ps_.WaitForKept(1));
  std::thread([&] {
    Payload payload({std::string(200000, 'z')}, &ps_.releases);
    sw_engine_reply(ps_.engine(), ps_.Kept()[0], 0, Bytes("done"), payload.get());
  }).join();
  ASSERT_TRUE(op.Wait());
  EXPECT_EQ(op.code, 0) << op.message;
  EXPECT_EQ(op.parts.at(0), std::string(200000, 'z'));
}

TEST_F(Abi, AnsweringTwiceOrAnUnknownTicketIsHarmless) {
  Op op;
  Call(kKeep, "", nullptr, &op);
  ASSERT_TRUE(ps_.WaitForKept(1));
  const sw_ticket ticket = ps_.Kept()[0];
  std::atomic<int> released{0};
  for (int i = 0; i < 3; ++i) {
    Payload payload({"answer"}, &released);
    sw_engine_reply(ps_.engine(), ticket, 0, Bytes("m"), payload.get());
  }
  Payload payload({"to nobody"}, &released);
  sw_engine_reply(ps_.engine(), {~uint64_t{0}, 12345}, 0, Bytes("m"), payload.get());
  ASSERT_TRUE(op.Wait());
  EXPECT_EQ(op.code, 0);
  Op after;
  Call(kEcho, "still there", nullptr, &after);
  ASSERT_TRUE(after.Wait());
  EXPECT_EQ(after.code, 0) << after.message;
  EXPECT_EQ(op.done(), 1);
  for (int i = 0; i < 300 && released < 4; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_EQ(released, 4) << "every payload is given back";
}

TEST_F(Abi, CancelEndsTheCallAndTellsThePeer) {
  Op op;
  const uint64_t id = Recv(77, "later", &op);
  ASSERT_TRUE(ps_.WaitForKept(1));
  sw_channel_cancel(channel_, id, 1, Bytes("enough"));
  ASSERT_TRUE(op.Wait());
  EXPECT_EQ(op.code, 1);
  EXPECT_NE(op.message.find("enough"), std::string::npos) << op.message;
  EXPECT_FALSE(op.from_peer);
  std::vector<Peer::Cancelled> cancelled;
  ASSERT_TRUE(ps_.WaitForCancelled(1, &cancelled));
  EXPECT_EQ(cancelled[0].method, 0u);
  EXPECT_EQ(cancelled[0].tag, 77);
  EXPECT_FALSE(cancelled[0].peer_gone);
  sw_channel_cancel(channel_, id, 1, Bytes("again"));
  sw_channel_cancel(channel_, 999999999, 1, Bytes("never was"));
  sw_engine_reply(ps_.engine(), ps_.Kept()[0], 0, Bytes("too late"), nullptr);
  Op after;
  Recv(78, "size3", &after);
  ASSERT_TRUE(after.Wait());
  EXPECT_EQ(after.code, 0);
  EXPECT_EQ(op.done(), 1);
}

TEST_F(Abi, CancelRacesWithTheAnswer) {
  for (int i = 0; i < 500; ++i) {
    Op op;
    const uint64_t id = Recv(i, "size20000", &op);
    if (i % 3 == 0) std::this_thread::yield();
    sw_channel_cancel(channel_, id, 1, Bytes("race"));
    ASSERT_TRUE(op.Wait());
    ASSERT_TRUE(op.code == 0 || op.code == 1) << op.code << op.message;
    if (op.code == 0) {
      ASSERT_EQ(op.parts.at(0), std::string(20000, static_cast<char>('a' + i % 26)));
    }
    ASSERT_EQ(op.done(), 1);
  }
}

TEST_F(Abi, Deadline) {
  // A call whose time is over before there is a connection reaches no peer.
  for (uint32_t limit_ms = 150; ps_.Kept().empty(); limit_ms *= 2) {
    ASSERT_LT(limit_ms, 60'000u);
    Op op;
    Call(kKeep, "", nullptr, &op, limit_ms);
    ASSERT_TRUE(op.Wait());
    EXPECT_EQ(op.code, 4) << op.message;
  }
  std::vector<Peer::Cancelled> cancelled;
  ASSERT_TRUE(ps_.WaitForCancelled(1, &cancelled));
  EXPECT_EQ(cancelled[0].method, static_cast<uint32_t>(kKeep));
}

TEST_F(Abi, RefusedReply) {
  Op refused;
  refused.refuse_with = 8;
  Recv(1, "size300000", &refused);
  ASSERT_TRUE(refused.Wait());
  EXPECT_EQ(refused.code, 8) << refused.message;
  Op after;
  Recv(2, "size300000", &after);
  ASSERT_TRUE(after.Wait());
  EXPECT_EQ(after.code, 0) << after.message;
}

TEST_F(Abi, LargePayload) {
  const size_t size = size_t{256} << 20;
  Op op;
  Recv(3, "size" + std::to_string(size), &op);
  Op small;
  Recv(4, "size10", &small);
  ASSERT_TRUE(small.Wait());
  ASSERT_TRUE(op.Wait());
  ASSERT_EQ(op.code, 0) << op.message;
  ASSERT_EQ(op.parts.at(0).size(), size);
  EXPECT_EQ(op.parts[0].find_first_not_of('d'), std::string::npos);
}

TEST_F(Abi, StopEndsEverythingInFlight) {
  std::vector<std::unique_ptr<Op>> ops;
  for (int i = 0; i < 200; ++i) {
    ops.push_back(std::make_unique<Op>());
    if (i % 2 == 0) {
      Recv(i, "later", ops.back().get());
    } else {
      Call(kKeep, "", nullptr, ops.back().get());
    }
  }
  ASSERT_TRUE(ps_.WaitForKept(200));
  worker_.Stop();
  worker_.Stop();
  for (auto& op : ops) {
    ASSERT_EQ(op->done(), 1) << "when stop returns every call has ended";
    EXPECT_NE(op->code, 0);
    EXPECT_FALSE(op->message.empty());
  }
  std::vector<Peer::Cancelled> cancelled;
  EXPECT_TRUE(ps_.WaitForCancelled(200, &cancelled));
  for (const auto& one : cancelled) EXPECT_TRUE(one.peer_gone);
  Op after;
  Call(kEcho, "", nullptr, &after);
  ASSERT_TRUE(after.Wait());
  EXPECT_NE(after.code, 0) << "a stopped engine fails calls";
  for (const sw_ticket& ticket : ps_.Kept()) sw_engine_reply(ps_.engine(), ticket, 0, Bytes("late"), nullptr);
}

TEST_F(Abi, PeerThatStopsEndsItsCallers) {
  std::vector<std::unique_ptr<Op>> ops;
  for (int i = 0; i < 50; ++i) {
    ops.push_back(std::make_unique<Op>());
    Recv(i, "later", ops.back().get());
  }
  ASSERT_TRUE(ps_.WaitForKept(50));
  ps_.Stop();
  for (auto& op : ops) {
    ASSERT_TRUE(op->Wait());
    EXPECT_TRUE(op->code == 14 || op->code == 10) << op->code << " " << op->message;
    EXPECT_FALSE(op->message.empty());
  }
  for (int i = 0; i < 300 && ps_.live_keys != 0; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_EQ(ps_.live_keys, 0) << "keys of a connection go with it";
}

TEST_F(Abi, UnknownTask) {
  sw_channel* nobody = worker_.Open("/job:ps/replica:0/task:9", "127.0.0.1:1");
  Op op;
  sw_channel_call(nobody, kEcho, Bytes("m"), nullptr, 0, 0, &Op::kVtable, &op);
  ASSERT_TRUE(op.Wait());
  EXPECT_EQ(op.code, 14) << op.message;
  EXPECT_NE(op.message.find("/job:ps/replica:0/task:9"), std::string::npos) << op.message;
}

TEST_F(Abi, ChannelsOutliveTheirEngine) {
  Op op;
  Call(kEcho, "m", nullptr, &op);
  ASSERT_TRUE(op.Wait());
  worker_.Free();
  Op after;
  Call(kEcho, "m", nullptr, &after);
  ASSERT_TRUE(after.Wait());
  EXPECT_NE(after.code, 0);
}

TEST_F(Abi, ManyThreads) {
  std::vector<std::thread> threads;
  std::atomic<int> good{0};
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 200; ++i) {
        Op op;
        const std::string meta = std::to_string(t) + "/" + std::to_string(i);
        Payload payload({std::string(1 + (i % 5) * 5000, 'q')}, nullptr);
        Call(kEcho, meta, payload.get(), &op);
        if (op.Wait() && op.code == 0 && op.meta == meta && op.parts.at(0).size() == 1u + (i % 5) * 5000) ++good;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(good, 1600);
}

TEST_F(Abi, Metrics) {
  Op op;
  Call(kEcho, "m", nullptr, &op);
  ASSERT_TRUE(op.Wait());
  const sw_string text = sw_engine_metrics(worker_.engine());
  EXPECT_NE(std::string(reinterpret_cast<char*>(text.data), text.len).find("starwire_"), std::string::npos);
  sw_string_free(text);
}

TEST(AbiErrors, EndpointMapIsReadStrictly) {
  char folder[] = "/tmp/starwire-abi-XXXXXX";
  ASSERT_NE(mkdtemp(folder), nullptr);
  const std::string file = std::string(folder) + "/.endpoint_map";
  std::ofstream(file) << "# a comment\nnot an entry\n";
  setenv("TF_SEASTAR_ENDPOINT_MAP_PATH", folder, 1);
  const std::string protocol = "grpc++", task = kPs, job = "ps", address = "127.0.0.1:0";
  const sw_bytes addresses[] = {Bytes(address)};
  const sw_bytes names[] = {Bytes(task)};
  sw_engine_options options = {};
  options.struct_size = sizeof(options);
  options.protocol = Bytes(protocol);
  options.task = Bytes(task);
  options.job = Bytes(job);
  options.grpc_address = Bytes(address);
  options.incarnation = 1;
  options.cluster_tasks = 1;
  options.cluster_addresses = addresses;
  options.cluster_names = names;
  sw_handlers handlers = {};
  handlers.struct_size = sizeof(handlers);
  handlers.on_recv = [](void*, const sw_recv_request*, size_t) {};
  handlers.on_call = [](void*, const sw_call_request*) {};
  handlers.on_cancel = [](void*, sw_ticket, uint32_t, int64_t, uint32_t) {};
  handlers.key_new = [](void*, sw_bytes) -> void* { return nullptr; };
  handlers.key_free = [](void*, void*) {};
  handlers.round_end = [](void*) {};
  handlers.log = [](void*, int32_t, sw_bytes) {};
  sw_engine* engine = nullptr;
  sw_error* error = nullptr;
  EXPECT_NE(sw_engine_new(&options, &handlers, nullptr, &engine, &error), 0);
  unsetenv("TF_SEASTAR_ENDPOINT_MAP_PATH");
  EXPECT_EQ(engine, nullptr);
  ASSERT_NE(error, nullptr);
  const std::string message = Text(sw_error_message(error));
  EXPECT_NE(message.find(file), std::string::npos) << message;
  EXPECT_NE(message.find(":2"), std::string::npos) << "the line is named: " << message;
  sw_error_free(error);
  sw_error_free(nullptr);
  unlink(file.c_str());
  rmdir(folder);
}

TEST(AbiNull, IsAnError) {
  sw_engine_options options = {};
  options.struct_size = sizeof(options);
  sw_star_options star = {};
  const sw_plan_graph graph = {};
  const sw_exec_spec spec = {sizeof(sw_exec_spec), nullptr, 0, nullptr, 0, 1};
  const auto told = [](const char* what, auto function, auto... arguments) {
    sw_error* error = nullptr;
    EXPECT_EQ(function(arguments..., &error), 3) << what;
    ASSERT_NE(error, nullptr) << what;
    EXPECT_EQ(Text(sw_error_message(error)), std::string("starwire: bug: ") + what + " is NULL");
    sw_error_free(error);
  };
  sw_engine* engine = nullptr;
  sw_port* port = nullptr;
  sw_exec* plan = nullptr;
  sw_fuse_plan* fuse_plan = nullptr;
  sw_star_plan* star_plan = nullptr;
  uint8_t bytes[1];
  size_t len = sizeof(bytes);
  const sw_engine_options* no_options = nullptr;
  const sw_handlers* no_handlers = nullptr;
  const sw_exec_spec* no_spec = nullptr;
  const sw_kernels* no_kernels = nullptr;
  const sw_plan_graph* no_graph = nullptr;
  const sw_star_options* no_star_options = nullptr;
  const sw_star_call_head* no_head = nullptr;
  void* owner = nullptr;
  told("options", sw_engine_new, no_options, no_handlers, owner, &engine);
  told("handlers", sw_engine_new, &options, no_handlers, owner, &engine);
  told("options", sw_port_bind, no_options, uint16_t{0}, &port);
  told("spec", sw_exec_new, no_spec, no_kernels, owner, &plan);
  told("kernels", sw_exec_new, &spec, no_kernels, owner, &plan);
  told("graph", sw_fuse_plan_new, no_graph, &fuse_plan);
  told("graph", sw_star_plan_new, no_graph, &star, &star_plan);
  told("options", sw_star_plan_new, &graph, no_star_options, &star_plan);
  told("head", sw_star_call_head_write, no_head, bytes, &len);
}

}  // namespace
