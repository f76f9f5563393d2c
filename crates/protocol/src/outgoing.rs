//! Frames and payloads that wait to be sent, and how they are packed into blocks.
//!
//! Small frames are encoded at once into the open control section. A payload with bulk parts becomes a [`Transfer`] in
//! one of two lanes: *express* for the smaller ones, which overtake, and *bulk* for the rest, in order of arrival each.
//! A block is one control section and some bytes of the lanes.

use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Instant;

use super::block;
use super::frame::{DATA_FRAME, FRAME_HEADER, PartLayout, put};
use super::idmap::{IdHash, IdMap};
use super::lending::Lender;
use super::limits::{
    BULK_SOFT, CONTROL_SOFT, EXPRESS_MAX, EXPRESS_SHARE, HEADER, LENDER_HIGH_WATER, MAX_FRAMES, MAX_INLINE,
    MAX_SEGMENTS, OUTGOING_HIGH_WATER, REPLIES_HIGH_WATER,
};
use super::owner::Payload;
use super::secret::BlockKey;
use super::segment::Segment;
use super::spare;
use super::stats::Stats;

/// Answers within a control section: a server may forget their requests once the section has left.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Answers {
    pub recvs: u32,
    pub calls: u32,
    pub call_bytes: u64,
}

impl Answers {
    pub fn add(&mut self, other: Answers) {
        self.recvs += other.recvs;
        self.calls += other.calls;
        self.call_bytes += other.call_bytes;
    }

    /// Takes back what was added.
    pub fn remove(&mut self, other: Answers) {
        self.recvs -= other.recvs;
        self.calls -= other.calls;
        self.call_bytes -= other.call_bytes;
    }
}

/// The frame that announces a payload.
pub enum Head {
    Call { method: u16, meta: Vec<u8>, deadline: Option<Instant> },
    Reply { code: i32, meta: Vec<u8>, answers: Answers },
}

impl Head {
    fn meta(&self) -> &[u8] {
        match self {
            Head::Call { meta, .. } | Head::Reply { meta, .. } => meta,
        }
    }
}

/// The progress of a dropped transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dropped {
    /// Its head was not sent.
    Unsent,
    /// The peer waits for the rest.
    Begun,
}

struct Transfer<P> {
    serial: u64,
    payload: Rc<P>,
    head: Option<Head>,
    part: usize,
    offset: u64,
    layout: PartLayout,
    left: u64,
}

#[derive(Default)]
struct Chunk {
    /// Starts with room for the block header. Empty: no frames.
    bytes: Vec<u8>,
    answers: Answers,
    /// A block of the handshake: nothing is added to it.
    alone: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Lane {
    Express,
    Bulk,
}

pub struct Outgoing<P> {
    closed: VecDeque<Chunk>,
    open: Chunk,
    /// Bytes in `closed` and `open`.
    queued: usize,
    transfers: IdMap<Transfer<P>>,
    /// Their bytes that are not in a block yet.
    waiting: u64,
    express: VecDeque<(u64, u64)>,
    bulk: VecDeque<(u64, u64)>,
    serial: u64,
    /// The last block was too full for a transfer's head: the next one belongs to the lanes.
    lanes_first: bool,
    ping: Option<u64>,
    pong: Option<u64>,
    sequence: u64,
    /// Authenticates the blocks, from the next one on.
    pub key: Option<BlockKey>,
    /// Only this many more of the closed chunks may leave.
    held: Option<usize>,
    /// The last frame was sent.
    mute: bool,
    pub lender: Lender<P>,
}

/// Lengths of the parts of a payload.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Measure {
    pub count: usize,
    pub inline: u64,
    pub bulk: u64,
}

impl Measure {
    /// None: the lengths do not fit into 62 bits.
    pub fn of<P: Payload>(payload: Option<&P>) -> Option<Measure> {
        let Some(payload) = payload else { return Some(Measure::default()) };
        let mut measure = Measure { count: payload.part_count(), inline: 0, bulk: 0 };
        let mut layout = PartLayout::default();
        for part in 0..measure.count {
            let len = payload.part_len(part);
            let sum = if layout.is_bulk(len) { &mut measure.bulk } else { &mut measure.inline };
            *sum = sum.checked_add(len).filter(|&sum| sum < 1 << 62)?;
        }
        Some(measure)
    }

