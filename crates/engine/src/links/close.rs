//! The end of a connection: orderly shutdowns, broken protocols, lost peers.

use std::time::{Duration, Instant};

use super::conn::{CLOSE_TIMEOUT, Drain, Path, Side};
use super::{LinkEvent, Links};
use crate::api::Host;
use crate::config::{Config, Ports};
use crate::peers::Stage;
use crate::tls::NO_TLS;
use starwire_net::reactor::driver::Completion;
use starwire_protocol::{ConnectionError, Failure, Sniff, code};

/// How long an exiting process waits for its last frames to reach the devices of its peers.
const EXIT_PATIENCE: Duration = Duration::from_millis(100);

/// A table of connections with room for no more than this many keeps it.
const SMALL_TABLE: usize = 128;

impl<H: Host> Links<H> {
    /// Shuts all connections down in order.
    pub fn close_all(&mut self) {
        let keys: Vec<u64> = self.conns.keys().copied().collect();
        for key in keys {
            self.close_in_order(key);
        }
    }

    /// Another process has this task, the one at the other end of `new_owner`: peers go there, and so do other copies
    /// of the state.
    pub fn close_moved(&mut self, new_owner: u64) {
        let Some(to) = self.shared.moved_to.get() else { return };
        let own = &self.shared.config.identity.task;
        let others = self.conns.iter().filter(|(key, conn)| **key != new_owner && matches!(conn.side, Side::Server));
        let keys: Vec<u64> = others.map(|(key, _)| *key).collect();
        let why = format!("{own} has moved to {to}");
        keys.into_iter().for_each(|key| self.lose(key, code::UNAVAILABLE, why.clone()));
    }

    /// Forgets what the kernel may still use after `patience`: no operation may outlive its memory.
    pub fn let_go(&mut self, patience: Duration) {
        if !self.conns.is_empty() && !self.driver.quiesce(patience) {
            std::mem::forget(std::mem::take(&mut self.conns));
            std::mem::forget(std::mem::take(&mut self.discard));
        }
    }

    /// Drops all connections, which ends their requests.
    pub fn clear(&mut self) {
        self.conns.clear();
    }

    /// The process is exiting: makes no callbacks and frees nothing, because memory that callbacks own may be gone.
    pub fn freeze(&mut self) {
        self.send_goodbyes();
        std::mem::forget(std::mem::take(&mut self.conns));
        self.dispatch.freeze_star();
    }

    /// Sends GOODBYE when the process exits, to peers with nothing else in flight, which could be memory of others.
    fn send_goodbyes(&mut self) {
        for conn in self.conns.values_mut() {
            let is_quiet = !conn.sending && !conn.has_unsent() && !conn.proto.wants_transmit();
            if is_quiet && conn.peer.is_some() && conn.closing.is_none() {
                conn.proto.leave("the process is exiting");
                // A peer that does not receive it counts a loss.
                let _ = conn.start_send(&mut *self.driver, self.dispatch.now);
            }
        }
        let until = Instant::now() + EXIT_PATIENCE;
        let mut timeout = Duration::ZERO;
        while self.driver.wait(Some(timeout), &mut self.completions).is_ok() {
            for completion in self.completions.drain(..) {
                if let Completion::Send { token, result: Ok(_) } = completion {
                    // A queue pair ends with the process, whatever is in flight.
                    self.driver.finish(token);
                }
            }
            timeout = until.saturating_duration_since(Instant::now());
            if !self.driver.is_finishing() || timeout.is_zero() {
                return;
            }
        }
    }

    /// Shuts a connection down in order, so that the peer does not count a loss.
    fn close_in_order(&mut self, key: u64) {
        const REASON: &str = "the server was stopped";
        let Some(conn) = self.conns.get_mut(&key) else { return };
        if conn.closing.is_some() || conn.peer.is_none() {
            return self.lose(key, code::UNAVAILABLE, REASON.into());
        }
        conn.proto.leave(REASON);
        conn.goodbye = Some(REASON.into());
        self.close_with_reason(key, Failure { code: code::UNAVAILABLE, message: REASON.into() });
    }

