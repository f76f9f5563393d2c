//! A connection of a reactor: the protocol's state machine, a descriptor, and C++'s memory.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::api::{Host, InBody, OutPayload, PendingOp};
use crate::metrics::{ConnectionEntry, Recorder};
use crate::peers::Peer;
use crate::shared::Shared;
use crate::star::Answer;
use crate::system::peer_memory::{PeerMemory, WitnessWord};
use crate::tls::{Opened, Session};
use starwire_marks::fail_point;
use starwire_net::reactor::driver::{Driver, IoPart, Token};
use starwire_net::reactor::timers::Timer;
use starwire_protocol::{CallHead, Connection, Failure, Owner, PeerInfo, Segment, Stats, Target, code};

/// Most pieces of one system call: the kernel's limit.
const MAX_PARTS: usize = 1024;
/// An idle connection keeps lists with room for this many pieces, but no longer ones.
const FEW_PARTS: usize = 64;
/// Most bytes that one send offers to the kernel; more would only delay other connections.
const MAX_SEND: u64 = 8 << 20;
/// The same if they are encrypted first.
const SEALED: u64 = 256 << 10;
/// How long a peer has to take the last frame.
pub const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
/// Most bytes that are read and dropped after the peer was told to leave.
const MAX_DRAINED: u64 = 64 << 20;
/// Unwanted bytes are received into a buffer of this size, one over the other.
const DISCARD: usize = 64 << 10;

/// Rendezvous keys of one connection as the host knows them, by number; None was refused as malformed.
pub type Keys<H> = Vec<Option<<H as Host>::Key>>;

/// The owner of connections: memory for incoming calls.
pub struct CallMemory<H: Host>(pub Arc<Shared<H>>);

impl<H: Host> Owner for CallMemory<H> {
    type Op = PendingOp<H::Op>;
    type Payload = OutPayload;
    type Body = Box<InBody>;

    fn call_memory(&mut self, call: &CallHead<'_>) -> Result<Box<InBody>, Failure> {
        if !self.0.host.takes_calls() {
            return Err(Failure { code: code::UNIMPLEMENTED, message: "this task serves no calls".into() });
        }
        InBody::new(&self.0.host, call.meta, call.lens).map(Box::new)
    }
}

pub enum Side {
    /// Of the channel with this number.
    Client {
        channel: u32,
        peer: Arc<Peer>,
    },
    Server,
}

/// The end of a connection whose peer must still receive the reason. Closing a socket with unread input resets the
/// connection, and the peer loses the reason with everything that it has not read. So the connection reads and drops
/// input until the peer has ended its side, or for [`CLOSE_TIMEOUT`].
#[derive(Default)]
pub struct Drain {
    /// Bytes that were read and dropped.
    drained: u64,
    /// The kernel has taken the last frame and the end of the stream.
    is_sent: bool,
    /// The peer has ended its side.
    pub peer_finished: bool,
}

impl Drain {
    pub fn is_done(&self) -> bool {
        (self.is_sent && self.peer_finished) || self.drained > MAX_DRAINED
    }
}

/// The transport of a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Path {
    #[default]
    Socket,
    /// Client: from the proposal to the proof. Server: until its answer has left.
    Migrating,
    QueuePair,
}

pub struct Conn<H: Host> {
    pub key: u64,
    pub token: Token,
    pub side: Side,
    /// Declared before `proto`, which holds what is lent, so that it is dropped first.
    pub witness: Option<WitnessWord>,
    /// The memory of a peer on this host, if it can be read: the peer may lend.
    pub peer_memory: Option<PeerMemory>,
    pub proto: Connection<CallMemory<H>>,
    /// Between the socket and `proto`.
    pub tls: Option<Box<Session>>,
    /// For messages: the peer's address, later its task.
    pub name: String,
    pub peer: Option<PeerInfo>,
    /// The socket is connected.
    pub connected: bool,
    /// Socket or queue pair.
    pub path: Path,
    /// Client: RDMA was offered to the peer.
    pub offered_pairs: bool,
    /// A second handle of a local socket, until the peer's credentials were checked.
    pub guard: Option<OwnedFd>,
    /// The peer was met over a unix socket.
    pub on_this_host: bool,
    /// Why it is being closed. Only a drain may still start; operations in flight are waited for.
    pub closing: Option<Failure>,
    /// The reason of a GOODBYE, of either side: then the end is not a loss.
    pub goodbye: Option<String>,
    /// WELCOME has said where the task is now.
    pub is_sent_on: bool,
    /// The peer must still receive the reason.
    pub drain: Option<Drain>,
    /// When the timer for this connection fires; it is only armed again to fire earlier.
    pub timer: Option<(Instant, Timer)>,
    /// In the list of connections with something to send.
    pub dirty: bool,
    pub keys: Keys<H>,
    targets: Vec<Target>,
    parts: Vec<IoPart>,
    pub receiving: bool,
    /// Outgoing blocks; the first `written` segments are done.
    out: Vec<Segment<OutPayload>>,
    written: usize,
    /// Bytes of the first unwritten segment that the kernel has taken.
    out_offset: u64,
    pub sending: bool,
    /// Bytes of the last send, and whether the transport had no room for all of them.
    offered: usize,
    was_short: bool,
    counted: Stats,
    counted_in_flight: usize,
    /// This connection in the table of the control service.
    pub entry: ConnectionEntry,
}

