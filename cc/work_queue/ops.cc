#include "cc/work_queue/ops.h"

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cc/base/register_kernel.h"
#include "cc/base/status_codec.h"
#include "cc/work_queue/work_queue.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_def_builder.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"

namespace starwire {
namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::tstring;
using Queue = tensorflow::core::RefCountPtr<WorkQueue>;

Status FindQueue(OpKernelContext* context, Queue* queue) {
  return tensorflow::LookupOrCreateResource<WorkQueue>(context, tensorflow::HandleFromInput(context, 0), queue,
                                                       [](WorkQueue** made) {
                                                         *made = new WorkQueue();
                                                         return OkStatus();
                                                       });
}

template <typename T>
Status Scalar(OpKernelContext* context, int input, T* value) {
  const Tensor& tensor = context->input(input);
  if (tensor.NumElements() != 1) {
    return MakeStatus(kInvalidArgument, "starwire: input " + std::to_string(input) + " of " +
                                            context->op_kernel().name() +
                                            " is not a scalar: " + tensor.shape().DebugString());
  }
  *value = T(tensor.flat<T>()(0));
  return OkStatus();
}

// What Create and Restore take.
class ItemsKernel : public OpKernel {
 public:
  explicit ItemsKernel(OpKernelConstruction* context) : OpKernel(context) {
    Int64 epochs = 1, seed = 0;
    OP_REQUIRES_OK(context, context->GetAttr("epochs", &epochs));
    OP_REQUIRES_OK(context, context->GetAttr("shuffle", &options_.shuffle));
    OP_REQUIRES_OK(context, context->GetAttr("seed", &seed));
    options_.epochs = epochs;
    options_.seed = static_cast<uint64_t>(seed);
  }

 protected:
  static std::vector<std::string> Items(OpKernelContext* context) {
    std::vector<std::string> items;
    const auto given = context->input(1).flat<tstring>();
    for (int64_t i = 0; i < given.size(); ++i) items.emplace_back(given(i));
    return items;
  }

  WorkQueue::Options options_;
};

class CreateOp : public ItemsKernel {
 public:
  using ItemsKernel::ItemsKernel;

  void Compute(OpKernelContext* context) override {
    Queue queue;
    OP_REQUIRES_OK(context, FindQueue(context, &queue));
    OP_REQUIRES_OK(context, queue->Create(Items(context), options_));
  }
};

class RestoreOp : public ItemsKernel {
 public:
  using ItemsKernel::ItemsKernel;

  void Compute(OpKernelContext* context) override {
    Queue queue;
    tstring state;
    bool is_other = false;
    OP_REQUIRES_OK(context, FindQueue(context, &queue));
    OP_REQUIRES_OK(context, Scalar(context, 2, &state));
    OP_REQUIRES_OK(context, queue->Restore(Items(context), options_, std::string(state), &is_other));
    if (is_other) {
      LOG(WARNING) << "starwire: the work queue " << name()
                   << " has other items, epochs or another order than in the checkpoint: all of them are handed out";
    }
  }
};

// A scalar that is a function of the queue.
template <typename T, typename Function>
void Return(OpKernelContext* context, Function function) {
  Queue queue;
  OP_REQUIRES_OK(context, FindQueue(context, &queue));
  Tensor* output = nullptr;
  OP_REQUIRES_OK(context, context->allocate_output(0, {}, &output));
  OP_REQUIRES_OK(context, function(*queue, &output->scalar<T>()()));
}

class SaveOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* context) override {
    Return<tstring>(context, [](const WorkQueue& queue, tstring* out) {
      std::string state;
      const Status status = queue.State(&state);
      *out = state;
      return status;
    });
  }
};

class SizeOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* context) override {
    Return<Int64>(context, [](const WorkQueue& queue, Int64* out) {
      *out = queue.Left();
      return OkStatus();
    });
  }
};

class IsInitializedOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* context) override {
    Return<bool>(context, [](const WorkQueue& queue, bool* out) {
      *out = queue.is_created();
      return OkStatus();
    });
  }
};

class TakeOp : public AsyncOpKernel {
 public:
  explicit TakeOp(OpKernelConstruction* context) : AsyncOpKernel(context) {
    Int64 in_progress = 1, lease_ms = 0;
    OP_REQUIRES_OK(context, context->GetAttr("in_progress", &in_progress));
    OP_REQUIRES_OK(context, context->GetAttr("lease_ms", &lease_ms));
    OP_REQUIRES_OK(context, context->GetAttr("waits", &asks_.waits));
    OP_REQUIRES_OK(context, context->GetAttr("ends_empty", &ends_empty_));
    static std::atomic<int64_t> kernels{0};
    kernel_ = ++kernels;
    asks_.in_progress = in_progress;
    asks_.lease = std::chrono::milliseconds(lease_ms);
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    Queue found;
    tstring name;
    Int64 incarnation = 0;
    OP_REQUIRES_OK_ASYNC(context, FindQueue(context, &found), done);
    OP_REQUIRES_OK_ASYNC(context, Scalar(context, 1, &name), done);
    OP_REQUIRES_OK_ASYNC(context, Scalar(context, 2, &incarnation), done);
    WorkQueue::Worker worker = asks_;
    worker.task = std::string(name);
    worker.name = worker.task + " " + this->name();
    // After an error there is another session, with a kernel of its own for this node: what the last one had comes
    // again.
    worker.incarnation = incarnation ^ kernel_;
    const std::shared_ptr<Call> call = std::make_shared<Call>();
    call->queue = std::move(found);
    call->ends_empty = ends_empty_;
    call->manager = context->cancellation_manager();
    if (call->manager != nullptr) {
      call->token = call->manager->get_cancellation_token();
      if (!call->manager->RegisterCallback(call->token, [call] { call->Cancel(); })) {
        context->SetStatus(AfterCancellation(MakeStatus(kCancelled, "starwire: " + this->name() + " was cancelled")));
        return done();
      }
    }
    call->Began(call->queue->Take(worker, WorkQueue::Clock::now(),
                                  [call, context, done](const Status& status, const std::string& item) {
                                    call->Answer(context, done, status, item);
                                  }));
  }

