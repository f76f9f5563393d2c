//! A run allocates nothing, in any mode. Counts the allocations of all threads of the process, so this must stay the
//! only test in this file.

#![allow(clippy::unwrap_used, reason = "a test may panic, and its numbers are small")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_queue::ArrayQueue;
use starwire_executor::{CONTROL, Call, Edge, Executor, Helper, KernelResult, Kernels, Node, Plan, RunRef, kind};

struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: forwards every call to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, SeqCst);
        // SAFETY: the caller upholds the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller upholds the contract of `dealloc`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static GLOBAL: Counting = Counting;

const EXPENSIVE: u32 = 1 << 24;

/// Work for other threads, in preallocated memory.
enum Work {
    Report(RunRef<Rig>, u32),
    Help(Helper<Rig>),
}

struct Rig {
    threads: Arc<ArrayQueue<Work>>,
    /// Expensive kernels running right now, and whether there were ever two.
    busy: AtomicU32,
    met: AtomicBool,
    ended: AtomicU64,
}

impl Kernels for Rig {
    type Scratch = ();

    fn open(&self) {}

    fn run(&self, call: Call<'_, Self>) -> KernelResult {
        if call.asynchronous {
            assert!(self.threads.push(Work::Report(call.run().clone(), call.task.node)).is_ok());
            return KernelResult::Pending;
        }
        if call.plan.costs().is_expensive(call.task.node) {
            if self.busy.fetch_add(1, SeqCst) == 1 {
                self.met.store(true, SeqCst);
            }
            thread::sleep(Duration::from_micros(200));
            self.busy.fetch_sub(1, SeqCst);
        }
        KernelResult::Done
    }

    fn release(&self, _: &(), _: u32) {}

    fn unshare(&self, _: &(), _: u32) {}

    fn finished(&self, _: &(), failed: bool) {
        assert!(!failed);
        self.ended.fetch_add(1, SeqCst);
    }

    fn invite(&self, _: &(), helper: Helper<Self>) {
        assert!(self.threads.push(Work::Help(helper)).is_ok());
    }
}

fn executor(nodes: &[Node], edges: &[Edge]) -> Executor<Rig> {
    let threads = Arc::new(ArrayQueue::new(256));
    for _ in 0..2 {
        let queue = Arc::downgrade(&threads);
        thread::spawn(move || {
            while let Some(queue) = queue.upgrade() {
                match queue.pop() {
                    Some(Work::Report(run, node)) => run.report(node, false),
                    Some(Work::Help(helper)) => helper.help(),
                    None => thread::sleep(Duration::from_micros(50)),
                }
            }
        });
    }
    let rig = Rig { threads, busy: AtomicU32::new(0), met: AtomicBool::new(false), ended: AtomicU64::new(0) };
    Executor::new(Plan::new(nodes, edges).unwrap(), rig, 4, 2)
}

/// Runs one after the other; returns the allocations of the last ones.
fn allocations(executor: &Executor<Rig>) -> u64 {
    // Other threads may still hold the arena of a finished run when the next one begins.
    drop((0..4).map(|_| executor.begin()).collect::<Vec<_>>());
    let mut before = 0;
    for run in 0..150 {
        if run == 50 {
            before = ALLOCATIONS.load(SeqCst);
        }
        executor.begin().go(false);
        let patience = Instant::now() + Duration::from_secs(30);
        // A thread that has not got round to help with a run still holds its memory.
        while executor.kernels().ended.load(SeqCst) <= run || !executor.kernels().threads.is_empty() {
            assert!(Instant::now() < patience, "a run does not end");
            thread::sleep(Duration::from_micros(20));
        }
    }
    ALLOCATIONS.load(SeqCst) - before
}

/// One node, `width` others after it, one after all of them.
fn fan(middle: Node, width: u32) -> (Vec<Node>, Vec<Edge>) {
    let mut nodes = vec![Node { outputs: 1, ..Node::default() }];
    let mut edges = Vec::new();
    for at in 1..=width {
        nodes.push(Node { inputs: 1, outputs: 1, ..middle });
        edges.push(Edge { src: 0, output: 0, dst: at, input: 0 });
        edges.push(Edge { src: at, output: 0, dst: width + 1, input: at - 1 });
        edges.push(Edge { src: 0, output: CONTROL, dst: at, input: CONTROL });
    }
    nodes.push(Node { inputs: width, ..Node::default() });
    (nodes, edges)
}

#[test]
fn a_run_allocates_nothing() {
    let ways = [
        ("straight", fan(Node::default(), 20)),
        ("with reports", fan(Node { kind: kind::ASYNC, ..Node::default() }, 20)),
        ("shared out", fan(Node { cost_ns: EXPENSIVE, ..Node::default() }, 6)),
    ];
    for (name, (nodes, edges)) in ways {
        let executor = executor(&nodes, &edges);
        assert_eq!(allocations(&executor), 0, "{name}");
        assert_eq!(executor.kernels().met.load(SeqCst), name == "shared out", "{name}: whether kernels met");
    }
    let before = ALLOCATIONS.load(SeqCst);
    drop(Box::new(before));
    assert_eq!(ALLOCATIONS.load(SeqCst) - before, 1, "allocations are counted");
}