impl<H: Host> Conn<H> {
    /// Whether the peer is this task.
    pub fn is_of(&self, task: &str) -> bool {
        self.peer.as_ref().is_some_and(|peer| peer.task == task)
    }

    pub fn new(
        key: u64,
        token: Token,
        side: Side,
        proto: Connection<CallMemory<H>>,
        name: String,
        entry: ConnectionEntry,
    ) -> Self {
        let accepted = matches!(side, Side::Server);
        Self {
            key,
            token,
            side,
            witness: None,
            peer_memory: None,
            proto,
            tls: None,
            name,
            peer: None,
            connected: accepted,
            path: Path::Socket,
            offered_pairs: false,
            guard: None,
            on_this_host: false,
            closing: None,
            goodbye: None,
            is_sent_on: false,
            drain: None,
            timer: None,
            dirty: false,
            keys: Keys::<H>::new(),
            targets: Vec::new(),
            parts: Vec::new(),
            receiving: false,
            out: Vec::new(),
            written: 0,
            out_offset: 0,
            sending: false,
            offered: 0,
            was_short: false,
            counted: Stats::default(),
            counted_in_flight: 0,
            entry,
        }
    }

    /// Adds the changes since the last call to the metrics.
    pub fn count(&mut self, metrics: &Recorder) {
        let (now, then) = (*self.proto.stats(), self.counted);
        metrics.bytes_sent.add(now.bytes_out - then.bytes_out);
        metrics.bytes_received.add(now.bytes_in - then.bytes_in);
        metrics.payload_bytes_sent.add(now.payload_out - then.payload_out);
        metrics.payload_bytes_received.add(now.payload_in - then.payload_in);
        metrics.copied_bytes_sent.add(now.copied_out - then.copied_out);
        metrics.copied_bytes_received.add(now.copied_in - then.copied_in);
        metrics.blocks_sent.add(now.blocks_out - then.blocks_out);
        metrics.blocks_received.add(now.blocks_in - then.blocks_in);
        let (lent, borrowed) = (now.lent - then.lent, now.borrowed - then.borrowed);
        metrics.lent_bytes.add(lent);
        metrics.borrowed_bytes.add(borrowed);
        self.entry.add_bytes_in(now.bytes_in - then.bytes_in + borrowed);
        self.entry.add_bytes_out(now.bytes_out - then.bytes_out + lent);
        let in_flight = self.proto.in_flight();
        #[expect(clippy::cast_possible_wrap, reason = "requests in memory are fewer than 2^63")]
        let change = in_flight as i64 - self.counted_in_flight as i64;
        match self.side {
            Side::Client { .. } => {
                metrics.replies_received.add(now.replies - then.replies);
                metrics.keys_interned.add(now.keys - then.keys);
                metrics.requests_in_flight.add(change);
            }
            Side::Server => {
                metrics.replies_sent.add(now.replies - then.replies);
                metrics.requests_unanswered.add(change);
            }
        }
        self.entry.set_in_flight(in_flight);
        self.counted = now;
        self.counted_in_flight = in_flight;
    }

    /// Answers a request of the peer that needs nothing of the owner.
    pub fn answer(&mut self, answer: Answer) {
        let Answer { id, code, meta, payload } = answer;
        self.proto.reply(id, code, meta.as_slice(), payload);
    }

    /// Announces this side's witness, so that it may lend.
    pub fn lend(&mut self, random: u64) {
        let word = WitnessWord::new(random);
        self.proto.lend(word.witness());
        self.witness = Some(word);
    }

