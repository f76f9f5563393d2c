//! Dispatches the events of connections to the engine's host.

use std::sync::Arc;
use std::time::Instant;

use super::conn::{CallMemory, Conn, Keys};
use crate::api::{Host, IncomingCall, PendingOp, RecvRequest, Ticket};
use crate::command::StarCommand;
use crate::measure;
use crate::metrics::Recorder;
use crate::shared::Shared;
use crate::star::{Accounts, Answer, StarServer, StarShard, State};
use crate::tunnel::TunnelServer;
use starwire_marks::fail_point;
use starwire_protocol::measure::MEASURE;
use starwire_protocol::star::is_star;
use starwire_protocol::tunnel::TUNNEL;
use starwire_protocol::{Event, Failure, Outcome, PeerInfo, RecvFrame, code, digest};
use starwire_state::StateError;

const MOVED: &[u8] = b"starwire: another process has this task now";
const CHANGED: &[u8] = b"starwire: the payload of the call was changed on its way: its digest is wrong";
/// Most requests that the host gets at once. All requests of an input are parsed before the first is delivered.
const BATCH: usize = 256;

/// An event that concerns the connection.
pub enum ConnEvent {
    Ready(PeerInfo),
    /// The peer announced its end, for this reason.
    Goodbye(String),
    Migration(MigrationEvent),
}

/// An event of the protocol's migration.
pub enum MigrationEvent {
    May,
    Proposed(Vec<u8>),
    Answered(Result<Vec<u8>, Failure>),
}

/// What answers requests of peers beside the host.
pub struct Services<H: Host> {
    /// If this task serves star calls.
    pub star: Option<Arc<StarServer<H>>>,
    pub tunnels: Arc<TunnelServer<H>>,
}

impl<H: Host> Services<H> {
    /// An error says what is wrong with the state.
    pub fn new(shared: &Arc<Shared<H>>) -> Result<Self, StateError> {
        let accounts = Accounts::default();
        let state = State::open(shared, &accounts)?;
        let star = shared.host.star().map(|_| Arc::new(StarServer::new(shared.clone(), accounts, state)));
        Ok(Self { star, tunnels: Arc::new(TunnelServer::new(shared.clone())) })
    }
}

impl<H: Host> Clone for Services<H> {
    fn clone(&self) -> Self {
        Self { star: self.star.clone(), tunnels: self.tunnels.clone() }
    }
}

/// Calls the host for the events of a reactor's connections.
pub struct Dispatcher<H: Host> {
    shared: Arc<Shared<H>>,
    pub memory: CallMemory<H>,
    batch: Vec<RecvRequest<H::Key>>,
    star: Option<StarShard<H>>,
    tunnels: Arc<TunnelServer<H>>,
    /// The host was called in this round.
    delivered: bool,
    pub metrics: Recorder,
    /// The time of this round: exact enough for metrics.
    pub now: Instant,
}

impl<H: Host> Dispatcher<H> {
    pub fn new(shared: Arc<Shared<H>>, services: Services<H>) -> Self {
        Self {
            metrics: shared.metrics.recorder(),
            memory: CallMemory(shared.clone()),
            star: services.star.map(StarShard::new),
            tunnels: services.tunnels,
            now: shared.now(),
            shared,
            batch: Vec::with_capacity(BATCH),
            delivered: false,
        }
    }