    pub fn total(&self) -> u64 {
        self.inline + self.bulk
    }
}

impl<P: Payload> Outgoing<P> {
    pub fn new(hash: IdHash) -> Self {
        Outgoing {
            closed: VecDeque::new(),
            open: Chunk::default(),
            queued: 0,
            transfers: IdMap::with_hasher(hash),
            waiting: 0,
            express: VecDeque::new(),
            bulk: VecDeque::new(),
            serial: 0,
            lanes_first: false,
            ping: None,
            pong: None,
            sequence: 0,
            key: None,
            held: None,
            mute: false,
            lender: Lender::new(),
        }
    }

    pub fn is_empty(&self) -> bool {
        if let Some(allowed) = self.held {
            return allowed == 0;
        }
        self.open.bytes.is_empty()
            && self.closed.is_empty()
            && self.transfers.is_empty()
            && self.ping.is_none()
            && self.pong.is_none()
    }

    /// So much is encoded and unsent that nothing more should be copied.
    pub fn is_high(&self) -> bool {
        self.queued >= OUTGOING_HIGH_WATER
    }

    /// So many bytes of payloads wait that no more should be asked for.
    pub fn is_full(&self) -> bool {
        self.waiting >= if self.lender.is_allowed() { LENDER_HIGH_WATER } else { REPLIES_HIGH_WATER }
    }

    /// Appends a small frame. `answers`: the request that it answers, if it is a REPLY.
    pub fn frame(&mut self, answers: Answers, encode: impl FnOnce(&mut Vec<u8>)) {
        if self.mute {
            return;
        }
        if self.open.bytes.len() >= CONTROL_SOFT {
            self.cut();
        }
        if self.open.bytes.is_empty() {
            self.open.bytes = Self::new_chunk();
        }
        let before = self.open.bytes.len();
        encode(&mut self.open.bytes);
        self.queued += self.open.bytes.len() - before;
        self.open.answers.add(answers);
    }

    /// The frames so far make up a block of their own.
    pub fn cut_alone(&mut self) {
        self.open.alone = true;
        self.cut();
    }

    /// The chunks closed so far may leave, nothing else until `go_on`.
    pub fn hold(&mut self) {
        self.held = Some(self.closed.len());
    }

    pub fn go_on(&mut self) {
        self.held = None;
    }

    /// Everything that may leave has left.
    pub fn is_held(&self) -> bool {
        self.held == Some(0)
    }

    fn cut(&mut self) {
        if !self.open.bytes.is_empty() {
            self.closed.push_back(std::mem::take(&mut self.open));
        }
    }

    /// Takes a payload that is not encoded at once.
    pub fn transfer(&mut self, id: u64, head: Head, payload: P, measure: Measure) {
        if self.mute {
            return;
        }
        self.serial += 1;
        let transfer = Transfer {
            serial: self.serial,
            payload: Rc::new(payload),
            head: Some(head),
            part: 0,
            offset: 0,
            layout: PartLayout::default(),
            left: measure.bulk,
        };
        self.waiting += measure.bulk;
        self.transfers.insert(id, transfer);
        let lane = if measure.bulk <= EXPRESS_MAX { &mut self.express } else { &mut self.bulk };
        lane.push_back((id, self.serial));
        if lane.len() > 64 + 2 * self.transfers.len() {
            lane.retain(|(id, serial)| self.transfers.get(id).is_some_and(|transfer| transfer.serial == *serial));
        }
    }

    /// Some(true): its head was sent, but not all of its bytes. None: there is no such transfer.
    pub fn has_begun(&self, id: u64) -> Option<bool> {
        if self.transfers.is_empty() {
            return None;
        }
        self.transfers.get(&id).map(|transfer| transfer.head.is_none())
    }

    /// Drops a payload whose bytes are no longer wanted; returns its answers if it was not even announced. None: there
    /// is no such transfer.
    pub fn drop_transfer(&mut self, id: u64) -> Option<(Dropped, Answers)> {
        if self.transfers.is_empty() {
            return None;
        }
        let transfer = self.transfers.remove(&id)?;
        self.waiting -= transfer.left;
        Some(match transfer.head {
            None => (Dropped::Begun, Answers::default()),
            Some(Head::Call { .. }) => (Dropped::Unsent, Answers::default()),
            Some(Head::Reply { answers, .. }) => (Dropped::Unsent, answers),
        })
    }

