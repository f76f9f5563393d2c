//! The control service on the data port: gRPC health, statistics, Prometheus' `/metrics`, and a page for people.
//!
//! A reactor that finds HTTP on a new connection hands the socket over, with the bytes it has read. One small thread
//! serves all of them; it starts with the first. Everything here is read-only. If the port is the task's only one, the
//! thread also passes clients of TensorFlow's gRPC on to it.

mod activity;
mod authority;
pub(crate) mod grpc_proxy;
mod handshakes;
mod health;
mod http;
pub mod proto;
mod service;
mod slots;
mod stats;
mod stream;

use std::time::Duration;

pub use crate::config::ControlAccess;
use crate::config::Setting;
use crate::metrics::{ConnectionFacts, PeerFacts, Sample};
pub use http::router;
pub use service::{Behind, ControlError, ControlService, Guard};

/// The service's view of its server. Called on the control thread; must return at once.
pub trait ControlState: Send + Sync + 'static {
    /// A client was passed on to TensorFlow's gRPC.
    fn passed_on(&self);
    /// A TLS handshake has to wait for its part of the time.
    fn handshake_delayed(&self);
    /// A client was sent away.
    fn refused(&self, client: &str, why: &ControlError);
    /// Whether a request may be for this host, with or without a port.
    fn answers_to(&self, authority: &str) -> bool;
    fn server(&self) -> ServerFacts;
    fn metrics(&self) -> Vec<Sample>;
    fn connections(&self) -> Vec<ConnectionFacts>;
    fn peers(&self) -> Vec<PeerFacts>;
    fn settings(&self) -> Vec<Setting>;
}

#[derive(Clone, Debug, Default)]
pub struct ServerFacts {
    pub protocol: String,
    pub task: String,
    pub incarnation: u64,
    pub banner: String,
    pub uptime: Duration,
    /// Another process has the task now, at this address.
    pub moved_to: Option<String>,
    /// With TLS: when the own certificate ends, in seconds of Unix time.
    pub certificate_ends: Option<u64>,
}

/// HttpLimits for clients, which have proved nothing.
#[derive(Clone, Copy, Debug)]
pub struct HttpLimits {
    /// Connections from other hosts …
    pub connections: usize,
    /// … and from this one. Beyond them, the source with the most connections loses its oldest.
    pub local: usize,
    /// Bytes of one request's header.
    pub header: u32,
    /// A silent connection is closed after this time, and one without a request after one to two times this.
    pub idle: Duration,
    /// An HTTP/2 client has to answer a ping within this time.
    pub pong: Duration,
}

impl Default for HttpLimits {
    fn default() -> Self {
        Self {
            connections: 64,
            local: 16,
            header: 16 << 10,
            idle: Duration::from_secs(10),
            pong: Duration::from_secs(5),
        }
    }
}
