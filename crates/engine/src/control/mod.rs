//! The control service on the data port: gRPC health, statistics, Prometheus' `/metrics`.
//!
//! A reactor that finds HTTP on a new connection hands the socket over, with the bytes it has read, and is done with
//! it. One small thread of its own serves all of them; it is started with the first. Everything here only reads.

mod activity;
mod health;
mod http;
mod places;
pub mod proto;
mod service;
mod stats;
mod stream;

use std::time::Duration;

pub use crate::config::ControlAccess;
use crate::config::Setting;
use crate::metrics::{ConnectionFacts, Sample};
pub use http::router;
pub use service::{ControlError, ControlService};

/// What the service can ask its server. Called on the control thread; must answer at once.
pub trait ControlState: Send + Sync + 'static {
    fn server(&self) -> ServerFacts;
    /// `None`: switched off by the operator.
    fn metrics(&self) -> Option<Vec<Sample>>;
    fn connections(&self) -> Vec<ConnectionFacts>;
    fn settings(&self) -> Vec<Setting>;
}

#[derive(Clone, Debug, Default)]
pub struct ServerFacts {
    pub protocol: String,
    pub task: String,
    pub incarnation: u64,
    pub banner: String,
    pub uptime: Duration,
}

/// Bounds on what strangers can take.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Of other hosts …
    pub connections: usize,
    /// … and of this one. Beyond them, the source with most connections loses its oldest.
    pub local: usize,
    /// Bytes of one request's header.
    pub header: u32,
    /// A connection that says nothing for so long is closed, and one without a request between one and two times as
    /// long.
    pub idle: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self { connections: 64, local: 16, header: 16 << 10, idle: Duration::from_secs(10) }
    }
}
