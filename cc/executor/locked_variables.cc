#include "cc/executor/locked_variables.h"

#include <algorithm>
#include <functional>

#include "cc/base/compat_executor.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/types.h"

namespace starwire {

using tensorflow::OpKernelContext;

bool LockedVariables::Hold(OpKernelContext* context, int count, bool exclusive) {
  const bool is_resource = context->input_dtype(0) == tensorflow::DT_RESOURCE;
  Mutexes mutexes{};
  for (int i = 0; i < count; ++i) {
    const auto at = static_cast<size_t>(i);
    if (!is_resource) {
      if (exclusive) mutexes[at] = context->input_ref_mutex(i);
      continue;
    }
    if (context->input(i).NumElements() != 1) return false;
    if (!tensorflow::LookupResource(context, tensorflow::HandleFromInput(context, i), &variables_[at]).ok()) {
      return false;
    }
    mutexes[at] = variables_[at]->mu();
  }
  Lock(mutexes, exclusive);
  for (int i = 0; i < count; ++i) {
    const auto at = static_cast<size_t>(i);
    if (!is_resource) {
      tensors_[at] = context->mutable_input(i, exclusive);
      continue;
    }
    // In this mode nobody else has a reference to the variable's memory. TensorFlow's kernel turns it on.
    if (!variables_[at]->copy_on_read_mode.load()) return false;
    tensors_[at] = *variables_[at]->tensor();
  }
  return true;
}

void LockedVariables::Lock(Mutexes mutexes, bool exclusive) TF_NO_THREAD_SAFETY_ANALYSIS {
  // In the order of their addresses, each once, as everywhere in TensorFlow.
  std::sort(mutexes.begin(), mutexes.end(), std::less<tensorflow::mutex*>());
  std::fill(std::unique(mutexes.begin(), mutexes.end()), mutexes.end(), nullptr);
  for (tensorflow::mutex* mutex : mutexes) {
    if (mutex == nullptr) continue;
    if (exclusive) {
      mutex->lock();
    } else {
      mutex->lock_shared();
    }
  }
  locked_ = mutexes;
  exclusive_ = exclusive;
}

LockedVariables::~LockedVariables() TF_NO_THREAD_SAFETY_ANALYSIS {
  // Whoever holds the variables next finds no reference to their memory.
  tensors_.fill(tensorflow::Tensor());
  for (tensorflow::mutex* mutex : locked_) {
    if (mutex == nullptr) continue;
    if (exclusive_) {
      mutex->unlock();
    } else {
      mutex->unlock_shared();
    }
  }
}

}  // namespace starwire