    /// The protocol ended this connection.
    pub(super) fn broken(&mut self, key: u64, error: ConnectionError) {
        let Some(conn) = self.conns.get_mut(&key) else { return };
        if let (ConnectionError::NotStarwire(sniff), Side::Server) = (&error, &conn.side) {
            match sniff {
                // Over TLS, the client has said that it is a task.
                Sniff::Http1 | Sniff::Http2 if conn.tls.is_none() => return self.hand_over_http(key),
                Sniff::Tls => conn.say_plainly(&NO_TLS),
                _ => {}
            }
        }
        let is_server = matches!(conn.side, Side::Server);
        let name = conn.name.clone();
        match error {
            ConnectionError::PeerSilent { .. } => self.dispatch.metrics.keepalive_losses.add(1),
            ConnectionError::HandshakeTimeout { .. } if is_server => {
                self.dispatch.metrics.unauthenticated_dropped.add(1)
            }
            ConnectionError::Refused { .. } | ConnectionError::NotStarwire(_) => self.dispatch.metrics.refusals.add(1),
            _ => {}
        }
        let has_last_frame = conn.connected && (conn.proto.wants_transmit() || conn.has_unsent());
        if is_server && !matches!(error, ConnectionError::PeerSilent { .. }) {
            self.log_dropped(&name, &error.to_string());
        }
        let hint = match error {
            ConnectionError::NotStarwire(_) if !is_server => {
                let Config { identity, ports, .. } = &self.shared.config;
                let ports = if *ports == Ports::One { "one port" } else { "two ports" };
                format!("; it needs protocol=\"{}\" and {ports}, as this task has (STARWIRE_PORTS)", identity.protocol)
            }
            _ => String::new(),
        };
        let message = format!("{error}{hint}");
        if !has_last_frame {
            return self.lose(key, error.code(), message);
        }
        self.close_with_reason(key, Failure { code: error.code(), message });
    }

    /// Ends a connection, whose peer has a second to take what waits to be sent.
    pub(super) fn close_with_reason(&mut self, key: u64, failure: Failure) {
        let Some(conn) = self.conns.get_mut(&key) else { return };
        conn.closing = Some(failure);
        conn.drain = Some(Drain::default());
        self.rearm(key, self.dispatch.now + CLOSE_TIMEOUT);
        self.continue_drain(key);
    }

    /// Continues the end of a connection whose peer is told the reason.
    pub(super) fn continue_drain(&mut self, key: u64) {
        let now = self.dispatch.now;
        let Some(conn) = self.conns.get_mut(&key) else { return };
        if conn.drain.is_none() {
            return;
        }
        let driver = &mut *self.driver;
        let going = conn.sending || conn.send_rest(driver, now).is_ok();
        let going = going && conn.start_receive(driver, &mut self.discard).is_ok();
        if !going || conn.drain.as_ref().is_some_and(Drain::is_done) {
            conn.drain = None;
            self.driver.close(conn.token);
        }
    }

    /// The peer sends no more.
    pub(super) fn ended(&mut self, key: u64) {
        if let Some(drain) = self.conns.get_mut(&key).and_then(|conn| conn.drain.as_mut()) {
            drain.peer_finished = true;
            return self.continue_drain(key);
        }
        let goodbye = self.conns.get(&key).and_then(|conn| conn.goodbye.as_ref());
        let message = match goodbye {
            Some(reason) => format!("the peer ended the connection: {reason}"),
            // As gRPC says it: programs look for these words.
            None if self.conns.get(&key).is_some_and(|conn| conn.is_handshaking()) => {
                "Socket closed by the peer during the TLS handshake".into()
            }
            None => "Socket closed by the peer".into(),
        };
        self.lose(key, code::UNAVAILABLE, message);
    }

    /// Starts to close a connection: operations end once the kernel has released their memory.
    pub fn lose(&mut self, key: u64, code: i32, message: String) {
        let Some(conn) = self.conns.get_mut(&key) else { return };
        if conn.closing.is_some() {
            // Not even the last frame gets through.
            if conn.drain.take().is_some() {
                self.driver.close(conn.token);
            }
            return;
        }
        conn.closing = Some(Failure { code, message });
        self.driver.close(conn.token);
    }

    pub(super) fn closed(&mut self, key: u64) {
        let Some(mut conn) = self.conns.remove(&key) else { return };
        // A table never shrinks by itself, and would keep kilobytes for each connection that it ever had.
        if self.conns.capacity() > SMALL_TABLE && self.conns.len() < self.conns.capacity() / 8 {
            self.conns.shrink_to(self.conns.len() * 2);
        }
        let failure = conn.closing.take().unwrap_or(Failure { code: code::UNAVAILABLE, message: "closed".into() });
        let message = format!("starwire: lost the connection to {}: {}", conn.name, failure.message);
        let was_ready = conn.peer.is_some();
        conn.proto.fail(failure.code, &message);
        self.dispatch.finish(&mut conn);
        conn.witness = None;
        conn.proto.take_back();
        self.dispatch.note();
        conn.count(&self.dispatch.metrics);
        if was_ready {
            self.dispatch.peer_gone(key);
            let metrics = &self.dispatch.metrics;
            metrics.losses.add(u64::from(conn.goodbye.is_none()));
            match conn.side {
                Side::Server => metrics.connections_in.add(-1),
                Side::Client { .. } => metrics.connections_out.add(-1),
            }
        }
        match conn.side {
            Side::Server => {
                if !was_ready {
                    self.events.push_back(LinkEvent::Settled(key));
                }
                self.shared.leaves(key);
            }
            Side::Client { channel, .. } => {
                let stage = match conn.path {
                    _ if !conn.connected => Stage::Connect,
                    Path::Migrating if !self.requires_pairs() => Stage::Migration,
                    _ => Stage::Handshake,
                };
                self.events.push_back(LinkEvent::Lost { channel, key, stage, failure });
            }
        }
    }
}
