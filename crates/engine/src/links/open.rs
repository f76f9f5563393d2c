//! How connections begin: those of channels, and those that listeners accept.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use super::conn::{CallMemory, Conn, Side};
use super::{LinkEvent, Links, mark};
use crate::admission::{Evicted, Listener, Source};
use crate::api::{Host, Level};
use crate::command::Command;
use crate::keys::conn_key;
use crate::metrics::{Direction, State};
use crate::peers::{Peer, is_guess};
use starwire_marks::fail_point;
use starwire_net::reactor::driver::Token;
use starwire_net::transport::{SocketAddress, tcp, unix};
use starwire_protocol::{Connection, Failure, code};

impl<H: Host> Links<H> {
    /// Takes a listening socket; accepted connections are spread over all reactors.
    pub fn listen(&mut self, fd: OwnedFd, listener: Listener) -> std::io::Result<()> {
        let token = self.driver.register(fd)?;
        self.driver.accept(token)?;
        self.listeners.push((token, listener));
        Ok(())
    }

    pub fn stop_listening(&mut self) {
        for (token, _) in std::mem::take(&mut self.listeners) {
            self.driver.close(token);
        }
    }

    pub(super) fn accepted(&mut self, listener: Token, result: std::io::Result<OwnedFd>) {
        let Some(kind) = self.listeners.iter().find(|l| l.0 == listener).map(|l| l.1) else { return };
        match result {
            Ok(fd) => {
                fail_point!("a connection is accepted");
                let reactors = self.shared.senders.get().map_or(1, Vec::len);
                let to = self.next_adopter % reactors;
                self.next_adopter = self.next_adopter.wrapping_add(1);
                self.shared.send(to, Command::Adopt { fd, listener: kind });
            }
            // At a limit, every listener of every reactor fails again and again.
            Err(error) if self.shared.log_limiter.allows_event("accept", self.dispatch.now) => {
                self.shared.host.log(
                    Level::Warning,
                    &format!("starwire: cannot accept a connection: {error} (retrying ten times a second; repeats are suppressed for a minute)"),
                );
            }
            Err(_) => {}
        }
    }

    fn add(&mut self, token: Token, side: Side, proto: Connection<CallMemory<H>>, name: String) -> u64 {
        let key = conn_key(self.index, self.next_conn);
        self.next_conn += 1;
        self.tokens.insert(token.0, key);
        let (direction, state) = match side {
            Side::Client { .. } => (Direction::Outgoing, State::Connecting),
            Side::Server => (Direction::Incoming, State::Handshake),
        };
        let entry = self.shared.connections.enter(direction, state, &name, self.index);
        self.conns.insert(key, Box::new(Conn::new(key, token, side, proto, name, entry)));
        key
    }

    /// Begins a connection of a channel. Returns its key.
    pub fn connect(
        &mut self,
        channel: u32,
        peer: &Arc<Peer>,
        address: &SocketAddress,
        with_pairs: bool,
    ) -> Result<u64, String> {
        let config = &self.shared.config;
        // A secret or a certificate proves the name that a peer gives, and the network may lead to another member.
        // Without them, whoever answers at the address is the peer, except on a unix socket: an address that belongs
        // to several hosts leads to the wrong one. A task that has joined chose the address itself.
        let has_proof = config.secret.is_some() || config.tls.is_some();
        let expected = (has_proof || peer.has_joined || is_guess(address)).then(|| peer.task.clone());
        let (fd, guard): (OwnedFd, Option<OwnedFd>) = match address {
            SocketAddress::Inet(inet) => {
                (tcp::socket(*inet, &tcp::TcpOptions::default()).map_err(|e| e.to_string())?, None)
            }
            SocketAddress::Unix(_) => {
                let fd = unix::socket().map_err(|e| e.to_string())?;
                let guard = fd.try_clone().map_err(|e| e.to_string())?;
                (fd, Some(guard))
            }
        };
        let mut settings = self.shared.settings(expected);
        let offered_pairs = guard.is_none() && self.offer_pairs(&mut settings, with_pairs);
        if guard.is_some() {
            self.offer_loans(&mut settings);
        }
        let session = self.session_to(address)?.map(Box::new);
        let proto = Connection::client(settings, self.dispatch.now);
        let token = self.driver.register(fd).map_err(|e| e.to_string())?;
        let side = Side::Client { channel, peer: peer.clone() };
        let key = self.add(token, side, proto, format!("{} at {address}", peer.task));
        if let Some(conn) = self.conns.get_mut(&key) {
            conn.guard = guard;
            conn.tls = session;
            conn.offered_pairs = offered_pairs;
        }
        if let Err(error) = self.driver.connect(token, address) {
            self.conns.remove(&key);
            self.driver.close(token);
            return Err(error.to_string());
        }
        self.arm(key);
        Ok(key)
    }

