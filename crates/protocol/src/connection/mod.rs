//! The state machine: bytes and time in, blocks and events out. `client.rs` and `server.rs` deal with requests,
//! `handshake.rs` with the beginning.

mod client;
mod handshake;
mod lending;
mod migration;
mod server;

use std::time::{Duration, Instant};

use self::client::{Client, Leaves};
use self::handshake::refused_before_handshake;
use self::migration::MigrationState;
use self::server::Server;
use crate::error::{ConnectionError, ProtocolError, code};
use crate::event::{Event, Events};
use crate::frame::{Frame, Frames, loan_pieces, put};
use crate::idmap::IdHash;
use crate::incoming::{Incoming, Parsed};
use crate::limits::{MAX_CONTROL, MAX_HANDSHAKE_CONTROL};
use crate::outgoing::{Answers, Outgoing};
use crate::owner::{Failure, Owner};
use crate::role::Role;
use crate::secret::BlockKey;
use crate::segment::{Segment, Target};
use crate::settings::{Claim, PeerInfo, Settings};
use crate::spare;
use crate::stats::Stats;

pub use self::client::{Call, Recv};

/// One side of one connection.
pub struct Connection<O: Owner> {
    settings: Settings,
    side: Side<O>,
    /// Known once the handshake is done.
    peer: Option<PeerInfo>,
    incoming: Incoming,
    out: Outgoing<O::Payload>,
    events: Events<O>,
    stats: Stats,
    /// How requests end that are made after `fail`.
    failure: Option<(i32, String)>,
    /// Waiting requests may be sent now.
    unblocked: bool,
    phase: Phase,
    /// GOODBYE that waits for the end of the handshake.
    parting: Option<String>,
    born: Instant,
    /// When the peer last gave a sign of life.
    last_heard: Instant,
    /// A PING was sent: the quarters of the timeout that have passed, and when the next one ends.
    ping_sent: Option<(u32, Instant)>,
    pings: u64,
    /// Server: the client proposed a move; it may do so once.
    move_seen: bool,
    /// Server: whether the client may be what it claims.
    client_check: Option<ClientCheck>,
}