    /// Delivers events of a connection, in order, up to one that concerns the connection; None: it has no more. Must be
    /// called after each input of a connection until it returns None.
    pub fn next(&mut self, conn: &mut Conn<H>) -> Option<ConnEvent> {
        let elsewhere = self.goes_elsewhere(conn);
        let event = loop {
            let Some(event) = conn.proto.poll_event() else { break None };
            match event {
                // The connections from before are about to be closed: their requests are made again elsewhere.
                Event::RecvRequest(recv) if elsewhere => {
                    if conn.is_sent_on {
                        conn.proto.reply(recv.id, code::UNAVAILABLE, MOVED, None);
                    }
                }
                Event::RecvRequest(recv) => match key_of(&conn.keys, recv.key) {
                    Some(key) => self.add_to_batch(conn.key, key, recv),
                    None => {
                        let message = b"starwire: malformed rendezvous key";
                        conn.proto.reply(recv.id, code::INVALID_ARGUMENT, message, None);
                    }
                },
                Event::ReplyDone { op, outcome } => self.reply_done(op, &outcome),
                Event::CallReady { id, method, deadline_ms, mut body } => {
                    self.flush();
                    if elsewhere {
                        if conn.is_sent_on {
                            conn.proto.reply(id, code::UNAVAILABLE, MOVED, None);
                        }
                        continue;
                    }
                    if self.shared.config.secret.is_some() && digest::has_digest(method) && !body.is_authentic() {
                        conn.proto.reply(id, code::DATA_LOSS, CHANGED, None);
                        continue;
                    }
                    self.delivered = true;
                    self.metrics.calls_received.add(1);
                    let ticket = Ticket { conn: conn.key, id };
                    if method == MEASURE {
                        conn.answer(measure::answer(id, body.meta(), conn.on_this_host));
                        continue;
                    }
                    if method == TUNNEL {
                        self.tunnels.call(ticket, body.meta());
                        continue;
                    }
                    if let Some(star) = self.star.as_mut().filter(|_| is_star(method)) {
                        fail_point!("a star call is read, and does not run yet");
                        let answer = star.request(ticket, method, body, self.now, &self.metrics);
                        if let Some(answer) = answer {
                            conn.answer(answer);
                        }
                        continue;
                    }
                    self.shared.host.call(IncomingCall { ticket, method, deadline_ms, body });
                }
                Event::RequestCancelled { id, method, tag, peer_gone } => {
                    self.flush();
                    self.delivered = true;
                    self.metrics.cancels_received.add(u64::from(!peer_gone));
                    let ticket = Ticket { conn: conn.key, id };
                    if method == TUNNEL {
                        // Its end is a call of its own.
                        continue;
                    }
                    match self.star.as_mut().filter(|_| is_star(method)) {
                        Some(star) => star.cancelled(ticket, peer_gone),
                        None => self.shared.host.cancelled(ticket, method, tag, peer_gone),
                    }
                }
                // Keys count up, so the table's length is the number of the next one.
                Event::KeyDefined { prefix, .. } => conn.keys.push(self.shared.host.key(prefix)),
                Event::KeysForgotten => {
                    // The batch may use them.
                    self.flush();
                    self.forget_keys(&mut conn.keys);
                }
                Event::Ready(peer) => {
                    if let Some(star) = &mut self.star {
                        star.peer_came(conn.key, &peer.task, peer.incarnation, self.now);
                    }
                    self.shared.host.peer_came(conn.key, &peer.task, peer.incarnation);
                    break Some(ConnEvent::Ready(peer.clone()));
                }
                Event::Goodbye { reason } => break Some(ConnEvent::Goodbye(reason.to_owned())),
                Event::MayMove => break Some(ConnEvent::Migration(MigrationEvent::May)),
                Event::MoveProposed { endpoint } => {
                    break Some(ConnEvent::Migration(MigrationEvent::Proposed(endpoint.to_vec())));
                }
                Event::MoveAnswered(answer) => {
                    break Some(ConnEvent::Migration(MigrationEvent::Answered(answer.map(<[u8]>::to_vec))));
                }
            }
        };
        self.flush();
        event
    }

    /// Another process has this task, and this is no connection of that.
    fn goes_elsewhere(&self, conn: &Conn<H>) -> bool {
        self.shared.moved_to.get().is_some() && !conn.is_of(&self.shared.config.identity.task)
    }

    /// Delivers the last events of a connection that has failed.
    pub fn finish(&mut self, conn: &mut Conn<H>) {
        while self.next(conn).is_some() {}
        self.forget_keys(&mut conn.keys);
    }

    /// This connection is closed; its last events were delivered.
    pub fn peer_gone(&mut self, conn: u64) {
        if let Some(star) = &mut self.star {
            star.peer_gone(conn, self.now, &self.metrics);
        }
        self.tunnels.peer_gone(conn);
        self.shared.host.peer_gone(conn);
    }

    /// Returns the connection to answer, and the answer.
    pub fn star_command(&mut self, command: StarCommand<H>) -> Option<(u64, Answer)> {
        self.delivered = true;
        self.star.as_mut()?.execute(command, self.now, &self.metrics)
    }

    /// No request follows.
    pub fn stop_star(&mut self) {
        if let Some(star) = self.star.take() {
            star.stop();
        }
    }

    /// The process is exiting: frees nothing.
    pub fn freeze_star(&mut self) {
        std::mem::forget(self.star.take());
    }

    fn forget_keys(&self, keys: &mut Keys<H>) {
        keys.drain(..).flatten().for_each(|key| self.shared.host.key_gone(key));
    }

    /// Tells the host that this round is over, if it was called in it.
    pub fn end_round(&mut self) {
        if std::mem::take(&mut self.delivered) {
            self.shared.host.round_end();
        }
    }

    pub fn note(&mut self) {
        self.delivered = true;
    }

    fn add_to_batch(&mut self, conn: u64, key: H::Key, recv: RecvFrame) {
        let RecvFrame { id, step, frame, iter, .. } = recv;
        self.batch.push(RecvRequest { ticket: Ticket { conn, id }, step, key, frame, iter });
        if self.batch.len() >= BATCH {
            self.flush();
        }
    }

    fn flush(&mut self) {
        if !self.batch.is_empty() {
            self.delivered = true;
            self.metrics.tensor_requests_received.add(self.batch.len() as u64);
            self.shared.host.recv(&self.batch);
            self.batch.clear();
        }
    }

    fn reply_done(&mut self, op: PendingOp<H::Op>, outcome: &Outcome<'_>) {
        self.delivered = true;
        match outcome {
            Outcome::Ok { .. } => {}
            Outcome::PeerError { .. } => self.metrics.error_replies_received.add(1),
            Outcome::Local { code: code::DEADLINE_EXCEEDED, .. } => self.metrics.deadlines_exceeded.add(1),
            Outcome::Local { .. } | Outcome::Lost { .. } => self.metrics.ended_locally.add(1),
        }
        if let Some(started) = op.started {
            let took = self.now.saturating_duration_since(started);
            if op.is_tensor { self.metrics.tensor_time.record(took) } else { self.metrics.call_time.record(took) }
        }
        op.done(outcome);
    }
}

fn key_of<K: Clone>(keys: &[Option<K>], key: u64) -> Option<K> {
    keys.get(usize::try_from(key).ok()?)?.clone()
}
