//! The connections of a reactor: descriptors and queue pairs, TLS, and memory of peers on this host. Requests and
//! replies go straight to the host; what concerns channels and admission leaves as a [`LinkEvent`].
//!
//! After each input, the caller takes the events with [`Links::poll`].

mod close;
#[allow(unsafe_code)]
mod conn;
mod dispatch;
mod lending;
mod migrate;
mod open;
mod timers;
mod tls;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::admission::Listener;
use crate::api::{Host, Level, OutPayload, PendingOp};
use crate::command::{Meta, NewCall, NewRecv, Request, StarCommand};
use crate::config::Config;
use crate::keys::NumberMap;
use crate::metrics::{Recorder, State};
use crate::peers::{Stage, Waiting};
use crate::shared::{self, Shared};
use conn::{Conn, DiscardBuffer, Side};
pub use dispatch::Services;
use dispatch::{ConnEvent, Dispatcher};
use starwire_net::reactor::driver::{Completion, Driver, Token};
use starwire_net::reactor::timers::Timers;
use starwire_protocol::{Call, Failure, Outcome, PeerInfo, Recv, code};

/// What happened to a connection, by its key.
#[derive(Debug)]
pub enum LinkEvent {
    /// The ClientHello of a task has arrived. The handshake goes on with [`Links::admit`].
    Hello(u64),
    /// This reactor spent so much time on the handshakes of clients.
    HandshakeTook(Duration),
    /// The certificate of a client was verified. Its handshake took so long.
    Verified(u64, Duration),
    /// An accepted connection is ready, was closed before, or is not a task's.
    Settled(u64),
    /// The connection of a channel is ready for requests.
    Ready {
        channel: u32,
        key: u64,
        incarnation: u64,
    },
    /// The peer's task has another process, at this address. The connection is closed.
    Moved {
        channel: u32,
        key: u64,
        to: String,
    },
    /// The peer answers open requests, but takes no new ones.
    Goodbye {
        channel: u32,
        key: u64,
    },
    /// RDMA works with the peer of a channel.
    PairsWork {
        channel: u32,
    },
    /// RDMA does not work with the peer of a channel.
    PairsFailed {
        channel: u32,
        why: String,
    },
    Lost {
        channel: u32,
        key: u64,
        stage: Stage,
        failure: Failure,
    },
}

pub struct Links<H: Host> {
    index: usize,
    shared: Arc<Shared<H>>,
    driver: Box<dyn Driver>,
    /// Boxed: a table that holds connections by value is one block, copied whenever it grows, and the allocator keeps
    /// what many of them left behind.
    conns: NumberMap<u64, Box<Conn<H>>>,
    tokens: NumberMap<u64, u64>,
    listeners: Vec<(Token, Listener)>,
    dispatch: Dispatcher<H>,
    timers: Timers<u64>,
    /// Connections with something to send.
    dirty: Vec<u64>,
    discard: DiscardBuffer,
    completions: Vec<Completion>,
    events: VecDeque<LinkEvent>,
    next_conn: u64,
    next_adopter: usize,
    random: u64,
}

