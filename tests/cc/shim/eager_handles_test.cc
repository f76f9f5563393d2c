// The handles of an eager context, as star calls name them.
#include "cc/server/eager_handles.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cc/base/private_members.h"
#include "cc/base/status_codec.h"
#include "cc/rendezvous/rendezvous.h"
#include "cc/star/peers.h"
#include "cc/worker/component_functions.h"
#include "cc/worker/eager_client.h"
#include "cc/worker/remote_eager.h"
#include "cc/worker/step_handles.h"
#include "tensorflow/core/common_runtime/eager/context.h"
#include "tensorflow/core/common_runtime/eager/tensor_handle.h"
#include "tensorflow/core/common_runtime/process_function_library_runtime.h"
#include "tensorflow/core/distributed_runtime/eager/cluster_function_library_runtime.h"
#include "tensorflow/core/distributed_runtime/eager/remote_mgr.h"
#include "tensorflow/core/distributed_runtime/eager/remote_tensor_handle.h"
#include "tensorflow/core/framework/resource_handle.h"
#include "tensorflow/core/public/version.h"
#include "tests/cc/shim/star_rig.h"

namespace starwire {
namespace {

using tensorflow::TensorHandle;
using tensorflow::eager::EagerClusterFunctionLibraryRuntime;
using tensorflow::eager::EagerServiceImpl;

STARWIRE_REACH(ContextsTag, EagerServiceImpl::contexts_);
STARWIRE_REACH(RuntimeTag, tensorflow::ProcessFunctionLibraryRuntime::parent_);
STARWIRE_REACH(ComponentsTag, EagerClusterFunctionLibraryRuntime::function_data_);

constexpr uint64_t kContext = 7;

class Workers : public NoWorkers {
 public:
  void ListWorkers(std::vector<std::string>* workers) const override { workers->clear(); }
  void ListWorkersInJob(const std::string&, std::vector<std::string>* workers) const override { workers->clear(); }
  Status GetEagerClientCache(std::unique_ptr<tensorflow::eager::EagerClientCache>*) override { return OkStatus(); }
};

class EagerHandlesTest : public StarServiceTest {
 protected:
  void SetUp() override {
    StarServiceTest::SetUp();
    rendezvous_ = std::make_unique<RendezvousMgr>(&ps_->env);
    ps_->env.rendezvous_mgr = rendezvous_.get();
    ps_->sessions = std::make_unique<tensorflow::SessionMgr>(
        &ps_->env, ps_->name, std::make_unique<Workers>(),
        [](const tensorflow::ServerDef&, tensorflow::WorkerCacheInterface** cache) {
          *cache = new Workers;
          return OkStatus();
        },
        nullptr);
    ps_->env.session_mgr = ps_->sessions.get();
    service_ = std::make_unique<EagerServiceImpl>(&ps_->env);
    tensorflow::eager::CreateContextRequest request;
    tensorflow::eager::CreateContextResponse response;
    *request.mutable_server_def() = Cluster().server("ps");
    request.mutable_version_def()->set_producer(TF_GRAPH_DEF_VERSION);
    request.set_context_id(kContext);
    tensorflow::Device* local = ps_->devices->ListDevices()[0];
    *request.add_cluster_device_attributes() = local->attributes();
    const Status created = service_->CreateContext(&request, &response);
    ASSERT_TRUE(created.ok()) << StatusMessage(created);
    context_ = (*service_.*Reach(ContextsTag())).at(kContext)->Context();
    handles_ = std::make_unique<EagerHandles>(service_.get(), kCpu);
  }
  void TearDown() override {
    handles_.reset();
    service_.reset();
    StarServiceTest::TearDown();
  }
  tensorflow::Device* device() { return context_->local_device_mgr()->ListDevices()[0]; }
  Tensor Resource(const std::string& name) {
    Tensor tensor(DT_RESOURCE, TensorShape({}));
    tensorflow::ResourceHandle handle;
    handle.set_device(kCpu);
    handle.set_name(name);
    tensor.scalar<tensorflow::ResourceHandle>()() = handle;
    return tensor;
  }
  void Add(int64_t op_id, TensorHandle* handle) { context_->RemoteMgr()->AddOperationOutput(handle, op_id, 0); }
  void AddResource(int64_t op_id, const std::string& name) {
    Add(op_id, TensorHandle::CreateLocalHandle(Resource(name), device(), device(), context_));
  }
  // The names of the resources.
  std::vector<std::string> Find(const std::vector<std::pair<int64_t, int32_t>>& names, Status* status,
                                bool may_wait = false, bool* would_wait = nullptr) {
    bool late = false;
    std::vector<Tensor> found;
    *status = handles_->Find(kContext, names, may_wait, &late, &found);
    if (would_wait != nullptr) *would_wait = late;
    std::vector<std::string> all;
    for (const Tensor& one : found) all.push_back(one.scalar<tensorflow::ResourceHandle>()().name());
    return all;
  }

