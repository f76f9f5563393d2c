//! Where arenas rest between runs: a row of places per core, taken and given back with one swap each.
//!
//! A place holds one arena or none, so there is no list whose links could be mistaken (ABA), and nothing to reclaim. A
//! core looks at its own row first: what it finds there is warm in its cache.
//!
//! An item may own what the pool lies in. So closing, which drops the items, waits for those who are just giving one
//! back: they hold no lock, they are counted, in their own row. Closing and giving back meet in a store-load handshake
//! (Dekker's), as in the reactor's mailbox. `crates/executor/tests/model.rs` checks all interleavings.

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
    /// Who is inside of `give`.
    givers: AtomicU32,
}

impl<T> Pool<T> {
    pub fn new(cores: usize) -> Self {
        let row =
            |_| Row { places: std::array::from_fn(|_| AtomicPtr::new(ptr::null_mut())), givers: AtomicU32::new(0) };
        Pool { rows: (0..cores.max(1)).map(row).map(CachePadded::new).collect(), closed: AtomicBool::new(false) }
    }

    /// From the core's own row, or from any other. Any number will do as a core's.
    pub fn take(&self, core: usize) -> Option<Box<T>> {
        self.places(core).find_map(Self::empty)
    }

    /// Gives back. What finds no place, or comes after [`Pool::close`], is returned. The pool may be gone before this
    /// returns.
    #[must_use]
    pub fn give(&self, core: usize, item: Box<T>) -> Option<Box<T>> {
        let givers = &self.rows[core % self.rows.len()].givers;
        givers.fetch_add(1, Ordering::Relaxed);
        let rejected = self.place(core, item);
        // The last that this thread does with the pool.
        givers.fetch_sub(1, Ordering::Release);
        rejected
    }

    fn place(&self, core: usize, item: Box<T>) -> Option<Box<T>> {
        let item = Box::into_raw(item);
        let place = self
            .places(core)
            .find(|place| place.compare_exchange(ptr::null_mut(), item, Ordering::Release, Ordering::Relaxed).is_ok());
        let Some(place) = place else {
            // SAFETY: from Box::into_raw above, and no place took it.
            return Some(unsafe { Box::from_raw(item) });
        };
        fence(Ordering::SeqCst);
        if self.closed.load(Ordering::Relaxed) { Self::empty(place) } else { None }
    }

    /// Drops what is there; what comes later is refused. Afterwards nobody touches the pool on behalf of an item that
    /// was dropped here.
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
        // Looks before it swaps, so that an empty place's cache line stays shared.
        if place.load(Ordering::Relaxed).is_null() {
            return None;
        }
        let item = place.swap(ptr::null_mut(), Ordering::Acquire);
        // SAFETY: a pointer in a place came from Box::into_raw in `place`; who swaps it out owns it.
        (!item.is_null()).then(|| unsafe { Box::from_raw(item) })
    }
}

impl<T> Drop for Pool<T> {
    fn drop(&mut self) {
        self.places(0).filter_map(Self::empty).for_each(drop);
    }
}
