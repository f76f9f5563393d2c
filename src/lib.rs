//! starwire: a thread-per-core transport that plugs into stock TensorFlow.
//!
//! The map of the crate, from TensorFlow's side inwards:
//!
//! * [`ffi`]: the C ABI (`include/starwire.h`), the only door between `cc/` and this crate.
//! * [`engine`]: what the C ABI exposes: engines, channels, calls, server-side dispatch; one shard per reactor thread.
//! * [`protocol`]: the sans-I/O connection state machine (`docs/protocol.md`). Knows neither sockets nor clocks.
//! * [`reactor`]: drivers (epoll, io_uring) behind one trait, mailbox, timers, pinning, polling policy.
//! * [`transport`]: sockets and addresses: TCP, unix sockets, peer credentials.
//! * [`executor`]: runs a sub-graph's kernels: lock-free, no TensorFlow in it.
//! * [`config`]: environment variables and `.endpoint_map`, parsed once into types.
//! * [`control`]: the tonic service on the data port (health, stats) and Prometheus' `/metrics`.
//! * [`crowd`]: who makes way when strangers take more than there is room for.
//! * [`metrics`]: counters, gauges and latencies.
//! * [`planner`]: pure graph algorithms: what crosses between tasks together.
//! * [`star`]: what a parameter server keeps for star calls: plans, and values between the calls of a step.

pub mod config;
pub mod control;
pub mod crowd;
pub mod engine;
pub mod executor;
pub mod ffi;
pub mod metrics;
pub mod planner;
pub mod protocol;
pub mod reactor;
pub mod star;
pub mod transport;
