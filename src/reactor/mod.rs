//! The thread-per-core loop's parts: drivers, mailbox, timers, pinning, polling policy.

pub mod driver;
pub mod epoll;
pub mod error;
pub mod mailbox;
mod slots;
mod sys;
pub mod uring;