    pub fn ping(&mut self, nonce: u64) {
        self.ping = Some(nonce).filter(|_| !self.mute);
    }

    /// Only the latest PING of a block is answered, so that a flood of them costs nothing.
    pub fn pong(&mut self, nonce: u64) {
        self.pong = Some(nonce).filter(|_| !self.mute);
    }

    /// Releases memory that only a busy connection needs.
    pub fn slim(&mut self) {
        self.transfers.shrink_to_fit();
        self.express.shrink_to_fit();
        self.bulk.shrink_to_fit();
    }

    /// Forgets everything and accepts nothing more, except one last frame.
    pub fn close(&mut self, last_word: Option<impl FnOnce(&mut Vec<u8>)>) {
        self.closed.clear();
        self.open = Chunk::default();
        self.queued = 0;
        self.transfers.clear();
        self.waiting = 0;
        self.express.clear();
        self.bulk.clear();
        self.ping = None;
        self.pong = None;
        self.held = None;
        if let Some(encode) = last_word {
            self.frame(Answers::default(), encode);
        }
        self.mute = true;
    }

    fn new_chunk() -> Vec<u8> {
        let mut bytes = spare::take_out();
        bytes.resize(HEADER, 0);
        bytes
    }

    /// Packs the next block. Returns its length (0: nothing to send) and the answers in it.
    pub fn poll(&mut self, now: Instant, stats: &mut Stats, out: &mut Vec<Segment<P>>) -> (u64, Answers) {
        if self.is_empty() {
            return (0, Answers::default());
        }
        if let Some(allowed) = &mut self.held {
            *allowed -= 1;
        }
        let mut chunk = if self.lanes_first {
            Chunk::default()
        } else {
            self.closed.pop_front().unwrap_or_else(|| std::mem::take(&mut self.open))
        };
        self.lanes_first = false;
        if chunk.bytes.is_empty() {
            chunk.bytes = Self::new_chunk();
        } else {
            self.queued = self.queued.saturating_sub(chunk.bytes.len() - HEADER);
        }
        if !chunk.alone {
            self.take_pings(&mut chunk.bytes, stats);
        }

        let first = out.len();
        out.push(Segment::Control(Vec::new()));
        let mut bulk = 0;
        if !self.transfers.is_empty() && !chunk.alone {
            let mut filling = Filling { now, first, bulk: 0, out, chunk: &mut chunk, stats };
            let share = if self.bulk.is_empty() { BULK_SOFT } else { EXPRESS_SHARE };
            self.fill(Lane::Express, share, &mut filling);
            self.fill(Lane::Bulk, BULK_SOFT, &mut filling);
            bulk = filling.bulk;
        }
        if chunk.bytes.len() == HEADER {
            // Only stale lane entries were left, or the lanes had to be skipped this time.
            out.truncate(first);
            spare::give_out(chunk.bytes);
            return if self.is_empty() { (0, Answers::default()) } else { self.poll(now, stats, out) };
        }
        let room = MAX_FRAMES.saturating_sub(chunk.bytes.len());
        if self.lender.lend(&mut chunk.bytes, out, first + 1, bulk, room) {
            stats.lent += bulk;
            bulk = 0;
        }
        block::seal(&mut chunk.bytes, bulk, self.sequence, self.key.as_ref());
        self.sequence += 1;
        let len = chunk.bytes.len() as u64 + bulk;
        stats.blocks_out += 1;
        stats.bytes_out += len;
        out[first] = Segment::Control(chunk.bytes);
        (len, chunk.answers)
    }

    fn take_pings(&mut self, control: &mut Vec<u8>, stats: &mut Stats) {
        if let Some(nonce) = self.ping.take() {
            put::ping(control, nonce);
            stats.pings_sent += 1;
        }
        if let Some(nonce) = self.pong.take() {
            put::pong(control, nonce);
        }
    }

