//! Timers.
//!
//! A binary heap: starting a timer takes a few moves (most are later than the earlier ones), and checking the next one
//! is free. Cancelling only removes the timer's key; its heap entry is dropped when it comes up, or when such entries
//! become the majority.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Instant;

use super::driver::Token;
use super::slots::Slots;

pub struct Timers<K> {
    keys: Slots<K>,
    /// Due time, then order of start.
    heap: BinaryHeap<Reverse<(Instant, u64, Token)>>,
    started: u64,
}

/// Identifies a running timer; invalid forever once the timer has fired or was cancelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timer(Token);

impl<K> Default for Timers<K> {
    fn default() -> Self {
        Timers { keys: Slots::new(), heap: BinaryHeap::new(), started: 0 }
    }
}

impl<K> Timers<K> {
    pub fn start(&mut self, at: Instant, key: K) -> Timer {
        let token = self.keys.insert(key);
        self.started += 1;
        self.heap.push(Reverse((at, self.started, token)));
        Timer(token)
    }

    /// Returns the key if the timer was still running.
    pub fn cancel(&mut self, timer: Timer) -> Option<K> {
        let key = self.keys.remove(timer.0)?;
        if self.heap.len() > 64 && self.heap.len() > 2 * self.keys.len() {
            let keys = &self.keys;
            self.heap.retain(|Reverse((_, _, token))| keys.contains(*token));
        }
        Some(key)
    }

    pub fn next_due(&mut self) -> Option<Instant> {
        self.drop_cancelled();
        self.heap.peek().map(|Reverse((at, _, _))| *at)
    }

    /// Takes one timer that is due, the earliest first.
    pub fn pop_due(&mut self, now: Instant) -> Option<K> {
        if self.next_due()? > now {
            return None;
        }
        let Reverse((_, _, token)) = self.heap.pop()?;
        self.keys.remove(token)
    }

    fn drop_cancelled(&mut self) {
        while self.heap.peek().is_some_and(|Reverse((_, _, token))| !self.keys.contains(*token)) {
            self.heap.pop();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::time::Duration;

    #[test]
    fn timers_go_off_in_order_and_not_early() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut timers = Timers::default();
        for (ms, key) in [(5, 'c'), (1, 'a'), (5, 'd'), (3, 'b')] {
            timers.start(at(ms), key);
        }
        assert_eq!(timers.next_due(), Some(at(1)));
        assert_eq!(timers.pop_due(start), None);
        let due: Vec<_> = std::iter::from_fn(|| timers.pop_due(at(5))).collect();
        assert_eq!(due, ['a', 'b', 'c', 'd']);
        assert_eq!(timers.next_due(), None);
    }

    #[test]
    fn a_cancelled_timer_never_fires_and_its_handle_stays_invalid() {
        let now = Instant::now();
        let mut timers = Timers::default();
        let first = timers.start(now, 1);
        assert_eq!(timers.cancel(first), Some(1));
        timers.start(now, 2);
        assert_eq!(timers.cancel(first), None);
        assert_eq!(timers.pop_due(now), Some(2));
        assert!(timers.keys.is_empty() && timers.next_due().is_none());
    }

    #[test]
    fn cancelled_timers_do_not_pile_up() {
        let far = Instant::now() + Duration::from_secs(3600);
        let mut timers = Timers::default();
        for number in 0..100_000 {
            let timer = timers.start(far, number);
            timers.cancel(timer);
        }
        assert!(timers.heap.len() <= 128, "{} entries", timers.heap.len());
    }

    proptest! {
        #[test]
        fn like_a_sorted_list(steps in prop::collection::vec((0u64..50, any::<bool>(), any::<prop::sample::Index>()), 1..200)) {
            let start = Instant::now();
            let at = |ms| start + Duration::from_millis(ms);
            let mut timers = Timers::default();
            let mut model: Vec<(u64, usize, Timer)> = Vec::new();
            for (number, (ms, cancel, which)) in steps.into_iter().enumerate() {
                if cancel && !model.is_empty() {
                    let (_, number, timer) = model.remove(which.index(model.len()));
                    prop_assert_eq!(timers.cancel(timer), Some(number));
                } else {
                    model.push((ms, number, timers.start(at(ms), number)));
                }
                prop_assert_eq!(timers.next_due(), model.iter().map(|(ms, _, _)| at(*ms)).min());
                prop_assert_eq!(timers.keys.len(), model.len());
            }
            model.sort_by_key(|(ms, number, _)| (*ms, *number));
            for (ms, number, _) in model {
                prop_assert_eq!(timers.pop_due(at(ms)), Some(number));
            }
            prop_assert!(timers.keys.is_empty());
        }
    }
}
