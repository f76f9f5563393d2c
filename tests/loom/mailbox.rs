//! The mailbox's handshake under every interleaving and every outcome that the memory model allows (loom). Compiles the
//! mailbox's own source with loom's atomics, and with a queue behind loom's lock in place of `SegQueue`.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[allow(dead_code)]
#[path = "../../crates/net/src/reactor/mailbox.rs"]
mod mailbox;

mod sync {
    pub use loom::sync::Arc;
    pub use loom::sync::atomic::{AtomicBool, Ordering, fence};

    use loom::sync::Mutex;
    use loom::sync::atomic::AtomicUsize;
    use std::collections::VecDeque;

    /// `is_empty` takes no lock and orders nothing, so that it adds no ordering to the handshake that a lock-free queue
    /// would not provide.
    pub struct Queue<T> {
        items: Mutex<VecDeque<T>>,
        len: AtomicUsize,
    }

    impl<T> Queue<T> {
        pub fn new() -> Self {
            Queue { items: Mutex::new(VecDeque::new()), len: AtomicUsize::new(0) }
        }

        pub fn push(&self, item: T) {
            let mut items = self.items.lock().unwrap();
            items.push_back(item);
            self.len.fetch_add(1, Ordering::Relaxed);
        }

        pub fn pop(&self) -> Option<T> {
            if self.is_empty() {
                return None;
            }
            let mut items = self.items.lock().unwrap();
            let item = items.pop_front()?;
            self.len.fetch_sub(1, Ordering::Relaxed);
            Some(item)
        }

        pub fn is_empty(&self) -> bool {
            self.len.load(Ordering::Relaxed) == 0
        }
    }
}

use loom::sync::{Arc, Notify};
use loom::thread;
use mailbox::{Waker, mailbox};
// The mailbox's source expects this module beside itself.
use starwire_net::reactor::driver;

/// An eventfd: a wake-up persists until a thread waits for it. A lost one becomes a deadlock, which loom reports.
#[derive(Clone)]
struct Event(Arc<Notify>);

impl Event {
    fn new() -> Self {
        Event(Arc::new(Notify::new()))
    }

    fn wait(&self) {
        self.0.wait();
    }
}

impl Waker for Event {
    fn wake(&self) {
        self.0.notify();
    }
}

fn check(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(model);
}

#[test]
fn a_sleeper_gets_every_message() {
    check(|| {
        let event = Event::new();
        let (sender, mut receiver) = mailbox(event.clone());
        let producers: Vec<_> = (0..2)
            .map(|number| {
                let sender = sender.clone();
                thread::spawn(move || sender.send(number).unwrap())
            })
            .collect();
        let mut seen = 0;
        while seen < 2 {
            match receiver.pop() {
                Some(_) => seen += 1,
                None => {
                    if receiver.prepare_sleep() {
                        event.wait();
                        receiver.awake();
                    } else {
                        thread::yield_now();
                    }
                }
            }
        }
        producers.into_iter().for_each(|producer| producer.join().unwrap());
    });
}

#[test]
fn a_plain_wake_up_is_not_lost_on_a_sleeper() {
    check(|| {
        let event = Event::new();
        let (sender, mut receiver) = mailbox::<(), _>(event.clone());
        assert!(receiver.prepare_sleep());
        let waker = thread::spawn(move || sender.wake());
        event.wait();
        receiver.awake();
        waker.join().unwrap();
    });
}

#[test]
fn every_message_comes_out_once_when_the_mailbox_closes() {
    check(|| {
        let (sender, mut receiver) = mailbox(Event::new());
        let producers: Vec<_> = (0..2u32)
            .map(|number| {
                let sender = sender.clone();
                thread::spawn(move || sender.send(number).err())
            })
            .collect();
        receiver.close();
        let mut seen: Vec<u32> = std::iter::from_fn(|| receiver.pop()).collect();
        seen.extend(producers.into_iter().filter_map(|producer| producer.join().unwrap()));
        seen.sort_unstable();
        assert_eq!(seen, [0, 1]);
    });
}
