//! Networking below the protocol.
//!
//! * [`transport`]: sockets and addresses: TCP, unix sockets, peer credentials, RDMA.
//! * [`reactor`]: drivers (epoll, io_uring, RDMA beside either) behind one trait, mailbox, timers, pinning, polling
//!   policy.

#![cfg_attr(
    test,
    allow(
        clippy::unwrap_used,
        clippy::cast_possible_wrap,
        clippy::print_stderr,
        reason = "a test may panic, and its numbers are small"
    )
)]
#![deny(unsafe_code)]

#[allow(unsafe_code)]
pub mod reactor;
#[allow(unsafe_code)]
pub mod transport;
