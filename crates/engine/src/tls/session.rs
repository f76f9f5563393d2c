//! TLS on one connection of a reactor: ciphertext in, plaintext out, and the reverse. No I/O.
//!
//! Both directions have one buffer of ciphertext, which is small on an idle connection and bounded on a busy one. The
//! caller moves plaintext straight to where it belongs; a part of a record that has no place yet is kept.

use std::sync::Arc;
use std::time::Duration;

use rustls::client::UnbufferedClientConnection;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::server::{Acceptor, UnbufferedServerConnection};
use rustls::unbuffered::{ConnectionState, EncodeError, EncryptError, UnbufferedStatus};
use rustls::{ClientConfig, ServerConfig};
use starwire_protocol::{Sniff, sniff};

use super::credentials::ALPN;
use super::explain;

/// Ciphertext received at a time: from an unauthenticated peer, on an idle connection, and in steps on a busy one.
const ROOMS: [usize; 4] = [1 << 10, 8 << 10, 32 << 10, 128 << 10];
/// So many receives or sends in a row that need little make a buffer small again. Keep-alive alone brings them.
const CALM: u32 = 16;
/// The longest record on the wire.
const RECORD: usize = 5 + (16 << 10) + 256;
/// Plaintext in a record, and what encryption adds to it.
const FRAGMENT: usize = 16 << 10;
const OVERHEAD: usize = 32;
/// Most plaintext that is encrypted ahead of the kernel: whole records. With more, the peer begins to decrypt later;
/// with less, both sides wake up more often. Measured with tensors of 4 KB to 10 MB, together with the largest of
/// `ROOMS`.
const AHEAD: usize = 7 * FRAGMENT;
/// A handshake message may not be longer than this; unauthenticated peers send them.
const LONGEST_HANDSHAKE: usize = 32 << 10;
/// The headers of a record and of a handshake message.
const RECORD_HEADER: usize = 5;
const MESSAGE_HEADER: usize = 4;
const SPLIT: &str = "the TLS hello of the peer is not in one record";
/// The first byte of a TLS handshake.
pub const HANDSHAKE: u8 = 0x16;

pub struct Session {
    side: Side,
    /// Received ciphertext is `incoming[start..end]`.
    incoming: Vec<u8>,
    start: usize,
    end: usize,
    /// The last receive filled the buffer.
    was_full: bool,
    /// Receives and sends in a row that needed little.
    calm_in: u32,
    calm_out: u32,
    /// Decrypted bytes without a place; those before `placed` are done.
    plain: Vec<u8>,
    placed: usize,
    /// The kernel may be reading it; the first `sent` bytes were sent …
    outgoing: Out,
    sent: usize,
    /// … and what the handshake has added meanwhile.
    added: Out,
    established: bool,
    failed: bool,
    /// Why it failed, to be told after the bytes that came before.
    fault: Option<String>,
    /// The socket carries TLS in this direction, not an RDMA queue pair something else.
    pub receives: bool,
    pub sends: bool,
    /// The time that this side's part of the handshake has taken.
    pub handshake_took: Duration,
}

enum Side {
    /// Of a server that has not seen enough to tell who this is.
    Listening(Arc<ServerConfig>),
    Client(Box<UnbufferedClientConnection>),
    Server(Box<UnbufferedServerConnection>),
}

/// Who has connected, by the first bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientKind {
    /// Too few bytes to tell.
    Unknown,
    /// The hello of a task of the cluster has arrived.
    Hello,
    /// A task of the cluster that was admitted.
    Task,
    /// HTTP, with TLS or without.
    Http,
    /// Something without TLS.
    Plain(Sniff),
}

/// What the next bytes came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opened {
    /// So many bytes of plaintext were placed.
    Bytes(usize),
    /// More ciphertext is needed, or plaintext has no place.
    Nothing,
    /// The peer has ended its side.
    End,
}

/// After one step of the state machine.
enum Next {
    Again,
    Blocked,
    End,
}

impl Session {
    pub fn client(config: Arc<ClientConfig>, name: ServerName<'static>) -> Result<Self, String> {
        let client = UnbufferedClientConnection::new(config, name).map_err(|error| explain::handshake(&error))?;
        let mut session = Self::new(Side::Client(Box::new(client)));
        session.advance(&mut |_| {}).map(|_| session)
    }

    pub fn server(config: Arc<ServerConfig>) -> Self {
        Self::new(Side::Listening(config))
    }

    fn new(side: Side) -> Self {
        Self {
            side,
            incoming: Vec::new(),
            start: 0,
            end: 0,
            was_full: true,
            calm_in: 0,
            calm_out: 0,
            plain: Vec::new(),
            placed: 0,
            outgoing: Out::default(),
            sent: 0,
            added: Out::default(),
            established: false,
            failed: false,
            fault: None,
            receives: true,
            sends: true,
            handshake_took: Duration::ZERO,
        }
    }

