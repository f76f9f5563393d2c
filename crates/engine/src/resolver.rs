//! Finds the addresses of a peer.

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

/// Resolves the host of a channel's peer, which is at `target`. A name is looked up on a separate thread, because name
/// services may block: then this returns `None`, and a [`Command::Addresses`] follows.
pub fn resolve<H: Host>(
    shared: &Arc<Shared<H>>,
    shard: usize,
    channel: u32,
    peer: &Arc<Peer>,
    target: &HostPort,
) -> Option<Result<Vec<SocketAddress>, Failure>> {
    let target = target.clone();
    if let Ok(ip) = target.host.parse() {
        return Some(Ok(candidates(&shared.config, peer, vec![SocketAddr::new(ip, target.port)])));
    }
    let (shared, host, peer) = (shared.clone(), target.host.clone(), peer.clone());
    let slot = match peer.has_joined.then(Slot::take) {
        Some(None) => {
            let message = format!("cannot look up {host}: {MOST_JOINED} look-ups of tasks that joined have not ended");
            return Some(Err(Failure { code: code::UNAVAILABLE, message }));
        }
        slot => slot.flatten(),
    };
    let thread = std::thread::Builder::new().name("starwire-names".into()).spawn(move || {
        let _slot = slot;
        // Keep off the CPU of a pinned reactor; a failure only costs time.
        let _ = shared.topology.as_ref().map(Topology::unpin_current_thread);
        let failure =
            |error| Failure { code: code::UNAVAILABLE, message: format!("cannot look up {}: {error}", target.host) };
        let found = target.resolve().map_err(failure);
        let result = found.map(|addresses| candidates(&shared.config, &peer, addresses));
        shared.send(shard, Command::Addresses { channel, result });
    });
    let error = thread.err()?;
    let message = format!("cannot start a thread to look up {host}: {error}");
    Some(Err(Failure { code: code::RESOURCE_EXHAUSTED, message }))
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
