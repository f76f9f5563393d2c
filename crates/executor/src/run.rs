//! One run of a plan.
//!
//! A thread works in a *lane*: it takes ready nodes from its own stack, then from the queue that all lanes share, and
//! leaves when both are empty. No thread ever waits: while only asynchronous kernels are in flight, a run has no thread
//! at all, and each report brings its own. A failed run still gives every node its turn, without running kernels, so
//! that counters and values end where they must.

use std::time::Instant;

use super::arena::{Arena, Call, Helper, KernelResult, Kernels, NONE, RunRef, Shared, core};
use super::compiled::{Compiled, counted};
use super::cost::Costs;
use super::plan::{Plan, kind};
use super::pool::Pool;
use super::queue::{Lanes, MOST_LANES};
use super::sync::{Arc, AtomicU32, Ordering};
use starwire_marks::mark;

/// A compiled sub-graph with its kernels.
pub struct Executor<K: Kernels> {
    shared: Arc<Shared<K>>,
}

impl<K: Kernels> Executor<K> {
    /// At most `lanes` threads work on one run. Arenas stay with the core, out of `cores`, on which their run ended.
    pub fn new(plan: Plan, kernels: K, lanes: u32, cores: usize) -> Self {
        let lanes = lanes.clamp(1, MOST_LANES);
        Executor { shared: Arc::new(Shared { plan, kernels, lanes, pool: Pool::new(cores) }) }
    }

    pub fn plan(&self) -> &Plan {
        &self.shared.plan
    }

    pub fn kernels(&self) -> &K {
        &self.shared.kernels
    }

    /// Takes an arena. Allocates only if more runs are in flight than ever before.
    pub fn begin(&self) -> Run<K> {
        Run(match self.shared.pool.take(core()) {
            Some(arena) => Arena::reference(arena),
            None => Arena::create(&self.shared),
        })
    }
}

impl<K: Kernels> Drop for Executor<K> {
    /// Runs in flight end normally.
    fn drop(&mut self) {
        self.shared.pool.close();
    }
}

/// An arena for a run that has not started.
pub struct Run<K: Kernels>(RunRef<K>);

impl<K: Kernels> Run<K> {
    pub fn scratch(&self) -> &K::Scratch {
        &self.0.scratch
    }

    /// The reference that this run owns.
    pub fn into_ref(self) -> RunRef<K> {
        self.0
    }

    /// Undoes `into_ref`, once.
    pub fn from_ref(run: RunRef<K>) -> Self {
        Run(run)
    }

    /// Runs as far as possible on this thread. [`Kernels::finished`] is called exactly once, here or where the last
    /// report arrives. `alone`: invites no helpers.
    pub fn go(self, alone: bool) {
        let arena = &*self.0;
        let Shared { plan, lanes, .. } = &*arena.shared;
        let run = arena.runs.load(Ordering::Relaxed);
        arena.runs.store(run.wrapping_add(1), Ordering::Relaxed);
        let measured = Costs::measures(run);
        let crew = !alone && *lanes > 1 && plan.costs.expensive() > 1;
        arena.crew.store(crew, Ordering::Relaxed);
        if plan.is_straight() && !crew {
            return self.straight(measured);
        }
        arena.measured.store(measured, Ordering::Relaxed);
        // One more for the start: the run does not end while this thread still invites others.
        arena.remaining.store(counted(plan.nodes()) + 1, Ordering::Relaxed);
        if plan.nodes() == 0 {
            arena.shared.kernels.finished(&arena.scratch, false);
        } else if crew {
            Lane::<K, true>::start(&self.0);
        } else {
            Lane::<K, false>::start(&self.0);
        }
    }

    fn straight(&self, measured: bool) {
        let Shared { plan, kernels, .. } = &*self.0.shared;
        let scratch = &self.0.scratch;
        let turn = |task| kernels.run(Call { scratch, plan, task, lane: 0, asynchronous: false, run: &self.0 });
        let done = if measured {
            plan.ordered.iter().all(|task| timed(plan, task.node, || turn(task)) == KernelResult::Done)
        } else {
            plan.ordered.iter().all(|task| turn(task) == KernelResult::Done)
        };
        kernels.finished(scratch, !done);
    }
}

