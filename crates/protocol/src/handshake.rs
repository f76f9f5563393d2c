//! The handshake: HELLO, WELCOME, proofs. `hello.rs` has the contents of the frames.

use std::time::Instant;

use super::client::Client;
use super::connection::{Connection, Phase, Side, unexpected};
use super::error::{ConnectionError, ProtocolError, code};
use super::frame::{FRAME_HEADER, Frame, put};
use super::hello::{self, Hello, Role, WIRE_VERSION};
use super::idmap::IdHash;
use super::moving::{FEATURE_QUEUE_PAIRS, Step as MoveStep};
use super::owner::Owner;
use super::settings::{PeerInfo, Settings};

impl<O: Owner> Connection<O> {
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

    pub(super) fn handshake_frame(&mut self, frame: Frame<'_>, name: &'static str) -> Result<(), ConnectionError> {
        let interrupted = Phase::Broken(ConnectionError::Misuse("the handshake was interrupted"));
        match (std::mem::replace(&mut self.phase, interrupted), frame) {
            (Phase::Hello { .. }, Frame::Hello(frame)) => {
                check_version(frame.version)?;
                let theirs = Hello::decode("HELLO", frame.version, frame.features, frame.fields)?;
                hello::check(Role::Server, &self.settings, &theirs)?;
                self.welcome(theirs, frame.bytes);
            }
            (Phase::Hello { hello }, Frame::Welcome(frame)) => {
                check_version(frame.version)?;
                let theirs = Hello::decode("WELCOME", frame.version, frame.features, frame.fields)?;
                hello::check(Role::Client, &self.settings, &theirs)?;
                if frame.features & !self.settings.features != 0 {
                    let why = "it accepts features that were not offered";
                    return Err(ProtocolError::Frame { frame: "WELCOME", why }.into());
                }
                let authenticated = self.settings.secret.is_some();
                let peer = Box::new(theirs.into_peer(frame.features, authenticated));
                if authenticated {
                    self.phase = Phase::Proof { hello, welcome: frame.bytes.to_vec(), peer };
                } else {
                    self.handshake_done(*peer);
                }
            }
            (Phase::Proof { hello, welcome, peer }, Frame::Proof { mac }) => {
                let Some(secret) = self.settings.secret.clone() else {
                    return Err(ConnectionError::Misuse("a PROOF without a shared secret"));
                };
                let (role, prover) = match self.role() {
                    Role::Client => (Role::Client, Role::Server),
                    Role::Server => (Role::Server, Role::Client),
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
                self.handshake_done(*peer);
            }
            _ => return Err(unexpected(name, "at this point in the handshake")),
        }
        Ok(())
    }

    /// Answers a HELLO that was accepted.
    fn welcome(&mut self, theirs: Hello, hello_bytes: &[u8]) {
        let features = theirs.features & self.settings.features;
        let fields = Hello::ours(&self.settings, features).encode();
        let welcome = frame_bytes(|out| put::welcome(out, WIRE_VERSION, features, &fields), fields.len());
        self.say(|out| put::welcome(out, WIRE_VERSION, features, &fields));
        let peer = theirs.into_peer(features, self.settings.secret.is_some());
        match &self.settings.secret {
            None => {
                self.out.cut_alone();
                self.handshake_done(peer);
            }
            Some(secret) => {
                let mac = hello::prove(secret, Role::Server, hello_bytes, &welcome);
                self.say(|out| put::proof(out, &mac));
                self.out.cut_alone();
                self.phase = Phase::Proof { hello: hello_bytes.to_vec(), welcome, peer: Box::new(peer) };
            }
        }
    }

    fn handshake_done(&mut self, peer: PeerInfo) {
        if self.role() == Role::Client && peer.features & FEATURE_QUEUE_PAIRS != 0 {
            self.phase = Phase::Moving { peer: Box::new(peer), step: MoveStep::Asked };
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
    bytes.truncate(FRAME_HEADER + meta_len);
    bytes
}