    /// The handshake is done: the peer's certificate was verified, and plaintext may flow.
    pub fn is_established(&self) -> bool {
        self.established
    }

    /// The peer's own certificate, once the handshake is done.
    pub fn certificate(&self) -> Option<&CertificateDer<'static>> {
        let chain = match &self.side {
            Side::Listening(_) => None,
            Side::Client(client) => client.peer_certificates(),
            Side::Server(server) => server.peer_certificates(),
        };
        chain?.first()
    }

    // Ciphertext in.

    /// Memory for the next ciphertext; stays in place until `arrived`.
    pub fn room(&mut self) -> &mut [u8] {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
        let size = self.next_size();
        if size > self.incoming.len() || (self.end == 0 && size < self.incoming.len()) {
            let mut other = vec![0; size];
            other[..self.end - self.start].copy_from_slice(&self.incoming[self.start..self.end]);
            (self.start, self.end) = (0, self.end - self.start);
            self.incoming = other;
        } else if self.start != 0 && self.incoming.len() - self.start < RECORD {
            self.incoming.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        &mut self.incoming[self.end..]
    }

    /// A receive that filled the buffer asks for a larger one, many that hardly used it for a smaller one.
    fn next_size(&self) -> usize {
        let now = self.incoming.len();
        let most = if self.established { ROOMS[3] } else { LONGEST_HANDSHAKE };
        match ROOMS.into_iter().find(|room| *room > now) {
            Some(larger) if self.was_full && larger <= most => larger,
            _ if self.calm_in >= CALM && self.end == 0 => now.min(ROOMS[1]),
            _ => now,
        }
    }

    /// `n` bytes were received into the room.
    pub fn arrived(&mut self, n: usize) {
        self.end += n;
        self.calm_in = if n < ROOMS[1] { self.calm_in.saturating_add(1) } else { 0 };
        self.was_full = self.end == self.incoming.len();
    }

    /// Everything received so far, of a visitor that is handed over.
    pub fn received(&self) -> &[u8] {
        &self.incoming[self.start..self.end]
    }

    /// Server: who this is. After the answer `Hello`, the handshake begins with `admit`.
    pub fn client_kind(&mut self) -> Result<ClientKind, String> {
        let Side::Listening(_) = &self.side else { return Ok(ClientKind::Task) };
        match self.received() {
            [] => return Ok(ClientKind::Unknown),
            [HANDSHAKE, ..] => {}
            first => {
                return Ok(match sniff(first) {
                    Sniff::NeedMore => ClientKind::Unknown,
                    Sniff::Http1 | Sniff::Http2 => ClientKind::Http,
                    other => ClientKind::Plain(other),
                });
            }
        }
        // Parsed once, and no more than one record: what an unauthenticated peer may cost, byte by byte, is little.
        let Some(mut hello) = first_record(self.received())? else { return Ok(ClientKind::Unknown) };
        let mut acceptor = Acceptor::default();
        acceptor.read_tls(&mut hello).map_err(|error| error.to_string())?;
        match acceptor.accept() {
            Ok(Some(accepted)) => {
                let is_task = accepted.client_hello().alpn().is_some_and(|mut names| names.any(|name| name == ALPN));
                Ok(if is_task { ClientKind::Hello } else { ClientKind::Http })
            }
            Ok(None) => Err(SPLIT.to_owned()),
            Err((error, _)) => Err(explain::handshake(&error)),
        }
    }

    /// Server: the handshake takes its course, and from now on this is a `Task`.
    pub fn admit(&mut self) -> Result<(), String> {
        if let Side::Listening(config) = &self.side {
            let server = UnbufferedServerConnection::new(config.clone());
            self.side = Side::Server(Box::new(server.map_err(|error| explain::handshake(&error))?));
        }
        Ok(())
    }

    /// Decrypts what has arrived. `place` takes the beginning of the plaintext that it is given and returns how much;
    /// taking less ends the call.
    pub fn open(&mut self, place: &mut dyn FnMut(&[u8]) -> usize) -> Result<Opened, String> {
        let mut total = 0;
        if self.placed < self.plain.len() {
            let n = place(&self.plain[self.placed..]);
            self.placed += n;
            total = n;
            if self.placed < self.plain.len() {
                return Ok(if n == 0 { Opened::Nothing } else { Opened::Bytes(n) });
            }
            self.placed = 0;
            self.plain.clear();
        }
        if let Some(fault) = self.fault.take_if(|_| total == 0) {
            return Err(fault);
        }
        loop {
            let (mut taken, mut rest) = (0, Vec::new());
            let next = self.advance(&mut |bytes| {
                let n = if rest.is_empty() { place(bytes) } else { 0 };
                taken += n;
                rest.extend_from_slice(&bytes[n..]);
            });
            total += taken;
            let has_rest = !rest.is_empty();
            if has_rest {
                self.plain = rest;
            }
            match next {
                Ok(Next::Again) if !has_rest => {}
                Err(why) if total > 0 => {
                    self.fault = Some(why);
                    return Ok(Opened::Bytes(total));
                }
                Err(why) => return Err(why),
                Ok(_) if total > 0 => return Ok(Opened::Bytes(total)),
                Ok(Next::End) => return Ok(Opened::End),
                Ok(Next::Again | Next::Blocked) => break,
            }
        }
        let is_stuck = !self.established && self.end - self.start >= LONGEST_HANDSHAKE;
        if is_stuck { Err(self.broken(too_long())) } else { Ok(Opened::Nothing) }
    }

    /// Decrypted bytes wait for a place.
    pub fn has_plain(&self) -> bool {
        self.placed < self.plain.len()
    }

    /// One step of the handshake, or one record. `sink` gets the plaintext.
    fn advance(&mut self, sink: &mut dyn FnMut(&[u8])) -> Result<Next, String> {
        if self.failed {
            return Ok(Next::Blocked);
        }
        let incoming = &mut self.incoming[self.start..self.end];
        let out = &mut self.added;
        let (discard, result) = match &mut self.side {
            Side::Listening(_) => return Ok(Next::Blocked),
            Side::Client(client) => step(client.process_tls_records(incoming), out, sink),
            Side::Server(server) => step(server.process_tls_records(incoming), out, sink),
        };
        self.start += discard;
        match result {
            Ok(next) => {
                self.established |= match &self.side {
                    Side::Listening(_) => false,
                    Side::Client(client) => !client.is_handshaking(),
                    Side::Server(server) => !server.is_handshaking(),
                };
                Ok(next)
            }
            Err(error) => {
                let why = explain::handshake(&error);
                Err(self.broken(why))
            }
        }
    }

    /// The connection is of no more use, but for an alert to the peer.
    fn broken(&mut self, why: String) -> String {
        self.failed = true;
        let out = &mut self.added;
        loop {
            let incoming = &mut self.incoming[self.start..self.end];
            let (discard, result) = match &mut self.side {
                Side::Listening(_) => return why,
                Side::Client(client) => step(client.process_tls_records(incoming), out, &mut |_| {}),
                Side::Server(server) => step(server.process_tls_records(incoming), out, &mut |_| {}),
            };
            self.start += discard;
            if !matches!(result, Ok(Next::Again)) {
                return why;
            }
        }
    }

    // Ciphertext out.

    /// Ciphertext for the kernel. Only while nothing is being sent; stays in place until `sent`.
    pub fn unsent(&mut self) -> &mut [u8] {
        if self.added.ready > 0 {
            let added = std::mem::take(&mut self.added);
            self.outgoing.append(&added.bytes[..added.ready]);
        }
        &mut self.outgoing.bytes[self.sent..self.outgoing.ready]
    }

    pub fn has_unsent(&self) -> bool {
        self.sent < self.outgoing.ready || self.added.ready > 0
    }

    /// The kernel took `n` bytes.
    pub fn sent(&mut self, n: usize) {
        self.sent += n;
        self.calm_out = if self.outgoing.ready < ROOMS[1] { self.calm_out.saturating_add(1) } else { 0 };
        if self.sent >= self.outgoing.ready {
            (self.sent, self.outgoing.ready) = (0, 0);
        }
    }

    /// Nothing more is to be sent at the moment.
    pub fn rest(&mut self) {
        if self.outgoing.ready == 0 && self.outgoing.bytes.len() > ROOMS[1] && self.calm_out >= CALM {
            self.outgoing = Out::default();
        }
    }

    /// Encrypts the beginning of these bytes, and returns how much of them; 0: not now. Only while nothing is being
    /// sent, after `unsent`.
    pub fn seal(&mut self, bytes: &[u8]) -> Result<usize, String> {
        if !self.established || self.failed {
            return Ok(0);
        }
        let room = AHEAD.saturating_sub(self.outgoing.ready);
        let bytes = &bytes[..bytes.len().min(room)];
        if bytes.is_empty() {
            return Ok(0);
        }
        // Received records come first; what they contain waits.
        loop {
            let mut found = Vec::new();
            let incoming = &mut self.incoming[self.start..self.end];
            let out = &mut self.outgoing;
            let sink = &mut |bytes: &[u8]| found.extend_from_slice(bytes);
            let (discard, result) = match &mut self.side {
                Side::Listening(_) => return Ok(0),
                Side::Client(client) => write(client.process_tls_records(incoming), out, sink, bytes),
                Side::Server(server) => write(server.process_tls_records(incoming), out, sink, bytes),
            };
            self.start += discard;
            self.plain.append(&mut found);
            match result {
                Ok(true) => return Ok(bytes.len()),
                Ok(false) => {}
                Err(error) => return Err(self.broken(error)),
            }
        }
    }
}