    /// Moves bytes of one lane into the block until it holds `limit` bulk bytes.
    fn fill(&mut self, lane: Lane, limit: u64, block: &mut Filling<'_, P>) {
        loop {
            let queue = if lane == Lane::Express { &mut self.express } else { &mut self.bulk };
            let Some(&(id, serial)) = queue.front() else { return };
            let Some(transfer) = self.transfers.get_mut(&id).filter(|transfer| transfer.serial == serial) else {
                queue.pop_front();
                continue;
            };
            let room = limit.saturating_sub(block.bulk);
            if (room == 0 && transfer.left != 0) || block.segments() >= MAX_SEGMENTS {
                return;
            }
            if let Some(head) = &transfer.head {
                let size = head_size(head, &*transfer.payload);
                if block.chunk.bytes.len() + size + DATA_FRAME > MAX_FRAMES {
                    self.lanes_first = true;
                    return;
                }
                block.announce(id, head, &*transfer.payload);
                transfer.head = None;
            } else if block.chunk.bytes.len() + DATA_FRAME > MAX_FRAMES {
                return;
            }
            let before = transfer.left;
            block.continue_transfer(id, transfer, room);
            self.waiting -= before - transfer.left;
            if transfer.left == 0 {
                self.transfers.remove(&id);
                let queue = if lane == Lane::Express { &mut self.express } else { &mut self.bulk };
                queue.pop_front();
            }
            if block.chunk.bytes.len() > CONTROL_SOFT {
                return;
            }
        }
    }
}

/// An upper bound of the length of a head frame.
fn head_size<P: Payload>(head: &Head, payload: &P) -> usize {
    FRAME_HEADER + 8 + 8 * payload.part_count() + head.meta().len() + 8 + MAX_INLINE
}

/// Milliseconds until the deadline, at least 1 and at most as many as a CALL can hold (the client keeps the deadline);
/// 0 without a deadline.
pub fn remaining_ms(now: Instant, deadline: Option<Instant>) -> u32 {
    deadline.map_or(0, |deadline| {
        let millis = deadline.saturating_duration_since(now).as_micros().div_ceil(1000);
        u32::try_from(millis.max(1)).unwrap_or(u32::MAX)
    })
}

/// A block in the making.
struct Filling<'a, P> {
    now: Instant,
    first: usize,
    bulk: u64,
    out: &'a mut Vec<Segment<P>>,
    chunk: &'a mut Chunk,
    stats: &'a mut Stats,
}

impl<P: Payload> Filling<'_, P> {
    fn segments(&self) -> usize {
        self.out.len() - self.first
    }

    fn announce(&mut self, id: u64, head: &Head, payload: &P) {
        match head {
            Head::Call { method, meta, deadline } => {
                let deadline_ms = remaining_ms(self.now, *deadline);
                put::call(&mut self.chunk.bytes, id, *method, deadline_ms, meta, Some(payload));
            }
            Head::Reply { code, meta, answers } => {
                put::reply(&mut self.chunk.bytes, id, *code, meta, Some(payload));
                self.chunk.answers.add(*answers);
            }
        }
        if let Some(measure) = Measure::of(Some(payload)) {
            self.stats.payload_out += measure.inline;
            self.stats.copied_out += measure.inline;
        }
    }

    /// One DATA frame and its segments: at most `room` bytes.
    fn continue_transfer(&mut self, id: u64, transfer: &mut Transfer<P>, room: u64) {
        let before = self.bulk;
        let end = before + room.min(transfer.left);
        while self.bulk < end && self.segments() < MAX_SEGMENTS {
            if transfer.part >= transfer.payload.part_count() {
                // The payload changed its lengths, so what was announced cannot be sent.
                debug_assert!(false, "a payload changed while it was sent");
                transfer.left = 0;
                return;
            }
            let len = transfer.payload.part_len(transfer.part);
            if transfer.offset == 0 && !transfer.layout.is_bulk(len) {
                transfer.part += 1;
                continue;
            }
            let piece = (len - transfer.offset).min(end - self.bulk);
            self.out.push(Segment::Part {
                payload: Rc::clone(&transfer.payload),
                part: transfer.part,
                offset: transfer.offset,
                len: piece,
            });
            self.bulk += piece;
            transfer.left -= piece;
            transfer.offset += piece;
            if transfer.offset == len {
                transfer.part += 1;
                transfer.offset = 0;
            }
        }
        let sent = self.bulk - before;
        if sent != 0 {
            put::data(&mut self.chunk.bytes, id, sent);
            self.stats.payload_out += sent;
        }
    }
}

#[cfg(test)]
#[path = "outgoing_tests.rs"]
mod tests;
