//! What needs no argument goes before what needs one, whatever their numbers are.

use std::sync::Mutex;

use starwire_executor::{Call, Edge, Executor, Helper, KernelResult, Kernels, Node, Plan, kind};

/// Notes which kernels ran.
#[derive(Default)]
struct Notes(Mutex<Vec<u32>>);

impl Kernels for Notes {
    type Scratch = ();

    fn open(&self) {}

    fn run(&self, call: Call<'_, Self>) -> KernelResult {
        self.0.lock().unwrap().push(call.task.node);
        KernelResult::Done
    }

    fn release(&self, (): &(), _slot: u32) {}

    fn unshare(&self, (): &(), _slot: u32) {}

    fn finished(&self, (): &(), _failed: bool) {}

    fn invite(&self, (): &(), _helper: Helper<Self>) {}
}

#[test]
fn what_needs_no_argument_runs_first() {
    // An argument, an update by it, and a read. The second plan has an asynchronous kernel, so it has no fixed order.
    for bits in [0, kind::ASYNC] {
        let node = |kind, inputs, outputs| Node { kind, inputs, outputs, cost_ns: 0 };
        let nodes = [node(kind::NOTHING, 0, 1), node(0, 1, 0), node(bits, 0, 1)];
        let plan = Plan::new(&nodes, &[Edge { src: 0, output: 0, dst: 1, input: 0 }]).unwrap();
        assert_eq!(plan.is_straight(), bits == 0);
        let executor = Executor::new(plan, Notes::default(), 1, 1);
        executor.begin().go(true);
        assert_eq!(*executor.kernels().0.lock().unwrap(), [2, 1]);
    }
}
