#include "cc/star/ops.h"

#include <memory>
#include <utility>

#include "cc/base/compat_executor.h"
#include "cc/base/compat_profiler.h"
#include "cc/base/compat_session.h"
#include "cc/base/recovery.h"
#include "cc/base/register_kernel.h"
#include "cc/base/status_codec.h"
#include "cc/rendezvous/rendezvous.h"
#include "cc/star/client.h"
#include "cc/star/state.h"
#include "cc/worker/remote_worker.h"
#include "cc/worker/step_handles.h"
#include "tensorflow/core/common_runtime/step_stats_collector.h"
#include "tensorflow/core/distributed_runtime/worker_cache.h"
#include "tensorflow/core/distributed_runtime/worker_session.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/device_base.h"
#include "tensorflow/core/framework/node_def_util.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_def_builder.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/step_stats.pb.h"

namespace starwire {

const char kStarCallOp[] = "StarwireCall";

namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;

class StarCallKernel : public AsyncOpKernel {
 public:
  explicit StarCallKernel(OpKernelConstruction* context) : AsyncOpKernel(context) {
    Int64 incarnation = 0;
    std::string plan;
    OP_REQUIRES_OK(context, context->GetAttr("plan", &plan));
    OP_REQUIRES_OK(context, context->GetAttr("task", &callee_.task));
    OP_REQUIRES_OK(context, context->GetAttr("incarnation", &incarnation));
    OP_REQUIRES_OK(context, context->GetAttr("feeds", &feeds_));
    OP_REQUIRES_OK(context, context->GetAttr("keeps", &keeps_));
    OP_REQUIRES_OK(context, context->GetAttr("returns", &returns_));
    OP_REQUIRES_OK(context, context->GetAttr("last", &callee_.last));
    OP_REQUIRES_OK(context, context->GetAttr("handles", &handles_));
    OP_REQUIRES_OK(context, context->GetAttr("function", &function_));
    int inputs = 0, outputs = 0;
    for (int32_t slot : feeds_) inputs += slot < 0 ? 1 : 0;
    bool agree = keeps_.size() == returns_.size();
    // In order, so each once.
    for (int32_t output : returns_) agree = agree && (output < 0 || output == outputs++);
    OP_REQUIRES(context, agree && inputs == num_inputs() && outputs == num_outputs(),
                MakeStatus(kInvalidArgument, "starwire: inconsistent attributes of " + name()));
    callee_.name = name();
    callee_.of_function = !function_.empty();
    callee_.hash = PlanHashOf(AsBytes(plan));
    callee_.plan = std::make_shared<const std::string>(std::move(plan));
    callee_.incarnation = static_cast<uint64_t>(incarnation);
    if (RecoverMs() != 0 && handles_.empty()) {
      tensorflow::GraphDef graph;
      if (graph.ParseFromString(*callee_.plan)) callee_.needs = NeedsOf(graph);
    }
    uses_slots_ = callee_.last;
    callee_.can_repeat = !callee_.last && feeds_.size() == static_cast<size_t>(inputs);
    for (size_t fetch = 0; fetch < keeps_.size(); ++fetch) {
      if (keeps_[fetch] < 0) continue;
      StarKeep keep = {};
      keep.fetch = static_cast<uint32_t>(fetch);
      keep.slot = static_cast<uint32_t>(keeps_[fetch]);
      if (returns_[fetch] >= 0) keep.flags = kAlsoReturned;
      callee_.keeps.push_back(keep);
      callee_.can_repeat = false;
      uses_slots_ = true;
    }
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    StarClient::Where where;
    std::shared_ptr<HandleBoard> board;
    OP_REQUIRES_OK_ASYNC(context, FindWay(context, &where, &board), done);
    std::vector<StarValue> feeds;
    feeds.reserve(feeds_.size());
    int input = 0;
    for (int32_t slot : feeds_) {
      feeds.push_back(slot < 0 ? StarValue(context->input(input++)) : StarValue::Slot(static_cast<uint32_t>(slot)));
    }
    auto finish = [this, context, begun = BeginActivity(), done = std::move(done)](
                      const Status& status, std::vector<StarValue> fetches, const std::string& stats) {
      EndActivity(begun, [this] { return "StarCall#task=" + callee_.task + "#"; });
      const Status outcome = status.ok() ? HandOut(context, std::move(fetches)) : status;
      if (!outcome.ok()) context->SetStatus(outcome);
      if (!stats.empty()) KeepStats(context, stats);
      done();
    };
    if (handles_.empty()) {
      StarClient::Start(&callee_, std::move(where), std::move(feeds), std::move(finish));
      return;
    }
    const std::string session = where.session;
    HandleBoard* const asked = board.get();
    asked->Get(session, context->step_id(), callee_.task + "/device:CPU:0", function_, context->cancellation_manager(),
               [this, board = std::move(board), where = std::move(where), feeds = std::move(feeds),
                finish = std::move(finish)](const Status& status, const HandleBoard::Found& found) mutable {
                 tensorflow::Tensor names;
                 const Status named = status.ok() ? NameHandles(*found, &names) : status;
                 if (!named.ok()) {
                   finish(StarClient::Named(callee_, named), {}, std::string());
                   return;
                 }
                 feeds.push_back(StarValue(std::move(names)));
                 StarClient::Start(&callee_, std::move(where), std::move(feeds), std::move(finish));
               });
  }

