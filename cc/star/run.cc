#include "cc/star/run.h"

#include <limits>
#include <utility>

#include "cc/base/guard.h"
#include "cc/base/status_codec.h"
#include "cc/star/object.h"
#include "cc/star/service.h"
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

uint32_t Micros(uint64_t ns) {
  const uint64_t micros = ns / 1000;
  constexpr uint32_t kMost = std::numeric_limits<uint32_t>::max();
  return micros > kMost ? kMost : static_cast<uint32_t>(micros);
}

void ReleaseBody(void* body) { sw_body_free(static_cast<sw_body*>(body)); }

}  // namespace

StarRun::StarRun(std::shared_ptr<StarService> service, BodyHandle body, const sw_call_request& request)
    : ticket(request.ticket),
      service_(std::move(service)),
      body_(std::move(body)),
      arrived_(Clock::now()),
      started_(arrived_) {
  service_->running_.fetch_add(1, std::memory_order_relaxed);
}

StarRun::~StarRun() {
  if (rendezvous_ != nullptr) rendezvous_->Unref();
  if (plan_ != nullptr) plan_->Unref();
}

Status StarRun::Read(const sw_call_request& request) {
  size_t consumed = 0;
  Status status = DecodeStarCall(request.meta, &call_, &consumed);
  if (!status.ok()) {
    body_.reset();
    return status;
  }
  session_ = AsString(call_.session);
  call_.session = {nullptr, 0};
  const sw_bytes table = {request.meta.data + consumed, request.meta.len - consumed};
  status = cargo_.Adopt(table, request.parts, request.n_parts, body_.release(), ReleaseBody);
  bytes_in_ = cargo_.bytes();
  return status;
}

Status StarRun::TakeValues() {
  const Status status = cargo_.Finish(tensorflow::cpu_allocator(), &values_);
  uses_slots_ = !call_.keeps.empty();
  for (const StarValue& value : values_) {
    uses_slots_ = uses_slots_ || value.kind == StarValue::Kind::kSlot;
    if (value.kind == StarValue::Kind::kDead) {
      return MakeStatus(kInvalidArgument, "starwire: a star call has a dead feed");
    }
  }
  return status;
}

Status StarRun::Begin() {
  ErrorHandle error;
  const sw_code code =
      sw_star_tables_call_begin(service_->tables_.get(), ticket.conn, call_.step_id, uses_slots_ ? 1 : 0, Into(&error));
  if (code != 0) return StatusFromError(code, error);
  began_ = true;
  return OkStatus();
}

Status StarRun::Prepare(StarPlan* plan) {
  plan_ = plan;
  const SessionSubgraph& subgraph = plan_->subgraph();
  if (values_.size() != subgraph.num_feeds()) {
    return MakeStatus(kInvalidArgument, "starwire: a star call has " + std::to_string(values_.size()) +
                                            " feeds, but its plan has " + std::to_string(subgraph.num_feeds()));
  }
  for (const StarKeep& keep : call_.keeps) {
    if (keep.fetch < subgraph.num_fetches()) continue;
    return MakeStatus(kInvalidArgument, "starwire: a star call keeps fetch " + std::to_string(keep.fetch) +
                                            ", but its plan has " + std::to_string(subgraph.num_fetches()));
  }
  fetches.resize(subgraph.num_fetches());
  return TakeFeeds();
}

Status StarRun::TakeFeeds() {
  feeds.reserve(values_.size());
  for (StarValue& value : values_) {
    if (value.kind == StarValue::Kind::kTensor) {
      feeds.push_back(std::move(value.tensor));
      continue;
    }
    auto* kept = static_cast<KeptValue*>(
        StarObjectOf(sw_star_tables_slot_get(service_->tables_.get(), ticket.conn, call_.step_id, value.slot)));
    if (kept == nullptr) {
      return MakeStatus(kFailedPrecondition, "starwire: slot " + std::to_string(value.slot) + " of step " +
                                                 std::to_string(call_.step_id) + " is empty on " + service_->task_ +
                                                 ": the call that should have filled it failed, or the step has ended");
    }
    feeds.push_back(kept->tensor);
    kept->Unref();
  }
  values_.clear();
  return OkStatus();
}

void StarRun::Go(bool alone) {
  alone_ = alone;
  self_ = shared_from_this();
  started_ = Clock::now();
  if (cancelled_.load()) {
    OnDone(MakeStatus(kCancelled, "cancelled before it was started"));
    return;
  }
  tensorflow::thread::ThreadPool* pool = service_->env_->compute_pool;
  args.step_id = call_.step_id;
  args.session_handle = session_;
  args.run_all_kernels_inline = alone;
  args.runner = [pool](std::function<void()> work) { pool->Schedule(std::move(work)); };
  // What runs to its end on a reactor cannot be cancelled meanwhile.
  args.cancellation_manager = alone ? nullptr : &*cancellation_;
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
    rendezvous_ = new tensorflow::RefCountedIntraProcessRendezvous(plan_->device_mgr());
    args.rendezvous = rendezvous_;
  }
  if (wants_trace()) {
    collector_.emplace(&stats_);
    args.stats_collector = &*collector_;
  }
  plan_->subgraph().Run(this);
}

