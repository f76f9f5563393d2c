//! Peers: how a channel finds its task and connects, once and again, and which requests wait meanwhile. No I/O; time
//! is an argument.
//!
//! After each input of a [`Channel`], the caller takes actions ([`Do`]) with [`Peers::poll`] and carries them out in
//! order. A request starts at once on [`Channel::connection`], if there is one; only others are submitted.

mod channel;
#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::api::Level;
use crate::config::DataAddress;
use crate::keys::NumberMap;
pub use channel::Channel;
use starwire_net::reactor::timers::Timers;
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

/// The channels of a reactor, by number.
pub struct Peers<R> {
    channels: NumberMap<u32, Channel<R>>,
    timers: Timers<u32>,
    /// Channels that had an input since their last action was taken.
    changed: VecDeque<u32>,
}

impl<R> Default for Peers<R> {
    fn default() -> Self {
        Self { channels: NumberMap::default(), timers: Timers::default(), changed: VecDeque::new() }
    }
}

impl<R> Peers<R> {
    pub fn open(&mut self, channel: u32, peer: Arc<Peer>, connect_timeout: Duration, seed: u64) {
        self.channels.insert(channel, Channel::new(peer, connect_timeout, seed));
    }

    pub fn get(&self, channel: u32) -> Option<&Channel<R>> {
        self.channels.get(&channel)
    }

    /// Gives a channel an input, if it is still open.
    pub fn tell(&mut self, channel: u32, input: impl FnOnce(&mut Channel<R>)) {
        if let Some(found) = self.channels.get_mut(&channel) {
            input(found);
            self.changed.push_back(channel);
        }
    }

    /// Returns the next action, and its channel.
    pub fn poll(&mut self) -> Option<(u32, Do<R>)> {
        while let Some(channel) = self.changed.front().copied() {
            if let Some(action) = self.channels.get_mut(&channel).and_then(Channel::poll) {
                return Some((channel, action));
            }
            self.changed.pop_front();
        }
        None
    }

    /// Carries out [`Do::WakeAt`].
    pub fn wake_at(&mut self, channel: u32, at: Instant) {
        self.timers.start(at, channel);
    }

    /// Returns when [`Peers::tick`] has something to do.
    pub fn next_due(&mut self) -> Option<Instant> {
        self.timers.next_due()
    }

    pub fn tick(&mut self, now: Instant) {
        while let Some(channel) = self.timers.pop_due(now) {
            self.tell(channel, |channel| channel.tick(now));
        }
    }

    /// Ends all requests that wait, and takes no more.
    pub fn stop(&mut self, now: Instant) {
        for (number, channel) in &mut self.channels {
            channel.stop(now);
            self.changed.push_back(*number);
        }
    }

    /// Closes a channel.
    pub fn remove(&mut self, channel: u32) {
        self.channels.remove(&channel);
    }

    pub fn clear(&mut self) {
        self.channels.clear();
    }
}

/// Unix sockets are derived from TCP addresses: they may not exist, or belong to another server.
pub fn is_guess(address: &SocketAddress) -> bool {
    matches!(address, SocketAddress::Unix(_))
}
