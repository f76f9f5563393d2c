//! What a run works with: the kernels, as [`Kernels`], and its mutable state, the arena. An arena is created once,
//! passes from run to run through the pool, and is reset on the way.
//!
//! The thread that brings a counter to its end also resets it: no other thread touches it again in that run. Only state
//! without such a moment (the queue, the failure) is reset when the arena returns to the pool.

use std::ops::Deref;
use std::ptr::NonNull;

use super::plan::{Plan, Task};
use super::pool::Pool;
use super::queue::{Lanes, Queue};
use super::report::Report;
use super::sync::{Arc, AtomicBool, AtomicU32, Ordering};

/// The owner of the kernels and the values, as the executor uses it.
pub trait Kernels: Send + Sync + Sized {
    /// The values of one arena. Lives as long as the arena, across runs.
    type Scratch: Send + Sync;

    fn open(&self) -> Self::Scratch;

    /// Runs one kernel and then releases `call.released()`, even if the kernel failed. For an asynchronous kernel in
    /// flight, the report ([`RunRef::report`]) marks the end of the call instead, and comes exactly once.
    fn run(&self, call: Call<'_, Self>) -> KernelResult;

    /// No node reads the slot any more in this run. It may be empty.
    fn release(&self, scratch: &Self::Scratch, slot: u32);

    /// The slot has one reader left, which runs next and reads it once.
    fn unshare(&self, scratch: &Self::Scratch, slot: u32);

    /// The run is over. If it failed, slots may still be full.
    fn finished(&self, scratch: &Self::Scratch, failed: bool);

    /// There is expensive work for another thread: have one call [`Helper::help`].
    fn invite(&self, scratch: &Self::Scratch, helper: Helper<Self>);
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelResult {
    Done,
    /// The report will follow. Asynchronous kernels only.
    Pending,
    Failed,
}

pub struct Call<'a, K: Kernels> {
    pub scratch: &'a K::Scratch,
    pub plan: &'a Plan,
    pub task: &'a Task,
    /// No other thread uses this lane of this run during the call.
    pub lane: u32,
    /// The kernel may end after the call returns.
    pub asynchronous: bool,
    pub(super) run: &'a RunRef<K>,
}

impl<K: Kernels> Call<'_, K> {
    /// The slots that only this node still reads, although several nodes did: their values may be modified in place.
    pub fn unshared(&self) -> &[u32] {
        &self.plan.lists[self.task.first as usize..][..self.task.unshared as usize]
    }

    /// The slots that no node reads after this one.
    pub fn released(&self) -> &[u32] {
        &self.plan.lists[(self.task.first + self.task.unshared) as usize..][..self.task.released as usize]
    }

    /// The run, valid during the call. An asynchronous kernel in flight keeps a clone, for its report.
    pub fn run(&self) -> &RunRef<K> {
        self.run
    }
}

pub(super) struct Shared<K: Kernels> {
    pub plan: Plan,
    pub kernels: K,
    pub lanes: u32,
    pub pool: Pool<Arena<K>>,
}

/// Ends a lane's stack.
pub(super) const NONE: u32 = u32::MAX;

pub struct Arena<K: Kernels> {
    pub(super) shared: Arc<Shared<K>>,
    pub(super) scratch: K::Scratch,
    /// The number of holders: the starter, invited helpers, outstanding reports.
    references: AtomicU32,
    /// By node: the arrivals it still waits for.
    pub(super) pending: Box<[AtomicU32]>,
    /// By node: the node below it on the stack of the lane in which it is ready.
    pub(super) below: Box<[AtomicU32]>,
    /// By slot: the readers left. Used if there are several.
    pub(super) readers: Box<[AtomicU32]>,
    /// By asynchronous kernel: the progress of its start and its report.
    pub(super) reports: Box<[Report]>,
    pub(super) queue: Queue,
    pub(super) lanes: Lanes,
    /// For runs that only one thread at a time works on.
    pub(super) solo: Lanes,
    pub(super) crew: AtomicBool,
    pub(super) measured: AtomicBool,
    pub(super) failed: AtomicBool,
    /// Nodes that have not had their turn.
    pub(super) remaining: AtomicU32,
    /// Helpers invited but not yet arrived.
    pub(super) invited: AtomicU32,
    pub(super) runs: AtomicU32,
}

