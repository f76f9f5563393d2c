//! The reasons why a driver is not available.

use std::io;

#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    #[error("this kernel ({kernel}) lacks {what}, added in Linux {since}: use the epoll driver")]
    Missing { what: &'static str, since: &'static str, kernel: String },
    #[error(
        "io_uring is not permitted ({source}): check the sysctl kernel.io_uring_disabled and the container's seccomp profile, or use the epoll driver"
    )]
    Forbidden { source: io::Error },
    #[error("io_uring is out of memory ({0}): raise the locked-memory limit (ulimit -l), or use the epoll driver")]
    Memory(io::Error),
    #[error("cannot set up io_uring: {0}")]
    Uring(io::Error),
    #[error("cannot set up epoll: {0}")]
    Epoll(io::Error),
}

impl DriverError {
    pub(super) fn missing(what: &'static str, since: &'static str) -> Self {
        let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        let kernel = if kernel.is_empty() { "of unknown version" } else { kernel.trim() };
        DriverError::Missing { what, since, kernel: kernel.to_owned() }
    }

    pub(super) fn setup(error: io::Error) -> Self {
        match error.raw_os_error() {
            Some(libc::ENOSYS) => DriverError::missing("io_uring", "5.1"),
            Some(libc::EPERM | libc::EACCES) => DriverError::Forbidden { source: error },
            Some(libc::ENOMEM) => DriverError::Memory(error),
            _ => DriverError::Uring(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_say_what_to_do() {
        let text = |code| DriverError::setup(io::Error::from_raw_os_error(code)).to_string();
        assert!(text(libc::ENOSYS).contains("lacks io_uring, added in Linux 5.1"), "{}", text(libc::ENOSYS));
        assert!(text(libc::EPERM).contains("kernel.io_uring_disabled"));
        assert!(text(libc::ENOMEM).contains("ulimit -l"));
        assert!(text(libc::EIO).contains("cannot set up io_uring"));
    }
}
