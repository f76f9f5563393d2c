//! Finds the addresses of a peer.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::api::Host;
use crate::command::Command;
use crate::config::{Config, DataAddress, HostPort, UnixSockets};
use crate::peers::Peer;
use crate::shared::Shared;
use starwire_net::reactor::topology::Topology;
use starwire_net::transport::{SocketAddress, unix};
use starwire_protocol::{Failure, code};

/// A name that is looked up for a channel.
pub struct LookUp<H: Host> {
    pub shared: Arc<Shared<H>>,
    pub shard: usize,
    channel: u32,
    peer: Arc<Peer>,
    pub target: HostPort,
}

impl<H: Host> LookUp<H> {
    /// The name service has answered.
    pub fn end(self, found: io::Result<Vec<SocketAddr>>) {
        let Self { shared, shard, channel, peer, target } = self;
        let failure =
            |error| Failure { code: code::UNAVAILABLE, message: format!("cannot look up {}: {error}", target.host) };
        let result = found.map_err(failure).map(|addresses| candidates(&shared.config, &peer, addresses));
        shared.send(shard, Command::Addresses { channel, result });
    }
}

/// Looks a name up, and ends the look-up later; or says why it cannot.
pub type LookUpName<H> = fn(LookUp<H>) -> Result<(), Failure>;

/// Resolves the host of a channel's peer, which is at `target`. `None`: its name is looked up, and a
/// [`Command::Addresses`] follows.
pub fn resolve<H: Host>(
    shared: &Arc<Shared<H>>,
    shard: usize,
    channel: u32,
    peer: &Arc<Peer>,
    target: &HostPort,
    look_up_name: LookUpName<H>,
) -> Option<Result<Vec<SocketAddress>, Failure>> {
    if let Ok(ip) = target.host.parse() {
        return Some(Ok(candidates(&shared.config, peer, vec![SocketAddr::new(ip, target.port)])));
    }
    let look_up = LookUp { shared: shared.clone(), shard, channel, peer: peer.clone(), target: target.clone() };
    look_up_name(look_up).err().map(Err)
}

/// On a separate thread, because name services may block.
pub fn look_up_in_thread<H: Host>(look_up: LookUp<H>) -> Result<(), Failure> {
    let host = look_up.target.host.clone();
    let slot = match look_up.peer.has_joined.then(Slot::take) {
        Some(None) => {
            let message = format!("cannot look up {host}: {MOST_JOINED} look-ups of tasks that joined have not ended");
            return Err(Failure { code: code::UNAVAILABLE, message });
        }
        slot => slot.flatten(),
    };
    let thread = std::thread::Builder::new().name("starwire-names".into()).spawn(move || {
        let _slot = slot;
        // Keep off the CPU of a pinned reactor; a failure only costs time.
        let _ = look_up.shared.topology.as_ref().map(Topology::unpin_current_thread);
        let found = look_up.target.resolve();
        look_up.end(found);
    });
    let failure = |error| Failure {
        code: code::RESOURCE_EXHAUSTED,
        message: format!("cannot start a thread to look up {host}: {error}"),
    };
    thread.map(drop).map_err(failure)
}

/// Look-ups of tasks that have joined, at the same time. Each may join with a new name each time.
const MOST_JOINED: usize = 32;

struct Slot;

static TAKEN: AtomicUsize = AtomicUsize::new(0);

impl Slot {
    fn take() -> Option<Self> {
        let take = |taken| (taken < MOST_JOINED).then_some(taken + 1);
        // A slot that is made is given back.
        TAKEN.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).ok().map(|_| Self)
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        TAKEN.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The addresses to try: a task on this host has a unix socket as well.
fn candidates(config: &Config, peer: &Peer, found: Vec<SocketAddr>) -> Vec<SocketAddress> {
    // A map has the last word on where peers are reached.
    let takes_shortcut = config.unix != UnixSockets::Off && !matches!(peer.data, DataAddress::Mapped(_));
    let beside = found.iter().filter(|_| takes_shortcut).flat_map(|address| unix::possibly_beside(*address));
    let mut all: Vec<SocketAddress> = beside.collect();
    all.extend(found.into_iter().map(SocketAddress::from));
    all
}
