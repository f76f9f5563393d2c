//! TLS of connections: how it begins, handshakes, and received records.

use std::time::{Duration, Instant};

use super::conn::Side;
use super::{LinkEvent, Links, mark};
use crate::api::Host;
use crate::tls::{ClientKind, Opened, Session, Subject};
use starwire_net::transport::SocketAddress;
use starwire_protocol::{Failure, Sniff, code};

const PLAIN_TASK: &str = "this port requires TLS, and the connection began without: set STARWIRE_TLS_CERT, STARWIRE_TLS_KEY and STARWIRE_TLS_CA for all tasks of the cluster";

impl<H: Host> Links<H> {
    /// Returns the session of a connection to this address, or `None` for a connection without TLS.
    pub(super) fn session_to(&self, address: &SocketAddress) -> Result<Option<Session>, String> {
        // On this host the kernel says who the peer is.
        let SocketAddress::Inet(address) = address else { return Ok(None) };
        let Some(credentials) = self.shared.credentials() else { return Ok(None) };
        Session::client(credentials.client.clone(), address.ip().to_canonical().into()).map(Some)
    }

    /// Returns the session of a connection that was accepted over TCP.
    pub(super) fn session_from(&self) -> Option<Session> {
        self.shared.credentials().map(|credentials| Session::server(credentials.server.clone()))
    }

    /// Goes on with a handshake after [`LinkEvent::Hello`].
    pub fn admit(&mut self, key: u64) {
        match self.conns.get_mut(&key).and_then(|conn| conn.tls.as_mut()).map_or(Ok(()), |tls| tls.admit()) {
            Ok(()) => self.receive_on(key),
            Err(why) => self.tls_failed(key, why),
        }
    }

    /// Processes buffered TLS records. Returns true if the caller may start another receive.
    pub(super) fn open_records(&mut self, key: u64) -> bool {
        loop {
            let Some(conn) = self.conns.get_mut(&key) else { return false };
            if conn.receiving || conn.closing.is_some() {
                return !conn.receiving;
            }
            let Some(tls) = conn.tls.as_mut().filter(|tls| tls.receives) else { return true };
            match tls.client_kind() {
                Ok(ClientKind::Task) => {}
                Ok(ClientKind::Hello) => {
                    self.events.push_back(LinkEvent::Hello(key));
                    return false;
                }
                Ok(ClientKind::Unknown) => return true,
                Ok(ClientKind::Http) => {
                    self.hand_over_http(key);
                    return false;
                }
                Ok(ClientKind::Plain(sniff)) => {
                    self.refuse_plaintext(key, sniff);
                    return false;
                }
                Err(why) => {
                    self.tls_failed(key, why);
                    return false;
                }
            }
            let was_established = tls.is_established();
            let begun = (!was_established && matches!(conn.side, Side::Server)).then(Instant::now);
            let opened = conn.open(&mut self.discard);
            let is_established = conn.tls.as_ref().is_some_and(|tls| tls.is_established());
            if let (Some(begun), Some(tls)) = (begun, conn.tls.as_mut()) {
                // In simulation it must not depend on the machine, or a seed would not do the same each time.
                let took = if cfg!(test) { Duration::from_micros(100) } else { begun.elapsed() };
                tls.handshake_took += took;
                self.events.push_back(LinkEvent::HandshakeTook(took));
            }
            if conn.has_unsent() || (is_established && !was_established) {
                mark(&mut self.dirty, conn);
            }
            if is_established && !was_established && !self.tls_established(key) {
                return false;
            }
            match opened {
                Ok(Opened::Bytes(n)) if self.took(key, n) => {}
                Ok(Opened::Bytes(_)) => return false,
                Ok(Opened::Nothing) => return true,
                Ok(Opened::End) => {
                    self.ended(key);
                    return false;
                }
                Err(why) => {
                    self.tls_failed(key, why);
                    return false;
                }
            }
        }
    }

    /// The peer's certificate was verified. A server must have the name of the task that was dialled; what a client may
    /// call itself is checked when it says so. False: the connection ends.
    fn tls_established(&mut self, key: u64) -> bool {
        self.dispatch.metrics.tls_handshakes.add(1);
        let Some(conn) = self.conns.get_mut(&key) else { return false };
        let certificate = conn.tls.as_ref().and_then(|tls| tls.certificate()).cloned();
        let Side::Client { peer, .. } = &conn.side else {
            let shared = self.shared.clone();
            let took = conn.tls.as_ref().map_or(Duration::ZERO, |tls| tls.handshake_took);
            self.events.push_back(LinkEvent::Verified(key, took));
            conn.proto.check_client(Box::new(move |claim| {
                let subject = Subject { task: claim.task, address: shared.config.identity.address_of(claim.task) };
                let proof = shared.config.tls.as_ref().map_or(Ok(()), |t| t.speaks_for(certificate.as_ref(), &subject));
                proof.map_err(|message| Failure { code: code::UNAUTHENTICATED, message })?;
                shared.arrives(key, claim)
            }));
            return true;
        };
        let Some(tls) = &self.shared.config.tls else { return false };
        let subject = Subject { task: &peer.task, address: Some(&peer.grpc_address) };
        match tls.speaks_for(certificate.as_ref(), &subject) {
            Ok(()) => true,
            Err(why) => {
                self.dispatch.metrics.refusals.add(1);
                self.lose(key, code::UNAUTHENTICATED, format!("refused the peer: {why}"));
                false
            }
        }
    }

    /// Refuses a connection that does not begin with TLS. A task is told the reason.
    fn refuse_plaintext(&mut self, key: u64, sniff: Sniff) {
        let Some(conn) = self.conns.get_mut(&key) else { return };
        conn.tls = None;
        let is_task = sniff == Sniff::Starwire;
        if is_task {
            conn.proto.refuse(code::UNAUTHENTICATED, PLAIN_TASK);
        }
        let name = conn.name.clone();
        self.dispatch.metrics.refusals.add(1);
        let what = if is_task { "a starwire task" } else { "unknown" };
        self.log_dropped(&name, &format!("this port requires TLS, and it began without ({what})"));
        self.close_with_reason(key, Failure { code: code::UNAUTHENTICATED, message: PLAIN_TASK.to_owned() });
    }

    /// The handshake failed, or a record was not the peer's.
    fn tls_failed(&mut self, key: u64, why: String) {
        let Some(conn) = self.conns.get_mut(&key) else { return };
        let is_server = matches!(conn.side, Side::Server);
        let code = if conn.peer.is_some() { code::UNAVAILABLE } else { code::UNAUTHENTICATED };
        let name = conn.name.clone();
        self.dispatch.metrics.tls_failures.add(1);
        if is_server {
            self.log_dropped(&name, &why);
        }
        self.close_with_reason(key, Failure { code, message: why });
    }
}
