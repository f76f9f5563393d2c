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
        clippy::cast_sign_loss,
        reason = "a test may panic, and its numbers are small"
    )
)]
#![deny(unsafe_code)]

#[cfg(not(target_pointer_width = "64"))]
compile_error!("starwire runs on 64-bit machines only: a usize holds a u64");

mod admission;
mod api;
mod channel;
mod command;
pub mod config;
pub mod control;
mod engine;
mod error;
mod http_guard;
mod joined;
mod keys;
mod links;
mod log_limiter;
mod measure;
pub mod metrics;
mod observe;
mod peers;
mod port;
#[cfg(test)]
mod random;
mod resolver;
mod shard;
mod shared;
#[cfg(test)]
mod simulation;
mod standby;
pub mod star;
#[allow(unsafe_code)]
mod system;
pub mod tls;
mod tunnel;

pub use api::{
    Buffers, ForeignMemory, Host, InBody, IncomingCall, Level, Op, OutPayload, PendingOp, Piece, RecvRequest, Ticket,
};
pub use channel::Channel;
pub use command::{NewCall, NewRecv};
pub use engine::Engine;
pub use error::EngineError;
pub use port::Port;
pub use standby::take_over;