void StarRun::OnDone(const Status& status) {
  const std::shared_ptr<StarRun> self = std::move(self_);
  const Status outcome = Guard(
      "answering a star call",
      [&] {
        Status kept = status.ok() ? KeepFetches() : status;
        return kept.ok() ? Answer() : kept;
      },
      [](const Status& thrown) { return thrown; });
  if (!outcome.ok()) Fail(outcome);
}

Status StarRun::KeepFetches() {
  values_.resize(fetches.size());
  for (size_t i = 0; i < fetches.size(); ++i) {
    if (fetches[i].dead) {
      values_[i] = StarValue::Dead();
    } else {
      values_[i].tensor = std::move(fetches[i].tensor);
    }
  }
  for (const StarKeep& keep : call_.keeps) {
    StarValue& value = values_[keep.fetch];
    if (value.kind != StarValue::Kind::kTensor) continue;
    auto* kept = new KeptValue(value.tensor);
    ErrorHandle error;
    const sw_code code = sw_star_tables_slot_keep(service_->tables_.get(), ticket.conn, call_.step_id, keep.slot,
                                                  InTable(kept), value.tensor.TotalBytes(), Into(&error));
    if (code != 0) return StatusFromError(code, error);
    if ((keep.flags & StarKeep::kAlsoReturned) == 0) value = StarValue::Slot(keep.slot);
  }
  return OkStatus();
}

Status StarRun::Answer() {
  StarReply reply;
  reply.queue_micros = Micros(Nanos(started_ - arrived_));
  reply.run_micros = Micros(Nanos(Clock::now() - started_));
  std::string stats;
  if (collector_.has_value()) {
    collector_->Finalize();
    if (stats_.ByteSizeLong() <= kMaxStats) stats = stats_.SerializeAsString();
  }
  reply.stats_bytes = static_cast<uint32_t>(stats.size());
  std::vector<uint8_t> meta;
  EncodeStarReply(reply, &meta);
  CargoOut cargo;
  const Status status = cargo.Pack(values_.data(), values_.size(), &meta);
  if (!status.ok()) return status;
  bytes_out_ = cargo.bytes();
  if (!stats.empty()) cargo.AddPart(std::move(stats));
  plan_->Ran(Nanos(Clock::now() - started_), alone_, service_->inline_ns_);
  Leave();
  sw_engine_reply(service_->engine_.get(), ticket, 0, {meta.data(), meta.size()}, cargo.Take());
  End();
  return OkStatus();
}

void StarRun::AskForPlan() {
  StarReply reply;
  reply.flags = StarReply::kRegister;
  std::vector<uint8_t> meta;
  EncodeStarReply(reply, &meta);
  Leave();
  sw_engine_reply(service_->engine_.get(), ticket, 0, {meta.data(), meta.size()}, nullptr);
  End();
}

void StarRun::Fail(const Status& status) {
  Leave();
  ReplyError(service_->engine_.get(), ticket, status);
  End();
}

void StarRun::Leave() {
  over_.store(true);
  values_.clear();
  feeds.clear();
  fetches.clear();
  container_.reset();
  if (began_) {
    sw_star_counts counts = {};
    counts.struct_size = sizeof(counts);
    counts.hit = plan_ != nullptr ? 1 : 0;
    counts.ran_inline = alone_ ? 1 : 0;
    counts.bytes_in = bytes_in_;
    counts.bytes_out = bytes_out_;
    counts.queue_ns = Nanos(started_ - arrived_);
    counts.run_ns = Nanos(Clock::now() - started_);
    // The call that asks for its plan comes again.
    const bool last = plan_ != nullptr && (call_.flags & StarCall::kLast) != 0;
    sw_star_tables_call_end(service_->tables_.get(), ticket.conn, call_.step_id, uses_slots_ ? 1 : 0, last ? 1 : 0,
                            &counts);
  }
}

void StarRun::End() {
  if (!alone_) service_->Forget(ticket);
  if (plan_ != nullptr) std::exchange(plan_, nullptr)->Unref();
  service_->running_.fetch_sub(1, std::memory_order_release);
}

void StarRun::Cancel() {
  cancelled_.store(true);
  // Cancelling wakes kernels: TensorFlow code of unknown length, not for a reactor.
  service_->errands_->urgent.Run([self = shared_from_this()] {
    if (!self->over_.load() && self->cancellation_.has_value()) self->cancellation_->StartCancel();
  });
}

}  // namespace starwire
