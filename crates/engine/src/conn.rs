//! One connection of a shard: the protocol's state machine tied to a descriptor and to C++'s memory.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Instant;

use crate::delivery::{CallMemory, Keys};
use crate::host::Host;
use crate::memory::OutPayload;
use crate::metrics::{ConnectionEntry, Recorder};
use crate::moving::Way;
use crate::system::peer_memory::{PeerMemory, WitnessWord};
use starwire_net::reactor::driver::{Driver, IoPart, Token};
use starwire_net::reactor::timers::Timer;
use starwire_net::transport::SocketAddress;
use starwire_protocol::{Connection, Failure, PeerInfo, Segment, Stats, Target};

/// Pieces that one system call may gather: the kernel's limit.
const MAX_PARTS: usize = 1024;
/// How much one send offers the kernel; more would only grow the time until other connections get their turn.
const MAX_SEND: u64 = 8 << 20;
/// What a peer may still send after it was told that nobody listens.
const MAX_DRAINED: u64 = 64 << 20;
/// Received bytes that nobody wants land here, on top of each other.
const DISCARD: usize = 64 << 10;

pub enum Role {
    /// Of the channel with this number.
    Client {
        channel: u32,
    },
    Server,
}

/// The end of a connection whose peer is to hear the reason. A socket that is closed with unread input resets the
/// connection, and the reason is lost with what the peer had not read yet: so what it still sends is read, and dropped,
/// until it has ended its side, or for a while.
#[derive(Default)]
pub struct Farewell {
    /// Bytes that were read and dropped.
    drained: u64,
    /// The kernel has all of the last word, and that nothing will follow.
    said: bool,
    /// The peer has ended its side.
    pub heard_out: bool,
}

impl Farewell {
    pub fn is_over(&self) -> bool {
        (self.said && self.heard_out) || self.drained > MAX_DRAINED
    }
}

pub struct Conn<H: Host> {
    pub key: u64,
    pub token: Token,
    pub role: Role,
    /// Before `proto`, which holds what is lent: dropped first.
    pub witness: Option<WitnessWord>,
    /// Of a peer of this host, where it can be read: the peer may lend.
    pub peer_memory: Option<PeerMemory>,
    pub proto: Connection<CallMemory<H>>,
    /// For messages: the peer's address, later its task.
    pub name: String,
    pub peer: Option<PeerInfo>,
    /// The socket is connected: bytes may flow.
    pub connected: bool,
    /// Socket or queue pair.
    pub way: Way,
    /// Client: RDMA was offered to the peer, which is at this address.
    pub offered_pairs: bool,
    pub address: Option<SocketAddress>,
    /// A second handle of a local socket until the peer's credentials were checked.
    pub guard: Option<OwnedFd>,
    /// Why it is being closed; nothing is started any more (but a farewell), and what is in flight is waited for.
    pub closing: Option<Failure>,
    /// The peer, or this side, has said that the end is near, and why: then it is no loss.
    pub goodbye: Option<String>,
    /// It had not introduced itself, and its place was needed.
    pub sent_away: bool,
    /// The peer is still told why.
    pub farewell: Option<Farewell>,
    /// When the shard's timer for this connection fires, to arm it only if it must fire earlier.
    pub timer: Option<(Instant, Timer)>,
    /// In the shard's list of connections with something to send.
    pub dirty: bool,
    pub keys: Keys<H>,
    targets: Vec<Target>,
    parts: Vec<IoPart>,
    pub receiving: bool,
    /// Blocks on their way out, the first `written` segments of which are done.
    out: Vec<Segment<OutPayload>>,
    written: usize,
    /// Bytes of the first unwritten segment that the kernel has taken.
    out_offset: u64,
    pub sending: bool,
    counted: Stats,
    counted_in_flight: usize,
    /// This connection's line in the table that operators see.
    pub entry: ConnectionEntry,
}

impl<H: Host> Conn<H> {
    pub fn new(
        key: u64,
        token: Token,
        role: Role,
        proto: Connection<CallMemory<H>>,
        name: String,
        entry: ConnectionEntry,
    ) -> Self {
        let accepted = matches!(role, Role::Server);
        Self {
            key,
            token,
            role,
            witness: None,
            peer_memory: None,
            proto,
            name,
            peer: None,
            connected: accepted,
            way: Way::Socket,
            offered_pairs: false,
            address: None,
            guard: None,
            closing: None,
            goodbye: None,
            sent_away: false,
            farewell: None,
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
            counted: Stats::default(),
            counted_in_flight: 0,
            entry,
        }
    }