/// Whether a client may be what it claims; otherwise, why not.
pub type ClientCheck = Box<dyn FnOnce(&Claim<'_>) -> Result<(), Failure> + Send>;

pub(super) enum Side<O: Owner> {
    Client(Client<O>),
    Server(Server<O>),
}

pub(super) enum Phase {
    /// With a secret: waits for the peer's challenge.
    Challenge,
    /// Server: waits for HELLO; from then on the key authenticates what it sends. Client: waits for WELCOME.
    Hello {
        key: Option<BlockKey>,
    },
    /// Client: the connection moves to a queue pair.
    Migrating {
        peer: Box<PeerInfo>,
        state: MigrationState,
    },
    Ready,
    Broken(ConnectionError),
}

impl<O: Owner> Connection<O> {
    /// The side that accepted.
    pub fn server(settings: Settings, now: Instant) -> Self {
        let hash = IdHash::new();
        Self::new(settings, now, Side::Server(Server::new(hash)), hash)
    }

    fn new(settings: Settings, now: Instant, side: Side<O>, hash: IdHash) -> Self {
        Connection {
            incoming: Incoming::new(hash, matches!(side, Side::Server(_))),
            phase: if settings.secret.is_some() { Phase::Challenge } else { Phase::Hello { key: None } },
            settings,
            side,
            peer: None,
            out: Outgoing::new(hash),
            events: Events::new(),
            stats: Stats::default(),
            failure: None,
            unblocked: false,
            parting: None,
            born: now,
            last_heard: now,
            ping_sent: None,
            pings: 0,
            move_seen: false,
            client_check: None,
        }
    }

    /// Server: what the client's HELLO claims is checked before anything else that it sends is believed.
    pub fn check_client(&mut self, check: ClientCheck) {
        self.client_check = Some(check);
    }

    // Events.

    /// The next event, in the order in which they happened. To be called after each input until it returns None.
    pub fn poll_event(&mut self) -> Option<Event<'_, O>> {
        self.events.poll(self.peer.as_ref())
    }

    // Bytes in.

    /// Replaces `out` by the targets of the next bytes of the stream. Empty: do not read now, ask again after the next
    /// `poll_transmit` that returned a block. The targets (and the scratch memory) stay valid until `on_received` or
    /// `fail`.
    pub fn receive_targets(&mut self, out: &mut Vec<Target>) {
        if matches!(self.phase, Phase::Broken(_)) || self.is_paused() {
            out.clear();
        } else {
            self.incoming.plan(out);
        }
    }

    /// The memory of a `Target::Scratch`. Does not move until `on_received`.
    pub fn scratch_mut(&mut self, offset: usize, len: usize) -> &mut [u8] {
        self.incoming.scratch_mut(offset, len)
    }

    /// `n` bytes were stored into the targets of the last plan, from the first one on. An error ends the connection;
    /// events that precede it are still to be polled.
    pub fn on_received(&mut self, now: Instant, n: usize, owner: &mut O) -> Result<(), ConnectionError> {
        if let Side::Client(client) = &mut self.side {
            client.end_deferred(&mut self.events);
        }
        self.guard(|this| this.receive(now, n, owner))
    }

    /// Bytes that were received and not understood: after `ConnectionError::NotStarwire`, everything since the start.
    pub fn unread(&self) -> &[u8] {
        self.incoming.unread()
    }

    // Bytes out.

    /// Appends the segments of the next block to `out` and returns their total length; 0: nothing to send. Blocks must
    /// be written in order.
    pub fn poll_transmit(&mut self, now: Instant, out: &mut Vec<Segment<O::Payload>>) -> u64 {
        if self.is_paused() {
            // We do not read at the moment; that the peer reads is its sign of life.
            self.heard(now);
        }
        let (len, answers) = self.out.poll(now, &mut self.stats, out);
        if let Side::Server(server) = &mut self.side {
            server.answered(answers);
        }
        len
    }

    /// True if `poll_transmit` would return a block.
    pub fn wants_transmit(&self) -> bool {
        !self.out.is_empty()
    }

    /// Takes a written `Segment::Control` back for reuse.
    pub fn recycle(&mut self, control: Vec<u8>) {
        spare::give_out(control);
    }

    // Time.

    /// The transport had no room, and has taken bytes again: so the peer has taken some, though it may say nothing. A
    /// PING may wait behind them for longer than its timeout.
    pub fn progressed(&mut self, now: Instant) {
        self.heard(now);
    }

    pub fn next_timeout(&self) -> Option<Instant> {
        let own = match &self.phase {
            Phase::Broken(_) => return None,
            Phase::Ready => self.keepalive_at(),
            Phase::Migrating { .. } => Some(self.born + self.move_limit()),
            Phase::Challenge | Phase::Hello { .. } => Some(self.born + self.settings.handshake_timeout),
        };
        let deadline = match &self.side {
            Side::Client(client) => client.next_deadline(),
            Side::Server(_) => None,
        };
        match (own, deadline) {
            (Some(own), Some(deadline)) => Some(own.min(deadline)),
            (own, deadline) => own.or(deadline),
        }
    }

    pub fn on_timeout(&mut self, now: Instant) -> Result<(), ConnectionError> {
        self.guard(|this| this.tick(now))
    }

    // The end.

    /// Sends GOODBYE: a server answers new requests with Unavailable from now on, a client sends no new ones (those
    /// not yet sent end at once).
    pub fn goodbye(&mut self, reason: &str) {
        match &mut self.side {
            Side::Server(server) => server.leave(reason),
            Side::Client(_) => self.refuse_waiting(reason, Leaves::Own),
        }
        match self.phase {
            Phase::Ready => self.say(|out| put::goodbye(out, reason)),
            Phase::Broken(_) => {}
            _ => self.parting = Some(reason.to_owned()),
        }
    }

    /// Shuts the connection down in order: what is not in flight is dropped, and GOODBYE is the last frame. `fail`
    /// follows when the peer has ended its side, or after a while.
    pub fn leave(&mut self, reason: &str) {
        if matches!(self.phase, Phase::Broken(_)) {
            return;
        }
        let goodbye = self.is_ready().then_some(|out: &mut Vec<u8>| put::goodbye(out, reason));
        self.out.close(goodbye);
        self.phase = Phase::Broken(ConnectionError::Left(reason.to_owned()));
    }

    /// Server: turns the peer away, at any point; REFUSE is the last frame.
    pub fn refuse(&mut self, code: i32, reason: &str) {
        let refused = ConnectionError::Refused { code, message: reason.to_owned() };
        let _ = self.guard(|_| Err(refused));
    }

    /// The connection is gone (or will be): ends each op with `code` and reports to a server's owner that its callers
    /// are gone. Call it when the driver no longer touches any memory of this connection. Idempotent; requests made
    /// afterwards end at once with the same failure.
    pub fn fail(&mut self, code: i32, message: &str) {
        if self.failure.is_some() {
            return;
        }
        self.failure = Some((code, message.to_owned()));
        if !matches!(self.phase, Phase::Broken(_)) {
            self.phase = Phase::Broken(ConnectionError::Misuse("a connection was used after it ended"));
        }
        self.out.close(None::<fn(&mut Vec<u8>)>);
        self.incoming.clear();
        match self.side {
            Side::Client(_) => self.fail_client(code, message),
            Side::Server(_) => self.fail_server(),
        }
    }

    // Queries.

    /// Known once the handshake is done.
    pub fn peer(&self) -> Option<&PeerInfo> {
        self.peer.as_ref()
    }

    pub fn is_ready(&self) -> bool {
        matches!(self.phase, Phase::Ready)
    }

    /// No request in flight, nothing to send, nothing lent, and no event to poll.
    pub fn is_idle(&self) -> bool {
        self.in_flight() == 0 && self.out.is_empty() && self.out.lender.is_empty() && self.events.is_empty()
    }

    /// Requests without an answer (client: ours, server: the peer's).
    pub fn in_flight(&self) -> usize {
        match &self.side {
            Side::Client(client) => client.in_flight(),
            Side::Server(server) => server.in_flight(),
        }
    }

    /// The op of a `Target::Reply`. None for other ids.
    pub fn op_mut(&mut self, id: u64) -> Option<&mut O::Op> {
        match &mut self.side {
            Side::Client(client) => client.op_mut(id),
            Side::Server(_) => None,
        }
    }

    /// The body of a `Target::Call`. None for other ids.
    pub fn body_mut(&mut self, id: u64) -> Option<&mut O::Body> {
        match &mut self.side {
            Side::Client(_) => None,
            Side::Server(server) => server.body_mut(id),
        }
    }

    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    // Internals.

    /// A server with too many unsent answers takes no further requests. A client always reads, so this cannot
    /// deadlock.
    fn is_paused(&self) -> bool {
        matches!(self.side, Side::Server(_)) && (self.out.is_high() || self.out.is_full())
    }

    fn role(&self) -> Role {
        match self.side {
            Side::Client(_) => Role::Client,
            Side::Server(_) => Role::Server,
        }
    }

    /// A frame that answers nothing.
    fn say(&mut self, encode: impl FnOnce(&mut Vec<u8>)) {
        self.out.frame(Answers::default(), encode);
    }

    /// Runs an input. Its error ends the connection, with a last frame to the peer where that helps.
    fn guard(&mut self, input: impl FnOnce(&mut Self) -> Result<(), ConnectionError>) -> Result<(), ConnectionError> {
        if let Phase::Broken(error) = &self.phase {
            return Err(error.clone());
        }
        let result = input(self);
        if let Err(error) = &result {
            let refusal = match error {
                ConnectionError::Refused { code, message } => Some((*code, message.clone())),
                ConnectionError::Protocol(_) => Some((error.code(), error.to_string())),
                _ => None,
            };
            let refusal = refusal.map(|(code, reason)| move |out: &mut Vec<u8>| put::refuse(out, code, &reason));
            self.out.close(refusal);
            self.phase = Phase::Broken(error.clone());
        }
        result
    }

    fn receive(&mut self, now: Instant, n: usize, owner: &mut O) -> Result<(), ConnectionError> {
        let mut bulk = self.incoming.arrived(n)?;
        if n != 0 {
            self.heard(now);
        }
        let counter = if self.incoming.loan.is_some() { &mut self.stats.borrowed } else { &mut self.stats.bytes_in };
        *counter += n as u64;
        self.stats.payload_in += bulk;
        while bulk != 0 {
            let (taken, complete) = self.incoming.take_bulk(bulk);
            bulk -= taken;
            if let Some(id) = complete {
                match self.side {
                    Side::Client(_) => self.reply_complete(id),
                    Side::Server(_) => self.call_complete(id),
                }
            }
        }
        self.return_loan();
        loop {
            let max_control = if self.is_ready() { MAX_CONTROL } else { MAX_HANDSHAKE_CONTROL };
            let (from, to, is_forged) = match self.incoming.step(max_control)? {
                Parsed::Wait => break,
                Parsed::Section { from, to } => (from, to, false),
                Parsed::Forged { from, to } => (from, to, true),
            };
            let scratch = self.incoming.lend_scratch();
            let section = scratch.get(from..to).unwrap_or_default();
            let result =
                if is_forged { Err(self.forged(self.stats.blocks_in, section)) } else { self.section(section, owner) };
            self.stats.blocks_in += 1;
            self.incoming.return_scratch(scratch);
            result?;
            self.incoming.section_done()?;
        }
        if self.unblocked {
            self.send_waiting(now);
        }
        Ok(())
    }

    fn section(&mut self, section: &[u8], owner: &mut O) -> Result<(), ConnectionError> {
        let from = match self.role() {
            Role::Client => Role::Server,
            Role::Server => Role::Client,
        };
        let is_unproved = self.settings.secret.is_some() && self.incoming.key.is_none();
        let mut frames = Frames::new(section, from);
        while let Some(frame) = frames.next()? {
            if is_unproved {
                self.check_unproved(&frame, frames.name())?;
            }
            if let Frame::Refuse { code, reason } = frame {
                return Err(match code {
                    _ if !self.is_ready() => refused_before_handshake(code, reason),
                    0 => ConnectionError::RefusedByPeer { code: code::UNAVAILABLE, message: printable(reason) },
                    code => ConnectionError::RefusedByPeer { code, message: printable(reason) },
                });
            }
            match (&self.phase, &self.side) {
                (Phase::Ready, Side::Client(_)) => self.client_frame(frame, frames.name())?,
                (Phase::Migrating { .. }, Side::Client(_)) => self.migration_frame(frame, frames.name())?,
                (Phase::Ready, Side::Server(_)) => self.server_frame(frame, frames.name(), owner)?,
                _ => self.handshake_frame(frame, frames.name())?,
            }
        }
        Ok(())
    }

    fn client_frame(&mut self, frame: Frame<'_>, name: &'static str) -> Result<(), ConnectionError> {
        match frame {
            Frame::Reply(reply) => self.on_reply(reply)?,
            Frame::Data { id, len, abort } => {
                if abort {
                    self.check_abort(id)?;
                    self.reply_aborted(id);
                } else {
                    self.incoming.claim(id, len)?;
                }
            }
            Frame::Goodbye { reason } => {
                let reason = printable(reason);
                let task = self.peer.as_ref().map_or("the peer", |peer| &peer.task);
                let message = format!("{task} is closing the connection: {reason}");
                self.refuse_waiting(&message, Leaves::Peer);
                self.events.goodbye(&reason);
            }
            other => self.common_frame(other, name)?,
        }
        Ok(())
    }

    fn server_frame(&mut self, frame: Frame<'_>, name: &'static str, owner: &mut O) -> Result<(), ConnectionError> {
        match frame {
            Frame::Recv(recv) => self.on_recv_frame(recv)?,
            Frame::Key { key, forget, prefix } => self.on_key(key, forget, prefix)?,
            Frame::Call(call) => self.on_call_frame(call, owner)?,
            Frame::Data { id, len, abort } => {
                if abort {
                    self.check_abort(id)?;
                    self.incoming.forget(id);
                } else {
                    self.incoming.claim(id, len)?;
                }
            }
            Frame::Cancel { id, code } => self.on_cancel(id, code),
            Frame::Move { code, meta } => self.on_move(code, meta)?,
            Frame::Goodbye { reason } => self.events.goodbye(&printable(reason)),
            other => self.common_frame(other, name)?,
        }
        Ok(())
    }

    /// Frames that mean the same in both directions.
    fn common_frame(&mut self, frame: Frame<'_>, name: &'static str) -> Result<(), ConnectionError> {
        match frame {
            Frame::Lend { witness, pieces } => self.on_lend(witness, loan_pieces(pieces))?,
            Frame::Taken { blocks } => self.on_taken(blocks)?,
            Frame::Ping { nonce } => self.out.pong(nonce),
            Frame::Pong { .. } => {}
            _ => return Err(unexpected(name, "after the handshake")),
        }
        Ok(())
    }

    /// A payload may only be aborted when the receiver no longer wants it.
    fn check_abort(&mut self, id: u64) -> Result<(), ProtocolError> {
        let why = match self.incoming.transfer_mut(id) {
            Some(transfer) if !transfer.wanted => return Ok(()),
            Some(_) => "is still wanted",
            None => "expects no bytes",
        };
        Err(ProtocolError::BadId { frame: "DATA", id, why })
    }

    /// Why no requests can be made any more, if so.
    fn broken(&self) -> Option<(i32, String)> {
        match (&self.failure, &self.phase) {
            (Some(failure), _) => Some(failure.clone()),
            (None, Phase::Broken(error)) => Some((error.code(), error.to_string())),
            _ => None,
        }
    }

    /// After a quiet time, tables that grew in a busy one release their memory.
    fn slim(&mut self) {
        self.out.slim();
        self.events.slim();
        match &mut self.side {
            Side::Client(client) => client.slim(),
            Side::Server(server) => server.slim(),
        }
    }

    fn heard(&mut self, now: Instant) {
        self.last_heard = self.last_heard.max(now);
        self.ping_sent = None;
    }

    fn keepalive_at(&self) -> Option<Instant> {
        if self.settings.keepalive_interval == Duration::ZERO {
            return None;
        }
        Some(match self.ping_sent {
            Some((_, at)) => at,
            None => self.last_heard + self.settings.keepalive_interval,
        })
    }

    fn tick(&mut self, now: Instant) -> Result<(), ConnectionError> {
        self.end_overdue(now);
        let waited = |since| now.saturating_duration_since(since);
        if self.is_migrating() {
            if now >= self.born + self.move_limit() {
                return Err(ConnectionError::MoveTimeout { waited: waited(self.born) });
            }
        } else if !self.is_ready() {
            if now >= self.born + self.settings.handshake_timeout {
                return Err(ConnectionError::HandshakeTimeout { waited: waited(self.born) });
            }
        } else if self.keepalive_at().is_some_and(|at| at <= now) {
            // If this process was suspended, perhaps with the peer, the answer may be in the socket, or on its way.
            // Each quarter begins when the last one was noticed, so that a suspension counts for one of them only.
            let passed = match self.ping_sent {
                Some((3, _)) => return Err(ConnectionError::PeerSilent { waited: waited(self.last_heard) }),
                Some((passed, _)) => passed + 1,
                None => {
                    self.slim();
                    self.pings += 1;
                    self.out.ping(self.pings);
                    0
                }
            };
            self.ping_sent = Some((passed, now + self.settings.keepalive_timeout / 4));
        }
        if self.unblocked {
            self.send_waiting(now);
        }
        Ok(())
    }
}

pub(super) fn unexpected(frame: &'static str, when: &'static str) -> ConnectionError {
    ProtocolError::Unexpected { frame, when }.into()
}

/// Text from the peer for a log line.
pub(super) fn printable(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}
