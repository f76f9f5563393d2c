//! The way into a reactor from any other thread: a lock-free queue and a wake-up that is paid for only if the reactor sleeps.
//!
//! The queue is crossbeam's `SegQueue`. A Vyukov list would be shorter, but it allocates for every message and has a window in which a stalled producer
//! hides the messages behind its own; a segmented queue allocates once per 31 messages and only delays the stalled one. That many threads may take from it is
//! used as well: a sender that finds the mailbox closed takes a message back out (see [`Sender::send`]).
//!
//! Sleeping is a store-load handshake (Dekker's): the producer pushes, then looks at `sleeping`; the consumer sets `sleeping`, then looks at the queue. With a
//! sequentially consistent fence between the two steps of each, at least one of them sees the other. `tests/loom_mailbox.rs` checks all interleavings.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

#[cfg(not(loom))]
use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering, fence},
};

#[cfg(loom)]
use loom::sync::{
    Arc,
    atomic::{AtomicBool, Ordering, fence},
};

/// What a wake-up is: an eventfd, or, in a model of the handshake, whatever can be waited for there.
pub trait Waker {
    fn wake(&self);
}

/// Writes to a driver's eventfd.
pub struct EventWaker(OwnedFd);

impl EventWaker {
    /// A waker for [`Driver::wake_fd`](super::driver::Driver::wake_fd). It holds its own duplicate, so it may outlive the driver.
    pub fn new(wake_fd: std::os::fd::BorrowedFd<'_>) -> io::Result<Self> {
        wake_fd.try_clone_to_owned().map(EventWaker)
    }

    /// A waker for this driver.
    pub fn of(driver: &dyn super::driver::Driver) -> io::Result<Self> {
        // SAFETY: the driver owns the descriptor and is borrowed for the duration.
        Self::new(unsafe { std::os::fd::BorrowedFd::borrow_raw(driver.wake_fd()) })
    }
}

impl Waker for EventWaker {
    fn wake(&self) {
        let one = 1u64.to_ne_bytes();
        // SAFETY: eight readable bytes. It can fail only because the counter is full (EAGAIN), and then the reader is awake or about to be.
        unsafe { libc::write(self.0.as_raw_fd(), one.as_ptr().cast(), one.len()) };
    }
}

/// Makes a mailbox. The receiving half belongs to the one thread that `waker` wakes.
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
    /// After [`Receiver::close`], `Err` gives a message back. Of several senders that fail at the same moment each gets one, not necessarily its own: every
    /// message comes out exactly once, at the receiver or here, and must carry with it whatever is needed to end it.
    pub fn send(&self, message: T) -> Result<(), T> {
        let shared = &*self.shared;
        if shared.closed.load(Ordering::Relaxed) {
            return Err(message);
        }
        shared.queue.push(message);
        // Between the push and the loads, as the receiver has one between its stores and its look at the queue.
        fence(Ordering::SeqCst);
        if shared.closed.load(Ordering::Relaxed) {
            // If the receiver's last look at the queue was late enough to find the message, there may be nothing left to take.
            return shared.queue.pop().map_or(Ok(()), Err);
        }
        self.wake_if_asleep();
        Ok(())
    }

    /// Ends the receiver's sleep, if it sleeps, without a message.
    pub fn wake(&self) {
        fence(Ordering::SeqCst);
        self.wake_if_asleep();
    }

    fn wake_if_asleep(&self) {
        let sleeping = &self.shared.sleeping;
        // Looks before it swaps, so that producers share the cache line while the receiver is awake. Only one of them pays for the wake-up.
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

    /// Announces that this thread is about to wait. `true`: whoever sends from now on wakes it. `false`: something has arrived, do not wait.
    #[must_use]
    pub fn prepare_sleep(&mut self) -> bool {
        self.shared.sleeping.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let empty = self.shared.queue.is_empty();
        if !empty {
            self.awake();
        }
        empty
    }

    /// Takes the announcement back: to be called after each wait.
    pub fn awake(&mut self) {
        self.shared.sleeping.store(false, Ordering::Relaxed);
    }

    /// Refuses messages from now on. Those sent before are still to be popped, after this call, until there are none.
    pub fn close(&mut self) {
        self.shared.closed.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }
}

