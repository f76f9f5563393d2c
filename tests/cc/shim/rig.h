// Parts for tests with a cluster in one process: a ps and a worker, each with TensorFlow's devices and an engine.
#ifndef STARWIRE_TESTS_CC_SHIM_RIG_H_
#define STARWIRE_TESTS_CC_SHIM_RIG_H_

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <stddef.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <fstream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cc/rendezvous/recv_service.h"
#include "cc/server/engine.h"
#include "cc/star/service.h"
#include "cc/worker/worker_service.h"
#include "tensorflow/core/common_runtime/device_factory.h"
#include "tensorflow/core/common_runtime/device_mgr.h"
#include "tensorflow/core/distributed_runtime/worker_env.h"
#include "tensorflow/core/lib/core/threadpool.h"
#include "tensorflow/core/platform/env.h"
#include "tensorflow/core/platform/logging.h"
#include "tensorflow/core/protobuf/tensorflow_server.pb.h"
#include "tensorflow/core/public/session_options.h"

namespace starwire {

constexpr char kPs[] = "/job:ps/replica:0/task:0";
constexpr char kWorker[] = "/job:worker/replica:0/task:0";
constexpr auto kPatience = std::chrono::seconds(30);

// A server that is the only member of its cluster.
inline tensorflow::ServerDef LonelyServer() {
  tensorflow::ServerDef def;
  def.set_protocol("grpc++");
  def.set_job_name("ps");
  auto* job = def.mutable_cluster()->add_job();
  job->set_name("ps");
  (*job->mutable_tasks())[0] = "127.0.0.1:0";
  return def;
}

// A ps and a worker. While it exists, the environment names an endpoint map with their data ports.
class Cluster {
 public:
  Cluster() {
    char folder[] = "/tmp/starwire-shim-XXXXXX";
    EXPECT_NE(mkdtemp(folder), nullptr);
    folder_ = folder;
    {
      std::ofstream map(folder_ + "/map");
      for (const auto& task : addresses) {
        data_ports.push_back(FreePort());
        map << task.second << "=127.0.0.1:" << data_ports.back() << "\n";
      }
    }
    setenv("STARWIRE_ENDPOINT_MAP", (folder_ + "/map").c_str(), 1);
  }
  ~Cluster() {
    unsetenv("STARWIRE_ENDPOINT_MAP");
    unlink((folder_ + "/map").c_str());
    rmdir(folder_.c_str());
  }
  Cluster(const Cluster&) = delete;
  Cluster& operator=(const Cluster&) = delete;

  tensorflow::ServerDef server(const std::string& job) const {
    tensorflow::ServerDef def;
    def.set_job_name(job);
    def.set_task_index(0);
    for (const auto& task : addresses) {
      auto* entry = def.mutable_cluster()->add_job();
      entry->set_name(task.first == kPs ? "ps" : "worker");
      (*entry->mutable_tasks())[0] = task.second;
    }
    return def;
  }

  const std::vector<std::pair<std::string, std::string>> addresses = {{kPs, "127.0.0.1:1"}, {kWorker, "127.0.0.1:2"}};
  std::vector<int> data_ports;  // of the same tasks

 private:
  // A port that the kernel gives to no connection. As in crates/engine/tests/engine/harness.rs, with which it shares
  // the ports: each process has some of its own, as long as it holds an abstract unix socket.
  static int FreePort() {
    constexpr int kShares = 64, kFirst = 2048, kEnd = 10000;
    static const int share = [] {
      for (int number = 0; number < kShares; ++number) {
        const int share = (getpid() + number) % kShares;
        if (BindTo("starwire-rust-test-ports-" + std::to_string(share))) return share;
      }
      LOG(FATAL) << "more processes of tests than shares of ports";
    }();
    static std::atomic<int> next{static_cast<int>(getpid())};
    for (int tries = 0; tries < kEnd; ++tries) {
      const int port = kFirst + share + kShares * (next++ % ((kEnd - kFirst) / kShares));
      if (port / 1000 % 2 == 0 && IsFree(port)) return port;
    }
    LOG(FATAL) << "no port of share " << share << " is free";
  }

  // Holds an abstract unix socket for as long as this process lives.
  static bool BindTo(const std::string& name) {
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    name.copy(address.sun_path + 1, sizeof(address.sun_path) - 1);
    const socklen_t len = offsetof(sockaddr_un, sun_path) + 1 + name.size();
    if (bind(fd, reinterpret_cast<sockaddr*>(&address), len) == 0) return true;
    close(fd);
    return false;
  }

  static bool IsFree(int port) {
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const int one = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_ANY);
    address.sin_port = htons(port);
    const bool is_free = bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
    close(fd);
    return is_free;
  }

  std::string folder_;
};

// Older versions of TensorFlow keep a list of devices in the environment besides the manager; it must not be empty.
template <typename Env>
auto ListLocalDevices(Env* env, const tensorflow::DeviceMgr& devices, int)
    -> decltype(env->local_devices = devices.ListDevices(), void()) {
  env->local_devices = devices.ListDevices();
}
template <typename Env>
void ListLocalDevices(Env*, const tensorflow::DeviceMgr&, long) {}

// A task of the cluster. A derived class completes `env` and calls Start.
class EngineTask {
 public:
  explicit EngineTask(const std::string& job)
      : name("/job:" + job + "/replica:0/task:0"), pool(tensorflow::Env::Default(), "test_" + job, 2), job_(job) {
    std::vector<std::unique_ptr<tensorflow::Device>> all;
    EXPECT_TRUE(tensorflow::DeviceFactory::AddDevices(tensorflow::SessionOptions(), name, &all).ok());
    devices = std::make_unique<tensorflow::StaticDeviceMgr>(std::move(all));
    env.env = tensorflow::Env::Default();
    env.device_mgr = devices.get();
    ListLocalDevices(&env, *devices, 0);
    env.compute_pool = &pool;
  }
  uint64_t incarnation() const { return devices->ListDevices()[0]->attributes().incarnation(); }
  // The value of the metric "starwire_" + name; -1: there is none.
  double EngineMetric(const std::string& name) const {
    const sw_string text = sw_engine_metrics(engine->handle());
    const std::string all(reinterpret_cast<const char*>(text.data), text.len);
    sw_string_free(text);
    const size_t at = all.find("\nstarwire_" + name + "{");
    if (at == std::string::npos) return -1;
    return std::stod(all.substr(all.find("} ", at) + 2));
  }

  const std::string name;
  tensorflow::thread::ThreadPool pool;
  std::unique_ptr<tensorflow::DeviceMgr> devices;
  tensorflow::WorkerEnv env;
  const std::shared_ptr<Engine> engine = std::make_shared<Engine>();
  std::shared_ptr<StarService> star;

 protected:
  void Start(const std::string& protocol, const Cluster& cluster) {
    Engine::Services services;
    services.recv = std::make_shared<RecvService>(&env);
    services.worker = std::make_shared<WorkerService>(nullptr, &env);
    services.star = star = std::make_shared<StarService>(&env);
    services.compute_pool = &pool;
    const Status status = engine->Start(protocol, cluster.server(job_), 0, services);
    EXPECT_TRUE(status.ok()) << StatusMessage(status);
  }

 private:
  const std::string job_;
};

}  // namespace starwire

#endif  // STARWIRE_TESTS_CC_SHIM_RIG_H_