    /// Starts a receive into the targets of the next bytes. Some: so many bytes were already copied from the peer's
    /// memory.
    pub fn start_receive(&mut self, driver: &mut dyn Driver, discard: &mut DiscardBuffer) -> io::Result<Option<usize>> {
        if self.receiving || !self.connected {
            return Ok(None);
        }
        if self.closing.is_some() {
            return self.drain(driver, discard).map(|()| None);
        }
        if self.tls.as_ref().is_some_and(|tls| tls.receives) {
            return self.receive_ciphertext(driver).map(|()| None);
        }
        self.plan(discard)?;
        if self.parts.is_empty() {
            // The protocol is paused until some of its answers have left.
            return Ok(None);
        }
        if self.proto.loan().is_some() {
            return self.borrow().map(Some);
        }
        // SAFETY: scratch belongs to `proto` and does not move while a plan is outstanding; reply and call buffers are
        // valid until their op or body goes, which `proto` delays until the receive was reported (or the connection was
        // closed and the driver confirmed it); the discard buffer outlives the driver.
        unsafe { driver.recv(self.token, &self.parts)? };
        self.receiving = true;
        Ok(None)
    }

    /// Finds the memory for the next bytes of the stream.
    fn plan(&mut self, discard: &mut DiscardBuffer) -> io::Result<()> {
        self.targets.clear();
        self.parts.clear();
        self.proto.receive_targets(&mut self.targets);
        let is_lent = self.proto.loan().is_some();
        for target in self.targets.iter().take(MAX_PARTS) {
            let (ptr, len) = match target {
                Target::Scratch { offset, len } => {
                    let scratch = self.proto.scratch_mut(*offset, *len);
                    (scratch.as_mut_ptr(), scratch.len() as u64)
                }
                Target::Reply { id, part, offset, len } => {
                    (self.proto.op_mut(*id).map_or(std::ptr::null_mut(), |op| op.pointer(*part, *offset, *len)), *len)
                }
                Target::Call { id, part, offset, len } => {
                    (self.proto.body_mut(*id).map_or(std::ptr::null_mut(), |b| b.pointer(*part, *offset, *len)), *len)
                }
                // Lent bytes that are not wanted are not copied.
                Target::Discard { len } if is_lent => (std::ptr::null_mut(), *len),
                Target::Discard { len } => (discard.pointer(), (*len).min(DISCARD as u64)),
            };
            if ptr.is_null() && !matches!(target, Target::Discard { .. }) {
                return Err(io::Error::other("a received piece lies outside its buffer"));
            }
            let size = usize::try_from(len).map_err(io::Error::other)?;
            self.parts.push(IoPart { ptr, len: size });
            if matches!(target, Target::Discard { len: all } if *all > len) {
                break;
            }
        }
        Ok(())
    }

    /// Copies the planned bytes from the peer's memory.
    fn borrow(&self) -> io::Result<usize> {
        let (Some(memory), Some(loan)) = (&self.peer_memory, self.proto.loan()) else {
            return Err(io::Error::other("a loan from a peer whose memory cannot be read"));
        };
        // SAFETY: reply and call buffers, which `proto` keeps while a plan is outstanding.
        unsafe { memory.copy(loan, &self.parts)? };
        Ok(self.parts.iter().map(|part| part.len).sum())
    }

    /// Receives into the discard buffer.
    fn drain(&mut self, driver: &mut dyn Driver, discard: &mut DiscardBuffer) -> io::Result<()> {
        if self.drain.as_ref().is_some_and(|f| !f.peer_finished) {
            let part = IoPart { ptr: discard.pointer(), len: DISCARD };
            // SAFETY: the discard buffer outlives the driver.
            unsafe { driver.recv(self.token, &[part])? };
            self.receiving = true;
        }
        Ok(())
    }

    /// `n` bytes were received into the discard buffer.
    pub fn drained(&mut self, n: usize) {
        self.receiving = false;
        if let Some(drain) = &mut self.drain {
            drain.drained += n as u64;
        }
    }

    /// Continues to drain. Only when no send is in flight.
    pub fn send_rest(&mut self, driver: &mut dyn Driver, now: Instant) -> io::Result<()> {
        self.start_send(driver, now)?;
        if let Some(drain) = self.drain.as_mut().filter(|f| !self.sending && !f.is_sent) {
            drain.is_sent = true;
            driver.finish(self.token);
        }
        Ok(())
    }

