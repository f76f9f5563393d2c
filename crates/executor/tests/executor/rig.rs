//! Kernels for random graphs: they compute numbers, and panic on reading a value that is missing or already released.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::SeqCst};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use crate::graph::Graph;
use crate::reference::{Expected, evaluate, value};
use starwire_executor::{Call, Executor, Helper, KernelResult, Kernels, Plan, RunRef};

const PATIENCE: Duration = Duration::from_secs(60);
const NOBODY: u32 = u32::MAX;

pub struct Rig {
    graph: Graph,
    threads: Sender<Work>,
    invited: AtomicU32,
}

type Work = Box<dyn FnOnce() + Send>;

/// Input and result of one run.
struct Step {
    seed: u64,
    fails_at: Option<u32>,
    ran: Vec<AtomicBool>,
    values: Vec<AtomicU64>,
    ended: Sender<bool>,
}

pub struct Scratch {
    step: Mutex<Option<Arc<Step>>>,
    slots: Vec<Slot>,
    /// By lane: whether a thread is in it.
    lanes: Vec<AtomicBool>,
}

#[derive(Default)]
struct Slot {
    full: AtomicBool,
    readers: AtomicU32,
    /// The node that was promised to be the only remaining reader, + 1; 0: none; `NOBODY`: not known yet.
    promised: AtomicU32,
    value: AtomicU64,
}

impl Scratch {
    fn step(&self) -> Arc<Step> {
        self.step.lock().unwrap().clone().expect("a kernel runs in a run")
    }

    fn empty(&self, slot: usize) {
        let slot = &self.slots[slot];
        assert_eq!(slot.readers.load(SeqCst), 0, "released while it is read");
        slot.promised.store(0, SeqCst);
        slot.full.store(false, SeqCst);
    }
}

impl Rig {
    fn inputs(&self, call: &Call<'_, Self>) -> Vec<u64> {
        let node = call.task.node;
        let sources = self.graph.inputs(node);
        let read = |(src, output): &(u32, u32)| {
            let slot = &call.scratch.slots[self.graph.slot(*src, *output)];
            slot.readers.fetch_add(1, SeqCst);
            let promised = slot.promised.load(SeqCst);
            assert!(promised == 0 || promised == node + 1, "node {node} reads what was promised to another");
            assert!(slot.full.load(SeqCst), "node {node} reads {src}:{output}, which is empty");
            let value = slot.value.load(SeqCst);
            slot.readers.fetch_sub(1, SeqCst);
            value
        };
        sources.iter().map(read).collect()
    }

    /// Stores the outputs in their slots.
    fn produce(&self, call: &Call<'_, Self>, step: &Step, inputs: &[u64]) {
        let node = call.task.node;
        for output in 0..self.graph.nodes[node as usize].outputs {
            let at = self.graph.slot(node, output);
            let value = value(step.seed, node, output, inputs);
            step.values[at].store(value, SeqCst);
            // Without a reader it is never released.
            if self.graph.edges.iter().any(|e| e.src == node && e.output == output) {
                assert!(!call.scratch.slots[at].full.swap(true, SeqCst), "{node}:{output} is written twice");
                call.scratch.slots[at].value.store(value, SeqCst);
            }
        }
    }
}

impl Kernels for Rig {
    type Scratch = Scratch;

    fn open(&self) -> Scratch {
        let slots = self.graph.nodes.iter().map(|node| node.outputs).sum::<u32>();
        Scratch {
            step: Mutex::new(None),
            slots: (0..slots).map(|_| Slot::default()).collect(),
            lanes: (0..8).map(|_| AtomicBool::new(false)).collect(),
        }
    }

    fn run(&self, call: Call<'_, Self>) -> KernelResult {
        let (step, node) = (call.scratch.step(), call.task.node);
        let lane = &call.scratch.lanes[call.lane as usize];
        assert!(!lane.swap(true, SeqCst), "two threads in one lane");
        assert!(!step.ran[node as usize].swap(true, SeqCst), "node {node} runs twice");
        for &slot in call.unshared() {
            call.scratch.slots[slot as usize].promised.store(node + 1, SeqCst);
        }
        for (src, output) in self.graph.inputs(node) {
            let promised = &call.scratch.slots[self.graph.slot(src, output)].promised;
            // The promise names no node: this one claims it.
            let _ = promised.compare_exchange(NOBODY, node + 1, SeqCst, SeqCst);
        }
        let inputs = self.inputs(&call);
        let fails = step.fails_at == Some(node);
        if !fails {
            self.produce(&call, &step, &inputs);
        }
        for &slot in call.released() {
            call.scratch.empty(slot as usize);
        }
        lane.store(false, SeqCst);
        if !call.asynchronous {
            return if fails { KernelResult::Failed } else { KernelResult::Done };
        }
        let how = value(step.seed, node, 77, &inputs);
        let (run, report) = (call.run().clone(), move |run: RunRef<Rig>| run.report(node, fails));
        match how % 4 {
            0 => report(run),
            1 => return if fails { KernelResult::Failed } else { KernelResult::Done },
            2 => self.threads.send(Box::new(move || report(run))).unwrap(),
            _ => self
                .threads
                .send(Box::new(move || {
                    thread::sleep(Duration::from_micros(how >> 8 & 127));
                    report(run);
                }))
                .unwrap(),
        }
        KernelResult::Pending
    }

