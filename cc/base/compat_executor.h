// The differences between the executors and kernels of TensorFlow 1.15, DeepRec and 2.12 to 2.22: see compat.h.
#ifndef STARWIRE_CC_BASE_COMPAT_EXECUTOR_H_
#define STARWIRE_CC_BASE_COMPAT_EXECUTOR_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>

#include "cc/base/compat.h"
#include "tensorflow/core/common_runtime/device_mgr.h"
#include "tensorflow/core/common_runtime/executor.h"
#include "tensorflow/core/common_runtime/graph_constructor.h"
#include "tensorflow/core/common_runtime/local_executor_params.h"
#include "tensorflow/core/common_runtime/process_function_library_runtime.h"
#include "tensorflow/core/common_runtime/rendezvous_mgr.h"
#include "tensorflow/core/common_runtime/step_stats_collector.h"
#include "tensorflow/core/framework/node_def.pb.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/graph/graph.h"
#include "tensorflow/core/platform/env.h"
#include "tensorflow/core/protobuf/config.pb.h"

// Its name in 1.15.
#ifndef TF_NO_THREAD_SAFETY_ANALYSIS
#define TF_NO_THREAD_SAFETY_ANALYSIS NO_THREAD_SAFETY_ANALYSIS
#endif

namespace starwire {

// ---- What kernels are made from ----

namespace compat_internal {
template <typename F>
struct Creation;
template <typename R, typename Source, typename Kernel>
struct Creation<std::function<R(const Source&, Kernel)>> {
  using Type = Source;
};
}  // namespace compat_internal

// A node's definition in 1.15, a pointer to its properties later.
using KernelSource = compat_internal::Creation<decltype(::tensorflow::LocalExecutorParams::create_kernel)>::Type;

inline const ::tensorflow::NodeDef& DefOf(const ::tensorflow::NodeDef& source) { return source; }
template <typename Properties>
const ::tensorflow::NodeDef& DefOf(const std::shared_ptr<Properties>& source) {
  return source->node_def;
}

inline ::tensorflow::NodeDef WithDef(const ::tensorflow::NodeDef&, ::tensorflow::NodeDef def) { return def; }
template <typename Properties>
std::shared_ptr<Properties> WithDef(const std::shared_ptr<Properties>& source, ::tensorflow::NodeDef def) {
  return std::make_shared<Properties>(source->op_def, std::move(def), source->input_types, source->output_types);
}

namespace compat_internal {
template <typename Source>
struct Sources {
  template <typename Node>
  static Source Of(const Node& node) {
    return node.properties();
  }
  static Status Of(::tensorflow::NodeDef def, Source* source) {
    return std::decay_t<decltype(**source)>::CreateFromNodeDef(std::move(def), ::tensorflow::OpRegistry::Global(),
                                                               source);
  }
};
template <>
struct Sources<::tensorflow::NodeDef> {
  static const ::tensorflow::NodeDef& Of(const ::tensorflow::Node& node) { return node.def(); }
  static Status Of(::tensorflow::NodeDef def, ::tensorflow::NodeDef* source) {
    *source = std::move(def);
    return OkStatus();
  }
};
}  // namespace compat_internal

inline decltype(auto) SourceOf(const ::tensorflow::Node& node) {
  return compat_internal::Sources<KernelSource>::Of(node);
}
inline Status MakeSource(::tensorflow::NodeDef def, KernelSource* source) {
  return compat_internal::Sources<KernelSource>::Of(std::move(def), source);
}

// ---- Kernels ----

// Whether the kernel goes on after it has returned. Kernels of 1.15 do not say, and none of them does on a CPU.
template <typename Kernel>
bool IsDeferred(const Kernel& kernel) {
  return Either(STARWIRE_IF_VALID((const auto& k), k.is_deferred()), Otherwise(false))(kernel);
}
// The value of a constant's kernel, or null: 1.15 runs that kernel like any other.
template <typename Kernel>
const ::tensorflow::Tensor* ConstTensor(const Kernel& kernel) {
  return Either(STARWIRE_IF_VALID((const auto& k), k.const_tensor()), Otherwise(nullptr))(kernel);
}
// Operations whose errors say that a peer is unavailable. 1.15 knows no such mark.
template <typename OpDef>
bool IsCommunication(const OpDef& op) {
  return Either(STARWIRE_IF_VALID((const auto& o), o.is_distributed_communication()), Otherwise(false))(op);
}
// Whether its operations may say that something is unavailable. The executors of 2.x rename that error in all that do
// not communicate; those of 1.15 rename none.
template <typename OpDef>
bool MayBeUnavailable(const OpDef& op) {
  return Either(STARWIRE_IF_VALID((const auto& o), o.is_distributed_communication()), Otherwise(true))(op);
}
template <typename Builder>
Builder& MarkCommunication(Builder* op) {
  return Either(STARWIRE_IF_VALID((auto* o), o->SetIsDistributedCommunication()),
                STARWIRE_IF_VALID((auto* o), (*o)))(op);
}

// ---- What runs and kernels are told ----

namespace compat_internal {
template <typename Devices>
Status NewRendezvous(const Devices* devices, ::tensorflow::Rendezvous** out) {
  *out = new ::tensorflow::IntraProcessRendezvous(devices);
  return OkStatus();
}
template <typename Params>
auto SetRendezvousFactory(Params* params, int) -> decltype(void(*params->create_rendezvous)) {
  static const std::decay_t<decltype(*params->create_rendezvous)> kLocal = [](auto, const auto* devices, auto** out) {
    return NewRendezvous(devices, out);
  };
  params->create_rendezvous = &kLocal;
}
template <typename Params>
void SetRendezvousFactory(Params*, long) {}
}  // namespace compat_internal

// Functions that are called from a kernel of 1.15 make their rendezvous with this.
template <typename Params>
void SetRendezvousFactory(Params* params) {
  compat_internal::SetRendezvousFactory(params, 0);
}
// Whether functions that the kernel calls run on its thread as well. In 1.15 they do not.
template <typename Params>
void SetInline(Params* params, bool is_inline) {
  Either(STARWIRE_IF_VALID((auto* p, bool is_inline), p->run_all_kernels_inline = is_inline), OtherwiseNothing())(
      params, is_inline);
}
// Which outputs have readers. 1.15 computes all of them.
template <typename Params>
void SetRequired(Params* params, bool* required) {
  Either(STARWIRE_IF_VALID((auto* p, bool* required), p->outputs_required_array = required), OtherwiseNothing())(
      params, required);
}

// The inputs of a kernel: where they are, or in 1.15 and DeepRec a copy in vectors.
template <typename Params, bool kInVectors = std::is_pointer<decltype(Params::inputs)>::value>
class KernelInputs {
 public:
  template <typename Value, typename Attributes>
  void Set(Params* params, Value* values, Attributes* attributes, size_t count) {
    params->inputs = {values, count};
    params->input_alloc_attrs = {attributes, count};
  }
};
template <typename Params>
class KernelInputs<Params, true> {
 public:
  template <typename Value, typename Attributes>
  void Set(Params* params, Value* values, Attributes* attributes, size_t count) {
    values_.assign(values, values + count);
    attributes_.assign(attributes, attributes + count);
    params->inputs = &values_;
    params->input_alloc_attrs = &attributes_;
    SetContexts(params, count, &contexts_);
  }

