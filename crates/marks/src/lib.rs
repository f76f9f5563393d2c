//! Coverage marks and [fail points](fail_point!). The code of a rare path says `mark!("name")`; the test that is about
//! this path says `let _reached = starwire_marks::expect("name");` and fails if the path was not taken before the guard
//! is dropped.
//!
//! Marks count in builds with debug assertions only; in a release build they are nothing. Counting neither allocates
//! nor locks. `tests/tidy.rs` checks that each mark is expected by a test.

#![deny(unsafe_code)]

#[allow(unsafe_code)]
pub mod fail_points;

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// A place in the code. Several may have the same name.
#[derive(Debug)]
pub struct Mark {
    name: &'static str,
    count: AtomicU64,
    is_listed: AtomicBool,
}

/// The marks that were reached. More than a program has; a full table fails the tests that look for the rest.
static LIST: [OnceLock<&Mark>; 256] = [const { OnceLock::new() }; 256];

impl Mark {
    pub const fn new(name: &'static str) -> Self {
        Self { name, count: AtomicU64::new(0), is_listed: AtomicBool::new(false) }
    }

    #[cold]
    pub fn reach(&'static self) {
        self.count.fetch_add(1, Ordering::Relaxed);
        if !self.is_listed.swap(true, Ordering::Relaxed) {
            let _ = LIST.iter().find(|slot| slot.set(self).is_ok());
        }
    }
}

/// Counts that this line was reached, on any thread of the process.
#[macro_export]
macro_rules! mark {
    ($name:literal) => {
        if cfg!(debug_assertions) {
            static MARK: $crate::Mark = $crate::Mark::new($name);
            MARK.reach();
        }
    };
}

/// Returns how often marks of this name were reached since the process began.
pub fn reached(name: &str) -> u64 {
    let listed = LIST.iter().map_while(OnceLock::get).filter(|mark| mark.name == name);
    listed.map(|mark| mark.count.load(Ordering::Relaxed)).sum()
}

/// Panics when it is dropped if the mark was not reached in the meantime.
#[must_use]
#[derive(Debug)]
pub struct Expected {
    name: &'static str,
    before: u64,
}

/// Expects that the mark is reached before the guard is dropped.
pub fn expect(name: &'static str) -> Expected {
    Expected { name, before: reached(name) }
}

impl Drop for Expected {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            assert!(reached(self.name) > self.before, "the mark {:?} was not reached", self.name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_that_is_reached_satisfies_its_guard() {
        for _ in 0..2 {
            let _guard = expect("reached");
            mark!("reached");
        }
        assert_eq!(reached("reached"), 2);
    }

    #[test]
    #[should_panic(expected = "the mark \"missed\" was not reached")]
    fn a_mark_that_is_missed_fails_the_test() {
        mark!("missed");
        let _guard = expect("missed");
    }
}
