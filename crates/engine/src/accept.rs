//! Accepted connections: their registration, and the decisions of [`Admission`](crate::admission) carried out.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;

use crate::admission::{Evicted, Handshake, Listener, Next, Source};
use crate::api::{Host, Level};
use crate::conn::{CLOSE_TIMEOUT, Drain, Side};
use crate::shard::{Shard, TimerKey};
use starwire_net::transport::{SocketAddress, descriptors, tcp, unix};
use starwire_protocol::{Connection, Failure, code};

/// The most unauthenticated connections of a server, through each kind of listener …
const MOST: usize = 4096;
/// … but no more than this part of the descriptors that the process may have, as sessions and files need some as well …
const SHARE_OF_DESCRIPTORS: usize = 4;
/// … and no fewer than this on each reactor.
const LEAST: usize = 16;

/// The most unauthenticated connections of one of `reactors` reactors, through each kind of listener.
pub fn unauthenticated_limit(reactors: usize) -> usize {
    let all = MOST.min(descriptors::allowed() / SHARE_OF_DESCRIPTORS);
    (all / reactors.max(1)).max(LEAST)
}

impl<H: Host> Shard<H> {
    /// Takes over a socket that a listener of any reactor has accepted.
    pub(crate) fn adopt(&mut self, fd: OwnedFd, listener: Listener, now: Instant) {
        if self.is_stopping() {
            return;
        }
        let address = if listener == Listener::Tcp { tcp::peer_address(fd.as_fd()).ok().flatten() } else { None };
        let (name, source) = match address {
            Some(SocketAddress::Inet(address)) => (address.to_string(), Source::of_ip(address.ip())),
            _ => ("a local process".to_string(), Source::Unknown),
        };
        let checked = match listener {
            Listener::Unix => unix::check_peer(fd.as_fd()).map(Some),
            Listener::Tcp => tcp::configure(&fd, &self.shared.tcp_options()).map(|()| None),
        };
        let local_peer = match checked {
            Ok(peer) => peer,
            Err(error) => return self.log_dropped(&name, &error.to_string(), now),
        };
        let source = local_peer.map_or(source, |peer| Source::Process(peer.pid));
        let mut settings = self.shared.settings_for_peer();
        if listener == Listener::Tcp {
            self.offer_pairs(&mut settings, true);
        } else {
            self.offer_loans(&mut settings);
        }
        let proto = Connection::server(settings, now);
        let key = match self.driver.register(fd) {
            Ok(token) => self.add_conn(token, Side::Server, proto, name),
            Err(error) => {
                if self.shared.log_limiter.allows("register", now) {
                    let line = format!("starwire: cannot serve {name}: {error} (repeats are suppressed for a minute)");
                    self.shared.host.log(Level::Warning, &line);
                }
                return;
            }
        };
        if listener == Listener::Tcp {
            let session = self.session_from().map(Box::new);
            if let Some(conn) = self.conns.get_mut(&key) {
                conn.tls = session;
            }
        }
        if let Some(conn) = self.conns.get_mut(&key) {
            let shared = self.shared.clone();
            // Over TLS, another check replaces this one.
            conn.proto.check_client(Box::new(move |claim| shared.arrives(key, claim)));
        }
        if let Some(evicted) = self.admission.arrived(key, listener, source) {
            self.evict(evicted, now);
        }
        if let Some(peer) = local_peer {
            self.met_local_peer(key, peer.pid);
        }
        self.arm(key);
        self.receive_on(key);
    }

    /// The ClientHello of a task has arrived. Returns whether the handshake may go on; if not, it is resumed later.
    pub(crate) fn may_handshake(&mut self, key: u64) -> bool {
        match self.admission.handshake(key, self.dispatch.now) {
            Handshake::Proceeds => true,
            Handshake::Waits { is_new, wake_at } => {
                self.dispatch.metrics.tls_handshakes_delayed.add(u64::from(is_new));
                if let Some(at) = wake_at {
                    self.timers.start(at, TimerKey::Handshakes);
                }
                false
            }
        }
    }

    /// Resumes handshakes that wait, as far as the budget goes.
    pub(crate) fn resume_handshakes(&mut self, now: Instant) {
        loop {
            match self.admission.next(now) {
                Next::Resume(key) => self.receive_on(key),
                Next::WakeAt(at) => {
                    self.timers.start(at, TimerKey::Handshakes);
                    return;
                }
                Next::Empty => return,
            }
        }
    }

    /// Closes an evicted connection. It may be a slow peer, so it is told to try again.
    fn evict(&mut self, Evicted { key, drains }: Evicted, now: Instant) {
        let Some(conn) = self.conns.get_mut(&key) else { return };
        let name = conn.name.clone();
        self.dispatch.metrics.unauthenticated_dropped.add(1);
        self.log_dropped(&name, "it had not completed the handshake, and too many connections have not", now);
        let Some(conn) = self.conns.get_mut(&key).filter(|conn| conn.closing.is_none()) else { return };
        // A client that has not proved that it knows the secret is not told whose port this is.
        let who = if self.shared.config.secret.is_some() { "this task" } else { &self.shared.config.identity.task };
        let reason = format!("{who} has too many connections that have not completed the handshake: try again");
        if !drains {
            return self.lose(key, code::UNAVAILABLE, reason);
        }
        conn.proto.refuse(code::UNAVAILABLE, &reason);
        conn.closing = Some(Failure { code: code::UNAVAILABLE, message: reason });
        conn.drain = Some(Drain::default());
        self.rearm(key, now + CLOSE_TIMEOUT);
        self.continue_drain(key);
    }
}
