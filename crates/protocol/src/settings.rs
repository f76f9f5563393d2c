//! Settings of a connection, and what the handshake reveals about its peer.

use std::time::Duration;

use super::limits::{CHALLENGE, Limits};
use super::secret::Secret;

/// Names, limits and timeouts of one side.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Own task, e.g. `/job:ps/replica:0/task:0`.
    pub task: String,
    /// Protocol string of the TensorFlow server, e.g. `grpc++`. Both sides must have the same.
    pub protocol: String,
    /// A random number that the task drew when it started.
    pub incarnation: u64,
    /// Both sides must have the same, unless one of them is empty.
    pub cluster_id: String,
    /// Client only: the task to talk to. `None`: any.
    pub expected_task: Option<String>,
    /// Client only: where the server can reach this task. May be empty.
    pub address: String,
    /// Server only: where the task is now, if another process has it. May be empty.
    pub moved_to: String,
    /// Both sides must have the same, or both none.
    pub secret: Option<Secret>,
    /// Optional features that this side understands, as bits …
    pub features: u64,
    /// … and those that it requires.
    pub required_features: u64,
    /// Limits for the peer.
    pub limits: Limits,
    /// After this time without received bytes, send PING …
    pub keepalive_interval: Duration,
    /// … and end the connection if nothing arrives within this time.
    pub keepalive_timeout: Duration,
    pub handshake_timeout: Duration,
    /// Fresh random bytes for this one connection.
    pub challenge: [u8; CHALLENGE],
}

impl Settings {
    /// Settings with default timeouts and limits.
    pub fn new(task: &str, protocol: &str, incarnation: u64, challenge: [u8; CHALLENGE]) -> Self {
        Settings {
            task: task.to_owned(),
            protocol: protocol.to_owned(),
            incarnation,
            cluster_id: String::new(),
            expected_task: None,
            address: String::new(),
            moved_to: String::new(),
            secret: None,
            features: 0,
            required_features: 0,
            limits: Limits::default(),
            keepalive_interval: Duration::from_secs(1),
            keepalive_timeout: Duration::from_secs(3),
            handshake_timeout: Duration::from_secs(10),
            challenge,
        }
    }
}

/// What a client says of itself, before the server has accepted it.
#[derive(Clone, Copy, Debug)]
pub struct Claim<'a> {
    pub task: &'a str,
    pub incarnation: u64,
    /// Where it can be reached; may be empty.
    pub address: &'a str,
}

/// The peer, as the handshake described it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerInfo {
    pub task: String,
    pub protocol: String,
    pub incarnation: u64,
    pub cluster_id: String,
    /// Features that both sides understand.
    pub features: u64,
    /// The peer's limits for us.
    pub limits: Limits,
    /// Where its task is now, if another process has it; empty: here.
    pub moved_to: String,
    /// Both sides proved that they have the shared secret.
    pub authenticated: bool,
}