impl<T, W: Waker> Drop for Receiver<T, W> {
    fn drop(&mut self) {
        self.close();
        while self.pop().is_some() {}
    }
}

#[cfg(not(loom))]
type Queue<T> = crossbeam_queue::SegQueue<T>;

/// The model is about the handshake: a queue behind a lock stands in for the lock-free one, which has its own proofs. The lock is the model's own kind, so
/// its ordering is part of the model; to keep it from lending the handshake an order that `SegQueue` does not promise, emptiness is a separate relaxed flag.
#[cfg(loom)]
struct Queue<T> {
    items: loom::sync::Mutex<std::collections::VecDeque<T>>,
    len: loom::sync::atomic::AtomicUsize,
}

#[cfg(loom)]
impl<T> Queue<T> {
    fn new() -> Self {
        Queue { items: loom::sync::Mutex::new(Default::default()), len: loom::sync::atomic::AtomicUsize::new(0) }
    }

    fn push(&self, item: T) {
        self.items.lock().unwrap().push_back(item);
        self.len.fetch_add(1, Ordering::Relaxed);
    }

    fn pop(&self) -> Option<T> {
        if self.is_empty() {
            return None;
        }
        let item = self.items.lock().unwrap().pop_front();
        if item.is_some() {
            self.len.fetch_sub(1, Ordering::Relaxed);
        }
        item
    }

    fn is_empty(&self) -> bool {
        self.len.load(Ordering::Relaxed) == 0
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    #[derive(Clone, Default)]
    struct Count(std::sync::Arc<AtomicUsize>);

    impl Waker for Count {
        fn wake(&self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn only_a_sleeper_is_woken_and_only_once() {
        let wakes = Count::default();
        let (sender, mut receiver) = mailbox(wakes.clone());
        sender.send(1).unwrap();
        assert_eq!(wakes.0.load(Ordering::Relaxed), 0);
        assert!(!receiver.prepare_sleep());
        assert_eq!(receiver.pop(), Some(1));
        assert!(receiver.prepare_sleep());
        sender.send(2).unwrap();
        sender.clone().send(3).unwrap();
        assert_eq!(wakes.0.load(Ordering::Relaxed), 1);
        receiver.awake();
        assert_eq!((receiver.pop(), receiver.pop(), receiver.pop()), (Some(2), Some(3), None));
    }

    #[test]
    fn nothing_is_lost_when_it_closes() {
        let (sender, mut receiver) = mailbox(Count::default());
        sender.send(1).unwrap();
        receiver.close();
        assert_eq!(sender.send(2), Err(2));
        assert_eq!(receiver.pop(), Some(1));
        drop(receiver);
        assert_eq!(sender.send(3), Err(3));
    }

    #[test]
    fn many_producers_one_sleeping_consumer() {
        const PRODUCERS: usize = 4;
        const EACH: usize = 20_000;
        let mut driver = crate::reactor::epoll::EpollDriver::new().unwrap();
        use crate::reactor::driver::Driver;
        // SAFETY: the driver outlives the borrow.
        let wake_fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(driver.wake_fd()) };
        let (sender, mut receiver) = mailbox(EventWaker::new(wake_fd).unwrap());
        let producers: Vec<_> = (0..PRODUCERS)
            .map(|producer| {
                let sender = sender.clone();
                std::thread::spawn(move || {
                    for number in 0..EACH {
                        sender.send((producer, number)).unwrap();
                        if number % 64 == 0 {
                            std::thread::yield_now();
                        }
                    }
                })
            })
            .collect();
        let mut next = [0; PRODUCERS];
        let mut seen = 0;
        let mut out = Vec::new();
        while seen < PRODUCERS * EACH {
            while let Some((producer, number)) = receiver.pop() {
                assert_eq!(next[producer], number);
                next[producer] += 1;
                seen += 1;
            }
            if seen < PRODUCERS * EACH && receiver.prepare_sleep() {
                let before = std::time::Instant::now();
                driver.wait(Some(std::time::Duration::from_secs(20)), &mut out).unwrap();
                assert!(before.elapsed() < std::time::Duration::from_secs(15), "a wake-up was lost");
                receiver.awake();
            }
        }
        producers.into_iter().for_each(|producer| producer.join().unwrap());
    }
}
