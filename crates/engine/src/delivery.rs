//! What the protocol reports, on its way to the engine's owner.

use std::sync::Arc;
use std::time::Instant;

use crate::host::{Host, IncomingCall, RecvRequest, Ticket};
use crate::memory::{InBody, OutPayload};
use crate::metrics::Recorder;
use crate::moving::MoveEvent;
use crate::op::PendingOp;
use crate::shared::Shared;
use starwire_protocol::{Failure, Handler, Outcome, PeerInfo, code};

/// Rendezvous keys of one connection as the owner knows them, by number; None was refused as malformed.
pub type Keys<H> = Vec<Option<<H as Host>::Key>>;

/// Requests of one batch at most, so that the first need not wait for too many others to be parsed.
const BATCH: usize = 256;

/// The protocol's handler for whichever connection is being fed: see [`Delivery::serve`].
pub struct Delivery<H: Host> {
    shared: Arc<Shared<H>>,
    conn: u64,
    keys: Keys<H>,
    batch: Vec<RecvRequest<H::Key>>,
    ready: Option<PeerInfo>,
    goodbye: Option<String>,
    moving: Option<MoveEvent>,
    /// Requests to refuse (id, code, message), which needs the connection that is being borrowed meanwhile.
    refused: Vec<(u64, i32, String)>,
    /// Something was delivered in this round.
    delivered: bool,
    pub metrics: Recorder,
    /// The time of this round: exact enough for metrics.
    pub now: Instant,
}

/// What has to happen to the connection after the protocol was fed.
pub struct After {
    pub ready: Option<PeerInfo>,
    /// The peer will not talk any more, for this reason.
    pub goodbye: Option<String>,
    /// The protocol wants to know something about a queue pair.
    pub moving: Option<MoveEvent>,
    pub refused: Vec<(u64, i32, String)>,
}

impl<H: Host> Delivery<H> {
    pub fn new(shared: Arc<Shared<H>>) -> Self {
        Self {
            metrics: shared.metrics.recorder(),
            shared,
            conn: 0,
            keys: Keys::<H>::new(),
            batch: Vec::with_capacity(BATCH),
            ready: None,
            goodbye: None,
            moving: None,
            refused: Vec::new(),
            delivered: false,
            now: Instant::now(),
        }
    }

    /// Runs `feed` with this delivery serving connection `conn`.
    pub fn serve<R>(&mut self, conn: u64, keys: &mut Keys<H>, feed: impl FnOnce(&mut Self) -> R) -> (R, After) {
        self.conn = conn;
        std::mem::swap(&mut self.keys, keys);
        let result = feed(self);
        self.flush();
        std::mem::swap(&mut self.keys, keys);
        (
            result,
            After {
                ready: self.ready.take(),
                goodbye: self.goodbye.take(),
                moving: self.moving.take(),
                refused: std::mem::take(&mut self.refused),
            },
        )
    }

    pub fn forget_keys(&self, keys: &mut Keys<H>) {
        keys.drain(..).flatten().for_each(|key| self.shared.host.key_gone(key));
    }

    /// Tells the owner that this round is over, if it was told anything in it.
    pub fn end_round(&mut self) {
        if std::mem::take(&mut self.delivered) {
            self.shared.host.round_end();
        }
    }

    pub fn note(&mut self) {
        self.delivered = true;
    }

    fn flush(&mut self) {
        if !self.batch.is_empty() {
            self.delivered = true;
            self.metrics.tensor_requests_received.add(self.batch.len() as u64);
            self.shared.host.recv(&self.batch);
            self.batch.clear();
        }
    }

    fn ticket(&self, id: u64) -> Ticket {
        Ticket { conn: self.conn, id }
    }
}

impl<H: Host> Handler for Delivery<H> {
    type Op = PendingOp<H::Op>;
    type Payload = OutPayload;
    type Body = Box<InBody>;

