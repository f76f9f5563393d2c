//! How far the start and the end of an asynchronous kernel have come, which are two threads' news.
//!
//! Whoever is second goes on with the run: the thread that started the kernel if the end came before the start had
//! returned, and else the thread that reports the end.

use super::sync::{AtomicU8, Ordering};

const STARTED: u8 = 1;
const UNDER_WAY: u8 = 2;
const ENDED: u8 = 3;

#[derive(Default)]
pub struct Report(AtomicU8);

impl Report {
    /// Before the kernel is started. Nobody else may use it meanwhile.
    pub fn start(&self) {
        self.0.store(STARTED, Ordering::Relaxed);
    }

    /// The start has returned. True: the end came already.
    pub fn started(&self) -> bool {
        self.0.swap(UNDER_WAY, Ordering::AcqRel) == ENDED
    }

    /// True: the start has returned. To say the end twice is a bug, and changes nothing.
    pub fn ended(&self) -> bool {
        self.0.swap(ENDED, Ordering::AcqRel) == UNDER_WAY
    }
}
