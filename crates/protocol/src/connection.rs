//! The state machine itself: bytes and time in, frames and events out. Requests and answers are in `client.rs` and
//! `server.rs`.

use std::time::{Duration, Instant};

use super::client::Client;
use super::error::{ConnectionError, ProtocolError, code};
use super::frame::{Frame, Frames, loan_pieces, put};
use super::handler::{Handler, Segment, Target};
use super::hello::{self, Hello, Role, WIRE_VERSION};
use super::idmap::IdHash;
use super::incoming::{Incoming, Step};
use super::limits::{MAX_CONTROL, MAX_HANDSHAKE_CONTROL};
use super::moving::{FEATURE_QUEUE_PAIRS, Step as MoveStep};
use super::outgoing::{Answers, Outgoing};
use super::server::Server;
use super::settings::{PeerInfo, Settings};
use super::spare;
use super::stats::Stats;

/// One side of one connection.
pub struct Connection<H: Handler> {
    pub(super) settings: Settings,
    pub(super) side: Side<H>,
    /// Known once the handshake is done.
    pub(super) peer: Option<PeerInfo>,
    pub(super) incoming: Incoming,
    pub(super) out: Outgoing<H::Payload>,
    pub(super) stats: Stats,
    /// What requests end with that are made after `fail`.
    pub(super) failure: Option<(i32, String)>,
    /// Requests that wait may go now.
    pub(super) unblocked: bool,
    pub(super) phase: Phase,
    /// GOODBYE that waits for the end of the handshake.
    parting: Option<String>,
    born: Instant,
    last_received: Instant,
    ping_sent: Option<Instant>,
    pub(super) pings: u64,
    /// Server: the client proposed a move; it may do so once.
    pub(super) move_seen: bool,
}

pub(super) enum Side<H: Handler> {
    Client(Client<H>),
    Server(Server<H>),
}

pub(super) enum Phase {
    /// Server: waits for HELLO. Client: waits for WELCOME; `hello` is the HELLO that it sent.
    Hello {
        hello: Vec<u8>,
    },
    /// Waits for the peer's proof; both frames are what it is about.
    Proof {
        hello: Vec<u8>,
        welcome: Vec<u8>,
        peer: Box<PeerInfo>,
    },
    /// Client: both can move to a queue pair, and that is being done.
    Moving {
        peer: Box<PeerInfo>,
        step: MoveStep,
    },
    Ready,
    Broken(ConnectionError),
}

impl<H: Handler> Connection<H> {
    /// The side that connected. HELLO waits in `poll_transmit`; requests may be made at once and wait for the
    /// handshake.
    pub fn client(settings: Settings, now: Instant) -> Self {
        let hash = IdHash::new();
        let mut connection = Self::new(settings, now, Side::Client(Client::new(hash)), hash);
        let fields = Hello::ours(&connection.settings, connection.settings.features).encode();
        let features = connection.settings.features;
        let hello = frame_bytes(|out| put::hello(out, WIRE_VERSION, features, &fields), fields.len());
        connection.say(|out| put::hello(out, WIRE_VERSION, features, &fields));
        connection.out.cut_alone();
        connection.phase = Phase::Hello { hello };
        connection
    }

    /// The side that accepted.
    pub fn server(settings: Settings, now: Instant) -> Self {
        let hash = IdHash::new();
        Self::new(settings, now, Side::Server(Server::new(hash)), hash)
    }

    fn new(settings: Settings, now: Instant, side: Side<H>, hash: IdHash) -> Self {
        Connection {
            incoming: Incoming::new(hash, matches!(side, Side::Server(_))),
            settings,
            side,
            peer: None,
            out: Outgoing::new(hash),
            stats: Stats::default(),
            failure: None,
            unblocked: false,
            phase: Phase::Hello { hello: Vec::new() },
            parting: None,
            born: now,
            last_received: now,
            ping_sent: None,
            pings: 0,
            move_seen: false,
        }
    }

    // Bytes in.

