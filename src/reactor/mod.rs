//! The thread-per-core loop's parts: drivers, mailbox, timers, pinning, polling policy.

pub mod driver;
