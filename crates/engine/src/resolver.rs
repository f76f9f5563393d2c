//! From a peer's data address to the addresses of sockets: its host is looked up, and a task on this host has a unix
//! socket as well.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

use crate::api::Host;
use crate::channel::State;
use crate::command::Command;
use crate::config::{DataAddress, HostPort, Shortcut};
use crate::shard::Shard;
use starwire_net::reactor::topology::Topology;
use starwire_net::transport::{SocketAddress, unix};
use starwire_protocol::code;

impl<H: Host> Shard<H> {
    /// Resolves the peer's host on a separate thread, because name services may block, and connects.
    pub(crate) fn look_up(&mut self, number: u32, attempt: u32, now: Instant) {
        let Some(channel) = self.channels.get(&number) else { return };
        let target = channel.shared.data.address().clone();
        if let Some(address) = literal(&target) {
            return self.connect_first(number, vec![address], now);
        }
        let (shared, shard, host) = (self.shared.clone(), self.index, target.host.clone());
        let thread = std::thread::Builder::new().name("starwire-names".into()).spawn(move || {
            // Keep off the CPU of a pinned reactor; a failure only costs time.
            let _ = shared.topology.as_ref().map(Topology::unpin_current_thread);
            let result = target.resolve().map_err(|error| format!("cannot look up {}: {error}", target.host));
            shared.send(shard, Command::Addresses { channel: number, attempt, result });
        });
        if let Err(error) = thread {
            let message = format!("cannot start a thread to look up {host}: {error}");
            self.attempt_failed(number, code::RESOURCE_EXHAUSTED, &message, now);
        }
    }

    pub(crate) fn addresses(
        &mut self,
        number: u32,
        attempt: u32,
        result: Result<Vec<SocketAddr>, String>,
        now: Instant,
    ) {
        let channel = self.channels.get(&number);
        let is_current = channel.is_some_and(|c| c.attempt == attempt && matches!(c.state, State::LookingUp));
        if !is_current || self.is_stopping() {
            return;
        }
        match result {
            Ok(found) => self.connect_first(number, found, now),
            Err(message) => self.attempt_failed(number, code::UNAVAILABLE, &message, now),
        }
    }

    fn connect_first(&mut self, number: u32, found: Vec<SocketAddr>, now: Instant) {
        let Some(channel) = self.channels.get(&number) else { return };
        // A map has the last word on where peers are reached.
        let is_mapped = matches!(channel.shared.data, DataAddress::Mapped(_));
        let takes_shortcut = self.shared.config.unix == Shortcut::Auto && !is_mapped;
        let beside = found.iter().filter(|_| takes_shortcut).flat_map(|address| unix::possibly_beside(*address));
        let mut all: VecDeque<SocketAddress> = beside.collect();
        all.extend(found.into_iter().map(SocketAddress::from));
        self.connect_next(number, all, now);
    }
}

/// Unix sockets are derived from TCP addresses: they may not exist, or belong to another server.
pub fn is_guess(address: &SocketAddress) -> bool {
    matches!(address, SocketAddress::Unix(_))
}

/// The address, unless the target is a name.
fn literal(target: &HostPort) -> Option<SocketAddr> {
    target.host.parse().ok().map(|ip: IpAddr| SocketAddr::new(ip, target.port))
}