    fn release(&self, scratch: &Scratch, slot: u32) {
        scratch.empty(slot as usize);
    }

    fn unshare(&self, scratch: &Scratch, slot: u32) {
        scratch.slots[slot as usize].promised.store(NOBODY, SeqCst);
    }

    fn finished(&self, scratch: &Scratch, failed: bool) {
        let step = scratch.step.lock().unwrap().take().expect("a run ends once");
        for slot in &scratch.slots {
            let full = slot.full.swap(false, SeqCst);
            slot.promised.store(0, SeqCst);
            assert!(!full || failed, "a value outlives its run");
        }
        step.ended.send(failed).unwrap();
    }

    /// Every other helper comes at once, as on a pool whose queue is full, and may end the run.
    fn invite(&self, scratch: &Scratch, helper: Helper<Self>) {
        assert!(scratch.step.lock().unwrap().is_some(), "helpers are invited to a run that is over");
        if self.invited.fetch_add(1, SeqCst) & 1 == 0 {
            return helper.help();
        }
        self.threads.send(Box::new(move || helper.help())).unwrap();
    }
}

/// Threads that run reports and helpers in arbitrary order.
fn threads(n: usize) -> Sender<Work> {
    let (sender, receiver) = channel::<Work>();
    let receiver: Arc<Mutex<Receiver<Work>>> = Arc::new(Mutex::new(receiver));
    for _ in 0..n {
        let receiver = receiver.clone();
        thread::spawn(move || {
            loop {
                let Ok(work) = receiver.lock().unwrap().recv() else { return };
                work();
            }
        });
    }
    sender
}

pub struct Bench {
    graph: Graph,
    executor: Executor<Rig>,
}

impl Bench {
    pub fn new(graph: &Graph, lanes: u32) -> Self {
        let plan = Plan::new(&graph.nodes, &graph.edges).expect("the generator makes valid graphs");
        let rig = Rig { graph: graph.clone(), threads: threads(3), invited: AtomicU32::new(0) };
        Bench { graph: graph.clone(), executor: Executor::new(plan, rig, lanes, 2) }
    }

    /// Starts a run; the returned closure checks its outcome.
    pub fn start(&self, seed: u64, fails_at: Option<u32>, alone: bool) -> impl FnOnce() + use<> {
        let (ended, wait) = channel();
        let slots = self.executor.plan().slots();
        let step = Arc::new(Step {
            seed,
            fails_at,
            ran: self.graph.nodes.iter().map(|_| AtomicBool::new(false)).collect(),
            values: (0..slots).map(|_| AtomicU64::new(0)).collect(),
            ended,
        });
        let run = self.executor.begin();
        *run.scratch().step.lock().unwrap() = Some(step.clone());
        let expected = evaluate(&self.graph, seed);
        let check = move || {
            let failed = wait.recv_timeout(PATIENCE).expect("every run ends");
            compare(&step, &expected, failed);
            assert!(wait.recv_timeout(Duration::ZERO).is_err(), "a run ends once");
        };
        run.go(alone);
        check
    }
}

fn compare(step: &Step, expected: &Expected, failed: bool) {
    let ran: Vec<bool> = step.ran.iter().map(|ran| ran.load(SeqCst)).collect();
    let reached = step.fails_at.is_some_and(|node| ran[node as usize]);
    assert_eq!(failed, reached, "a run fails exactly if a kernel did");
    let values = step.values.iter().map(|value| value.load(SeqCst));
    if !failed {
        assert_eq!(ran, expected.ran);
        assert_eq!(values.collect::<Vec<_>>(), expected.values);
        return;
    }
    for (ran, expected) in ran.iter().zip(&expected.ran) {
        assert!(!ran || *expected, "a kernel ran that would not have without the failure");
    }
    for (value, expected) in values.zip(&expected.values) {
        assert!(value == 0 || value == *expected, "a failure changed a value");
    }
}