 private:
  struct Call {
    Queue queue;
    tensorflow::CancellationManager* manager = nullptr;
    tensorflow::CancellationToken token = 0;
    bool ends_empty = false;
    std::mutex mu;
    int64_t number = 0;
    bool is_cancelled = false;

    // The cancellation may come before the number.
    void Cancel() {
      CancelIf([this] { return is_cancelled = true, number != 0; });
    }
    void Began(int64_t given) {
      CancelIf([this, given] { return number = given, is_cancelled; });
    }

    template <typename Change>
    void CancelIf(Change change) {
      bool is_due = false;
      {
        const std::lock_guard<std::mutex> lock(mu);
        is_due = change();
      }
      if (is_due) queue->Cancel(number);
    }

    void Answer(OpKernelContext* context, const DoneCallback& done, const Status& status, const std::string& item) {
      // It waits for the end of a cancellation, which may be what brings this answer.
      if (manager != nullptr && StatusNumber(status) != kCancelled) manager->DeregisterCallback(token);
      Tensor* output = nullptr;
      const bool has_value = status.ok() || (ends_empty && StatusNumber(status) == kOutOfRange);
      const Status made = has_value ? context->allocate_output(0, {}, &output) : status;
      if (made.ok()) {
        output->scalar<tstring>()() = item;
      } else {
        context->SetStatus(made);
      }
      done();
    }
  };

  WorkQueue::Worker asks_;
  int64_t kernel_ = 0;
  // After the last item, there are empty ones.
  bool ends_empty_ = false;
};

template <typename Kernel>
void Add(const char* name, void (*define)(tensorflow::OpDefBuilder*)) {
  tensorflow::OpRegistry::Global()->Register([name, define](tensorflow::OpRegistrationData* data) -> Status {
    tensorflow::OpDefBuilder op(name);
    op.SetIsStateful();
    define(&op);
    return op.Finalize(data);
  });
  tensorflow::KernelDefBuilder kernel(name);
  RegisterCpuKernel<Kernel>(&kernel, name);
}

void TakesItems(tensorflow::OpDefBuilder* op) {
  op->Input("queue: resource").Input("items: string").Attr("epochs: int = 1").Attr("shuffle: bool = false");
  op->Attr("seed: int = 0").SetShapeFn(tensorflow::shape_inference::NoOutputs);
}

}  // namespace

void RegisterWorkQueueOps() {
  Add<tensorflow::ResourceHandleOp<WorkQueue>>("StarwireWorkQueue", [](tensorflow::OpDefBuilder* op) {
    op->Output("queue: resource").Attr("container: string = ''").Attr("shared_name: string = ''");
    op->SetShapeFn(tensorflow::shape_inference::ScalarShape);
  });
  Add<CreateOp>("StarwireWorkQueueCreate", TakesItems);
  Add<RestoreOp>("StarwireWorkQueueRestore", [](tensorflow::OpDefBuilder* op) {
    TakesItems(op);
    op->Input("state: string");
  });
  Add<TakeOp>("StarwireWorkQueueTake", [](tensorflow::OpDefBuilder* op) {
    op->Input("queue: resource").Input("worker: string").Input("incarnation: int64").Output("item: string");
    op->Attr("in_progress: int >= 1 = 1")
        .Attr("lease_ms: int >= 1")
        .Attr("waits: bool = true")
        .Attr("ends_empty: bool = false");
    op->SetShapeFn(tensorflow::shape_inference::ScalarShape);
  });
  Add<SaveOp>("StarwireWorkQueueSave", [](tensorflow::OpDefBuilder* op) {
    op->Input("queue: resource").Output("state: string").SetShapeFn(tensorflow::shape_inference::ScalarShape);
  });
  Add<SizeOp>("StarwireWorkQueueSize", [](tensorflow::OpDefBuilder* op) {
    op->Input("queue: resource").Output("size: int64").SetShapeFn(tensorflow::shape_inference::ScalarShape);
  });
  Add<IsInitializedOp>("StarwireWorkQueueIsInitialized", [](tensorflow::OpDefBuilder* op) {
    op->Input("queue: resource").Output("is_initialized: bool").SetShapeFn(tensorflow::shape_inference::ScalarShape);
  });
}

}  // namespace starwire
