//! Moving a connection from its socket to a queue pair: after the handshake, before the first request, and only if both
//! sides offered it.
//!
//! The protocol only determines when. `hold` keeps back everything that must not leave over the socket; the endpoints
//! are opaque to it.

use std::time::{Duration, Instant};

use super::{Connection, Phase, Side, printable, unexpected};
use crate::error::{ConnectionError, ProtocolError};
use crate::frame::{Frame, put};
use crate::hello::FEATURE_QUEUE_PAIRS;
use crate::owner::Owner;

/// The progress of the client's move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MigrationState {
    /// The owner was asked for a queue pair (`Event::MayMove`).
    Asked,
    /// MOVE was sent.
    Proposed,
    /// The server agreed; the owner connects its queue pair.
    Agreed,
    /// Nothing travels over the socket any more. The first PONG proves that the queue pair works in both directions.
    Proving,
}

impl<O: Owner> Connection<O> {
    /// Client: answers `Event::MayMove`. `endpoint` tells the peer how to reach our queue pair.
    pub fn propose_move(&mut self, endpoint: &[u8]) {
        if let Phase::Migrating { state: state @ MigrationState::Asked, .. } = &mut self.phase {
            *state = MigrationState::Proposed;
            self.say(|out| put::migrate(out, 0, endpoint));
            self.out.cut_alone();
            self.out.hold();
        }
    }

    /// Client: the other answer, also to a refusal. The connection stays on its socket.
    pub fn stay(&mut self, now: Instant) {
        if let Phase::Migrating { state: MigrationState::Asked | MigrationState::Agreed, .. } = self.phase {
            self.out.go_on();
            self.end_move();
            self.send_waiting(now);
        }
    }

    /// Client: the connection uses the queue pair from now on.
    pub fn moved(&mut self) {
        if let Phase::Migrating { state: state @ MigrationState::Agreed, .. } = &mut self.phase {
            *state = MigrationState::Proving;
            self.out.go_on();
            self.pings += 1;
            self.out.ping(self.pings);
        }
    }

    /// Server: answers `Event::MoveProposed`. Nothing leaves after it until `resume`.
    pub fn accept_move(&mut self, endpoint: &[u8]) {
        self.say(|out| put::migrate(out, 0, endpoint));
        self.out.cut_alone();
        self.out.hold();
    }

    /// Server: the other answer. The connection stays on its socket.
    pub fn refuse_move(&mut self, code: i32, reason: &str) {
        self.say(|out| put::migrate(out, code, reason.as_bytes()));
    }

    /// Server: its answer has left; what follows goes over the queue pair.
    pub fn resume(&mut self) {
        if !matches!(self.phase, Phase::Migrating { .. }) {
            self.out.go_on();
        }
    }

    /// Everything that may leave has been returned by `poll_transmit`, and more waits for the move.
    pub fn is_held(&self) -> bool {
        self.out.is_held()
    }

    /// Client: this connection waits for a queue pair, or for the proof that it works.
    pub fn is_migrating(&self) -> bool {
        matches!(self.phase, Phase::Migrating { .. })
    }

    /// A move must work within this time, so that some is left for a fallback.
    pub(super) fn move_limit(&self) -> Duration {
        self.settings.handshake_timeout / 2
    }

    /// Client: frames between handshake and proof.
    pub(super) fn migration_frame(&mut self, frame: Frame<'_>, name: &'static str) -> Result<(), ConnectionError> {
        let Phase::Migrating { state, .. } = &mut self.phase else { return Ok(()) };
        match (*state, frame) {
            (MigrationState::Proposed, Frame::Move { code, meta }) => {
                *state = MigrationState::Agreed;
                if code == 0 {
                    self.events.move_accepted(meta);
                } else {
                    self.events.move_refused(code, &printable(meta));
                }
                Ok(())
            }
            (MigrationState::Proving, Frame::Pong { .. }) => {
                self.end_move();
                Ok(())
            }
            (_, frame @ (Frame::Ping { .. } | Frame::Pong { .. } | Frame::Goodbye { .. })) => {
                self.client_frame(frame, name)
            }
            _ => Err(unexpected(name, "while a connection moves to RDMA")),
        }
    }

    /// Server: a client proposes to move.
    pub(super) fn on_move(&mut self, code: i32, meta: &[u8]) -> Result<(), ProtocolError> {
        let offered = self.peer.as_ref().is_some_and(|peer| peer.features & FEATURE_QUEUE_PAIRS != 0);
        let is_first = match &mut self.side {
            Side::Server(server) => server.is_untouched() && !std::mem::replace(&mut self.move_seen, true),
            Side::Client(_) => false,
        };
        if !offered || !is_first || code != 0 {
            return Err(ProtocolError::Unexpected { frame: "MOVE", when: "at this point in the connection" });
        }
        self.events.move_proposed(meta);
        Ok(())
    }

    fn end_move(&mut self) {
        let broken = Phase::Broken(ConnectionError::Misuse("the move was interrupted"));
        match std::mem::replace(&mut self.phase, broken) {
            Phase::Migrating { peer, .. } => self.become_ready(*peer),
            other => self.phase = other,
        }
    }
}
