//! Ready work that any thread of a run may take, and the lanes in which threads work.
//!
//! An entry is pushed at most once per run, so the queue is an array with one place per entry, each used once: it never
//! grows, nothing has to be reclaimed, and there is no ABA. Only kernels that take tens of microseconds are shared, so
//! one queue for all threads of a run has no measurable cost; each thread keeps cheap work to itself.
//!
//! Leaving is a store-load handshake (Dekker's): a thread that adds work looks for a free lane *after* adding; a thread
//! that leaves looks for work *after* freeing its lane; each has a sequentially consistent fence in between. So no work
//! is left unseen. `tests/loom/executor.rs` checks all interleavings.

use super::sync::{AtomicU32, AtomicU64, Ordering, fence};

/// As many lanes as fit into a word.
pub const MOST_LANES: u32 = 64;

pub struct Queue {
    /// 0: empty, else the entry + 1.
    places: Box<[AtomicU32]>,
    head: AtomicU32,
    tail: AtomicU32,
}

impl Queue {
    /// For `entries` pushes between two calls of [`Queue::reset`].
    pub fn new(entries: usize) -> Self {
        Queue {
            places: (0..entries).map(|_| AtomicU32::new(0)).collect(),
            head: AtomicU32::new(0),
            tail: AtomicU32::new(0),
        }
    }

    pub fn push(&self, entry: u32) {
        let place = self.tail.fetch_add(1, Ordering::Relaxed);
        // There is a place for each entry of a run.
        if let Some(place) = self.places.get(place as usize) {
            place.store(entry + 1, Ordering::Release);
        }
    }

    /// Also `None` while the next place is claimed but not filled: the thread that fills it looks for a lane
    /// afterwards.
    pub fn pop(&self) -> Option<u32> {
        let mut head = self.head.load(Ordering::Relaxed);
        loop {
            let found = self.places.get(head as usize)?.load(Ordering::Acquire);
            if found == 0 {
                return None;
            }
            match self.head.compare_exchange_weak(head, head + 1, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return Some(found - 1),
                Err(moved) => head = moved,
            }
        }
    }

    pub fn is_empty(&self) -> bool {
        let head = self.head.load(Ordering::Relaxed);
        self.places.get(head as usize).is_none_or(|place| place.load(Ordering::Acquire) == 0)
    }

    /// Empties the queue for the next run. The caller must have the queue to itself.
    pub fn reset(&self) {
        let used = self.tail.swap(0, Ordering::Relaxed) as usize;
        self.head.store(0, Ordering::Relaxed);
        for place in self.places.iter().take(used) {
            place.store(0, Ordering::Relaxed);
        }
    }
}

/// The free lanes of a run. One thread at a time works in a lane.
pub struct Lanes {
    /// One bit per free lane.
    free: AtomicU64,
}

impl Lanes {
    pub fn new(lanes: u32) -> Self {
        let lanes = lanes.clamp(1, MOST_LANES);
        Lanes { free: AtomicU64::new(u64::MAX >> (MOST_LANES - lanes)) }
    }

    /// Claims a free lane. Everything that its last holder did in it happened before.
    pub fn claim(&self) -> Option<u32> {
        let mut free = self.free.load(Ordering::Relaxed);
        while free != 0 {
            let lane = free.trailing_zeros();
            match self.free.compare_exchange_weak(free, free & !(1 << lane), Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return Some(lane),
                Err(changed) => free = changed,
            }
        }
        None
    }

    /// Claims a lane for work just added to the queue. If none is free, a thread that holds one will see the work.
    pub fn claim_for_new_work(&self) -> Option<u32> {
        fence(Ordering::SeqCst);
        self.claim()
    }

    /// Frees a lane. `true`: the queue holds work that the other threads may have missed; look again.
    #[must_use]
    pub fn leave(&self, lane: u32, queue: &Queue) -> bool {
        self.free.fetch_or(1 << lane, Ordering::Release);
        fence(Ordering::SeqCst);
        !queue.is_empty()
    }

    pub fn free(&self) -> u32 {
        self.free.load(Ordering::Relaxed).count_ones()
    }
}
