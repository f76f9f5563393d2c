//! The start and the end of an asynchronous kernel, which different threads observe.
//!
//! The second of the two continues the run: the starting thread if the kernel ended before the start returned, else the
//! thread that reports the end.

use super::sync::{AtomicU8, Ordering};

const STARTED: u8 = 1;
const UNDER_WAY: u8 = 2;
const ENDED: u8 = 3;

#[derive(Default)]
pub struct Report(AtomicU8);

impl Report {
    /// Before the kernel is started. No other thread may use the report yet.
    pub fn start(&self) {
        self.0.store(STARTED, Ordering::Relaxed);
    }

    /// The start has returned. True: the end has already been reported.
    pub fn started(&self) -> bool {
        self.0.swap(UNDER_WAY, Ordering::AcqRel) == ENDED
    }

    /// The kernel has ended. True: the start has returned. Reporting the end twice is a bug, but harmless.
    pub fn ended(&self) -> bool {
        self.0.swap(ENDED, Ordering::AcqRel) == UNDER_WAY
    }
}
