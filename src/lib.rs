//! starwire: a thread-per-core transport that plugs into stock TensorFlow.
//!
//! This crate is the library that TensorFlow loads: [`ffi`] is the C ABI (`include/starwire.h`), the only door between
//! `cc/` and what is behind it:
//!
//! * [`starwire_engine`]: channels, calls, the control service, metrics, configuration.
//! * [`starwire_protocol`]: the sans-I/O connection state machine (`docs/protocol.md`). Knows neither sockets nor
//!   clocks.
//! * [`starwire_net`]: sockets, RDMA, and the drivers of a reactor (epoll, io_uring).
//! * [`starwire_planner`]: pure graph algorithms: what crosses between tasks together.
//! * [`starwire_executor`]: runs a sub-graph's kernels: lock-free, no TensorFlow in it.

#![deny(unsafe_code)]

#[allow(unsafe_code)]
pub mod ffi;