    pub(super) fn connected(&mut self, key: u64, result: std::io::Result<()>) {
        let Some(conn) = self.conns.get_mut(&key) else { return };
        if conn.closing.is_some() {
            return;
        }
        if let Err(error) = result {
            // Who is not there refuses. Somebody had accepted this one, and it was cut before this thread saw it.
            if error.kind() == std::io::ErrorKind::ConnectionReset {
                starwire_marks::mark!("a connection is cut before its reactor sees it");
                conn.connected = true;
            }
            return self.lose(key, code::UNAVAILABLE, error.to_string());
        }
        // A local peer must run as the same user (or root) before it receives anything.
        if let Some(guard) = conn.guard.take() {
            match unix::check_peer(guard.as_fd()) {
                Ok(peer) => self.met_local_peer(key, peer.pid),
                Err(error) => return self.lose(key, code::UNAVAILABLE, error.to_string()),
            }
        }
        let Some(conn) = self.conns.get_mut(&key) else { return };
        conn.connected = true;
        conn.entry.set_state(State::Handshake);
        mark(&mut self.dirty, conn);
        self.arm(key);
        self.receive_on(key);
    }

    /// Takes over a socket that a listener of any reactor has accepted. Returns its key, and where it comes from.
    pub fn adopt(&mut self, fd: OwnedFd, listener: Listener) -> Option<(u64, Source)> {
        let now = self.dispatch.now;
        let address = if listener == Listener::Tcp { tcp::peer_address(fd.as_fd()).ok().flatten() } else { None };
        let (name, source) = match address {
            Some(SocketAddress::Inet(address)) => (address.to_string(), Source::of_ip(address.ip())),
            _ => ("a local process".to_string(), Source::Unknown),
        };
        let checked = match listener {
            Listener::Unix => unix::check_peer(fd.as_fd()).map(Some),
            Listener::Tcp => tcp::configure(&fd, &tcp::TcpOptions::default()).map(|()| None),
        };
        let local_peer = match checked {
            Ok(peer) => peer,
            Err(error) => {
                self.log_dropped(&name, &error.to_string());
                return None;
            }
        };
        let source = local_peer.map_or(source, |peer| Source::Process(peer.pid));
        let mut settings = self.shared.settings_for_peer();
        if listener == Listener::Tcp {
            self.offer_pairs(&mut settings, true);
        } else {
            self.offer_loans(&mut settings);
        }
        let is_sent_on = !settings.moved_to.is_empty();
        let proto = Connection::server(settings, now);
        let key = match self.driver.register(fd) {
            Ok(token) => self.add(token, Side::Server, proto, name),
            Err(error) => {
                if self.shared.log_limiter.allows_event("register", now) {
                    let line = format!("starwire: cannot serve {name}: {error} (repeats are suppressed for a minute)");
                    self.shared.host.log(Level::Warning, &line);
                }
                return None;
            }
        };
        let session = self.session_from().filter(|_| listener == Listener::Tcp).map(Box::new);
        if let Some(conn) = self.conns.get_mut(&key) {
            conn.is_sent_on = is_sent_on;
            conn.tls = session;
            let shared = self.shared.clone();
            // Over TLS, another check replaces this one.
            conn.proto.check_client(Box::new(move |claim| shared.arrives(key, claim)));
        }
        if let Some(peer) = local_peer {
            self.met_local_peer(key, peer.pid);
        }
        self.arm(key);
        self.receive_on(key);
        Some((key, source))
    }

    /// Closes an evicted connection. It may be a slow peer, so it is told to try again.
    pub fn evict(&mut self, Evicted { key, drains }: Evicted) {
        let Some(conn) = self.conns.get(&key) else { return };
        self.dispatch.metrics.unauthenticated_dropped.add(1);
        self.log_dropped(&conn.name, "it had not completed the handshake, and too many connections have not");
        let Some(conn) = self.conns.get_mut(&key).filter(|conn| conn.closing.is_none()) else { return };
        // A client that has not proved that it knows the secret is not told whose port this is.
        let who = if self.shared.config.secret.is_some() { "this task" } else { &self.shared.config.identity.task };
        let reason = format!("{who} has too many connections that have not completed the handshake: try again");
        if !drains {
            return self.lose(key, code::UNAVAILABLE, reason);
        }
        conn.proto.refuse(code::UNAVAILABLE, &reason);
        self.close_with_reason(key, Failure { code: code::UNAVAILABLE, message: reason });
    }

    /// Hands a connection that speaks HTTP to the control service.
    pub(super) fn hand_over_http(&mut self, key: u64) {
        let Some(token) = self.conns.get(&key).map(|conn| conn.token) else { return };
        let fd = match self.driver.release(token) {
            Ok(fd) => fd,
            // Its memory stays until the driver has closed it.
            Err(error) => {
                return self.lose(key, code::UNAVAILABLE, format!("cannot hand over an HTTP client: {error}"));
            }
        };
        self.events.push_back(LinkEvent::Settled(key));
        self.tokens.remove(&token.0);
        if let Some(conn) = self.conns.remove(&key) {
            self.dispatch.metrics.control_connections.add(1);
            let first = conn.tls.as_ref().map_or(conn.proto.unread(), |tls| tls.received()).to_vec();
            self.shared.serve_http(fd, first, &conn.name, self.dispatch.now);
        }
    }
}
