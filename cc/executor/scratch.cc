#include "cc/executor/scratch.h"

#include <algorithm>
#include <new>
#include <string>
#include <utility>

#include "cc/base/completion_batch.h"
#include "cc/base/guard.h"
#include "cc/base/kernel_scope.h"
#include "cc/base/status_codec.h"
#include "tensorflow/core/common_runtime/device.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/node_def_util.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/platform/mutex.h"

namespace starwire {

using tensorflow::NodeExecStatsInterface;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorValue;

namespace {

// The kernel that this thread is starting, until it ends.
thread_local const void* starting = nullptr;

int64_t NowNanos() { return static_cast<int64_t>(tensorflow::Env::Default()->NowNanos()); }

}  // namespace

Scratch::Scratch(SubgraphTable* table)
    : table_(table),
      device_(table->params.device),
      slots_(new Slot[table->readers.size()]),
      inputs_(table->input_slots.size()),
      lanes_(new Parameters[table->lanes]),
      asyncs_(new Async[table->num_asyncs]) {
  for (const auto& constant : table->constants) slots_[constant.first].constant = &constant.second;
  // Most inputs are in the same place in every run. TensorValue has no const tensors; OpKernelContext ensures that
  // inputs other than references are not modified.
  for (size_t i = 0; i < inputs_.size(); ++i) {
    Slot& slot = slots_[table->input_slots[i]];
    inputs_[i] = TensorValue(slot.constant != nullptr ? const_cast<Tensor*>(slot.constant) : &slot.value);
  }
  const auto& kinds = table->input_kinds;
  if (std::find(kinds.begin(), kinds.end(), InputKind::kDereferred) != kinds.end()) dereferred_.resize(inputs_.size());
  table_->Ref();
}

Status Scratch::Begin(Step* step) {
  const size_t expected = table_->arg_slots.size();
  if (step->feeds.size() < expected || step->fetches.size() < table_->num_fetches) {
    return MakeStatus(kInvalidArgument, "starwire: a sub-graph with " + std::to_string(expected) + " arguments and " +
                                            std::to_string(table_->num_fetches) + " results got " +
                                            std::to_string(step->feeds.size()) + " and " +
                                            std::to_string(step->fetches.size()));
  }
  for (size_t i = 0; i < expected; ++i) {
    const uint32_t slot = table_->arg_slots[i];
    if (slot == SubgraphTable::kNoSlot || step->feeds[i].dtype() == table_->output_types[slot]) continue;
    return MakeStatus(kInvalidArgument, "starwire: argument " + std::to_string(i) + " of a sub-graph has type " +
                                            tensorflow::DataTypeString(step->feeds[i].dtype()) + " instead of " +
                                            tensorflow::DataTypeString(table_->output_types[slot]));
  }
  step_ = step;
  ++runs_;
  for (size_t i = 0; i < expected; ++i) {
    const uint32_t slot = table_->arg_slots[i];
    if (slot == SubgraphTable::kNoSlot || table_->readers[slot] == 0) continue;
    slots_[slot].Fill(std::move(step->feeds[i]), table_->readers[slot] > 1);
  }
  for (Step::Value& fetch : step->fetches) fetch.dead = true;
  return OkStatus();
}

uint32_t Scratch::Run(sw_run* run, const sw_task& task, uint32_t lane) {
  const SubgraphNode& node = table_->nodes[task.node];
  tensorflow::CancellationManager* cancellation = step_->args.cancellation_manager;
  if (cancellation != nullptr && cancellation->IsCancelled()) {
    Fail(MakeStatus(kCancelled, "starwire: the step was cancelled"), node);
    Drop(node, task);
    return SW_OUTCOME_FAILED;
  }
  const uint32_t* unshared = table_->lists + task.first;
  for (uint32_t i = 0; i < task.unshared; ++i) Unshare(unshared[i]);
  if (node.inputs_vary) {
    Status status = PrepareInputs(node);
    if (!status.ok()) {
      Fail(std::move(status), node);
      Drop(node, task);
      return SW_OUTCOME_FAILED;
    }
  }
  if (node.fetch >= 0) return Fetch(node, task);
  if (node.async != nullptr) return Start(run, node, task);

  Parameters* parameters = &lanes_[lane];
  OpKernelContext::Params* params = Prepare(parameters, node);
  // A context counts allocations over its whole life or not at all, so discard one that is left from a run without
  // statistics before a run with them.
  if (step_->args.stats_collector != nullptr) parameters->context.reset();
  NodeExecStatsInterface* stats = step_->args.stats_collector == nullptr ? nullptr : StartStats(node, params);
  RenewContext(params, static_cast<int>(node.num_outputs), &parameters->context);
  OpKernelContext* context = &*parameters->context;
  device_->Compute(node.kernel, context);
  if (stats != nullptr) stats->RecordComputeEnded();
  const bool kept = Keep(node, context, stats);
  if (stats != nullptr) EndStats(stats, context);
  if (stats != nullptr || !kept) parameters->context.reset();
  params->track_allocations = false;
  Drop(node, task);
  return kept ? SW_OUTCOME_DONE : SW_OUTCOME_FAILED;
}

uint32_t Scratch::Threw(const Status& thrown, const sw_task& task, uint32_t lane) noexcept {
  const SubgraphNode& node = table_->nodes[task.node];
  try {
    Fail(thrown, node);
  } catch (...) {
    // Out of memory for a longer message.
    if (status_.ok()) status_ = thrown;
  }
  Parameters* parameters = node.async == nullptr ? &lanes_[lane] : &asyncs_[node.async_index].parameters;
  parameters->context.reset();
  parameters->params.track_allocations = false;
  Drop(node, task);
  return SW_OUTCOME_FAILED;
}

uint32_t Scratch::Start(sw_run* run, const SubgraphNode& node, const sw_task& task) {
  Async* async = &asyncs_[node.async_index];
  OpKernelContext::Params* params = Prepare(&async->parameters, node);
  async->stats = step_->args.stats_collector == nullptr ? nullptr : StartStats(node, params);
  async->scratch = this;
  async->run = run;
  async->task = &task;
  async->parameters.context.emplace(params, static_cast<int>(node.num_outputs));
  const void* outer = std::exchange(starting, async);
  try {
    device_->ComputeAsync(node.async, &*async->parameters.context, [async] { Ended(async); });
  } catch (...) {
    const bool has_ended = std::exchange(starting, outer) != async;
    if (!has_ended) throw;
    LogThrown("a kernel that had already finished");
  }
  starting = outer;
  return SW_OUTCOME_PENDING;
}

void Scratch::Ended(Async* async) {
  Scratch* self = async->scratch;
  sw_run* run = async->run;
  const sw_task& task = *async->task;
  const SubgraphNode& node = self->table_->nodes[task.node];
  if (async->stats != nullptr) async->stats->RecordComputeEnded();
  std::optional<OpKernelContext>* context = &async->parameters.context;
  const bool kept = self->Keep(node, &**context, async->stats);
  if (async->stats != nullptr) self->EndStats(async->stats, &**context);
  context->reset();
  async->parameters.params.track_allocations = false;
  self->Drop(node, task);
  const bool has_waited = starting != async;
  if (!has_waited) starting = nullptr;
  // The run may go on here.
  const auto report = [run, number = task.node, failed = kept ? 0U : 1U] {
    const KernelScope scope;
    sw_run_report(run, number, failed);
  };
  if (has_waited && CompletionBatch::OnReactor()) {
    // Another call has ended what the kernel waited for, and its reactor has no time for what follows here.
    try {
      const auto runner = self->step_->args.runner;
      return runner(report);
    } catch (...) {
      LogThrown("a kernel that has waited");
    }
  }
  report();
}

uint32_t Scratch::Fetch(const SubgraphNode& node, const sw_task& task) {
  Step::Value& fetch = step_->fetches[node.fetch];
  const Tensor& value = *inputs_[node.first_input].tensor;
  const uint32_t slot = table_->input_slots[node.first_input];
  const uint32_t* released = table_->lists + task.first + task.unshared;
  if (table_->input_kinds[node.first_input] == InputKind::kValue &&
      std::find(released, released + task.released, slot) != released + task.released) {
    fetch.tensor = std::move(slots_[slot].value);
  } else {
    fetch.tensor = value;
  }
  fetch.dead = false;
  Drop(node, task);
  return SW_OUTCOME_DONE;
}

OpKernelContext::Params* Scratch::Prepare(Parameters* parameters, const SubgraphNode& node) {
  OpKernelContext::Params& params = parameters->params;
  if (parameters->run != runs_) {
    const RunArgs& args = step_->args;
    params.step_id = args.step_id;
    params.device = device_;
    params.resource_manager = device_->resource_manager();
    params.step_container = args.step_container;
    params.rendezvous = args.rendezvous;
    params.cancellation_manager = args.cancellation_manager;
    params.call_frame = args.call_frame;
    params.runner = &step_->args.runner;
    params.stats_collector = args.stats_collector;
    params.slice_reader_cache = &*slice_readers_;
    params.track_allocations = false;
    SetInline(&params, args.run_all_kernels_inline);
    if (params.session_handle != args.session_handle) params.session_handle = args.session_handle;
    if (parameters->run == 0) {
      params.session_metadata = table_->params.session_metadata;
      params.function_library = table_->params.function_library;
      SetRendezvousFactory(&params);
      params.frame_iter = tensorflow::FrameAndIter(0, 0);
      // SubgraphTable refuses kernels that need these.
      params.inc_num_deferred_ops_function = [] {};
      params.dec_num_deferred_ops_function = [] {};
    }
    parameters->run = runs_;
  }
  params.op_kernel = node.kernel;
  parameters->inputs.Set(&params, inputs_.data() + node.first_input, table_->input_attributes.data() + node.first_input,
                         node.num_inputs);
  params.output_attr_array = table_->output_attributes.data() + node.first_slot;
  static constexpr int kPinned[] = {OpKernelContext::Params::kNeverForward};
  params.forward_from_array = node.is_pinned ? kPinned : nullptr;
  SetRequired(&params, node.outputs_required);
  return &params;
}

Status Scratch::PrepareInputs(const SubgraphNode& node) {
  for (uint32_t input = node.first_input; input < node.first_input + node.num_inputs; ++input) {
    if (table_->input_kinds[input] == InputKind::kValue) continue;
    Status status = PrepareReference(node, input);
    if (!status.ok()) return status;
  }
  return OkStatus();
}

Status Scratch::PrepareReference(const SubgraphNode& node, uint32_t input) {
  Slot& slot = slots_[table_->input_slots[input]];
  const bool as_reference = table_->input_kinds[input] == InputKind::kReference;
  tensorflow::tf_shared_lock lock(*slot.mutex);
  if (!slot.variable->IsInitialized() && !node.reads_uninitialized) {
    const std::string name =
        node.kernel == nullptr ? "" : node.kernel->requested_input(static_cast<int>(input - node.first_input));
    return MakeStatus(kFailedPrecondition, "Attempting to use uninitialized value " + name);
  }
  if (as_reference) {
    inputs_[input] = TensorValue(slot.mutex, slot.variable);
    return OkStatus();
  }
  dereferred_[input] = *slot.variable;
  inputs_[input] = TensorValue(&dereferred_[input]);
  const tensorflow::DataType expected = tensorflow::RemoveRefType(table_->output_types[table_->input_slots[input]]);
  if (dereferred_[input].dtype() != expected) {
    return MakeStatus(kInvalidArgument, "starwire: the type of a variable has changed to " +
                                            tensorflow::DataTypeString(dereferred_[input].dtype()) + ", expected " +
                                            tensorflow::DataTypeString(expected));
  }
  return OkStatus();
}

bool Scratch::Keep(const SubgraphNode& node, OpKernelContext* context, NodeExecStatsInterface* stats) {
  if (!context->status().ok()) {
    Fail(context->status(), node);
    return false;
  }
  for (uint32_t i = 0; i < node.num_outputs; ++i) {
    const TensorValue value = context->release_output(static_cast<int>(i));
    const uint32_t at = node.first_slot + i;
    if (value.tensor == nullptr || value.is_ref() || value.tensor->dtype() != table_->output_types[at]) {
      Status status = KeepUnusual(node, i, value);
      if (status.ok()) continue;
      Fail(std::move(status), node);
      return false;
    }
    if (stats != nullptr && value.tensor->IsInitialized()) stats->SetOutput(static_cast<int>(i), value.tensor);
    const uint32_t readers = table_->readers[at];
    if (readers > 0) slots_[at].Fill(std::move(*value.tensor), readers > 1);
    delete value.tensor;
  }
  return true;
}

Status Scratch::KeepUnusual(const SubgraphNode& node, uint32_t output, TensorValue value) {
  const uint32_t at = node.first_slot + output;
  if (value.tensor == nullptr) {
    if (table_->readers[at] == 0) return OkStatus();
    return MakeStatus(kInternal,
                      "starwire: Missing " + std::to_string(output) + "-th output from " + node.kernel->name());
  }
  const tensorflow::DataType type = value.is_ref() ? value.dtype_safe() : value.tensor->dtype();
  if (!value.is_ref()) delete value.tensor;
  if (type != table_->output_types[at]) {
    return MakeStatus(kInternal, "starwire: output " + std::to_string(output) + " has type " +
                                     tensorflow::DataTypeString(type) + " instead of " +
                                     tensorflow::DataTypeString(table_->output_types[at]));
  }
  if (table_->readers[at] > 0) {
    slots_[at].variable = value.tensor;
    slots_[at].mutex = value.mutex_if_ref;
    slots_[at].full = true;
  }
  return OkStatus();
}

NodeExecStatsInterface* Scratch::StartStats(const SubgraphNode& node, OpKernelContext::Params* params) {
  NodeExecStatsInterface* stats = table_->timeline_nodes->Begin(step_->args.stats_collector, *node.kernel);
  params->track_allocations = stats != nullptr && stats->TrackAllocations();
  if (stats != nullptr) {
    stats->SetScheduled(NowNanos());
    stats->RecordExecutorStarted();
    stats->RecordComputeStarted();
  }
  return stats;
}

void Scratch::EndStats(NodeExecStatsInterface* stats, OpKernelContext* context) {
  stats->SetMemory(context);
  stats->RecordExecutorEnded();
  stats->Done(device_->name());
}

void Scratch::Drop(const SubgraphNode& node, const sw_task& task) {
  if (node.inputs_vary && !dereferred_.empty()) {
    for (uint32_t i = node.first_input; i < node.first_input + node.num_inputs; ++i) {
      if (table_->input_kinds[i] == InputKind::kDereferred) dereferred_[i] = Tensor();
    }
  }
  const uint32_t* released = table_->lists + task.first + task.unshared;
  for (uint32_t i = 0; i < task.released; ++i) Release(released[i]);
}

void Scratch::Release(uint32_t slot) { slots_[slot].Empty(); }

void Scratch::Unshare(uint32_t slot) { slots_[slot].shared.reset(); }

void Scratch::Fail(Status status, const SubgraphNode& node) {
  if (failed_.exchange(true)) return;
  tensorflow::CancellationManager* cancellation = step_->args.cancellation_manager;
  if (node.kernel != nullptr) {
    // TensorFlow recovers from Unavailable by starting over, so only network failures may return it.
    if (StatusNumber(status) == kUnavailable && !node.may_be_unavailable) {
      status = MakeStatus(kInternal,
                          "starwire: the operation returned Unavailable, which is reserved for network failures: " +
                              StatusMessage(status));
    }
    status = tensorflow::AttachDef(status, node.kernel->def());
  }
  status_ = cancellation != nullptr && cancellation->IsCancelled() ? AfterCancellation(status) : status;
  if (step_->args.rendezvous != nullptr) step_->args.rendezvous->StartAbort(status_);
  if (cancellation != nullptr) cancellation->StartCancel();
}

void Scratch::Finish(bool failed) {
  Status status;
  if (failed) {
    for (size_t slot = 0; slot < table_->readers.size(); ++slot) slots_[slot].Empty();
    for (Tensor& tensor : dereferred_) tensor = Tensor();
    status = std::exchange(status_, OkStatus());
    failed_.store(false);
  }
  slice_readers_.emplace();
  std::exchange(step_, nullptr)->OnDone(status);
}

void Scratch::Invite(sw_run* helper) {
  step_->args.runner([helper] { sw_run_help(helper); });
}

namespace {

// What a run has of the executor's memory; empty if there was no memory for the rest when it was opened.
using Place = std::optional<Scratch>;

// The scratch behind a callback of sw_kernels.
Scratch* Of(void* scratch) { return &**static_cast<Place*>(scratch); }
void Open(void* owner, void* scratch) { (new (scratch) Place)->emplace(static_cast<SubgraphTable*>(owner)); }
void Close(void*, void* scratch) { static_cast<Place*>(scratch)->~Place(); }
uint32_t RunKernel(void* scratch, sw_run* run, const sw_task* task, uint32_t lane) {
  return Of(scratch)->Run(run, *task, lane);
}
uint32_t KernelThrew(const Status& thrown, void* scratch, sw_run*, const sw_task* task, uint32_t lane) {
  return Of(scratch)->Threw(thrown, *task, lane);
}
void ReleaseSlot(void* scratch, uint32_t slot) { Of(scratch)->Release(slot); }
void UnshareSlot(void* scratch, uint32_t slot) { Of(scratch)->Unshare(slot); }
void Finished(void* scratch, uint32_t failed) { Of(scratch)->Finish(failed != 0); }
void Invite(void* scratch, sw_run* helper) { Of(scratch)->Invite(helper); }
// No other thread can help, so this one does.
void InviteThrew(const Status&, void*, sw_run* helper) { sw_run_help(helper); }

}  // namespace

sw_kernels SubgraphKernels() {
  sw_kernels kernels = {};
  kernels.struct_size = sizeof(sw_kernels);
  kernels.scratch_size = sizeof(Place);
  kernels.scratch_align = alignof(Place);
  kernels.open = Guarded<&Open>;
  kernels.close = Guarded<&Close>;
  kernels.run = Guarded<&RunKernel, &KernelThrew>;
  kernels.release = Guarded<&ReleaseSlot>;
  kernels.unshare = Guarded<&UnshareSlot>;
  kernels.finished = Guarded<&Finished>;
  kernels.invite = Guarded<&Invite, &InviteThrew>;
  return kernels;
}

void Subgraph::Run(Step* step) const {
  void* memory = nullptr;
  sw_run* run = sw_exec_begin(table_->plan.get(), &memory);
  if (run == nullptr) {
    step->OnDone(MakeStatus(kInternal, "starwire: bug: cannot start a run of a sub-graph"));
    return;
  }
  auto* place = static_cast<Place*>(memory);
  const Status status = Guard(
      "a run of a sub-graph",
      [&] {
        if (!place->has_value()) place->emplace(table_);
        return (*place)->Begin(step);
      },
      [](const Status& thrown) { return thrown; });
  // There may be no memory for a status either.
  if (!status.ok() || !place->has_value()) {
    sw_run_abandon(run);
    step->OnDone(status.ok() ? MakeStatus(kResourceExhausted, "starwire: out of memory") : status);
    return;
  }
  sw_run_go(run, step->args.run_all_kernels_inline ? SW_EXEC_ALONE : 0);
}

}  // namespace starwire