/// The record that these bytes begin with, once all of it has arrived. It must contain a whole message.
fn first_record(received: &[u8]) -> Result<Option<&[u8]>, String> {
    let Some(&[_, _, _, high, low]) = received.first_chunk::<RECORD_HEADER>() else { return Ok(None) };
    let length = usize::from(u16::from_be_bytes([high, low]));
    if length > FRAGMENT {
        return Err(too_long());
    }
    if length < MESSAGE_HEADER {
        return Err(SPLIT.to_owned());
    }
    let Some(&[_, first, second, third]) =
        received.get(RECORD_HEADER..).and_then(|message| message.first_chunk::<MESSAGE_HEADER>())
    else {
        return Ok(None);
    };
    let message = u32::from_be_bytes([0, first, second, third]);
    if message as usize > length - MESSAGE_HEADER {
        return Err(SPLIT.to_owned());
    }
    Ok(received.get(..RECORD_HEADER + length))
}

fn too_long() -> String {
    "the TLS handshake of the peer is too long".to_owned()
}

/// Ciphertext to send.
#[derive(Default)]
struct Out {
    bytes: Vec<u8>,
    /// The beginning of `bytes` that is.
    ready: usize,
}

impl Out {
    /// At least `n` bytes behind those that are ready.
    fn room(&mut self, n: usize) -> &mut [u8] {
        let needed = self.ready + n;
        if needed > self.bytes.len() {
            self.bytes.resize(needed.next_power_of_two().max(1 << 10), 0);
        }
        &mut self.bytes[self.ready..]
    }

