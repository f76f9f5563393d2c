//! Messages to a reactor from any other thread: a lock-free queue, and a wake-up only if the reactor sleeps.
//!
//! The queue is crossbeam's `SegQueue`. A Vyukov list would be shorter, but allocates per message; `SegQueue` allocates
//! a segment per 31. In both, a producer that is preempted between claiming its slot and filling it delays everything
//! sent after it. The multi-consumer side of `SegQueue` is used as well: a sender that finds the mailbox closed takes a
//! message back out (see [`Sender::send`]).
//!
//! Sleeping is a store-load handshake (Dekker's): the producer pushes, then checks `sleeping`; the consumer sets
//! `sleeping`, then checks the queue. With a sequentially consistent fence between the two steps on each side, at least
//! one of them sees the other. `tests/loom/mailbox.rs` checks all interleavings; it compiles this file
//! against its own `sync` module.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::RwLock;

use super::sync::{Arc, AtomicBool, Ordering, Queue, fence};

/// Wakes the receiver: an eventfd, or, in a model of the handshake, the model's equivalent.
pub trait Waker {
    fn wake(&self);
    /// The receiver will not sleep again: releases the resources for wake-ups. May race with `wake`.
    fn retire(&self) {}
}

/// Writes to a driver's eventfd.
pub struct EventWaker(RwLock<Option<OwnedFd>>);

impl EventWaker {
    /// A waker for a driver's `wake_fd`. It holds its own duplicate, so it may outlive the driver.
    pub fn new(wake_fd: std::os::fd::BorrowedFd<'_>) -> io::Result<Self> {
        wake_fd.try_clone_to_owned().map(|fd| EventWaker(RwLock::new(Some(fd))))
    }

    /// A waker for this driver.
    pub fn of(driver: &dyn super::driver::Driver) -> io::Result<Self> {
        // SAFETY: the driver owns the descriptor and stays borrowed until `new` has duplicated it.
        Self::new(unsafe { std::os::fd::BorrowedFd::borrow_raw(driver.wake_fd()) })
    }
}

impl Waker for EventWaker {
    fn wake(&self) {
        // Cheap next to a system call. Only `retire` locks exclusively, and then no wake-up is needed.
        let Ok(fd) = self.0.try_read() else { return };
        let Some(fd) = &*fd else { return };
        let one = 1u64.to_ne_bytes();
        // SAFETY: `one` is eight readable bytes. The write fails only if the counter is full (EAGAIN); then the reader
        // is awake or about to be.
        unsafe { libc::write(fd.as_raw_fd(), one.as_ptr().cast(), one.len()) };
    }

    /// Senders live as long as any handle to a channel; the descriptor need not.
    fn retire(&self) {
        if let Ok(mut fd) = self.0.write() {
            *fd = None;
        }
    }
}

/// Makes a mailbox. The receiver belongs to the one thread that `waker` wakes.
pub fn mailbox<T, W: Waker>(waker: W) -> (Sender<T, W>, Receiver<T, W>) {
    let shared = Arc::new(Shared {
        queue: Queue::new(),
        sleeping: AtomicBool::new(false),
        closed: AtomicBool::new(false),
        waker,
    });
    (Sender { shared: shared.clone() }, Receiver { shared })
}

pub struct Sender<T, W: Waker = EventWaker> {
    shared: Arc<Shared<T, W>>,
}

pub struct Receiver<T, W: Waker = EventWaker> {
    shared: Arc<Shared<T, W>>,
}

struct Shared<T, W> {
    queue: Queue<T>,
    sleeping: AtomicBool,
    closed: AtomicBool,
    waker: W,
}

impl<T, W: Waker> Clone for Sender<T, W> {
    fn clone(&self) -> Self {
        Sender { shared: self.shared.clone() }
    }
}

impl<T, W: Waker> Sender<T, W> {
    /// Delivers a message. Messages of one sender arrive in order.
    ///
    /// After [`Receiver::close`], `Err` returns a message. If several senders fail at once, each gets one message, not
    /// necessarily its own: every message comes out exactly once, at the receiver or here, and must carry everything
    /// needed to end it.
    pub fn send(&self, message: T) -> Result<(), T> {
        let shared = &*self.shared;
        if shared.closed.load(Ordering::Relaxed) {
            return Err(message);
        }
        shared.queue.push(message);
        // Pairs with the receiver's fence between its stores and its check of the queue.
        fence(Ordering::SeqCst);
        if shared.closed.load(Ordering::Relaxed) {
            // If the receiver's last check of the queue found the message, there may be nothing left to take.
            return shared.queue.pop().map_or(Ok(()), Err);
        }
        self.wake_if_asleep();
        Ok(())
    }

    /// Wakes the receiver without a message: whether it sleeps, or is about to and has seen no reason not to.
    pub fn wake(&self) {
        fence(Ordering::SeqCst);
        self.shared.sleeping.store(false, Ordering::Release);
        self.shared.waker.wake();
    }

    fn wake_if_asleep(&self) {
        let sleeping = &self.shared.sleeping;
        // Loads before it swaps, so that producers share the cache line while the receiver is awake. Only one of them
        // pays for the wake-up.
        if sleeping.load(Ordering::Relaxed) && sleeping.swap(false, Ordering::AcqRel) {
            self.shared.waker.wake();
        }
    }
}

impl<T, W: Waker> Receiver<T, W> {
    pub fn pop(&mut self) -> Option<T> {
        self.shared.queue.pop()
    }

    pub fn is_empty(&self) -> bool {
        self.shared.queue.is_empty()
    }

    /// Announces that this thread is about to wait. `true`: any later send wakes it. `false`: a message has arrived, do
    /// not wait.
    #[must_use]
    pub fn prepare_sleep(&mut self) -> bool {
        // A swap, although the old value does not matter: the model checker orders a plain store loosely against the
        // producers' swaps and would report a stale `false` that no hardware produces. Its cost is negligible next to
        // the wait.
        self.shared.sleeping.swap(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let empty = self.shared.queue.is_empty();
        if !empty {
            self.awake();
        }
        empty
    }

    /// Withdraws the announcement; to be called after each wait. `true`: a sender ended the wait.
    pub fn awake(&mut self) -> bool {
        !self.shared.sleeping.swap(false, Ordering::Relaxed)
    }

    /// Refuses messages from now on. Afterwards, the caller must pop those sent before until none is left.
    pub fn close(&mut self) {
        self.shared.closed.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.shared.waker.retire();
    }
}

impl<T, W: Waker> Drop for Receiver<T, W> {
    fn drop(&mut self) {
        self.close();
        while self.pop().is_some() {}
    }
}
