#include "cc/star/run.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "cc/base/compat_executor.h"
#include "cc/base/compat_profiler.h"
#include "cc/base/guard.h"
#include "cc/base/kernel_scope.h"
#include "cc/base/status_codec.h"
#include "cc/star/service.h"
#include "cc/tensor/slab.h"
#include "tensorflow/core/common_runtime/device.h"
#include "tensorflow/core/common_runtime/device_mgr.h"
#include "tensorflow/core/common_runtime/rendezvous_mgr.h"
#include "tensorflow/core/lib/core/threadpool.h"

namespace starwire {

namespace {

// More is dropped: a reply is not for gigabytes of statistics.
constexpr size_t kMaxStats = 64 << 20;

template <typename Duration>
uint64_t Nanos(Duration duration) {
  const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(duration).count();
  return ns < 0 ? 0 : static_cast<uint64_t>(ns);
}

void ReleaseBody(void* body) { sw_body_free(static_cast<sw_body*>(body)); }

StarObjectPtr<StarPlan> PlanOf(void* object) {
  auto* plan = static_cast<StarPlan*>(StarObjectOf(object));
  plan->Ref();
  return StarObjectPtr<StarPlan>(plan);
}

}  // namespace

StarRun::StarRun(std::shared_ptr<StarService> service, const sw_star_request& request)
    : service_(std::move(service)),
      ticket_(request.ticket),
      plan_(PlanOf(request.plan)),
      session_(AsString(request.session)),
      wants_trace_(request.trace != 0),
      short_ns_(request.short_ns),
      keeps_(request.keeps, request.keeps + request.n_keeps),
      started_(Clock::now()) {
  args.step_id = request.step_id;
  service_->running_.fetch_add(1, std::memory_order_relaxed);
}

StarRun::~StarRun() {
  if (rendezvous_ != nullptr) rendezvous_->Unref();
}

StarRun* StarRun::Begin(const sw_star_request& request, BodyHandle body) {
  const Status status = Guard(
      "a star call", [&] { return Read(request, std::move(body)); }, [](const Status& thrown) { return thrown; });
  if (!status.ok()) {
    Fail(status, /*names_peer=*/true);
    return nullptr;
  }
  alone_ = request.run_inline != 0 && !cargo_.is_laborious();
  if (alone_) {
    const KernelScope scope;
    if (Launch()) return nullptr;
    alone_ = false;
  }
  const Status scheduled = Guard(
      "a star call",
      [this] {
        cancellation_.emplace();
        Ref();
        service_->Schedule([this] { Launch(); });
        return OkStatus();
      },
      [this](const Status& thrown) {
        if (cancellation_.has_value()) Unref();
        return thrown;
      });
  if (scheduled.ok()) return this;
  Fail(scheduled, /*names_peer=*/false);
  return nullptr;
}

Status StarRun::Read(const sw_star_request& request, BodyHandle body) {
  Status status = cargo_.Adopt(request.table, request.parts, request.n_parts, body.release(), ReleaseBody);
  if (!status.ok()) return status;
  slots_ = cargo_.slots();
  for (const uint32_t slot : slots_) {
    kept_.emplace_back(static_cast<KeptValue*>(StarObjectOf(sw_star_slots_get(request.slots, slot))));
  }
  return OkStatus();
}

bool StarRun::Launch() {
  bool names_peer = false, late = false;
  const Status status = Guard(
      "a star call",
      [&] {
        Status made = has_feeds_ ? OkStatus() : MakeFeeds(&names_peer, &late);
        if (made.ok() && !late) late = IsTooLarge();
        if (made.ok() && !late) Go();
        return made;
      },
      [](const Status& thrown) { return thrown; });
  if (!status.ok()) Fail(status, names_peer);
  return !status.ok() || !late;
}

Status StarRun::MakeFeeds(bool* names_peer, bool* late) {
  if (!has_values_) {
    Status status = cargo_.Finish(tensorflow::cpu_allocator(), &values_);
    for (const StarValue& value : values_) {
      if (!status.ok() || value.kind != StarValue::Kind::kDead) continue;
      status = MakeStatus(kInvalidArgument, "starwire: a star call has a dead feed");
    }
    *names_peer = !status.ok();
    if (!status.ok()) return status;
    has_values_ = true;
  }
  if (plan_->num_handles() != 0) {
    const Status status = FindHandles(late);
    if (!status.ok() || *late) return status;
  }
  const SessionSubgraph& subgraph = plan_->subgraph();
  if (values_.size() != subgraph.num_feeds()) {
    return MakeStatus(kInvalidArgument, "starwire: a star call has " + std::to_string(values_.size()) +
                                            " feeds, but its plan has " + std::to_string(subgraph.num_feeds()));
  }
  for (const StarKeep& keep : keeps_) {
    if (keep.fetch < subgraph.num_fetches()) continue;
    return MakeStatus(kInvalidArgument, "starwire: a star call keeps fetch " + std::to_string(keep.fetch) +
                                            ", but its plan has " + std::to_string(subgraph.num_fetches()));
  }
  fetches.resize(subgraph.num_fetches());
  feeds.reserve(values_.size());
  auto kept = kept_.begin();
  for (StarValue& value : values_) {
    if (value.kind == StarValue::Kind::kTensor) {
      feeds.push_back(std::move(value.tensor));
      continue;
    }
    const StarObjectPtr<KeptValue> found = std::move(*kept++);
    if (found == nullptr) {
      // Sessions recover from Aborted: the connection may have been lost, and its values with it.
      return MakeStatus(kAborted, "starwire: slot " + std::to_string(value.slot) + " of step " +
                                      std::to_string(args.step_id) + " is empty on " + service_->task_ +
                                      ": the call that should have filled it failed, the connection was lost in "
                                      "between, or the step has ended");
    }
    feeds.push_back(found->tensor);
  }
  values_.clear();
  has_feeds_ = true;
  return OkStatus();
}

bool StarRun::IsTooLarge() {
  // A plan that is expensive needs no sizes: it does not come to a reactor.
  if (plan_->may_wait() || (!alone_ && plan_->subgraph().CostNanos() > short_ns_)) return false;
  if (size_.empty()) size_ = SizeOf(feeds);
  return alone_ && !plan_->short_runs()->Cover(size_);
}

Status StarRun::FindHandles(bool* late) {
  const size_t n = plan_->num_handles();
  const tensorflow::Tensor* names = values_.empty() ? nullptr : &values_.back().tensor;
  if (names == nullptr || values_.back().kind != StarValue::Kind::kTensor || names->dtype() != tensorflow::DT_INT64 ||
      names->dims() != 1 || names->NumElements() != 1 + 2 * static_cast<int64_t>(n)) {
    return MakeStatus(kInvalidArgument,
                      "starwire: a star call does not name the " + std::to_string(n) + " handles that its plan needs");
  }
  if (service_->handles_ == nullptr) {
    return MakeStatus(kFailedPrecondition, "starwire: " + service_->task_ + " has no eager contexts");
  }
  const auto flat = names->flat<Int64>();
  std::vector<std::pair<int64_t, int32_t>> wanted;
  for (size_t i = 0; i < n; ++i) wanted.emplace_back(flat(1 + 2 * i), static_cast<int32_t>(flat(2 + 2 * i)));
  std::vector<tensorflow::Tensor> handles;
  const Status status =
      service_->handles_->Find(static_cast<uint64_t>(flat(0)), wanted, /*may_wait=*/!alone_, late, &handles);
  if (!status.ok() || *late) return status;
  values_.pop_back();
  for (tensorflow::Tensor& handle : handles) values_.push_back(StarValue(std::move(handle)));
  return OkStatus();
}

void StarRun::Go() {
  started_ = Clock::now();
  if (cancelled_.load()) {
    Fail(MakeStatus(kCancelled, "cancelled before it was started"), /*names_peer=*/false);
    return;
  }
  tensorflow::thread::ThreadPool* pool = service_->env_->compute_pool;
  args.session_handle = session_;
  args.run_all_kernels_inline = alone_;
  args.runner = [pool](std::function<void()> work) { pool->Schedule(std::move(work)); };
  // A run on a reactor is over before anyone can cancel it.
  args.cancellation_manager = alone_ ? nullptr : &*cancellation_;
  if (plan_->needs_container()) {
    tensorflow::DeviceMgr* devices = plan_->device_mgr();
    container_.emplace(
        service_->containers_.fetch_add(1),
        [devices](const std::string& name) {
          for (tensorflow::Device* device : devices->ListDevices()) {
            device->resource_manager()->Cleanup(name).IgnoreError();
          }
        },
        "starwire");
    args.step_container = &*container_;
  } else {
    args.step_container = &service_->no_container_;
  }
  if (plan_->needs_rendezvous()) {
    rendezvous_ = new LocalRendezvous(plan_->device_mgr());
    args.rendezvous = rendezvous_;
  }
  if (wants_trace_) {
    collector_.emplace(&stats_);
    args.stats_collector = &*collector_;
  }
  for (const StateUpdate& update : plan_->updates()) {
    const auto feed = static_cast<size_t>(update.feed);
    changed_ids_.push_back(feed < feeds.size() ? feeds[feed] : tensorflow::Tensor());
  }
  begun_ = BeginActivity();
  plan_->subgraph().Run(this);
}

void StarRun::OnDone(const Status& status) {
  EndActivity(begun_, [] { return std::string("StarRun"); });
  const Status outcome = Guard(
      "answering a star call",
      [&] {
        // Before the result, after which the state may be written.
        if (!changed_ids_.empty()) service_->state_.Changed(plan_->updates(), changed_ids_);
        changed_ids_.clear();
        return status.ok() ? Answer() : status;
      },
      [](const Status& thrown) { return thrown; });
  if (!outcome.ok()) Fail(outcome, /*names_peer=*/false);
}

namespace {

// What is kept must not hold much more memory than its own: that of the call that brought it, say.
Status KeepAlone(tensorflow::Tensor* value) {
  const size_t bytes = value->TotalBytes();
  if (!tensorflow::DataTypeCanUseMemcpy(value->dtype()) || Slab::HeldBy(*value) <= 2 * bytes) return OkStatus();
  tensorflow::Tensor alone(tensorflow::cpu_allocator(), value->dtype(), value->shape());
  if (bytes != 0 && !alone.IsInitialized()) {
    return MakeStatus(kResourceExhausted, "starwire: no memory for " + std::to_string(bytes) + " bytes that are kept");
  }
  if (bytes != 0) std::memcpy(const_cast<char*>(alone.tensor_data().data()), value->tensor_data().data(), bytes);
  *value = std::move(alone);
  return OkStatus();
}

}  // namespace

Status StarRun::Answer() {
  std::vector<StarValue> values(fetches.size());
  for (size_t i = 0; i < fetches.size(); ++i) {
    if (fetches[i].dead) {
      values[i] = StarValue::Dead();
    } else {
      values[i].tensor = std::move(fetches[i].tensor);
    }
  }
  std::vector<StarObjectPtr<KeptValue>> kept;
  std::vector<sw_star_kept> stays;
  for (const StarKeep& keep : keeps_) {
    StarValue& value = values[keep.fetch];
    if (value.kind != StarValue::Kind::kTensor) continue;
    const Status status = KeepAlone(&value.tensor);
    if (!status.ok()) return status;
    kept.emplace_back(new KeptValue(value.tensor));
    const uint64_t bytes = std::max<uint64_t>(value.tensor.TotalBytes(), Slab::HeldBy(value.tensor));
    stays.push_back({keep.slot, InTable(kept.back().get()), bytes});
    if ((keep.flags & kAlsoReturned) == 0) value = StarValue::Slot(keep.slot);
  }
  std::string stats;
  if (collector_.has_value()) {
    collector_->Finalize();
    if (stats_.ByteSizeLong() <= kMaxStats) stats = stats_.SerializeAsString();
  }
  std::vector<uint8_t> table;
  ValueEncoder cargo;
  const Status status = cargo.Pack(values.data(), values.size(), &table);
  if (!status.ok()) return status;
  sw_star_outcome outcome = {};
  outcome.struct_size = sizeof(outcome);
  outcome.bytes = cargo.bytes();
  outcome.stats_bytes = static_cast<uint32_t>(stats.size());
  if (!stats.empty()) cargo.AddPart(std::move(stats));
  outcome.kept = stays.data();
  outcome.n_kept = stays.size();
  outcome.table = {table.data(), table.size()};
  outcome.ran_inline = alone_ ? 1 : 0;
  outcome.run_ns = Nanos(Clock::now() - started_);
  outcome.cost_ns = plan_->subgraph().CostNanos();
  if (!alone_ && outcome.run_ns <= short_ns_) plan_->short_runs()->Add(std::move(size_));
  values.clear();
  Leave();
  for (auto& value : kept) value.release();
  outcome.payload = cargo.Take();
  sw_engine_star_done(service_->engine_.get(), ticket_, &outcome);
  End();
  return OkStatus();
}

void StarRun::Fail(const Status& status, bool names_peer) {
  const std::string message = StatusMessage(status), details = EncodeErrorDetails(status);
  sw_star_outcome outcome = {};
  outcome.struct_size = sizeof(outcome);
  outcome.code = StatusNumber(status);
  outcome.names_peer = names_peer ? 1 : 0;
  outcome.message = AsBytes(message);
  outcome.details = AsBytes(details);
  outcome.ran_inline = alone_ ? 1 : 0;
  outcome.run_ns = Nanos(Clock::now() - started_);
  Leave();
  sw_engine_star_done(service_->engine_.get(), ticket_, &outcome);
  End();
}

void StarRun::Leave() {
  over_.store(true);
  feeds.clear();
  fetches.clear();
  kept_.clear();
  container_.reset();
}

void StarRun::End() {
  const std::shared_ptr<StarService> service = service_;
  plan_.reset();
  Unref();
  service->running_.fetch_sub(1, std::memory_order_release);
}

void StarRun::Cancel() {
  cancelled_.store(true);
  // Cancelling wakes kernels: TensorFlow code of unknown length, not for a reactor.
  Ref();
  service_->queues_->urgent.Run([this] {
    if (!over_.load() && cancellation_.has_value()) cancellation_->StartCancel();
    Unref();
  });
}

}  // namespace starwire