fn timed(plan: &Plan, node: u32, turn: impl FnOnce() -> KernelResult) -> KernelResult {
    if plan.nodes[node as usize].kind & (kind::CHEAP | kind::ASYNC) != 0 {
        return turn();
    }
    let started = Instant::now();
    let outcome = turn();
    plan.costs.note(node, started.elapsed().as_nanos());
    outcome
}

impl<K: Kernels> Helper<K> {
    pub fn help(self) {
        self.0.invited.fetch_sub(1, Ordering::Relaxed);
        if let Some(number) = self.0.lanes.claim() {
            Lane::<K, true>::new(&self.0, number).work();
        }
    }

    /// The reference that this helper owns.
    pub fn into_ref(self) -> RunRef<K> {
        self.0
    }

    /// Undoes `into_ref`, once.
    pub fn from_ref(run: RunRef<K>) -> Self {
        Helper(run)
    }
}

impl<K: Kernels> RunRef<K> {
    /// Reports the end of this node's asynchronous kernel. Continues the run on this thread if no other thread does.
    pub fn report(self, node: u32, failed: bool) {
        if failed {
            self.failed.store(true, Ordering::Relaxed);
        }
        let at = self.shared.plan.nodes.get(node as usize);
        let Some(report) = at.and_then(|at| self.reports.get(at.report as usize)) else { return };
        if !report.ended() {
            return;
        }
        self.queue.push(node << 1 | 1);
        if self.crew.load(Ordering::Relaxed) {
            Lane::<K, true>::join(&self);
        } else {
            Lane::<K, false>::join(&self);
        }
    }
}

/// One thread at work on a run. `CREW`: there may be others.
struct Lane<'a, K: Kernels, const CREW: bool> {
    run: &'a RunRef<K>,
    arena: &'a Arena<K>,
    plan: &'a Plan,
    kernels: &'a K,
    number: u32,
    measured: bool,
    /// The top of this lane's stack.
    top: u32,
    /// Nodes that had their turn and are not yet subtracted from `remaining`.
    done: u32,
    /// Entries that the last node added to the queue.
    added: u32,
}

impl<'a, K: Kernels, const CREW: bool> Lane<'a, K, CREW> {
    fn new(run: &'a RunRef<K>, number: u32) -> Self {
        let arena = &**run;
        let Shared { plan, kernels, .. } = &*arena.shared;
        let measured = arena.measured.load(Ordering::Relaxed);
        Lane { run, arena, plan, kernels, number, measured, top: NONE, done: 0, added: 0 }
    }

    fn lanes(run: &RunRef<K>) -> &Lanes {
        if CREW { &run.lanes } else { &run.solo }
    }

    fn start(run: &'a RunRef<K>) {
        let Some(number) = Self::lanes(run).claim() else { return };
        let mut lane = Self::new(run, number);
        lane.done = 1;
        lane.plan.roots.iter().rev().for_each(|node| lane.ready(*node));
        lane.share();
        lane.work();
    }

    /// Works on a new queue entry, unless all lanes are taken.
    fn join(run: &'a RunRef<K>) {
        if let Some(number) = Self::lanes(run).claim_for_new_work() {
            Self::new(run, number).work();
        }
    }

    fn work(mut self) {
        loop {
            while self.top != NONE {
                let node = self.top;
                self.top = self.arena.below[node as usize].load(Ordering::Relaxed);
                self.turn(node);
            }
            if let Some(entry) = self.arena.queue.pop() {
                let node = entry >> 1;
                if entry & 1 == 0 {
                    self.turn(node)
                } else {
                    self.passed(node, true)
                }
                continue;
            }
            let done = std::mem::take(&mut self.done);
            if done != 0 && self.take(&self.arena.remaining, done) == 0 {
                self.kernels.finished(&self.arena.scratch, self.failed());
            }
            let lanes = Self::lanes(self.run);
            if !lanes.leave(self.number, &self.arena.queue) {
                return;
            }
            let Some(number) = lanes.claim() else { return };
            self.number = number;
        }
    }

