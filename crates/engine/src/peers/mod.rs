//! Peers: how a channel finds its task and connects, once and again, and which requests wait meanwhile. No I/O; time
//! is an argument.
//!
//! After each input of a [`Channel`], the caller takes actions ([`Do`]) with [`Channel::poll`] and carries them out in
//! order. A request starts at once on [`Channel::connection`], if there is one; only others are submitted.

mod channel;
#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::api::Level;
use crate::config::DataAddress;
pub use channel::Channel;
use starwire_net::transport::SocketAddress;

/// The task at the other end of a channel.
pub struct Peer {
    /// "/job:ps/replica:0/task:0"
    pub task: String,
    /// Its entry in the ClusterSpec, for messages.
    pub grpc_address: String,
    pub data: DataAddress,
    /// It is not in the ClusterSpec, but has joined: the name that it gave is all that identifies it.
    pub has_joined: bool,
}

/// A request that waits for a connection.
#[derive(Debug, PartialEq)]
pub struct Waiting<R> {
    pub id: u64,
    pub request: R,
    pub deadline: Option<Instant>,
    pub wait_for_ready: bool,
}

/// What the caller has to do for a channel.
#[derive(Debug, PartialEq)]
pub enum Do<R> {
    /// Look up the peer's addresses; [`Channel::resolved`] follows.
    Resolve,
    /// Connect; [`Channel::connecting`] follows at once.
    Connect {
        address: SocketAddress,
        /// RDMA has not failed with this peer.
        with_pairs: bool,
    },
    /// Close a connection for this reason; [`Channel::lost`] follows.
    Close(u64, &'static str),
    /// A connection is ready.
    Connected {
        conn: u64,
        /// Since the first attempt.
        after: Duration,
        /// This incarnation of the peer was not met before.
        is_new: bool,
    },
    /// Start requests on an open connection.
    Start(u64, VecDeque<Waiting<R>>),
    End {
        requests: VecDeque<Waiting<R>>,
        code: i32,
        message: String,
    },
    /// Call [`Channel::tick`] then.
    WakeAt(Instant),
    Log(Level, String),
    CountFailedAttempt,
    /// RDMA does not work with the peer.
    CountFallback,
}

/// How far a connection had come when it was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    Connect,
    Handshake,
    /// To RDMA. The same address may work without.
    Migration,
}

/// Unix sockets are derived from TCP addresses: they may not exist, or belong to another server.
pub fn is_guess(address: &SocketAddress) -> bool {
    matches!(address, SocketAddress::Unix(_))
}