    /// Sends what waits, unless a send is in flight.
    pub fn start_send(&mut self, driver: &mut dyn Driver, now: Instant) -> io::Result<()> {
        if self.sending || !self.connected || (self.closing.is_some() && self.drain.is_none()) {
            return Ok(());
        }
        if self.tls.as_ref().is_some_and(|tls| tls.sends) {
            return self.send_ciphertext(driver, now);
        }
        self.take_blocks(now, MAX_SEND);
        if self.out.is_empty() {
            return Ok(());
        }
        self.parts.clear();
        let mut skip = self.out_offset;
        for segment in self.out.iter_mut().skip(self.written).take(MAX_PARTS) {
            let (ptr, len) = match segment {
                Segment::Control(bytes) => (bytes.as_mut_ptr(), bytes.len()),
                Segment::Part { payload, part, offset, len } => {
                    (payload.pointer(*part, *offset, *len), usize::try_from(*len).map_err(io::Error::other)?)
                }
            };
            if ptr.is_null() && len > 0 {
                return Err(io::Error::other("a piece to send lies outside its payload"));
            }
            let cut = usize::try_from(skip).map_err(io::Error::other)?.min(len);
            skip = 0;
            if len > cut {
                self.parts.push(IoPart { ptr: ptr.wrapping_add(cut), len: len - cut });
            }
        }
        // SAFETY: control bytes and payloads stay in `out`, untouched, until the send was reported (or the connection
        // was closed and the driver confirmed it).
        unsafe { driver.send(self.token, &self.parts)? };
        self.sending = true;
        self.offered = self.parts.iter().map(|part| part.len).sum();
        Ok(())
    }

    /// The next blocks, once the last ones are done.
    fn take_blocks(&mut self, now: Instant, most: u64) {
        if self.written < self.out.len() {
            return;
        }
        self.out.clear();
        self.written = 0;
        let mut bytes = 0;
        while self.out.len() < MAX_PARTS / 2 && bytes < most {
            match self.proto.poll_transmit(now, &mut self.out) {
                0 => break,
                more => bytes += more,
            }
        }
    }

    /// The kernel took `n` bytes.
    pub fn sent(&mut self, n: usize, now: Instant) {
        self.sending = false;
        // Not any bytes: a peer that has died takes none, but the kernel's buffer does until it is full.
        if std::mem::replace(&mut self.was_short, n < self.offered) && n > 0 {
            self.proto.progressed(now);
        }
        match self.tls.as_mut().filter(|tls| tls.sends) {
            Some(tls) => {
                tls.sent(n);
                if self.written == self.out.len() && !self.proto.wants_transmit() {
                    tls.rest();
                }
            }
            None => self.written(n),
        }
    }

    /// The first `n` bytes of what waits are done.
    fn written(&mut self, n: usize) {
        let mut left = n as u64;
        while let Some(first) = self.out.get_mut(self.written) {
            let rest = first.len() - self.out_offset;
            if left < rest {
                self.out_offset += left;
                if matches!(first, Segment::Part { .. }) {
                    fail_point!("part of a payload is sent");
                }
                return;
            }
            left -= rest;
            self.out_offset = 0;
            self.written += 1;
            // Releases memory at once: control bytes for reuse, the payload to its owner.
            if let Segment::Control(bytes) = std::mem::replace(first, Segment::Control(Vec::new())) {
                self.proto.recycle(bytes);
            }
        }
    }

    /// After a quiet time, lists that grew in a busy one release their memory.
    pub fn slim(&mut self) {
        // These two are empty or out of date between calls.
        if self.targets.capacity() > FEW_PARTS {
            self.targets = Vec::new();
        }
        if self.parts.capacity() > FEW_PARTS {
            self.parts = Vec::new();
        }
        if self.out.capacity() > FEW_PARTS && self.written == self.out.len() {
            (self.out, self.written) = (Vec::new(), 0);
        }
    }

    /// So many pieces fit into its longest list.
    #[cfg(test)]
    pub fn room(&self) -> usize {
        self.targets.capacity().max(self.parts.capacity()).max(self.out.capacity())
    }

    /// A send is in flight, or only part of a block was taken.
    pub fn has_unsent(&self) -> bool {
        self.written < self.out.len() || self.tls.as_ref().is_some_and(|tls| tls.sends && tls.has_unsent())
    }

    // TLS.