impl<H: Host> Links<H> {
    pub fn new(index: usize, shared: Arc<Shared<H>>, services: Services<H>, driver: Box<dyn Driver>) -> Self {
        Self {
            index,
            driver,
            conns: NumberMap::default(),
            tokens: NumberMap::default(),
            listeners: Vec::new(),
            dispatch: Dispatcher::new(shared.clone(), services),
            timers: Timers::default(),
            dirty: Vec::new(),
            discard: DiscardBuffer::new(),
            completions: Vec::new(),
            events: VecDeque::new(),
            next_conn: 0,
            next_adopter: 0,
            random: shared.incarnation ^ (index as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1,
            shared,
        }
    }

    pub fn is_empty(&self) -> bool {
        self.conns.is_empty()
    }

    /// So many pieces fit into the longest list of a connection.
    #[cfg(test)]
    pub fn room(&self) -> usize {
        self.conns.values().map(|conn| conn.room()).max().unwrap_or(0)
    }

    /// Sets the time for all that follows.
    pub fn set_now(&mut self, now: Instant) {
        self.dispatch.now = now;
    }

    pub fn metrics(&self) -> &Recorder {
        &self.dispatch.metrics
    }

    pub fn poll(&mut self) -> Option<LinkEvent> {
        self.events.pop_front()
    }

    pub fn random(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }

    /// The task that answers on a connection, as it says itself.
    pub fn peer_task(&self, key: u64) -> Option<&str> {
        self.conns.get(&key)?.peer.as_ref().map(|peer| peer.task.as_str())
    }

    // Requests and replies.

    /// Whether it is not being closed.
    pub fn is_open(&self, key: u64) -> bool {
        self.conns.get(&key).is_some_and(|conn| conn.closing.is_none())
    }

    /// Starts a request on an open connection.
    pub fn start(&mut self, key: u64, waiting: Waiting<Request<H::Op>>) {
        let now = self.dispatch.now;
        let Waiting { id, request, mut deadline, .. } = waiting;
        let Some(conn) = self.conns.get_mut(&key).filter(|c| c.closing.is_none()) else {
            // The connection is being closed; a new request shares its fate.
            let message = "starwire: the connection was just lost (Socket closed)";
            self.dispatch.note();
            return request.into_op().done(&Outcome::Lost { code: code::UNAVAILABLE, message });
        };
        match request {
            Request::Recv(recv) => {
                self.dispatch.metrics.tensors_requested.add(1);
                let NewRecv { step, prefix, frame, iter, op } = recv;
                conn.proto.recv(now, Recv { id, step, prefix: &prefix, frame, iter, deadline, op });
            }
            Request::Call(call) => {
                self.dispatch.metrics.calls_sent.add(1);
                let NewCall { method, meta, payload, deadline_to_connect, op, .. } = call;
                deadline = deadline.filter(|_| !deadline_to_connect);
                match u16::try_from(method) {
                    Ok(method) if method > 0 => {
                        conn.proto.call(now, Call { id, method, meta, payload, deadline, op });
                    }
                    _ => op.done(&Outcome::Local {
                        code: code::INVALID_ARGUMENT,
                        message: "starwire: the method number is not in 1 to 65535",
                    }),
                }
            }
        }
        mark(&mut self.dirty, conn);
        if deadline.is_some() {
            self.arm(key);
        }
        self.deliver(key);
    }

    /// Ends a request that was not started.
    pub fn end(&mut self, op: PendingOp<H::Op>, code: i32, message: &str) {
        self.dispatch.note();
        op.done(&Outcome::Local { code, message });
    }

    pub fn cancel(&mut self, key: u64, id: u64, code: i32, message: &str) {
        let Some(conn) = self.conns.get_mut(&key) else { return };
        self.dispatch.metrics.cancels_sent.add(1);
        conn.proto.cancel(self.dispatch.now, id, code, message);
        mark(&mut self.dirty, conn);
        self.deliver(key);
    }

    /// Answers a request of a peer.
    pub fn reply(&mut self, key: u64, id: u64, code: i32, meta: &Meta, payload: Option<OutPayload>) {
        if let Some(conn) = self.conns.get_mut(&key) {
            conn.proto.reply(id, code, meta.as_slice(), payload);
            mark(&mut self.dirty, conn);
        }
    }

    pub fn star_command(&mut self, command: StarCommand<H>) {
        let Some((key, answer)) = self.dispatch.star_command(command) else { return };
        if let Some(conn) = self.conns.get_mut(&key) {
            conn.answer(answer);
            mark(&mut self.dirty, conn);
        }
    }

    /// Tells the host that a round of callbacks is over.
    pub fn end_round(&mut self) {
        self.dispatch.end_round();
    }

    /// No request of a peer follows.
    pub fn stop_star(&mut self) {
        self.dispatch.stop_star();
    }

    // Descriptors.

    /// Waits for completions, and adds them to the list. Returns whether there are any.
    pub fn wait(&mut self, timeout: Option<Duration>) -> bool {
        self.dispatch.metrics.waits.add(1);
        if let Err(error) = self.driver.wait(timeout, &mut self.completions) {
            let line = format!("starwire: reactor {}: waiting for events failed: {error}", self.index);
            self.shared.host.log(Level::Error, &line);
            // Avoid a tight loop.
            std::thread::sleep(Duration::from_millis(10));
        }
        !self.completions.is_empty()
    }

    pub fn take_completions(&mut self) -> Vec<Completion> {
        std::mem::take(&mut self.completions)
    }

    /// Returns an emptied list, whose memory is used again.
    pub fn put_completions(&mut self, emptied: Vec<Completion>) {
        self.completions = emptied;
    }

    pub fn complete(&mut self, completion: Completion) {
        match completion {
            Completion::Recv { token, result } => {
                let Some(key) = self.tokens.get(&token.0).copied() else { return };
                match result {
                    Ok(0) => self.ended(key),
                    Ok(n) => self.received(key, n),
                    Err(error) => self.lose(key, code::UNAVAILABLE, error.to_string()),
                }
            }
            Completion::Send { token, result } => {
                let Some(key) = self.tokens.get(&token.0).copied() else { return };
                match result {
                    Ok(n) => self.sent(key, n),
                    Err(error) => self.lose(key, code::UNAVAILABLE, error.to_string()),
                }
            }
            Completion::Accepted { listener, result } => self.accepted(listener, result),
            Completion::Connected { token, result } => {
                if let Some(key) = self.tokens.get(&token.0).copied() {
                    self.connected(key, result);
                }
            }
            Completion::Readable { .. } => {}
            Completion::Closed { token } => {
                if let Some(key) = self.tokens.remove(&token.0) {
                    self.closed(key);
                }
            }
        }
    }

    /// Sends what waits.
    pub fn flush(&mut self) {
        let now = self.dispatch.now;
        let mut dirty = std::mem::take(&mut self.dirty);
        for key in dirty.drain(..) {
            let Some(conn) = self.conns.get_mut(&key) else { continue };
            conn.dirty = false;
            let started = conn.start_send(&mut *self.driver, now);
            conn.count(&self.dispatch.metrics);
            if let Err(error) = started {
                self.lose(key, code::UNAVAILABLE, format!("cannot send: {error}"));
            }
        }
        // `lose` may have marked others.
        dirty.append(&mut self.dirty);
        self.dirty = dirty;
    }

    fn received(&mut self, key: u64, n: usize) {
        let Some(conn) = self.conns.get_mut(&key) else { return };
        if conn.closing.is_some() {
            conn.drained(n);
            return self.continue_drain(key);
        }
        conn.receiving = false;
        if let Some(tls) = conn.tls.as_mut().filter(|tls| tls.receives) {
            tls.arrived(n);
            return self.receive_on(key);
        }
        if self.took(key, n) {
            self.receive_on(key);
        }
    }

    /// `n` bytes are in the targets of the plan. False: the connection ends.
    fn took(&mut self, key: u64, n: usize) -> bool {
        let Some(conn) = self.conns.get_mut(&key) else { return false };
        let result = conn.proto.on_received(self.dispatch.now, n, &mut self.dispatch.memory);
        self.deliver(key);
        let Some(conn) = self.conns.get_mut(&key) else { return false };
        conn.count(&self.dispatch.metrics);
        if conn.proto.wants_transmit() {
            mark(&mut self.dirty, conn);
        }
        match result {
            Ok(()) => {
                self.arm(key);
                true
            }
            Err(error) => {
                self.broken(key, error);
                false
            }
        }
    }

    /// Delivers the events of a connection. To be called after each of its inputs.
    fn deliver(&mut self, key: u64) {
        while let Some(conn) = self.conns.get_mut(&key) {
            match self.dispatch.next(conn) {
                Some(ConnEvent::Ready(peer)) => self.became_ready(key, peer),
                Some(ConnEvent::Migration(event)) => self.on_migration(key, event),
                Some(ConnEvent::Goodbye(reason)) => {
                    conn.goodbye = Some(reason);
                    if let Side::Client { channel, .. } = conn.side {
                        self.events.push_back(LinkEvent::Goodbye { channel, key });
                    }
                }
                None => return,
            }
        }
    }

    /// The handshake with this peer is done.
    fn became_ready(&mut self, key: u64, peer: PeerInfo) {
        let to = if self.is_own_address(&peer.moved_to) { String::new() } else { peer.moved_to.clone() };
        let Some(conn) = self.conns.get_mut(&key) else { return };
        let incarnation = peer.incarnation;
        conn.entry.set_peer(&peer.task);
        conn.entry.set_state(State::Ready);
        if matches!(conn.side, Side::Server) {
            conn.name = format!("{} at {}", peer.task, conn.name);
        }
        conn.peer = Some(peer);
        if conn.peer_memory.is_some() {
            conn.proto.allow_lending();
            mark(&mut self.dirty, conn);
        }
        let metrics = &self.dispatch.metrics;
        match conn.side {
            Side::Server => {
                metrics.accepts.add(1);
                metrics.connections_in.add(1);
                self.events.push_back(LinkEvent::Settled(key));
            }
            Side::Client { channel, .. } if !to.is_empty() => {
                metrics.connections_out.add(1);
                // No loss.
                conn.goodbye = Some("the task has moved".to_owned());
                self.events.push_back(LinkEvent::Moved { channel, key, to });
                self.lose(key, code::UNAVAILABLE, "the task has moved".to_owned());
            }
            Side::Client { channel, .. } => {
                metrics.connects.add(1);
                metrics.connections_out.add(1);
                self.settle_path(key, channel);
                self.events.push_back(LinkEvent::Ready { channel, key, incarnation });
            }
        }
    }

    /// Another process of this task says that it has moved here: this one takes over from it, and may not know yet that
    /// it has.
    fn is_own_address(&self, address: &str) -> bool {
        let Config { identity, .. } = &self.shared.config;
        let own = || self.shared.config.data_address(&identity.task, &identity.grpc_address);
        !address.is_empty() && own().is_ok_and(|own| own.address().to_string() == address)
    }

    /// Goes on to receive, after TLS records that have arrived were opened.
    fn receive_on(&mut self, key: u64) {
        let Some(mut conn) = self.conns.get_mut(&key) else { return };
        if conn.tls.is_some() {
            if !self.open_records(key) {
                return;
            }
            let Some(same) = self.conns.get_mut(&key) else { return };
            conn = same;
        }
        let is_loan = conn.proto.loan().is_some();
        match conn.start_receive(&mut *self.driver, &mut self.discard) {
            Ok(None) => {}
            Ok(Some(n)) => self.received(key, n),
            Err(error) if is_loan => self.cannot_borrow(key, &error),
            Err(error) => self.lose(key, code::UNAVAILABLE, format!("cannot receive: {error}")),
        }
    }

    fn sent(&mut self, key: u64, n: usize) {
        let Some(conn) = self.conns.get_mut(&key) else { return };
        conn.sent(n, self.dispatch.now);
        if conn.closing.is_some() {
            return self.continue_drain(key);
        }
        self.resume_migrated(key);
        let Some(conn) = self.conns.get_mut(&key) else { return };
        if conn.has_unsent() || conn.proto.wants_transmit() {
            mark(&mut self.dirty, conn);
        }
        if !conn.receiving {
            // The protocol may have paused reading while too much waited to be sent.
            self.receive_on(key);
        }
        self.arm(key);
    }

    fn log_dropped(&self, name: &str, what: &str) {
        if !self.shared.log_limiter.allows(&shared::party_of(name), self.dispatch.now) {
            return;
        }
        self.shared.host.log(
            Level::Warning,
            &format!("starwire: dropped a connection from {name}: {what} (repeats from this address are suppressed for a minute)"),
        );
    }
}

fn mark<H: Host>(dirty: &mut Vec<u64>, conn: &mut Conn<H>) {
    if !conn.dirty {
        conn.dirty = true;
        dirty.push(conn.key);
    }
}