impl<K: Kernels> Arena<K> {
    pub(super) fn create(shared: &Arc<Shared<K>>) -> RunRef<K> {
        let plan = &shared.plan;
        let counts = |counts: &mut dyn Iterator<Item = u32>| counts.map(AtomicU32::new).collect::<Box<[_]>>();
        let entries = if plan.is_straight() && shared.lanes == 1 { 0 } else { plan.nodes() };
        Self::reference(Box::new(Arena {
            scratch: shared.kernels.open(),
            shared: shared.clone(),
            references: AtomicU32::new(1),
            pending: counts(&mut plan.nodes[..plan.nodes()].iter().map(|node| node.pending)),
            below: (0..plan.nodes()).map(|_| AtomicU32::new(0)).collect(),
            readers: counts(&mut plan.readers.iter().copied()),
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

    /// Turns an unshared arena into the first reference to it.
    pub(super) fn reference(arena: Box<Self>) -> RunRef<K> {
        RunRef(NonNull::from(Box::leak(arena)))
    }

    /// Between two runs. The caller must have the arena to itself.
    fn reset(&self) {
        if self.shared.plan.is_straight() && !self.crew.load(Ordering::Relaxed) {
            return;
        }
        self.queue.reset();
        self.failed.store(false, Ordering::Relaxed);
    }
}

/// A counted reference to the arena of a run. Dropping the last one returns the arena to the pool.
pub struct RunRef<K: Kernels>(NonNull<Arena<K>>);

// SAFETY: an arena holds atomics, an `Arc<Shared<K>>` and a `K::Scratch`; `Kernels` requires `K` and `K::Scratch` to be
// `Send + Sync`. The reference count is atomic.
unsafe impl<K: Kernels> Send for RunRef<K> {}
// SAFETY: as above.
unsafe impl<K: Kernels> Sync for RunRef<K> {}

impl<K: Kernels> RunRef<K> {
    /// The arena's address, which owns this reference until `from_raw`.
    pub fn into_raw(self) -> *const Arena<K> {
        let arena = self.0.as_ptr();
        std::mem::forget(self);
        arena
    }

    /// # Safety
    /// `arena` came from `into_raw`, and each `into_raw` is undone at most once.
    pub unsafe fn from_raw(arena: *const Arena<K>) -> Option<Self> {
        NonNull::new(arena.cast_mut()).map(RunRef)
    }
}

/// A request for help with a run, which may be over by the time the helper arrives.
pub struct Helper<K: Kernels>(pub(super) RunRef<K>);

impl<K: Kernels> Clone for RunRef<K> {
    fn clone(&self) -> Self {
        self.references.fetch_add(1, Ordering::Relaxed);
        RunRef(self.0)
    }
}

impl<K: Kernels> Deref for RunRef<K> {
    type Target = Arena<K>;

    fn deref(&self) -> &Arena<K> {
        // SAFETY: `reference` leaked the arena, and only dropping the last reference frees it; `self` is a reference.
        unsafe { self.0.as_ref() }
    }
}

impl<K: Kernels> Drop for RunRef<K> {
    fn drop(&mut self) {
        // A count of 1 is this reference, so no other thread can clone one concurrently.
        if self.references.load(Ordering::Acquire) != 1 && self.references.fetch_sub(1, Ordering::AcqRel) != 1 {
            return;
        }
        self.references.store(1, Ordering::Relaxed);
        self.reset();
        // SAFETY: `reference` leaked the arena from a Box, and this was the last reference.
        let arena = unsafe { Box::from_raw(self.0.as_ptr()) };
        let pool: *const Pool<Arena<K>> = &arena.shared.pool;
        // SAFETY: `arena.shared` keeps the pool alive until `give` has stored the arena; from then on `Pool::close`
        // waits for this call. A rejected arena, and with it possibly the pool, is dropped after the call.
        drop(unsafe { (*pool).give(core(), arena) });
    }
}

/// The current core; 0 if the kernel does not tell.
pub(super) fn core() -> usize {
    // SAFETY: takes no pointers and has no preconditions.
    unsafe { libc::sched_getcpu() }.max(0).unsigned_abs() as usize
}