    /// The TLS handshake is under way.
    pub fn is_handshaking(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| !tls.is_established())
    }

    /// Sends bytes that are not the protocol's, to a peer that does not speak it.
    pub fn say_plainly(&mut self, bytes: &[u8]) {
        self.out.push(Segment::Control(bytes.to_vec()));
    }

    /// Starts a receive of ciphertext, unless what was received has no place yet.
    fn receive_ciphertext(&mut self, driver: &mut dyn Driver) -> io::Result<()> {
        self.targets.clear();
        self.proto.receive_targets(&mut self.targets);
        let Some(tls) = self.tls.as_mut().filter(|tls| !tls.has_plain() && !self.targets.is_empty()) else {
            return Ok(());
        };
        let room = tls.room();
        if room.is_empty() {
            return Err(io::Error::other("a TLS record is too long"));
        }
        let part = IoPart { ptr: room.as_mut_ptr(), len: room.len() };
        // SAFETY: the room belongs to the session, which neither moves nor reads it until the receive was reported (or
        // the connection was closed and the driver confirmed it).
        unsafe { driver.recv(self.token, &[part])? };
        self.receiving = true;
        Ok(())
    }

    /// Decrypts received bytes into the targets of the next bytes of the stream.
    pub fn open(&mut self, discard: &mut DiscardBuffer) -> Result<Opened, String> {
        if self.proto.loan().is_some() {
            return Err("a loan over TLS: the memory of another host cannot be read".to_owned());
        }
        self.plan(discard).map_err(|error| error.to_string())?;
        let Some(tls) = &mut self.tls else { return Ok(Opened::Nothing) };
        let mut parts = self.parts.iter();
        let mut part = parts.next().copied();
        tls.open(&mut |mut bytes| {
            let mut placed = 0;
            while let Some(target) = part.filter(|_| !bytes.is_empty()) {
                let n = target.len.min(bytes.len());
                // SAFETY: `plan` found memory for as many bytes, which nobody else uses while the plan is outstanding.
                unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), target.ptr, n) };
                placed += n;
                bytes = &bytes[n..];
                let rest = IoPart { ptr: target.ptr.wrapping_add(n), len: target.len - n };
                part = if rest.len == 0 { parts.next().copied() } else { Some(rest) };
            }
            placed
        })
    }

    /// Encrypts what waits, and sends it.
    fn send_ciphertext(&mut self, driver: &mut dyn Driver, now: Instant) -> io::Result<()> {
        while self.seal_next(now)? {}
        let Some(tls) = self.tls.as_mut() else { return Ok(()) };
        let bytes = tls.unsent();
        if bytes.is_empty() {
            return Ok(());
        }
        let part = IoPart { ptr: bytes.as_mut_ptr(), len: bytes.len() };
        // SAFETY: the session neither moves nor changes these bytes until the send was reported (or the connection was
        // closed and the driver confirmed it).
        unsafe { driver.send(self.token, &[part])? };
        self.sending = true;
        self.offered = part.len;
        Ok(())
    }

    /// Encrypts the beginning of what waits. False: nothing waits, or enough is encrypted.
    fn seal_next(&mut self, now: Instant) -> io::Result<bool> {
        let Some(tls) = self.tls.as_mut().filter(|tls| tls.is_established()) else { return Ok(false) };
        // In order: what the handshake has added precedes what is encrypted now.
        tls.unsent();
        self.take_blocks(now, SEALED);
        let offset = self.out_offset;
        let bytes = match self.out.get_mut(self.written) {
            None => return Ok(false),
            Some(Segment::Control(bytes)) => bytes.get(usize::try_from(offset).map_err(io::Error::other)?..),
            Some(Segment::Part { payload, part, offset: from, len }) => {
                let ptr = payload.pointer(*part, *from, *len);
                let size = usize::try_from(*len - offset).map_err(io::Error::other)?;
                let start = ptr.wrapping_add(usize::try_from(offset).map_err(io::Error::other)?);
                // SAFETY: the payload has `len` readable bytes there, and stays in `out` and unchanged until they are
                // written.
                (!ptr.is_null()).then(|| unsafe { std::slice::from_raw_parts(start, size) })
            }
        };
        let bytes = bytes.ok_or_else(|| io::Error::other("a piece to send lies outside its payload"))?;
        let is_empty = bytes.is_empty();
        let Some(tls) = self.tls.as_mut() else { return Ok(false) };
        let sealed = tls.seal(bytes).map_err(io::Error::other)?;
        self.written(sealed);
        Ok(sealed > 0 || is_empty)
    }
}

/// Memory for unwanted bytes. Only the kernel writes to it, and it is never read.
pub struct DiscardBuffer(Box<[u8]>);

impl DiscardBuffer {
    pub fn new() -> Self {
        Self(vec![0; DISCARD].into_boxed_slice())
    }

    fn pointer(&mut self) -> *mut u8 {
        self.0.as_mut_ptr()
    }
}

impl Default for DiscardBuffer {
    fn default() -> Self {
        Self::new()
    }
}