    fn ready(&mut self, peer: &PeerInfo) {
        self.shared.host.peer_came(self.conn, &peer.task, peer.incarnation);
        self.ready = Some(peer.clone());
    }

    fn goodbye(&mut self, reason: &str) {
        self.goodbye = Some(reason.to_owned());
    }

    fn may_move(&mut self) {
        self.moving = Some(MoveEvent::May);
    }

    fn move_answered(&mut self, answer: Result<&[u8], Failure>) {
        self.moving = Some(MoveEvent::Answered(answer.map(<[u8]>::to_vec)));
    }

    fn move_proposed(&mut self, endpoint: &[u8]) {
        self.moving = Some(MoveEvent::Proposed(endpoint.to_vec()));
    }

    fn key_defined(&mut self, _key: u64, prefix: &[u8]) -> bool {
        // Numbers count up, so the new key's is the table's length.
        let made = self.shared.host.key(prefix);
        let is_good = made.is_some();
        self.keys.push(made);
        is_good
    }

    fn keys_forgotten(&mut self) {
        // A batch in waiting may use them.
        self.flush();
        let mut keys = std::mem::take(&mut self.keys);
        self.forget_keys(&mut keys);
    }

    fn recv_request(&mut self, id: u64, step: i64, key: u64, frame: u64, iter: u64) {
        let found = usize::try_from(key).ok().and_then(|key| self.keys.get(key)?.clone());
        match found {
            Some(key) => {
                let ticket = self.ticket(id);
                self.batch.push(RecvRequest { ticket, step, key, frame, iter });
                if self.batch.len() >= BATCH {
                    self.flush();
                }
            }
            None => self.refused.push((id, code::INVALID_ARGUMENT, "starwire: malformed rendezvous key".into())),
        }
    }

    fn call_alloc(&mut self, _id: u64, _method: u16, meta: &[u8], lens: &[u64]) -> Result<Self::Body, Failure> {
        if !self.shared.host.takes_calls() {
            return Err(Failure { code: code::UNIMPLEMENTED, message: "this task serves no calls".into() });
        }
        InBody::new(&self.shared.host, meta, lens).map(Box::new)
    }

    fn write_call(&mut self, body: &mut Self::Body, part: usize, bytes: &[u8]) {
        body.write(part, bytes);
    }

    fn call_ready(&mut self, id: u64, method: u16, deadline_ms: u32, body: Self::Body) {
        self.flush();
        self.delivered = true;
        self.metrics.calls_received.add(1);
        self.shared.host.call(IncomingCall { ticket: self.ticket(id), method, deadline_ms, body });
    }

    fn request_cancelled(&mut self, id: u64, method: u16, tag: i64, peer_gone: bool) {
        self.flush();
        self.delivered = true;
        self.metrics.cancels_received.add(u64::from(!peer_gone));
        self.shared.host.cancelled(self.ticket(id), method, tag, peer_gone);
    }

    fn reply_alloc(&mut self, op: &mut Self::Op, meta: &[u8], lens: &[u64]) -> Result<(), Failure> {
        op.alloc(meta, lens)
    }

    fn write_reply(&mut self, op: &mut Self::Op, part: usize, bytes: &[u8]) {
        op.write(part, bytes);
    }

    fn reply_done(&mut self, op: Self::Op, result: Outcome<'_>) {
        self.delivered = true;
        match &result {
            Outcome::Ok { .. } => {}
            Outcome::PeerError { .. } => self.metrics.error_replies_received.add(1),
            Outcome::Local { code: code::DEADLINE_EXCEEDED, .. } => self.metrics.deadlines_exceeded.add(1),
            Outcome::Local { .. } => self.metrics.ended_locally.add(1),
        }
        if let Some(started) = op.started {
            let took = self.now.saturating_duration_since(started);
            if op.is_tensor { self.metrics.tensor_time.record(took) } else { self.metrics.call_time.record(took) }
        }
        op.done(&result);
    }
}