 private:
  struct None {};
  template <typename P, typename = void>
  struct Contexts {
    using Type = None;
  };
  template <typename P>
  struct Contexts<P, std::void_t<decltype(P::input_device_contexts)>> {
    using Type = std::decay_t<decltype(*P::input_device_contexts)>;
  };
  template <typename List>
  static void SetContexts(Params* params, size_t count, List* list) {
    list->assign(count, nullptr);
    params->input_device_contexts = list;
  }
  // DeepRec has none.
  static void SetContexts(Params*, size_t, None*) {}

  std::decay_t<decltype(*Params::inputs)> values_;
  std::decay_t<decltype(*Params::input_alloc_attrs)> attributes_;
  typename Contexts<Params>::Type contexts_;
};

// Newer versions can reuse a context for one kernel after another, as long as none of them fails.
template <typename Params, typename Context>
void RenewContext(Params* params, int num_outputs, std::optional<Context>* context) {
  const auto reset = STARWIRE_IF_VALID((auto& kept, int outputs), kept.ResetOutputs(outputs));
  if constexpr (std::is_invocable_v<decltype(reset), Context&, int>) {
    if (context->has_value()) return reset(**context, num_outputs);
  }
  context->emplace(params, num_outputs);
}

// ---- Executors ----

namespace compat_internal {
template <typename Args, typename = void>
struct RunArgs : Args {
  bool run_all_kernels_inline = false;
};
template <typename Args>
struct RunArgs<Args, std::void_t<decltype(Args::run_all_kernels_inline)>> : Args {};
}  // namespace compat_internal

// The arguments of a run; executors of 1.15 do not know `run_all_kernels_inline`, ours does.
using RunArgs = compat_internal::RunArgs<::tensorflow::Executor::Args>;

// TensorFlow's executor for a graph that goes on to exist: in 1.15 it gets a copy, which it owns.
inline Status NewStockExecutor(const ::tensorflow::LocalExecutorParams& params, const ::tensorflow::Graph& graph,
                               std::unique_ptr<::tensorflow::Executor>* out) {
  ::tensorflow::LocalExecutorParams own = params;
  const auto factory = [](auto, const auto* devices, auto** out) {
    return compat_internal::NewRendezvous(devices, out);
  };
  Either(STARWIRE_IF_VALID((auto* p, auto factory), p->rendezvous_factory = factory), OtherwiseNothing())(&own,
                                                                                                          factory);
  const auto copied = [](const auto& params, const auto& graph, auto* made) {
    using Graph = std::decay_t<decltype(graph)>;
    auto copy = std::make_unique<Graph>(graph.flib_def());
    ::tensorflow::CopyGraph(graph, copy.get());
    return ::tensorflow::NewLocalExecutor(params, std::unique_ptr<const Graph>(std::move(copy)), made);
  };
  ::tensorflow::Executor* made = nullptr;
  const Status status = Either(STARWIRE_IF_VALID((const auto& params, const auto& graph, auto* made),
                                                 ::tensorflow::NewLocalExecutor(params, graph, made)),
                               copied)(own, graph, &made);
  out->reset(made);
  return status;
}

// The functions of a graph, for the worker session's tasks. 1.15 has no use for the rest of the configuration.
template <typename Devices, typename Library, typename Cluster>
std::unique_ptr<::tensorflow::ProcessFunctionLibraryRuntime> NewRuntime(Devices* devices,
                                                                        const ::tensorflow::ConfigProto& config,
                                                                        int producer, Library* library,
                                                                        Cluster* cluster) {
  using Runtime = ::tensorflow::ProcessFunctionLibraryRuntime;
  ::tensorflow::Env* env = ::tensorflow::Env::Default();
  const auto& options = config.graph_options().optimizer_options();
  if constexpr (std::is_constructible_v<Runtime, Devices*, ::tensorflow::Env*, const ::tensorflow::ConfigProto*, int,
                                        Library*, decltype(options), std::nullptr_t, Cluster*>) {
    return std::make_unique<Runtime>(devices, env, &config, producer, library, options, nullptr, cluster);
  } else {
    return std::make_unique<Runtime>(devices, env, producer, library, options, nullptr, cluster);
  }
}

// The reference counted rendezvous of one process: the name of the class in 1.15, another name of it later.
using LocalRendezvous = ::tensorflow::IntraProcessRendezvous;

// ---- Threads ----

namespace compat_internal {
template <typename Pool, typename Work>
auto ForEachPart(Pool* pool, int64_t parts, Work work, int)
    -> decltype(void(typename Pool::SchedulingParams(Pool::SchedulingStrategy::kFixedBlockSize, std::nullopt, 1))) {
  const typename Pool::SchedulingParams one_each(Pool::SchedulingStrategy::kFixedBlockSize, std::nullopt, 1);
  pool->ParallelFor(parts, one_each, work);
}
template <typename Pool, typename Work>
void ForEachPart(Pool* pool, int64_t parts, Work work, long) {
  pool->TransformRangeConcurrently(1, parts, work);
}
}  // namespace compat_internal

// Calls work(begin, end) for ranges of [0, parts), one part at a time, on the pool's threads.
template <typename Pool, typename Work>
void ForEachPart(Pool* pool, int64_t parts, Work work) {
  compat_internal::ForEachPart(pool, parts, work, 0);
}

// ---- Timelines ----

namespace compat_internal {
template <typename Collector>
auto TakesDefinitions(Collector* collector, const ::tensorflow::NodeDef* node)
    -> decltype(collector->CreateNodeExecStats(node), std::true_type());
std::false_type TakesDefinitions(...);
using CollectorTakesDefinitions = decltype(TakesDefinitions(std::declval<::tensorflow::StepStatsCollectorInterface*>(),
                                                            std::declval<const ::tensorflow::NodeDef*>()));
template <typename Kernel, bool kTakesDefinitions>
class TimelineNodes {
 public:
  explicit TimelineNodes(const ::tensorflow::Graph&) {}
  template <typename Collector>
  auto Begin(Collector* collector, const Kernel& kernel) const {
    return collector->CreateNodeExecStats(&kernel.def());
  }
};
template <typename Kernel>
class TimelineNodes<Kernel, false> {
 public:
  explicit TimelineNodes(const ::tensorflow::Graph& graph) : graph_(graph.flib_def()) {
    ::tensorflow::CopyGraph(graph, &graph_);
    for (const ::tensorflow::Node* node : graph_.op_nodes()) nodes_.emplace(node->name(), node);
  }
  template <typename Collector>
  ::tensorflow::NodeExecStatsInterface* Begin(Collector* collector, const Kernel& kernel) const {
    const auto found = nodes_.find(kernel.name());
    return found == nodes_.end() ? nullptr : collector->CreateNodeExecStats(found->second);
  }

 private:
  ::tensorflow::Graph graph_;
  std::unordered_map<std::string, const ::tensorflow::Node*> nodes_;
};
}  // namespace compat_internal

// What a timeline is told of a kernel's node: its definition, or in 1.15 the node, which needs a copy of the graph.
using TimelineNodes =
    compat_internal::TimelineNodes<::tensorflow::OpKernel, compat_internal::CollectorTakesDefinitions::value>;

}  // namespace starwire

#endif  // STARWIRE_CC_BASE_COMPAT_EXECUTOR_H_