 private:
  // The context, then the name of each handle.
  Status NameHandles(const StepHandles& handles, tensorflow::Tensor* names) const {
    *names = tensorflow::Tensor(tensorflow::DT_INT64,
                                tensorflow::TensorShape({1 + 2 * static_cast<int64_t>(handles_.size())}));
    auto flat = names->flat<Int64>();
    flat(0) = static_cast<int64_t>(handles.context_id);
    int64_t at = 1;
    for (const int32_t argument : handles_) {
      const bool is_known = argument >= 0 && static_cast<size_t>(argument) < handles.names.size();
      const StepHandles::Name name = is_known ? handles.names[argument] : StepHandles::Name();
      if (name.output < 0) {
        return MakeStatus(kUnimplemented, "starwire: a resource of " + callee_.task +
                                              " is given to a function by a handle that is stored on another task: "
                                              "configure the server of this task with starwire.config(star=False)");
      }
      flat(at++) = name.op_id;
      flat(at++) = name.output;
    }
    return OkStatus();
  }

  // This process may have several servers; the step's rendezvous knows which one this is.
  Status FindWay(OpKernelContext* context, StarClient::Where* where, std::shared_ptr<HandleBoard>* board) const {
    auto* rendezvous = dynamic_cast<RemoteRendezvous*>(context->rendezvous());
    tensorflow::WorkerSession* session = rendezvous == nullptr ? nullptr : rendezvous->worker_session();
    if (session == nullptr || (!handles_.empty() && rendezvous->board() == nullptr)) {
      return MakeStatus(kFailedPrecondition,
                        "starwire: " + name() + " can only run in a session of a star_server server");
    }
    const auto cache = SharedWorkerCacheOf(*session);
    *board = rendezvous->board();
    auto* worker = dynamic_cast<RemoteWorker*>(cache->GetOrCreateWorker(callee_.task));
    if (worker == nullptr) {
      return MakeStatus(kFailedPrecondition, "starwire: " + callee_.task + " cannot be called by " + name() +
                                                 ": it is not a remote task reached over starwire");
    }
    if (!worker->status().ok()) return worker->status();
    where->channel = worker->shared_channel();
    where->session = SessionNameOf(*session);
    where->step_id = context->step_id();
    if (uses_slots_) where->step = rendezvous->State<StarStep>();
    where->allocator = context->device()->GetAllocator(tensorflow::AllocatorAttributes());
    where->cancellation = context->cancellation_manager();
    where->trace = context->stats_collector() != nullptr;
    return OkStatus();
  }