    fn append(&mut self, other: &[u8]) {
        self.room(other.len())[..other.len()].copy_from_slice(other);
        self.ready += other.len();
    }
}

fn step<D>(
    status: UnbufferedStatus<'_, '_, D>,
    out: &mut Out,
    sink: &mut dyn FnMut(&[u8]),
) -> (usize, Result<Next, rustls::Error>) {
    let UnbufferedStatus { mut discard, state, .. } = status;
    let next = match state {
        Err(error) => return (discard, Err(error)),
        Ok(ConnectionState::ReadTraffic(mut traffic)) => {
            while let Some(record) = traffic.next_record() {
                match record {
                    Ok(record) => {
                        discard += record.discard;
                        sink(record.payload);
                    }
                    Err(error) => return (discard, Err(error)),
                }
            }
            Next::Again
        }
        Ok(ConnectionState::EncodeTlsData(mut data)) => {
            let mut written = data.encode(out.room(0));
            if let Err(EncodeError::InsufficientSize(size)) = &written {
                written = data.encode(out.room(size.required_size));
            }
            match written {
                Ok(n) => out.ready += n,
                Err(error) => return (discard, Err(rustls::Error::General(error.to_string()))),
            }
            Next::Again
        }
        // It is in the buffer, which is sent before anything that is encrypted later.
        Ok(ConnectionState::TransmitTlsData(data)) => {
            data.done();
            Next::Again
        }
        Ok(ConnectionState::PeerClosed | ConnectionState::Closed) => Next::End,
        // Never allowed by the configuration.
        Ok(ConnectionState::ReadEarlyData(_)) => return (discard, Err(rustls::Error::HandshakeNotComplete)),
        Ok(_) => Next::Blocked,
    };
    (discard, Ok(next))
}

/// Encrypts `bytes` if it is their turn: then true.
fn write<D>(
    status: UnbufferedStatus<'_, '_, D>,
    out: &mut Out,
    sink: &mut dyn FnMut(&[u8]),
    bytes: &[u8],
) -> (usize, Result<bool, String>) {
    match status {
        UnbufferedStatus { discard, state: Ok(ConnectionState::WriteTraffic(mut traffic)), .. } => {
            let needed = bytes.len() + bytes.len().div_ceil(FRAGMENT) * OVERHEAD;
            let mut written = traffic.encrypt(bytes, out.room(needed));
            if let Err(EncryptError::InsufficientSize(size)) = &written {
                written = traffic.encrypt(bytes, out.room(size.required_size));
            }
            let written = written.map_err(|error| format!("cannot encrypt: {error}"));
            (
                discard,
                written.map(|n| {
                    out.ready += n;
                    true
                }),
            )
        }
        status => {
            let (discard, result) = step(status, out, sink);
            let result = match result {
                Ok(Next::Again) => Ok(false),
                Ok(Next::Blocked | Next::End) => Err("the peer has ended the TLS connection".to_owned()),
                Err(error) => Err(explain::handshake(&error)),
            };
            (discard, result)
        }
    }
}
