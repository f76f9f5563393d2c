//! The thread-per-core loop's parts: drivers, mailbox, timers, pinning, polling policy.

pub mod driver;
pub mod epoll;
pub mod mailbox;
mod slots;
mod sys;
