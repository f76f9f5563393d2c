//! The handshake: challenges (with a secret), HELLO, WELCOME. `hello.rs` has the contents of the frames, `secret.rs`
//! the keys.

use std::time::Instant;

use super::client::Client;
use super::migration::MigrationState;
use super::{Connection, Phase, Side, printable, unexpected};
use crate::error::{ConnectionError, ProtocolError, code};
use crate::frame::{Frame, Frames, put};
use crate::hello::{self, FEATURE_QUEUE_PAIRS, Hello};
use crate::idmap::IdHash;
use crate::limits::CHALLENGE;
use crate::owner::{Failure, Owner};
use crate::role::Role;
use crate::settings::{Claim, PeerInfo, Settings};

impl<O: Owner> Connection<O> {
    /// The side that connected. Its first frame waits in `poll_transmit`; requests may be made at once and wait for the
    /// handshake.
    pub fn client(settings: Settings, now: Instant) -> Self {
        let hash = IdHash::new();
        let mut connection = Self::new(settings, now, Side::Client(Client::new(hash)), hash);
        if connection.settings.secret.is_some() {
            connection.say_challenge();
        } else {
            connection.say_hello();
        }
        connection
    }

    fn say_challenge(&mut self) {
        let challenge = self.settings.challenge;
        self.say(|out| put::challenge(out, &challenge));
        self.out.cut_alone();
    }

    fn say_hello(&mut self) {
        let features = self.settings.features;
        let fields = Hello::ours(&self.settings, features).encode();
        self.say(|out| put::hello(out, features, &fields));
        self.out.cut_alone();
        self.phase = Phase::Hello { key: None };
    }

    pub(super) fn handshake_frame(&mut self, frame: Frame<'_>, name: &'static str) -> Result<(), ConnectionError> {
        let interrupted = Phase::Broken(ConnectionError::Misuse("the handshake was interrupted"));
        match (std::mem::replace(&mut self.phase, interrupted), frame) {
            (Phase::Challenge, Frame::Challenge(theirs)) => self.challenged(theirs),
            (Phase::Hello { key }, Frame::Hello(frame)) => {
                // Nothing is said in the server's name before the client has proved that it knows the secret.
                self.out.key = key;
                let theirs = Hello::decode("HELLO", frame.features, frame.fields)?;
                hello::check(Role::Server, &self.settings, &theirs)?;
                if let Some(check) = self.client_check.take() {
                    let Hello { task, incarnation, address, .. } = &theirs;
                    check(&Claim { task, incarnation: *incarnation, address })
                        .map_err(|Failure { code, message }| ConnectionError::Refused { code, message })?;
                }
                self.welcome(theirs);
            }
            (Phase::Hello { .. }, Frame::Welcome(frame)) => {
                let theirs = Hello::decode("WELCOME", frame.features, frame.fields)?;
                hello::check(Role::Client, &self.settings, &theirs)?;
                if frame.features & !self.settings.features != 0 {
                    let why = "it accepts features that were not offered";
                    return Err(ProtocolError::Frame { frame: "WELCOME", why }.into());
                }
                self.handshake_done(theirs.into_peer(frame.features, self.settings.secret.is_some()));
            }
            (Phase::Hello { .. }, Frame::Challenge(_)) if self.settings.secret.is_none() => {
                return Err(one_has_no_secret());
            }
            _ => return Err(unexpected(name, "at this point in the handshake")),
        }
        Ok(())
    }

    /// The keys are known: everything from the next block on is authenticated.
    fn challenged(&mut self, theirs: &[u8; CHALLENGE]) {
        let Some(secret) = &self.settings.secret else { return };
        let key = |sender, client, server| Some(secret.key(sender, client, server));
        let ours = &self.settings.challenge;
        match self.role() {
            Role::Client => {
                self.out.key = key(Role::Client, ours, theirs);
                self.incoming.key = key(Role::Server, ours, theirs);
                self.say_hello();
            }
            Role::Server => {
                self.incoming.key = key(Role::Client, theirs, ours);
                let key = key(Role::Server, theirs, ours);
                self.say_challenge();
                self.phase = Phase::Hello { key };
            }
        }
    }

    /// With a secret, nothing but this is believed in blocks that are not authenticated.
    pub(super) fn check_unproved(&self, frame: &Frame<'_>, name: &'static str) -> Result<(), ConnectionError> {
        match frame {
            Frame::Challenge(_) | Frame::Refuse { .. } => Ok(()),
            Frame::Hello(_) | Frame::Welcome(_) => Err(one_has_no_secret()),
            _ => Err(unexpected(name, "before the peer has proved that it knows the secret")),
        }
    }

    /// A block without the right code.
    pub(super) fn forged(&self, block: u64, section: &[u8]) -> ConnectionError {
        if !matches!(self.phase, Phase::Hello { .. }) {
            return ProtocolError::Forged { block }.into();
        }
        // A server that could not verify HELLO, or that has no place, says so without a code.
        if let (Role::Client, Ok(Some(Frame::Refuse { code, reason }))) =
            (self.role(), Frames::new(section, Role::Server).next())
        {
            return refused_before_handshake(code, reason);
        }
        let message = "the two sides have different shared secrets, or their connection was tampered with: compare STARWIRE_SECRET or STARWIRE_SECRET_FILE";
        ConnectionError::Refused { code: code::UNAUTHENTICATED, message: message.to_owned() }
    }

    /// Answers a HELLO that was accepted.
    fn welcome(&mut self, theirs: Hello) {
        let features = theirs.features & self.settings.features;
        let fields = Hello::ours(&self.settings, features).encode();
        self.say(|out| put::welcome(out, features, &fields));
        self.out.cut_alone();
        self.handshake_done(theirs.into_peer(features, self.settings.secret.is_some()));
    }

    fn handshake_done(&mut self, peer: PeerInfo) {
        if self.role() == Role::Client && peer.features & FEATURE_QUEUE_PAIRS != 0 {
            self.phase = Phase::Migrating { peer: Box::new(peer), state: MigrationState::Asked };
            return self.events.may_move();
        }
        self.become_ready(peer);
    }

    pub(super) fn become_ready(&mut self, peer: PeerInfo) {
        self.phase = Phase::Ready;
        self.peer = Some(peer);
        self.events.ready();
        self.unblocked = true;
        if let Some(reason) = self.parting.take() {
            self.say(|out| put::goodbye(out, &reason));
        }
    }
}

fn one_has_no_secret() -> ConnectionError {
    let message = "one side requires a shared secret and the other has none: set STARWIRE_SECRET or STARWIRE_SECRET_FILE for all tasks of the cluster";
    ConnectionError::Refused { code: code::UNAUTHENTICATED, message: message.to_owned() }
}

/// A peer that has proved nothing may turn this side away, but not choose how its requests end.
pub(super) fn refused_before_handshake(code: i32, reason: &[u8]) -> ConnectionError {
    let code = match code {
        code::FAILED_PRECONDITION | code::UNAUTHENTICATED => code,
        _ => code::UNAVAILABLE,
    };
    ConnectionError::RefusedByPeer { code, message: printable(reason) }
}