    /// Replaces `out` by where the next bytes of the stream belong. Empty: do not read now, ask again after the next
    /// `poll_transmit` that returned a block. The targets (and the scratch memory) stay valid until `on_received` or
    /// `fail`.
    pub fn recv_plan(&mut self, out: &mut Vec<Target>) {
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

    /// `n` bytes were stored into the targets of the last plan, from its beginning.
    pub fn on_received(&mut self, now: Instant, n: usize, handler: &mut H) -> Result<(), ConnectionError> {
        if let Side::Client(client) = &mut self.side {
            client.end_deferred(handler);
        }
        self.guard(|this| this.receive(now, n, handler))
    }

    /// What was received but not understood: after `ConnectionError::NotStarwire`, everything since the beginning.
    pub fn unread(&self) -> &[u8] {
        self.incoming.unread()
    }

    // Bytes out.

    /// Appends the segments of the next block to `out` and returns their total length; 0: nothing to send. Blocks must
    /// be written in order.
    pub fn poll_transmit(&mut self, now: Instant, out: &mut Vec<Segment<H::Payload>>) -> u64 {
        if self.is_paused() {
            // We do not listen at the moment; that the peer reads is its sign of life.
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

    /// Gives a written `Segment::Control` back for reuse.
    pub fn recycle(&mut self, control: Vec<u8>) {
        spare::give_out(control);
    }

    // Time.

    pub fn next_timeout(&self) -> Option<Instant> {
        let own = match &self.phase {
            Phase::Broken(_) => return None,
            Phase::Ready => self.keepalive_at(),
            Phase::Moving { .. } => Some(self.born + self.move_limit()),
            Phase::Hello { .. } | Phase::Proof { .. } => Some(self.born + self.settings.handshake_timeout),
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

    pub fn on_timeout(&mut self, now: Instant, handler: &mut H) -> Result<(), ConnectionError> {
        self.guard(|this| this.tick(now, handler))
    }

    // The end.

    /// Says GOODBYE: a server answers new requests with Unavailable from now on, a client sends no new ones (those not
    /// yet sent end at once).
    pub fn goodbye(&mut self, reason: &str, handler: &mut H) {
        match &mut self.side {
            Side::Server(server) => server.leave(reason),
            Side::Client(_) => self.refuse_waiting(reason, handler),
        }
        match self.phase {
            Phase::Ready => self.say(|out| put::goodbye(out, reason)),
            Phase::Broken(_) => {}
            _ => self.parting = Some(reason.to_owned()),
        }
    }

    /// Ends the connection in order: what is not on its way is dropped, and GOODBYE is the last word. `fail` follows
    /// when the peer has ended its side, or after a while.
    pub fn leave(&mut self, reason: &str) {
        if matches!(self.phase, Phase::Broken(_)) {
            return;
        }
        let goodbye = self.is_ready().then_some(|out: &mut Vec<u8>| put::goodbye(out, reason));
        self.out.close(&mut self.stats, goodbye);
        self.phase = Phase::Broken(ConnectionError::Left(reason.to_owned()));
    }

    /// Server: sends the peer away, whatever it has said so far; REFUSE is the last word.
    pub fn refuse(&mut self, code: i32, reason: &str) {
        let refused = ConnectionError::Refused { code, message: reason.to_owned() };
        let _ = self.guard(|_| Err(refused));
    }

    /// The connection is gone (or will be): ends each op with `code` and tells the server's owner that its callers are
    /// gone. Call it when the driver no longer touches any memory of this connection. Idempotent; requests made
    /// afterwards end at once with the same failure.
    pub fn fail(&mut self, code: i32, message: &str, handler: &mut H) {
        if self.failure.is_some() {
            return;
        }
        self.failure = Some((code, message.to_owned()));
        if !matches!(self.phase, Phase::Broken(_)) {
            self.phase = Phase::Broken(ConnectionError::Misuse("a connection was used after it ended"));
        }
        self.out.close(&mut self.stats, None::<fn(&mut Vec<u8>)>);
        self.incoming.clear();
        match self.side {
            Side::Client(_) => self.fail_client(code, message, handler),
            Side::Server(_) => self.fail_server(handler),
        }
    }

    // Looking.

    /// Known once the handshake is done.
    pub fn peer(&self) -> Option<&PeerInfo> {
        self.peer.as_ref()
    }

    pub fn is_ready(&self) -> bool {
        matches!(self.phase, Phase::Ready)
    }

    /// No request in flight, nothing to send, and nothing lent.
    pub fn is_idle(&self) -> bool {
        self.in_flight() == 0 && self.out.is_empty() && self.out.lender.is_empty()
    }

    /// Requests without an answer (client: ours, server: the peer's).
    pub fn in_flight(&self) -> usize {
        match &self.side {
            Side::Client(client) => client.in_flight(),
            Side::Server(server) => server.in_flight(),
        }
    }

    /// The op of a `Target::Reply`. None for other ids.
    pub fn op_mut(&mut self, id: u64) -> Option<&mut H::Op> {
        match &mut self.side {
            Side::Client(client) => client.op_mut(id),
            Side::Server(_) => None,
        }
    }

    /// The body of a `Target::Call`. None for other ids.
    pub fn body_mut(&mut self, id: u64) -> Option<&mut H::Body> {
        match &mut self.side {
            Side::Client(_) => None,
            Side::Server(server) => server.body_mut(id),
        }
    }

    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    // The inside.

    /// A server with too many unsent answers takes no further requests. A client always reads, so this cannot
    /// dead-lock.
    fn is_paused(&self) -> bool {
        matches!(self.side, Side::Server(_)) && self.out.is_high()
    }

    fn role(&self) -> Role {
        match self.side {
            Side::Client(_) => Role::Client,
            Side::Server(_) => Role::Server,
        }
    }

    /// A frame that answers nothing.
    pub(super) fn say(&mut self, encode: impl FnOnce(&mut Vec<u8>)) {
        self.out.frame(Answers::default(), &mut self.stats, encode);
    }

    /// Runs an input; its error ends the connection, with a last word to the peer where that helps.
    fn guard(&mut self, input: impl FnOnce(&mut Self) -> Result<(), ConnectionError>) -> Result<(), ConnectionError> {
        if let Phase::Broken(error) = &self.phase {
            return Err(error.clone());
        }
        let result = input(self);
        if let Err(error) = &result {
            let last_word = match error {
                ConnectionError::Refused { code, message } => Some((*code, message.clone())),
                ConnectionError::Protocol(_) => Some((code::UNAVAILABLE, error.to_string())),
                _ => None,
            };
            let last_word = last_word.map(|(code, reason)| move |out: &mut Vec<u8>| put::refuse(out, code, &reason));
            self.out.close(&mut self.stats, last_word);
            self.phase = Phase::Broken(error.clone());
        }
        result
    }

    fn receive(&mut self, now: Instant, n: usize, handler: &mut H) -> Result<(), ConnectionError> {
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
                    Side::Client(_) => self.reply_complete(id, handler),
                    Side::Server(_) => self.call_complete(id, handler),
                }
            }
        }
        self.return_loan();
        loop {
            let max_control = if self.is_ready() { MAX_CONTROL } else { MAX_HANDSHAKE_CONTROL };
            let Step::Section { from, to } = self.incoming.step(max_control)? else { break };
            self.stats.blocks_in += 1;
            let scratch = self.incoming.lend_scratch();
            let result = self.section(scratch.get(from..to).unwrap_or_default(), handler);
            self.incoming.return_scratch(scratch);
            result?;
            self.incoming.section_done()?;
        }
        if self.unblocked {
            self.send_waiting(now, handler);
        }
        Ok(())
    }

    fn section(&mut self, section: &[u8], handler: &mut H) -> Result<(), ConnectionError> {
        let mut frames = Frames::new(section);
        while let Some(frame) = frames.next()? {
            self.stats.frames_in += 1;
            if let Frame::Refuse { code, reason } = frame {
                let code = if code == 0 { code::UNAVAILABLE } else { code };
                return Err(ConnectionError::RefusedByPeer { code, message: printable(reason) });
            }
            match (&self.phase, &self.side) {
                (Phase::Ready, Side::Client(_)) => self.client_frame(frame, handler)?,
                (Phase::Moving { .. }, Side::Client(_)) => self.moving_frame(frame, handler)?,
                (Phase::Ready, Side::Server(_)) => self.server_frame(frame, handler)?,
                _ => self.handshake_frame(frame, handler)?,
            }
        }
        Ok(())
    }

    pub(super) fn client_frame(&mut self, frame: Frame<'_>, handler: &mut H) -> Result<(), ConnectionError> {
        match frame {
            Frame::Reply { id, code, meta, parts } => self.on_reply(id, code, meta, parts, handler)?,
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
                self.refuse_waiting(&message, handler);
                handler.goodbye(&reason);
            }
            Frame::Lend { witness, pieces } => self.on_lend(witness, loan_pieces(pieces))?,
            Frame::Taken { blocks } => self.on_taken(blocks)?,
            Frame::Ping { nonce } => self.out.pong(nonce),
            Frame::Pong { .. } => {}
            other => return Err(unexpected(other, "from the server side")),
        }
        Ok(())
    }

    fn server_frame(&mut self, frame: Frame<'_>, handler: &mut H) -> Result<(), ConnectionError> {
        match frame {
            Frame::Recv { id, step, key, frame, iter } => self.on_recv_frame(id, step, key, frame, iter, handler)?,
            Frame::Key { key, forget, prefix } => self.on_key(key, forget, prefix, handler)?,
            Frame::Call { id, method, deadline_ms, meta, parts } => {
                self.on_call_frame(id, method, deadline_ms, meta, parts, handler)?;
            }
            Frame::Data { id, len, abort } => {
                if abort {
                    self.check_abort(id)?;
                    self.incoming.forget(id);
                } else {
                    self.incoming.claim(id, len)?;
                }
            }
            Frame::Cancel { id, code } => self.on_cancel(id, code, handler),
            Frame::Move { code, meta } => self.on_move(code, meta, handler)?,
            Frame::Goodbye { reason } => handler.goodbye(&printable(reason)),
            Frame::Lend { witness, pieces } => self.on_lend(witness, loan_pieces(pieces))?,
            Frame::Taken { blocks } => self.on_taken(blocks)?,
            Frame::Ping { nonce } => self.out.pong(nonce),
            Frame::Pong { .. } => {}
            other => return Err(unexpected(other, "from the client side")),
        }
        Ok(())
    }

    /// A payload may only be cut short when the receiver does not want it any more.
    fn check_abort(&mut self, id: u64) -> Result<(), ProtocolError> {
        let why = match self.incoming.transfer_mut(id) {
            Some(transfer) if !transfer.wanted => return Ok(()),
            Some(_) => "is still wanted",
            None => "expects no bytes",
        };
        Err(ProtocolError::BadId { frame: "DATA", id, why })
    }

    fn handshake_frame(&mut self, frame: Frame<'_>, handler: &mut H) -> Result<(), ConnectionError> {
        let waiting = Phase::Broken(ConnectionError::Misuse("the handshake was interrupted"));
        match (std::mem::replace(&mut self.phase, waiting), frame, self.role()) {
            (Phase::Hello { .. }, Frame::Hello { version, features, fields, bytes }, Role::Server) => {
                check_version(version)?;
                let theirs = Hello::decode("HELLO", version, features, fields)?;
                hello::check(Role::Server, &self.settings, &theirs)?;
                self.welcome(theirs, bytes, handler);
            }
            (Phase::Hello { hello }, Frame::Welcome { version, features, fields, bytes }, Role::Client) => {
                check_version(version)?;
                let theirs = Hello::decode("WELCOME", version, features, fields)?;
                hello::check(Role::Client, &self.settings, &theirs)?;
                if features & !self.settings.features != 0 {
                    let why = "it accepts features that were not offered";
                    return Err(ProtocolError::Frame { frame: "WELCOME", why }.into());
                }
                let authenticated = self.settings.secret.is_some();
                let peer = Box::new(theirs.into_peer(features, authenticated));
                if authenticated {
                    self.phase = Phase::Proof { hello, welcome: bytes.to_vec(), peer };
                } else {
                    self.become_ready(*peer, handler);
                }
            }
            (Phase::Proof { hello, welcome, peer }, Frame::Proof { mac }, role) => {
                let prover = if role == Role::Client { Role::Server } else { Role::Client };
                let Some(secret) = self.settings.secret.clone() else {
                    return Err(ConnectionError::Misuse("a PROOF without a shared secret"));
                };
                if !hello::verify(&secret, prover, &hello, &welcome, mac) {
                    let message = format!("{} and {} have different shared secrets", self.settings.task, peer.task);
                    return Err(ConnectionError::Refused { code: code::UNAUTHENTICATED, message });
                }
                if role == Role::Client {
                    let mac = hello::prove(&secret, Role::Client, &hello, &welcome);
                    self.say(|out| put::proof(out, &mac));
                    self.out.cut_alone();
                }
                self.become_ready(*peer, handler);
            }
            (_, other, _) => return Err(unexpected(other, "at this point in the handshake")),
        }
        Ok(())
    }

    /// Answers a HELLO that is fine.
    fn welcome(&mut self, theirs: Hello, hello_bytes: &[u8], handler: &mut H) {
        let features = theirs.features & self.settings.features;
        let fields = Hello::ours(&self.settings, features).encode();
        let welcome = frame_bytes(|out| put::welcome(out, WIRE_VERSION, features, &fields), fields.len());
        self.say(|out| put::welcome(out, WIRE_VERSION, features, &fields));
        let peer = theirs.into_peer(features, self.settings.secret.is_some());
        match &self.settings.secret {
            None => {
                self.out.cut_alone();
                self.become_ready(peer, handler);
            }
            Some(secret) => {
                let mac = hello::prove(secret, Role::Server, hello_bytes, &welcome);
                self.say(|out| put::proof(out, &mac));
                self.out.cut_alone();
                self.phase = Phase::Proof { hello: hello_bytes.to_vec(), welcome, peer: Box::new(peer) };
            }
        }
    }

    /// The handshake is done.
    fn become_ready(&mut self, peer: PeerInfo, handler: &mut H) {
        if self.role() == Role::Client && peer.features & FEATURE_QUEUE_PAIRS != 0 {
            self.phase = Phase::Moving { peer: Box::new(peer), step: MoveStep::Asked };
            return handler.may_move();
        }
        self.be_ready(peer, handler);
    }

    pub(super) fn be_ready(&mut self, peer: PeerInfo, handler: &mut H) {
        self.phase = Phase::Ready;
        handler.ready(&peer);
        self.peer = Some(peer);
        self.unblocked = true;
        if let Some(reason) = self.parting.take() {
            self.say(|out| put::goodbye(out, &reason));
        }
    }

    /// Why nothing can be asked any more, if so.
    pub(super) fn broken(&self) -> Option<(i32, String)> {
        match (&self.failure, &self.phase) {
            (Some(failure), _) => Some(failure.clone()),
            (None, Phase::Broken(error)) => Some((error.code(), error.to_string())),
            _ => None,
        }
    }

    /// Nothing happened for a while: tables that grew in a busy time give their memory back.
    fn slim(&mut self) {
        self.out.slim();
        match &mut self.side {
            Side::Client(client) => client.slim(),
            Side::Server(server) => server.slim(),
        }
    }

    fn heard(&mut self, now: Instant) {
        self.last_received = self.last_received.max(now);
        self.ping_sent = None;
    }

    fn keepalive_at(&self) -> Option<Instant> {
        if self.settings.keepalive_interval == Duration::ZERO {
            return None;
        }
        Some(match self.ping_sent {
            Some(sent) => sent + self.settings.keepalive_timeout,
            None => self.last_received + self.settings.keepalive_interval,
        })
    }

    fn tick(&mut self, now: Instant, handler: &mut H) -> Result<(), ConnectionError> {
        self.end_overdue(now, handler);
        let waited_ms = |since| u64::try_from(now.saturating_duration_since(since).as_millis()).unwrap_or(u64::MAX);
        if self.is_moving() {
            if now >= self.born + self.move_limit() {
                return Err(ConnectionError::MoveTimeout { waited_ms: waited_ms(self.born) });
            }
        } else if !self.is_ready() {
            if now >= self.born + self.settings.handshake_timeout {
                return Err(ConnectionError::HandshakeTimeout { waited_ms: waited_ms(self.born) });
            }
        } else if let Some(at) = self.keepalive_at().filter(|at| *at <= now) {
            // A timer that comes much too late means that we were not looking: the peer's answer may lie in the socket.
            // Ask again.
            let stalled = now.saturating_duration_since(at) > self.settings.keepalive_timeout / 2;
            if self.ping_sent.is_some() && !stalled {
                return Err(ConnectionError::PeerSilent { waited_ms: waited_ms(self.last_received) });
            }
            self.slim();
            self.pings += 1;
            self.out.ping(self.pings);
            self.ping_sent = Some(now);
        }
        if self.unblocked {
            self.send_waiting(now, handler);
        }
        Ok(())
    }
}

fn unexpected(frame: Frame<'_>, when: &'static str) -> ConnectionError {
    ProtocolError::Unexpected { frame: frame.name(), when }.into()
}

fn check_version(version: u16) -> Result<(), ConnectionError> {
    if version == WIRE_VERSION {
        return Ok(());
    }
    let message = format!(
        "one side speaks version {WIRE_VERSION} of the starwire protocol, the other speaks version {version}: use the same starwire release on all tasks"
    );
    Err(ConnectionError::Refused { code: code::FAILED_PRECONDITION, message })
}

/// A frame without its padding.
fn frame_bytes(encode: impl FnOnce(&mut Vec<u8>), meta_len: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    encode(&mut bytes);
    bytes.truncate(super::frame::FRAME_HEADER + meta_len);
    bytes
}

/// Text from the peer for a log line.
pub(super) fn printable(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}
