//! The mailbox with real threads, queue and eventfd. `mailbox_model.rs` tests the interleavings.

#![allow(clippy::unwrap_used, reason = "a test may panic, and its numbers are small")]

use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use starwire_net::reactor::driver::Driver;
use starwire_net::reactor::epoll::EpollDriver;
use starwire_net::reactor::mailbox::{EventWaker, Waker, mailbox};

#[derive(Clone, Default)]
struct Count(Arc<AtomicUsize>);

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
fn a_closed_one_needs_no_descriptor() {
    let (mut reader, writer) = UnixStream::pair().unwrap();
    let (sender, mut receiver) = mailbox(EventWaker::new(writer.as_fd()).unwrap());
    drop(writer);
    assert!(receiver.prepare_sleep());
    sender.wake();
    receiver.close();
    assert_eq!(sender.send(1), Err(1));
    sender.wake();
    let mut written = Vec::new();
    // Ends only when the last writer is closed.
    reader.read_to_end(&mut written).unwrap();
    assert_eq!(written.len(), 8, "one wake-up");
}

#[test]
fn many_producers_and_a_consumer_that_sleeps() {
    const PRODUCERS: usize = 4;
    const EACH: usize = 20_000;
    let mut driver = EpollDriver::new().unwrap();
    // SAFETY: the driver owns the descriptor and outlives the borrow.
    let wake_fd = unsafe { BorrowedFd::borrow_raw(driver.wake_fd()) };
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
            // Does not end if a wake-up is lost.
            driver.wait(None, &mut out).unwrap();
            receiver.awake();
        }
    }
    producers.into_iter().for_each(|producer| producer.join().unwrap());
}
