//! Why a connection ends. Each error names the side at fault and what an operator needs to know.

use std::time::Duration;

use super::sniff::{Sniff, VERSION};

/// Numbers of `tensorflow::error::Code`.
pub mod code {
    pub const CANCELLED: i32 = 1;
    pub const INVALID_ARGUMENT: i32 = 3;
    pub const DEADLINE_EXCEEDED: i32 = 4;
    pub const PERMISSION_DENIED: i32 = 7;
    pub const RESOURCE_EXHAUSTED: i32 = 8;
    pub const FAILED_PRECONDITION: i32 = 9;
    pub const ABORTED: i32 = 10;
    pub const UNIMPLEMENTED: i32 = 12;
    pub const INTERNAL: i32 = 13;
    pub const UNAVAILABLE: i32 = 14;
    pub const DATA_LOSS: i32 = 15;
    pub const UNAUTHENTICATED: i32 = 16;
}

/// Ends the connection. Afterwards only `poll_transmit` (for a last frame to the peer), `poll_event` and `fail` are of
/// use.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConnectionError {
    /// The first bytes belong to another protocol: HTTP for the control service, or garbage. Nothing was answered;
    /// `Connection::unread` has the bytes.
    #[error("the peer does not speak the starwire protocol ({0})")]
    NotStarwire(Sniff),
    /// The peer sent REFUSE.
    #[error("refused by the peer: {message}")]
    RefusedByPeer { code: i32, message: String },
    /// This side refuses the peer; a REFUSE with this text waits in `poll_transmit`.
    #[error("refused the peer: {message}")]
    Refused { code: i32, message: String },
    /// This side shut down in order; GOODBYE with this reason waits in `poll_transmit`.
    #[error("this side closed the connection: {0}")]
    Left(String),
    /// The peer violated the protocol.
    #[error("protocol violation by the peer: {0}")]
    Protocol(#[from] ProtocolError),
    #[error("the peer has been silent for {} ms (keep-alive timeout)", waited.as_millis())]
    PeerSilent { waited: Duration },
    #[error("the peer did not complete the handshake within {} ms", waited.as_millis())]
    HandshakeTimeout { waited: Duration },
    #[error("received nothing over RDMA within {} ms", waited.as_millis())]
    MoveTimeout { waited: Duration },
    /// The owner of the connection used it wrongly.
    #[error("starwire internal error: {0}")]
    Misuse(&'static str),
}

impl ConnectionError {
    /// The code with which operations in flight should end.
    pub fn code(&self) -> i32 {
        match self {
            ConnectionError::RefusedByPeer { code, .. } | ConnectionError::Refused { code, .. } => *code,
            ConnectionError::NotStarwire(_) | ConnectionError::Protocol(ProtocolError::Version { .. }) => {
                code::FAILED_PRECONDITION
            }
            ConnectionError::Misuse(_) => code::INTERNAL,
            ConnectionError::Left(_)
            | ConnectionError::Protocol(_)
            | ConnectionError::PeerSilent { .. }
            | ConnectionError::MoveTimeout { .. }
            | ConnectionError::HandshakeTimeout { .. } => code::UNAVAILABLE,
        }
    }
}

/// A violation of the specification by the peer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProtocolError {
    #[error("block {block} does not start with the magic number")]
    Magic { block: u64 },
    #[error(
        "block {block} has version {found} of the starwire protocol, this side speaks version {VERSION}: use the same starwire release on all tasks"
    )]
    Version { block: u64, found: u8 },
    #[error("block {block} has reserved header bits set")]
    Reserved { block: u64 },
    #[error("block {block} carries sequence number {found}")]
    Sequence { block: u64, found: u64 },
    #[error("the checksum of block {block} does not match: damaged in transit")]
    Checksum { block: u64 },
    #[error("block {block} was changed on its way, or was not sent by the peer: its authentication code is wrong")]
    Forged { block: u64 },
    #[error("{what} is {value}, at most {limit} is allowed")]
    TooLarge { what: &'static str, value: u64, limit: u64 },
    #[error("malformed {frame} frame: {why}")]
    Frame { frame: &'static str, why: &'static str },
    #[error("unknown frame kind {kind}")]
    UnknownFrame { kind: u8 },
    #[error("{frame} frame is not allowed {when}")]
    Unexpected { frame: &'static str, when: &'static str },
    #[error("{frame} frame names request {id}, which {why}")]
    BadId { frame: &'static str, id: u64, why: &'static str },
    #[error("block {block} has {bulk} bulk bytes but its DATA frames claim {claimed}")]
    BulkMismatch { block: u64, bulk: u64, claimed: u64 },
    #[error("{what} exceeds the announced limit of {limit}")]
    Window { what: &'static str, limit: u64 },
}
