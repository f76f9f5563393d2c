//! Building blocks of the thread-per-core loop: drivers, mailbox, timers, pinning, polling policy.

pub mod driver;
pub mod epoll;
pub mod error;
pub mod mailbox;
pub mod polling;
mod slots;
mod sync;
mod sys;
pub mod timers;
pub mod topology;
pub mod uring;
pub mod verbs;

pub use error::DriverError;

use driver::Driver;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DriverKind {
    Epoll,
    IoUring,
}

/// Opens a driver, on the thread that will use it.
pub fn open_driver(kind: DriverKind) -> Result<Box<dyn Driver>, DriverError> {
    Ok(match kind {
        DriverKind::Epoll => Box::new(epoll::EpollDriver::new().map_err(DriverError::Epoll)?),
        DriverKind::IoUring => Box::new(uring::UringDriver::new()?),
    })
}