  Status HandOut(OpKernelContext* context, std::vector<StarValue> fetches) const {
    if (fetches.size() != returns_.size()) {
      return MakeStatus(kInternal, "starwire: " + callee_.task + " returned " + std::to_string(fetches.size()) +
                                       " values for " + name() + ", expected " + std::to_string(returns_.size()));
    }
    for (size_t i = 0; i < fetches.size(); ++i) {
      const int output = returns_[i];
      if (output < 0) continue;
      const tensorflow::Tensor& tensor = fetches[i].tensor;
      if (fetches[i].kind != StarValue::Kind::kTensor || tensor.dtype() != output_type(output)) {
        return MakeStatus(kInternal, "starwire: " + callee_.task + " returned no " +
                                         tensorflow::DataTypeString(output_type(output)) + " as value " +
                                         std::to_string(i) + " of " + name());
      }
    }
    for (size_t i = 0; i < fetches.size(); ++i) {
      if (returns_[i] >= 0) context->set_output(returns_[i], std::move(fetches[i].tensor));
    }
    return OkStatus();
  }

  // Statistics of the server's kernels go to the same collector as this worker's.
  static void KeepStats(OpKernelContext* context, const std::string& bytes) {
    auto* collector = dynamic_cast<tensorflow::StepStatsCollector*>(context->stats_collector());
    tensorflow::StepStats stats;
    if (collector == nullptr || !stats.ParseFromString(bytes)) return;
    for (auto& device : *stats.mutable_dev_stats()) {
      for (auto& node : *device.mutable_node_stats()) {
        collector->Save(device.device(), new tensorflow::NodeExecStats(std::move(node)));
      }
    }
  }

  StarCallee callee_;
  std::vector<int32_t> feeds_, keeps_, returns_, handles_;
  std::string function_;
  bool uses_slots_ = false;
};

}  // namespace

void SetAttributes(const StarCallSpec& spec, tensorflow::NodeDef* def) {
  tensorflow::AddNodeAttr("Tin", spec.inputs, def);
  tensorflow::AddNodeAttr("Tout", spec.outputs, def);
  tensorflow::AddNodeAttr("plan", spec.plan, def);
  tensorflow::AddNodeAttr("task", spec.task, def);
  tensorflow::AddNodeAttr("incarnation", static_cast<Int64>(spec.incarnation), def);
  tensorflow::AddNodeAttr("feeds", spec.feeds, def);
  tensorflow::AddNodeAttr("keeps", spec.keeps, def);
  tensorflow::AddNodeAttr("returns", spec.returns, def);
  tensorflow::AddNodeAttr("last", spec.last, def);
  tensorflow::AddNodeAttr("handles", spec.handles, def);
  tensorflow::AddNodeAttr("function", spec.function, def);
}

void RegisterStarOps() {
  tensorflow::OpRegistry::Global()->Register([](tensorflow::OpRegistrationData* data) -> Status {
    tensorflow::OpDefBuilder builder(kStarCallOp);
    // Otherwise the executor turns Unavailable into Internal, and no session recovers.
    return MarkCommunication(&builder)
        .Input("inputs: Tin")
        .Output("outputs: Tout")
        .Attr("Tin: list(type) >= 0")
        .Attr("Tout: list(type) >= 0")
        .Attr("plan: string")
        .Attr("task: string")
        .Attr("incarnation: int")
        .Attr("feeds: list(int) = []")
        .Attr("keeps: list(int) = []")
        .Attr("returns: list(int) = []")
        .Attr("last: bool = false")
        .Attr("handles: list(int) = []")
        .Attr("function: string = ''")
        .SetIsStateful()
        .SetShapeFn(tensorflow::shape_inference::UnknownShape)
        .Doc("A parameter server's part of a graph: takes its feeds there, and brings its fetches back.")
        .Finalize(data);
  });
  tensorflow::KernelDefBuilder call(kStarCallOp);
  RegisterCpuKernel<StarCallKernel>(&call, "starwire::StarCallKernel");
}

}  // namespace starwire
