//! The engine of one TensorFlow server: channels to peers, calls, and the dispatch of peers' requests.
//!
//! An [`Engine`] belongs to one server and is generic over its owner, a [`Host`]. It has one shard per reactor thread;
//! a connection stays on one shard, and shards share only a read-only part. Any thread sends commands to a shard
//! through its mailbox; a shard's own callbacks use a thread-local list instead.
//!
//! Beside it: [`config`] (environment variables and `.endpoint_map`, parsed once into types), [`control`] (health,
//! statistics and Prometheus' `/metrics` on the data port), [`metrics`] (counters, gauges and latencies), and [`star`]
//! (what a parameter server keeps for star calls).

#![cfg_attr(
    test,
    allow(
        clippy::unwrap_used,
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        reason = "a test may panic, and its numbers are small"
    )
)]
#![deny(unsafe_code)]

#[cfg(not(target_pointer_width = "64"))]
compile_error!("starwire runs on 64-bit machines only: a usize holds a u64");

mod accept;
mod admission;
mod api;
mod channel;
mod close;
mod command;
pub mod config;
#[allow(unsafe_code)]
mod conn;
pub mod control;
mod dial;
mod dispatch;
mod engine;
mod error;
mod joined;
mod keys;
mod lending;
mod log_limiter;
mod measure;
pub mod metrics;
mod migrate;
mod observe;
mod peers;
mod polling;
mod port;
#[cfg(test)]
mod random;
mod shard;
mod shared;
pub mod star;
#[allow(unsafe_code)]
mod system;
mod timers;
pub mod tls;
mod tls_link;
mod tunnel;

pub use api::{
    Buffers, ForeignMemory, Host, InBody, IncomingCall, Level, Op, OutPayload, PendingOp, Piece, RecvRequest, Ticket,
};
pub use channel::Channel;
pub use command::{NewCall, NewRecv};
pub use engine::Engine;
pub use error::EngineError;
pub use port::Port;
