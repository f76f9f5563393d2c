//! starwire: a thread-per-core transport that plugs into stock TensorFlow.
//!
//! The map of the crate, from TensorFlow's side inwards:
//!
//! * [`ffi`]: the C ABI (`include/starwire.h`), the only door between `cc/` and this crate.
//! * [`engine`]: what the C ABI exposes: engines, channels, calls, server-side dispatch; one shard per reactor thread.
//! * [`config`]: environment variables and `.endpoint_map`, parsed once into types.
//! * [`control`]: the tonic service on the data port (health, stats) and Prometheus' `/metrics`.
//! * [`crowd`]: who makes way when strangers take more than there is room for.
//! * [`metrics`]: counters, gauges and latencies.
//! * [`star`]: what a parameter server keeps for star calls: plans, and values between the calls of a step.
//!
//! Below it, crates that know nothing of it or of each other:
//!
//! * [`starwire_protocol`]: the sans-I/O connection state machine (`docs/protocol.md`). Knows neither sockets nor
//!   clocks.
//! * [`starwire_net`]: sockets, RDMA, and the drivers of a reactor (epoll, io_uring).
//! * [`starwire_planner`]: pure graph algorithms: what crosses between tasks together.
//! * [`starwire_executor`]: runs a sub-graph's kernels: lock-free, no TensorFlow in it.

#![deny(unsafe_code)]

pub mod config;
pub mod control;
pub mod crowd;
pub mod engine;
#[allow(unsafe_code)]
pub mod ffi;
pub mod metrics;
pub mod star;
