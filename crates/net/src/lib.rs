//! Networking below the protocol.
//!
//! * [`transport`]: sockets and addresses: TCP, unix sockets, peer credentials, RDMA.
//! * [`reactor`]: drivers (epoll, io_uring, RDMA beside either) behind one trait, mailbox, timers, pinning, polling
//!   policy.

#![deny(unsafe_code)]

#[allow(unsafe_code)]
pub mod reactor;
#[allow(unsafe_code)]
pub mod transport;
