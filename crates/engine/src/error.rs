//! Why an engine does not start or a channel does not open.

use std::io;

use crate::config::ConfigError;
use starwire_net::reactor::error::DriverError;
use starwire_net::transport::TransportError;
use starwire_net::transport::verbs::VerbsError;
use starwire_state::StateError;

#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    #[error("starwire: {0}")]
    Config(#[from] ConfigError),
    #[error("starwire: data port: {0}; choose another with STARWIRE_PORT_OFFSET or .endpoint_map")]
    Transport(#[from] TransportError),
    #[error(
        "starwire: {0}; with STARWIRE_PORTS=one the port is the one of the ClusterSpec, and STARWIRE_BIND may choose the address"
    )]
    OnePort(TransportError),
    #[error(
        "starwire: found no directory for the private socket of TensorFlow's gRPC server; TMPDIR names another ({0})"
    )]
    NoPrivateSocket(String),
    #[error("starwire: TensorFlow's gRPC server does not listen on its private socket: {0}")]
    GrpcSocket(io::Error),
    #[error("starwire: cannot listen on 127.0.0.1 for TensorFlow's gRPC clients of this process: {0}")]
    TunnelListener(io::Error),
    #[error("starwire: data port: no address to listen on; set STARWIRE_BIND")]
    NoAddress,
    #[error("starwire: cannot start reactor thread {index}: {source}")]
    Thread { index: usize, source: io::Error },
    #[error("starwire: reactor {index}: {source} (STARWIRE_DRIVER selects the driver)")]
    Driver { index: usize, source: DriverError },
    #[error("starwire: {0}; set STARWIRE_VERBS_FALLBACK=true to fall back to TCP")]
    Verbs(#[from] VerbsError),
    #[error("starwire: reactor {index} ended during start-up")]
    Died { index: usize },
    #[error("starwire: this process was forked from one that runs a server: create the server after the fork")]
    Forked,
    #[error("starwire: too many peers for one server")]
    TooMany,
    #[error("starwire: STARWIRE_STATE: {0}")]
    State(#[from] StateError),
    #[error("starwire: STARWIRE_STATE_FROM: {0}")]
    TakeOver(String),
    #[error("starwire: cannot start the thread that writes the state: {0}")]
    StateThread(io::Error),
    #[error("starwire: {0} is not in this server's ClusterSpec, and has not joined")]
    NotJoined(String),
}

impl EngineError {
    /// As a tensorflow::error::Code.
    pub fn code(&self) -> i32 {
        match self {
            Self::Config(_) => 3,
            Self::Transport(_)
            | Self::OnePort(_)
            | Self::TunnelListener(_)
            | Self::NoAddress
            | Self::StateThread(_)
            | Self::Thread { .. }
            | Self::Driver { .. } => 14,
            Self::Forked | Self::Verbs(_) | Self::NoPrivateSocket(_) | Self::State(_) | Self::TakeOver(_) => 9,
            Self::Died { .. } | Self::GrpcSocket(_) => 13,
            Self::TooMany => 8,
            Self::NotJoined(_) => 5,
        }
    }
}
