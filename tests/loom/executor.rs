//! The executor's shared state under every interleaving and every outcome that the memory model allows (loom). Compiles
//! the executor's own sources with loom's primitives.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[allow(dead_code)]
#[path = "../../crates/executor/src/pool.rs"]
mod pool;
#[allow(dead_code)]
#[path = "../../crates/executor/src/queue.rs"]
mod queue;
#[allow(dead_code)]
#[path = "../../crates/executor/src/report.rs"]
mod report;

mod sync {
    pub use loom::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering, fence};
    pub use loom::thread::yield_now;
}

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, Ordering};
use loom::thread;
use pool::Pool;
use queue::{Lanes, Queue};
use report::Report;

fn check(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(model);
}

/// The use of the queue by the threads of a run, without the nodes.
struct Work {
    queue: Queue,
    lanes: Lanes,
    /// Data that only the holder of the lane may write to.
    lane: UnsafeCell<u32>,
    done: AtomicU32,
}

impl Work {
    fn new(entries: usize) -> Arc<Self> {
        Arc::new(Work {
            queue: Queue::new(entries),
            lanes: Lanes::new(1),
            lane: UnsafeCell::new(0),
            done: AtomicU32::new(0),
        })
    }

    fn in_lane(&self, mut lane: u32) {
        loop {
            while let Some(entry) = self.queue.pop() {
                // SAFETY: loom checks that no two threads are in the lane at once.
                self.lane.with_mut(|seen| unsafe { *seen |= 1 << entry });
                self.done.fetch_add(1, Ordering::Relaxed);
            }
            if !self.lanes.leave(lane, &self.queue) {
                return;
            }
            match self.lanes.claim() {
                Some(again) => lane = again,
                None => return,
            }
        }
    }

    fn add(&self, entry: u32) {
        self.queue.push(entry);
        if let Some(lane) = self.lanes.claim_for_new_work() {
            self.in_lane(lane);
        }
    }
}

#[test]
fn no_entry_is_left_behind_and_a_lane_has_one_thread() {
    check(|| {
        let work = Work::new(3);
        let others: Vec<_> = (0..2)
            .map(|entry| {
                let work = work.clone();
                thread::spawn(move || work.add(entry))
            })
            .collect();
        work.add(2);
        others.into_iter().for_each(|other| other.join().unwrap());
        assert_eq!(work.done.load(Ordering::Relaxed), 3);
        let lane = work.lanes.claim().expect("free in the end");
        // SAFETY: as above.
        work.lane.with(|seen| assert_eq!(unsafe { *seen }, 0b111));
        assert_eq!((lane, work.queue.pop()), (0, None));
    });
}

/// A lane starts two asynchronous kernels, and another thread reports both ends.
#[test]
fn reports_leave_nothing_behind() {
    check(|| {
        let work = Work::new(2);
        let reports = Arc::new([Report::default(), Report::default()]);
        let lane = work.lanes.claim().expect("free in the beginning");
        reports.iter().for_each(Report::start);
        let starter = {
            let (work, reports) = (work.clone(), reports.clone());
            thread::spawn(move || {
                let early = reports.iter().filter(|report| report.started()).count();
                work.done.fetch_add(u32::try_from(early).unwrap(), Ordering::Relaxed);
                work.in_lane(lane);
            })
        };
        for (entry, report) in (0u32..).zip(reports.iter()) {
            if report.ended() {
                work.add(entry);
            }
        }
        starter.join().unwrap();
        assert_eq!(work.done.load(Ordering::Relaxed), 2);
    });
}

#[test]
fn an_entry_is_taken_once() {
    check(|| {
        let queue = Arc::new(Queue::new(2));
        queue.push(0);
        queue.push(1);
        let other = {
            let queue = queue.clone();
            thread::spawn(move || queue.pop())
        };
        let mut seen = [queue.pop(), other.join().unwrap()];
        seen.sort_unstable();
        assert_eq!(seen, [Some(0), Some(1)]);
        queue.reset();
        assert!(queue.is_empty());
        queue.push(1);
        assert_eq!((queue.pop(), queue.pop()), (Some(1), None));
    });
}

/// Counts its drops.
struct Item(Arc<AtomicU32>);

impl Drop for Item {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn an_arena_is_taken_once() {
    check(|| {
        let gone = Arc::new(AtomicU32::new(0));
        let pool = Arc::new(Pool::new(1));
        assert!(pool.give(0, Box::new(Item(gone.clone()))).is_none());
        let other = {
            let pool = pool.clone();
            thread::spawn(move || pool.take(0).is_some())
        };
        let taken = u32::from(pool.take(0).is_some()) + u32::from(other.join().unwrap());
        assert_eq!((taken, gone.load(Ordering::Relaxed)), (1, 1));
    });
}

#[test]
fn nothing_stays_in_a_closed_pool() {
    check(|| {
        let gone = Arc::new(AtomicU32::new(0));
        let pool = Arc::new(Pool::new(1));
        let giver = {
            let (pool, item) = (pool.clone(), Box::new(Item(gone.clone())));
            thread::spawn(move || drop(pool.give(0, item)))
        };
        pool.close();
        giver.join().unwrap();
        assert_eq!(gone.load(Ordering::Relaxed), 1);
        assert!(pool.give(0, Box::new(Item(gone.clone()))).is_some());
    });
}

/// Owns the memory that contains the pool, as an arena does.
struct Owner(#[allow(dead_code)] Arc<Pool<Owner>>);

#[test]
fn closing_waits_for_givers() {
    check(|| {
        let pool = Arc::new(Pool::new(1));
        let item = Box::new(Owner(pool.clone()));
        let giver = thread::spawn(move || {
            let pool: *const Pool<Owner> = &*item.0;
            // SAFETY: under test: loom detects if the pool is freed too early.
            drop(unsafe { (*pool).give(0, item) });
        });
        pool.close();
        drop(pool);
        giver.join().unwrap();
    });
}
