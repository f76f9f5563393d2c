#include "cc/worker/recv_buf.h"

#include <memory>
#include <string>
#include <utility>

#include "cc/base/compat.h"
#include "cc/base/compat_server.h"
#include "cc/base/guard.h"
#include "tensorflow/core/common_runtime/buf_rendezvous.h"
#include "tensorflow/core/common_runtime/device.h"
#include "tensorflow/core/common_runtime/device_mgr.h"
#include "tensorflow/core/common_runtime/dma_helper.h"
#include "tensorflow/core/framework/collective.h"
#include "tensorflow/core/framework/device_base.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/lib/core/threadpool.h"

namespace starwire {
namespace {

using tensorflow::BufRendezvous;
using tensorflow::RecvBufRequest;
using tensorflow::StatusCallback;
using tensorflow::Tensor;

bool OnHost(const BufRendezvous::Hook& hook) {
  return hook.prod_dev->attributes().device_type() == "CPU" || hook.prod_attr.on_host();
}

struct Lent {
  BufRendezvous::Hook* hook;
  tensorflow::thread::ThreadPool* pool;
};

// Resumes the producer, which is TensorFlow code: not on a reactor.
void ReleaseHook(void* owner) {
  std::unique_ptr<Lent> lent(static_cast<Lent*>(owner));
  BufRendezvous::Hook* hook = lent->hook;
  try {
    lent->pool->Schedule([hook] { BufRendezvous::DoneWithHook(hook); });
  } catch (...) {
    // The producer waits for it: better on this thread than never.
    BufRendezvous::DoneWithHook(hook);
  }
}

void SendCopy(tensorflow::WorkerEnv* env, BufRendezvous::Hook* hook, OutgoingBuffer* out, StatusCallback done) {
  tensorflow::Device* cpu = nullptr;
  Status status = env->device_mgr->LookupDevice("CPU:0", &cpu);
  Tensor* copy = nullptr;
  if (status.ok()) {
    tensorflow::AllocatorAttributes attributes;
    attributes.set_gpu_compatible(true);
    attributes.set_nic_compatible(true);
    copy = new Tensor(cpu->GetAllocator(attributes), hook->prod_value->dtype(), hook->prod_value->shape());
    if (!copy->IsInitialized()) {
      status = MakeStatus(kResourceExhausted, "out of host memory to send " +
                                                  std::to_string(hook->prod_value->TotalBytes()) + " bytes from " +
                                                  hook->prod_dev->name());
    }
  }
  if (!status.ok()) {
    delete copy;
    BufRendezvous::DoneWithHook(hook);
    done(status);
    return;
  }
  hook->prod_ctx->CopyDeviceTensorToCPU(hook->prod_value, "starwire_recv_buf", hook->prod_dev, copy,
                                        [hook, copy, out, done = std::move(done)](const Status& copied) {
                                          BufRendezvous::DoneWithHook(hook);
                                          if (copied.ok()) {
                                            out->Set(tensorflow::DMAHelper::base(copy), copy->TotalBytes(), copy,
                                                     Guarded<&DeleteOwner<Tensor>>);
                                          } else {
                                            delete copy;
                                          }
                                          done(copied);
                                        });
}

void Send(tensorflow::WorkerEnv* env, const RecvBufRequest& request, BufRendezvous::Hook* hook, OutgoingBuffer* out,
          StatusCallback done) {
  const Tensor& value = *hook->prod_value;
  if (!tensorflow::DMAHelper::CanUseDMA(&value)) {
    BufRendezvous::DoneWithHook(hook);
    done(MakeStatus(kInternal,
                    "the tensor for collective " + request.buf_rendezvous_key() + " has a type that cannot be copied"));
    return;
  }
  if (value.TotalBytes() == 0) {
    BufRendezvous::DoneWithHook(hook);
    done(OkStatus());
  } else if (OnHost(*hook)) {
    out->Set(tensorflow::DMAHelper::base(&value), value.TotalBytes(), new Lent{hook, env->compute_pool},
             Guarded<&ReleaseHook>);
    done(OkStatus());
  } else {
    SendCopy(env, hook, out, std::move(done));
  }
}

}  // namespace

void ServeRecvBuf(tensorflow::WorkerEnv* env, const RecvBufRequest* request, OutgoingBuffer* out, StatusCallback done) {
  tensorflow::CollectiveExecutor::Handle executor(env->collective_executor_mgr->FindOrCreate(request->step_id()),
                                                  /*inherit_ref=*/true);
  // Without a cancellation manager: a consumer that gives up does not withdraw from the rendezvous, and the producer
  // would wait forever.
  ConsumeBuf(executor.get()->remote_access()->buf_rendezvous(), request->buf_rendezvous_key(), request->src_device(),
             request->src_incarnation(),
             [env, request, out, done = std::move(done)](const Status& status, BufRendezvous::Hook* hook) {
               if (status.ok()) {
                 Send(env, *request, hook, out, done);
               } else {
                 done(status);
               }
             });
}

}  // namespace starwire
