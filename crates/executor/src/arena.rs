//! What one run writes to. An arena is made once, goes from run to run through the pool, and resets itself on the way.
//!
//! Each counter is set back by whoever brings it to its end: after that nobody else touches it in the same run. Only
//! what has no such moment (merges, the queue) is set back when the arena goes home.

use std::ops::Deref;
use std::ptr::NonNull;

use super::plan::Plan;
use super::pool::Pool;
use super::queue::{Lanes, Queue};
use super::report::Report;
use super::run::{Kernels, Shared};
use super::sync::{Arc, AtomicBool, AtomicU8, AtomicU32, Ordering};

/// In a node's pending word: an input is dead.
pub(super) const DEAD: u32 = 1 << 31;
/// The end of a lane's stack.
pub(super) const NONE: u32 = u32::MAX;

pub struct Arena<K: Kernels> {
    pub(super) shared: Arc<Shared<K>>,
    pub(super) scratch: K::Scratch,
    /// How many may still touch this arena: the starter, helpers that were asked, reports that are due.
    references: AtomicU32,
    /// Per node: how many arrivals it waits for, and `DEAD`.
    pub(super) pending: Box<[AtomicU32]>,
    /// Per node: what lies below it on the stack of the lane that it is ready in.
    pub(super) below: Box<[AtomicU32]>,
    /// Per slot: how many readers are left. Used where there are several.
    pub(super) readers: Box<[AtomicU32]>,
    /// Per slot: not 0 if its node said that it is dead.
    pub(super) marks: Box<[AtomicU8]>,
    /// Per merge: the input that came first + 1, and how many inputs have not turned out to be dead.
    pub(super) chosen: Box<[AtomicU32]>,
    pub(super) hopes: Box<[AtomicU32]>,
    /// Per asynchronous kernel: how far its start and its report have come.
    pub(super) reports: Box<[Report]>,
    pub(super) queue: Queue,
    pub(super) lanes: Lanes,
    /// For a run that one thread at a time works on.
    pub(super) solo: Lanes,
    pub(super) crew: AtomicBool,
    pub(super) measured: AtomicBool,
    pub(super) failed: AtomicBool,
    /// Nodes that have not had their turn.
    pub(super) remaining: AtomicU32,
    /// Helpers that were asked and have not come.
    pub(super) invited: AtomicU32,
    pub(super) runs: AtomicU32,
}

impl<K: Kernels> Arena<K> {
    pub(super) fn create(shared: &Arc<Shared<K>>) -> RunRef<K> {
        let plan = &shared.plan;

        let zeros = |n: usize| (0..n).map(|_| AtomicU32::new(0)).collect::<Box<[_]>>();
        let bytes = |n: usize| (0..n).map(|_| AtomicU8::new(0)).collect::<Box<[_]>>();
        let counts = |counts: &mut dyn Iterator<Item = u32>| counts.map(AtomicU32::new).collect::<Box<[_]>>();
        let entries = if plan.straight && shared.lanes == 1 { 0 } else { plan.nodes() };
        Self::reference(Box::new(Arena {
            scratch: shared.kernels.open(),
            shared: shared.clone(),
            references: AtomicU32::new(1),
            pending: counts(&mut plan.nodes[..plan.nodes()].iter().map(|node| node.pending)),
            below: zeros(plan.nodes()),
            readers: counts(&mut plan.readers.iter().copied()),
            marks: bytes(plan.slots()),
            chosen: zeros(plan.merges.len()),
            hopes: counts(&mut plan.merges.iter().map(|node| inputs(plan, *node))),
            reports: (0..plan.asyncs).map(|_| Report::default()).collect(),
            queue: Queue::new(entries),
            lanes: Lanes::new(shared.lanes),
            solo: Lanes::new(1),
            crew: AtomicBool::new(false),
            measured: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            remaining: AtomicU32::new(0),
            invited: AtomicU32::new(0),
            runs: AtomicU32::new(0),
        }))
    }

    /// Makes an arena that nobody else has into the first reference to it.
    pub(super) fn reference(arena: Box<Self>) -> RunRef<K> {
        RunRef(NonNull::from(Box::leak(arena)))
    }

    /// Between two runs, when nobody else has the arena.
    fn reset(&self) {
        let plan = &self.shared.plan;
        if plan.straight && !self.crew.load(Ordering::Relaxed) {
            return;
        }
        self.queue.reset();
        self.failed.store(false, Ordering::Relaxed);
        for ((chosen, hopes), node) in self.chosen.iter().zip(&self.hopes).zip(&plan.merges) {
            chosen.store(0, Ordering::Relaxed);
            hopes.store(inputs(plan, *node), Ordering::Relaxed);
        }
    }
}

fn inputs(plan: &Plan, node: u32) -> u32 {
    // A plan has fewer inputs than u32 has numbers.
    u32::try_from(plan.sources_of(node).len()).unwrap_or(u32::MAX)
}

/// One reference to the arena of a run. With the last one the arena goes home.
pub struct RunRef<K: Kernels>(NonNull<Arena<K>>);

// SAFETY: an arena consists of atomics and of what Kernels promises to be shareable; the references are counted
// atomically.
unsafe impl<K: Kernels> Send for RunRef<K> {}
// SAFETY: as above.
unsafe impl<K: Kernels> Sync for RunRef<K> {}

impl<K: Kernels> RunRef<K> {
    /// The arena's address, without a reference.
    pub fn as_ptr(&self) -> *const Arena<K> {
        self.0.as_ptr()
    }

    /// The arena's address, which stands for this reference until `from_raw`.
    pub fn into_raw(self) -> *const Arena<K> {
        let arena = self.0.as_ptr();
        std::mem::forget(self);
        arena
    }

    /// # Safety
    /// `arena` came from `into_raw`, which no other call of this has undone.
    pub unsafe fn from_raw(arena: *const Arena<K>) -> Option<Self> {
        NonNull::new(arena.cast_mut()).map(RunRef)
    }
}

impl<K: Kernels> Clone for RunRef<K> {
    fn clone(&self) -> Self {
        self.references.fetch_add(1, Ordering::Relaxed);
        RunRef(self.0)
    }
}

impl<K: Kernels> Deref for RunRef<K> {
    type Target = Arena<K>;

    fn deref(&self) -> &Arena<K> {
        // SAFETY: leaked in `reference`; freed below, by the last reference.
        unsafe { self.0.as_ref() }
    }
}

impl<K: Kernels> Drop for RunRef<K> {
    fn drop(&mut self) {
        // The only reference: nobody can make another one meanwhile.
        if self.references.load(Ordering::Acquire) != 1 && self.references.fetch_sub(1, Ordering::AcqRel) != 1 {
            return;
        }
        self.references.store(1, Ordering::Relaxed);
        self.reset();
        // SAFETY: leaked in `reference`, and nobody else has it any more.
        let arena = unsafe { Box::from_raw(self.0.as_ptr()) };
        let pool: *const Pool<Arena<K>> = &arena.shared.pool;
        // SAFETY: the arena owns a part of what the pool lies in until the pool has it; then `Pool::close` waits for
        // this call. An arena that comes back, and with it maybe the pool, goes after the call.
        drop(unsafe { (*pool).give(core(), arena) });
    }
}

/// The core that this thread is on, as well as it is known.
pub(super) fn core() -> usize {
    // SAFETY: asks for a number.
    usize::try_from(unsafe { libc::sched_getcpu() }).unwrap_or(0)
}
