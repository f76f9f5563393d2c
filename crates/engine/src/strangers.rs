//! Strangers: how many there may be, and which one loses its place when there are too many.
//!
//! Tasks on this host connect over the unix socket, which admits only processes of the same user. They are counted
//! separately, so that no one on the network can take their places.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;

use crate::command::Door;
use crate::conn::{Farewell, Role};
use crate::crowd::{Crowd, Source};
use crate::host::{Host, Level};
use crate::shard::{LAST_WORD, Shard};
use starwire_net::transport::{SocketAddress, descriptors, tcp, unix};
use starwire_protocol::{Connection, Failure, code};

/// Most strangers of a server, through each of its listeners …
const MOST: usize = 4096;
/// … but no more than this part of the descriptors that the process may have, as sessions and files need some as well …
const SHARE_OF_DESCRIPTORS: usize = 4;
/// … and no fewer than this on each reactor.
const LEAST: usize = 16;

pub struct Strangers {
    tcp: Crowd<u64>,
    unix: Crowd<u64>,
    /// Those that have lost their places and are still being told.
    sent_away: usize,
}

impl Strangers {
    /// For one of `reactors` reactors.
    pub fn new(reactors: usize) -> Self {
        let all = MOST.min(descriptors::allowed() / SHARE_OF_DESCRIPTORS);
        let limit = (all / reactors.max(1)).max(LEAST);
        Self { tcp: Crowd::new(limit), unix: Crowd::new(limit), sent_away: 0 }
    }

    /// It has completed the handshake, or is gone.
    pub fn leave(&mut self, key: u64) {
        if !self.tcp.leave(key) {
            self.unix.leave(key);
        }
    }
}

impl<H: Host> Shard<H> {
    /// Takes over a socket that a listener of any reactor has accepted.
    pub(crate) fn adopt(&mut self, fd: OwnedFd, door: Door, now: Instant) {
        if self.is_stopping() {
            return;
        }
        let address = if door == Door::Tcp { tcp::peer_address(fd.as_fd()).ok().flatten() } else { None };
        let (name, source) = match address {
            Some(SocketAddress::Inet(address)) => (address.to_string(), Source::of_ip(address.ip())),
            _ => ("a local process".to_string(), Source::Unknown),
        };
        let checked = match door {
            Door::Unix => unix::check_peer(fd.as_fd()).map(Some),
            Door::Tcp => tcp::configure(&fd, &self.shared.tcp_options()).map(|()| None),
        };
        let local_peer = match checked {
            Ok(peer) => peer,
            Err(error) => return self.log_offender(&name, &error.to_string(), now),
        };
        let source = local_peer.map_or(source, |peer| Source::Process(peer.pid));
        let mut settings = self.shared.settings_for_peer();
        if door == Door::Tcp {
            self.offer_pairs(&mut settings, true);
        } else {
            self.offer_loans(&mut settings);
        }
        let proto = Connection::server(settings, now);
        let key = match self.driver.register(fd) {
            Ok(token) => self.add_conn(token, Role::Server, proto, name),
            Err(error) => {
                if self.shared.offenders.is_news("register", now) {
                    let line = format!("starwire: cannot serve {name}: {error} (repeats are suppressed for a minute)");
                    self.shared.host.log(Level::Warning, &line);
                }
                return;
            }
        };
        if door == Door::Tcp {
            let session = self.session_from().map(Box::new);
            if let Some(conn) = self.conns.get_mut(&key) {
                conn.tls = session;
            }
        }
        let crowd = if door == Door::Tcp { &mut self.strangers.tcp } else { &mut self.strangers.unix };
        if let Some(other) = crowd.enter(key, source) {
            self.send_away(other, now);
        }
        if let Some(peer) = local_peer {
            self.met_local_peer(key, peer.pid);
        }
        self.arm(key);
        self.receive_on(key);
    }

    /// Its place is needed. It may be a slow member, so it is told to try again.
    fn send_away(&mut self, key: u64, now: Instant) {
        let Some(conn) = self.conns.get_mut(&key) else { return };
        let name = conn.name.clone();
        self.delivery.metrics.strangers_dropped.add(1);
        self.log_offender(&name, "it had not completed the handshake, and too many connections have not", now);
        let Some(conn) = self.conns.get_mut(&key).filter(|conn| conn.closing.is_none()) else { return };
        // Who has not proved that it knows the secret is not told whose port this is.
        let who = if self.shared.config.secret.is_some() { "this task" } else { &self.shared.config.identity.task };
        let reason = format!("{who} has too many connections that have not completed the handshake: try again");
        if self.strangers.sent_away >= self.strangers.tcp.limit() {
            return self.lose(key, code::UNAVAILABLE, reason);
        }
        conn.proto.refuse(code::UNAVAILABLE, &reason);
        conn.closing = Some(Failure { code: code::UNAVAILABLE, message: reason });
        conn.farewell = Some(Farewell::default());
        conn.sent_away = true;
        self.strangers.sent_away += 1;
        self.rearm(key, now + LAST_WORD);
        self.take_leave(key);
    }

    /// A connection that never completed the handshake was closed.
    pub(crate) fn stranger_gone(&mut self, key: u64, sent_away: bool) {
        self.strangers.leave(key);
        self.strangers.sent_away -= usize::from(sent_away);
    }
}
