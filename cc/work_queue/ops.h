// The operations of work queues (python/starwire/_work_queue.py).
#ifndef STARWIRE_CC_WORK_QUEUE_OPS_H_
#define STARWIRE_CC_WORK_QUEUE_OPS_H_

namespace starwire {

void RegisterWorkQueueOps();

}  // namespace starwire

#endif  // STARWIRE_CC_WORK_QUEUE_OPS_H_
