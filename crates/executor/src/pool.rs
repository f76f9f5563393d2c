//! Keeps arenas between runs: a row of places per core, each taken or filled with a single atomic operation.
//!
//! A place holds one arena or none, so there is no linked list (hence no ABA) and nothing to reclaim. A core tries its
//! own row first: an arena found there is warm in its cache.
//!
//! An item may own the memory that contains the pool. So closing, which drops the items, waits for threads that are
//! inside `give`: they hold no lock but are counted, per row. Closing and giving use a store-load handshake (Dekker's),
//! as in the reactor's mailbox. `tests/loom/executor.rs` checks all interleavings.

use std::ptr;

use crossbeam_utils::CachePadded;

use super::sync::{AtomicBool, AtomicPtr, AtomicU32, Ordering, fence, yield_now};

const PLACES: usize = 4;

pub struct Pool<T> {
    rows: Box<[CachePadded<Row<T>>]>,
    closed: AtomicBool,
}

struct Row<T> {
    places: [AtomicPtr<T>; PLACES],
    /// Threads inside `give`.
    givers: AtomicU32,
}

impl<T> Pool<T> {
    pub fn new(cores: usize) -> Self {
        let row =
            |_| Row { places: std::array::from_fn(|_| AtomicPtr::new(ptr::null_mut())), givers: AtomicU32::new(0) };
        Pool { rows: (0..cores.max(1)).map(row).map(CachePadded::new).collect(), closed: AtomicBool::new(false) }
    }

    /// Takes from the core's own row, or from any other. Any core number is valid.
    pub fn take(&self, core: usize) -> Option<Box<T>> {
        self.places(core).find_map(Self::empty)
    }

    /// Gives an item back. Returns it if no place is free or the pool is closed. The pool may be gone before this
    /// returns.
    #[must_use]
    pub fn give(&self, core: usize, item: Box<T>) -> Option<Box<T>> {
        let givers = &self.rows[core % self.rows.len()].givers;
        givers.fetch_add(1, Ordering::Relaxed);
        let rejected = self.place(core, item);
        // This thread's last access to the pool.
        givers.fetch_sub(1, Ordering::Release);
        rejected
    }

    fn place(&self, core: usize, item: Box<T>) -> Option<Box<T>> {
        let item = Box::into_raw(item);
        let place = self
            .places(core)
            .find(|place| place.compare_exchange(ptr::null_mut(), item, Ordering::Release, Ordering::Relaxed).is_ok());
        let Some(place) = place else {
            // SAFETY: from `Box::into_raw` above, and no place took it.
            return Some(unsafe { Box::from_raw(item) });
        };
        fence(Ordering::SeqCst);
        if self.closed.load(Ordering::Relaxed) { Self::empty(place) } else { None }
    }

    /// Drops all items; later ones are refused. Once it returns, no thread touches the pool on behalf of an item
    /// dropped here.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.places(0).filter_map(Self::empty).for_each(drop);
        for row in &self.rows {
            while row.givers.load(Ordering::Acquire) != 0 {
                yield_now();
            }
        }
    }

    fn places(&self, core: usize) -> impl Iterator<Item = &AtomicPtr<T>> {
        let (others, own) = self.rows.split_at(core % self.rows.len());
        own.iter().chain(others).flat_map(|row| row.places.iter())
    }

    fn empty(place: &AtomicPtr<T>) -> Option<Box<T>> {
        // Loads before it swaps, so that an empty place's cache line stays shared.
        if place.load(Ordering::Relaxed).is_null() {
            return None;
        }
        let item = place.swap(ptr::null_mut(), Ordering::Acquire);
        // SAFETY: every non-null pointer in a place came from `Box::into_raw` in `place`, and the swap made this thread
        // its only owner.
        (!item.is_null()).then(|| unsafe { Box::from_raw(item) })
    }
}

impl<T> Drop for Pool<T> {
    fn drop(&mut self) {
        self.places(0).filter_map(Self::empty).for_each(drop);
    }
}