  std::unique_ptr<RendezvousMgr> rendezvous_;
  std::unique_ptr<EagerServiceImpl> service_;
  tensorflow::EagerContext* context_ = nullptr;
  std::unique_ptr<EagerHandles> handles_;
};

TEST_F(EagerHandlesTest, HandlesAreFoundByName) {
  AddResource(1, "a");
  AddResource(2, "b");
  Status status;
  EXPECT_EQ(Find({{2, 0}, {1, 0}, {2, 0}}, &status), (std::vector<std::string>{"b", "a", "b"})) << status;
}

TEST_F(EagerHandlesTest, WhatIsUnknownIsRefused) {
  AddResource(1, "a");
  Status status;
  EXPECT_TRUE(Find({{1, 0}, {1, 1}}, &status).empty());
  EXPECT_EQ(StatusNumber(status), kInvalidArgument);
  // TensorFlow's coordinator looks for this sentence.
  EXPECT_NE(StatusMessage(status).find("Unable to find the relevant tensor remote_handle"), std::string::npos);
  bool late = false;
  std::vector<Tensor> found;
  EXPECT_EQ(StatusNumber(handles_->Find(kContext + 1, {{1, 0}}, true, &late, &found)), kAborted);
}

TEST_F(EagerHandlesTest, WhatIsNoResourceOfTheDeviceIsRefused) {
  Add(1, TensorHandle::CreateLocalHandle(Floats({1}), device(), device(), context_));
  Status status;
  Find({{1, 0}}, &status);
  EXPECT_EQ(StatusNumber(status), kUnimplemented);
}

TEST_F(EagerHandlesTest, HandlesAreDeletedMeanwhile) {
  std::atomic<bool> stop{false};
  std::thread deletes([&] {
    while (!stop) {
      AddResource(1, "a");
      std::this_thread::yield();
      EXPECT_TRUE(context_->RemoteMgr()->DeleteTensorHandle(tensorflow::eager::RemoteTensorHandleInternal(1, 0)).ok());
    }
  });
  for (int i = 0; i < 20000; ++i) {
    Status status;
    bool would_wait = false;
    const std::vector<std::string> found = Find({{1, 0}}, &status, false, &would_wait);
    if (status.ok() && !would_wait) {
      EXPECT_EQ(found, std::vector<std::string>{"a"});
    }
  }
  stop = true;
  deletes.join();
}

// A step that runs points into the list, to which the first steps of other functions add.
TEST_F(EagerHandlesTest, ComponentFunctionsStayWhereTheyAre) {
  auto* runtime = static_cast<EagerClusterFunctionLibraryRuntime*>(context_->pflr()->*Reach(RuntimeTag()));
  auto& functions = runtime->*Reach(ComponentsTag());
  ReserveComponentFunctions(kContext);
  EXPECT_EQ(functions.capacity(), 0) << "nobody knows the service";
  AddEagerService(service_.get());
  ReserveComponentFunctions(kContext + 1);
  EXPECT_EQ(functions.capacity(), 0) << "there is no such context";
  tensorflow::eager::EnqueueRequest request;
  tensorflow::eager::EnqueueResponse response;
  request.set_context_id(kContext);
  request.add_queue()->mutable_register_function()->set_is_component_function(true);
  tensorflow::core::RefCountPtr<EagerPortClient> client(
      new EagerPortClient(nullptr, nullptr, kPs, std::make_shared<EagerPeer>(), std::make_shared<HandleBoard>()));
  client->EnqueueAsync(nullptr, &request, &response, [](const Status&) {});
  const size_t room = functions.capacity();
  EXPECT_GT(room, 100'000);
  const auto* first = functions.data();
  ReserveComponentFunctions(kContext);
  EXPECT_EQ(functions.data(), first);
  EXPECT_EQ(functions.capacity(), room);
  RemoveEagerService(service_.get());
}

// Who can be asked for handles.
// ----------------------------------------------------------------------------------------

TEST_F(EagerHandlesTest, AServerWithoutContextsTakesNoHandles) {
  const std::string own = worker_->name;
  EXPECT_EQ(StarPeers::TakeHandles("/job:nobody/replica:0/task:0", {kPs}), std::vector<bool>{false});
  StarPeers::Attach(own, [this](const std::string& task) { return task == kPs ? channel_ : nullptr; });
  // The rig's servers have no eager service, like an older starwire.
  EXPECT_EQ(StarPeers::TakeHandles(own, {kPs, "/job:ps/replica:0/task:1"}), (std::vector<bool>{false, false}));
  StarPeers::Detach(own);
}

}  // namespace
}  // namespace starwire