    /// Adds what happened since last time to the metrics.
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
        let change = in_flight as i64 - self.counted_in_flight as i64;
        match self.role {
            Role::Client { .. } => {
                metrics.replies_received.add(now.replies - then.replies);
                metrics.keys_interned.add(now.keys - then.keys);
                metrics.requests_in_flight.add(change);
            }
            Role::Server => {
                metrics.replies_sent.add(now.replies - then.replies);
                metrics.requests_unanswered.add(change);
            }
        }
        self.entry.set_in_flight(in_flight);
        self.counted = now;
        self.counted_in_flight = in_flight;
    }

    /// Says where its payloads lie, if the peer can read them there.
    pub fn lend(&mut self, random: u64) {
        let word = WitnessWord::new(random);
        self.proto.lend(word.witness());
        self.witness = Some(word);
    }

    /// Starts a receive into wherever the next bytes belong. Some: so many are there already.
    pub fn start_receive(&mut self, driver: &mut dyn Driver, discard: &mut DiscardBuffer) -> io::Result<Option<usize>> {
        if self.receiving || !self.connected {
            return Ok(None);
        }
        if self.closing.is_some() {
            return self.drain(driver, discard).map(|()| None);
        }
        self.targets.clear();
        self.parts.clear();
        self.proto.recv_plan(&mut self.targets);
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
                // What is lent and not wanted is not copied.
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
        if self.parts.is_empty() {
            // The protocol does not want to read before some of its answers have left.
            return Ok(None);
        }
        if is_lent {
            return self.borrow().map(Some);
        }
        // SAFETY: scratch belongs to `proto` and does not move while a plan is outstanding; reply and call buffers are
        // valid until their op or body goes, which `proto` delays until the receive was reported (or the connection was
        // closed and the driver said so); the discard buffer outlives the driver.
        unsafe { driver.recv(self.token, &self.parts)? };
        self.receiving = true;
        Ok(None)
    }

    /// Copies from the peer's memory what the plan asks for.
    fn borrow(&self) -> io::Result<usize> {
        let (Some(memory), Some(loan)) = (&self.peer_memory, self.proto.loan()) else {
            return Err(io::Error::other("a loan from a peer whose memory cannot be read"));
        };
        // SAFETY: reply and call buffers, which `proto` keeps while a plan is outstanding.
        unsafe { memory.copy(loan, &self.parts)? };
        Ok(self.parts.iter().map(|part| part.len).sum())
    }

    /// Receives for nobody.
    fn drain(&mut self, driver: &mut dyn Driver, discard: &mut DiscardBuffer) -> io::Result<()> {
        if self.farewell.as_ref().is_some_and(|f| !f.heard_out) {
            let part = IoPart { ptr: discard.pointer(), len: DISCARD };
            // SAFETY: the discard buffer outlives the driver.
            unsafe { driver.recv(self.token, &[part])? };
            self.receiving = true;
        }
        Ok(())
    }

    /// `n` bytes came that nobody wants.
    pub fn drained(&mut self, n: usize) {
        self.receiving = false;
        if let Some(farewell) = &mut self.farewell {
            farewell.drained += n as u64;
        }
    }

    /// Goes on with the last word. Only when no send is under way.
    pub fn say_farewell(&mut self, driver: &mut dyn Driver, now: Instant) -> io::Result<()> {
        self.start_send(driver, now)?;
        if let Some(farewell) = self.farewell.as_mut().filter(|f| !self.sending && !f.said) {
            farewell.said = true;
            driver.finish(self.token);
        }
        Ok(())
    }

    /// Sends what there is to send, unless a send is under way.
    pub fn start_send(&mut self, driver: &mut dyn Driver, now: Instant) -> io::Result<()> {
        if self.sending || !self.connected || (self.closing.is_some() && self.farewell.is_none()) {
            return Ok(());
        }
        if self.written == self.out.len() {
            self.out.clear();
            self.written = 0;
            let mut bytes = 0;
            while self.out.len() < MAX_PARTS / 2 && bytes < MAX_SEND {
                match self.proto.poll_transmit(now, &mut self.out) {
                    0 => break,
                    more => bytes += more,
                }
            }
        }
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
        // was closed and the driver said so).
        unsafe { driver.send(self.token, &self.parts)? };
        self.sending = true;
        Ok(())
    }

    /// The kernel took `n` bytes.
    pub fn sent(&mut self, n: usize) {
        self.sending = false;
        let mut left = n as u64;
        while let Some(first) = self.out.get_mut(self.written) {
            let rest = first.len() - self.out_offset;
            if left < rest {
                self.out_offset += left;
                return;
            }
            left -= rest;
            self.out_offset = 0;
            self.written += 1;
            // Gives memory back at once: the control bytes for reuse, the payload to its owner.
            if let Segment::Control(bytes) = std::mem::replace(first, Segment::Control(Vec::new())) {
                self.proto.recycle(bytes);
            }
        }
    }

    /// A send is under way or only part of a block was taken.
    pub fn has_unsent(&self) -> bool {
        self.written < self.out.len()
    }
}

/// Memory for bytes that nobody wants. Only the kernel writes to it and nobody reads it.
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
