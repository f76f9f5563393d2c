//! Coverage marks. The code of a rare path says `mark!("name")`; the test that is about this path says
//! `let _reached = starwire_marks::expect("name");` and fails if the path was not taken before the guard is dropped.
//!
//! Marks count in builds with debug assertions only; in a release build they are nothing. `tests/tidy.rs` checks that
//! each mark is expected by a test.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

static COUNTS: Mutex<BTreeMap<&'static str, u64>> = Mutex::new(BTreeMap::new());

/// Counts that this line was reached, on any thread of the process.
#[macro_export]
macro_rules! mark {
    ($name:literal) => {
        if cfg!(debug_assertions) {
            $crate::count($name);
        }
    };
}

#[doc(hidden)]
#[cold]
pub fn count(name: &'static str) {
    *COUNTS.lock().unwrap_or_else(PoisonError::into_inner).entry(name).or_default() += 1;
}

/// Returns how often the mark was reached since the process began.
pub fn reached(name: &str) -> u64 {
    COUNTS.lock().unwrap_or_else(PoisonError::into_inner).get(name).copied().unwrap_or_default()
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
        let _guard = expect("reached");
        mark!("reached");
    }

    #[test]
    #[should_panic(expected = "the mark \"missed\" was not reached")]
    fn a_mark_that_is_missed_fails_the_test() {
        mark!("missed");
        let _guard = expect("missed");
    }
}