    /// Runs a node whose inputs have all arrived.
    fn turn(&mut self, node: u32) {
        let at = self.plan.nodes[node as usize];
        self.arena.pending[node as usize].store(at.pending, Ordering::Relaxed);
        if self.failed() || at.kind & kind::NOTHING != 0 {
            return self.passed(node, false);
        }
        match self.run_kernel(&at, node) {
            KernelResult::Done => self.passed(node, true),
            KernelResult::Pending => {}
            KernelResult::Failed => {
                self.arena.failed.store(true, Ordering::Relaxed);
                self.passed(node, true);
            }
        }
    }

    /// `Pending` if the report will continue the run.
    fn run_kernel(&self, at: &Compiled, node: u32) -> KernelResult {
        let Lane { arena, plan, kernels, .. } = *self;
        for &slot in plan.sources_of(node) {
            if plan.readers[slot as usize] > 1 && arena.readers[slot as usize].load(Ordering::Acquire) == 1 {
                kernels.unshare(&arena.scratch, slot);
            }
        }
        let task = &plan.tasks[node as usize];
        let report = (at.kind & kind::ASYNC != 0).then(|| &arena.reports[at.report as usize]);
        if let Some(report) = report {
            report.start();
        }
        let asynchronous = report.is_some();
        let call = Call { scratch: &arena.scratch, plan, task, lane: self.number, asynchronous, run: self.run };
        let turn = || kernels.run(call);
        let outcome = if self.measured { timed(plan, node, turn) } else { turn() };
        match (outcome, report) {
            (KernelResult::Pending, Some(report)) => match report.started() {
                true if self.failed() => KernelResult::Failed,
                true => {
                    mark!("a kernel reports before its call returns");
                    KernelResult::Done
                }
                false => KernelResult::Pending,
            },
            // A synchronous kernel may not report.
            (KernelResult::Pending, None) => KernelResult::Failed,
            (outcome, _) => outcome,
        }
    }

    /// A node has had its turn: releases its inputs and notifies its targets.
    fn passed(&mut self, node: u32, ran: bool) {
        let Lane { arena, plan, .. } = *self;
        for &slot in plan.sources_of(node) {
            // If the kernel ran, [`Kernels::run`] has released the slots with one reader.
            if !ran || plan.readers[slot as usize] > 1 {
                self.used(slot);
            }
        }
        for &target in plan.targets_of(node) {
            if self.take(&arena.pending[target as usize], 1) == 0 {
                self.ready(target);
            }
        }
        self.done += 1;
        self.share();
    }

    /// One reader of a slot is done with it.
    fn used(&self, slot: u32) {
        let Lane { arena, plan, kernels, .. } = *self;
        let readers = plan.readers[slot as usize];
        if readers > 1 {
            let left = &arena.readers[slot as usize];
            if self.take(left, 1) != 0 {
                return;
            }
            left.store(readers, Ordering::Relaxed);
        }
        if readers != 0 {
            kernels.release(&arena.scratch, slot);
        }
    }

    fn ready(&mut self, node: u32) {
        if CREW
            && self.plan.costs.is_expensive(node)
            && self.plan.nodes[node as usize].kind & (kind::ASYNC | kind::NOTHING) == 0
        {
            self.arena.queue.push(node << 1);
            self.added += 1;
            return;
        }
        self.arena.below[node as usize].store(self.top, Ordering::Relaxed);
        self.top = node;
    }

    /// Invites helpers for what the last node added to the queue, less one entry if this lane is free for it.
    fn share(&mut self) {
        if !CREW || self.added == 0 {
            return;
        }
        let own = u32::from(self.top == NONE);
        let arena = self.arena;
        for _ in own..std::mem::take(&mut self.added) {
            if arena.lanes.free() <= arena.invited.load(Ordering::Relaxed) {
                return;
            }
            arena.invited.fetch_add(1, Ordering::Relaxed);
            self.kernels.invite(&arena.scratch, Helper(self.run.clone()));
        }
    }

    fn failed(&self) -> bool {
        self.arena.failed.load(Ordering::Relaxed)
    }

    /// Subtracts `n` from a counter and returns the rest.
    fn take(&self, counter: &AtomicU32, n: u32) -> u32 {
        if CREW {
            counter.fetch_sub(n, Ordering::AcqRel) - n
        } else {
            let left = counter.load(Ordering::Relaxed) - n;
            counter.store(left, Ordering::Relaxed);
            left
        }
    }
}
