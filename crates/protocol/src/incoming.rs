//! Received bytes: the scratch buffer for headers and control sections, and the destinations of bulk bytes.

use std::collections::VecDeque;

use super::block::BlockHeader;
use super::error::{ConnectionError, ProtocolError};
use super::frame::Parts;
use super::idmap::{IdHash, IdMap};
use super::lending::Loan;
use super::limits::{FIRST_READ, HEADER, MAX_BULK, MAX_TARGETS, TAG};
use super::secret::BlockKey;
use super::segment::Target;
use super::sniff::{Sniff, sniff};
use super::spare;

/// The largest scratch buffer that a connection keeps between two blocks.
const SCRATCH_KEPT: usize = 4 << 10;

/// A payload whose bulk parts are arriving.
pub struct Transfer {
    serial: u64,
    /// Part number and length of each bulk part.
    parts: Vec<(usize, u64)>,
    next: usize,
    offset: u64,
    /// Bytes that no DATA frame has claimed so far.
    unclaimed: u64,
    /// Bytes that have not arrived.
    left: u64,
    last_block: Option<u64>,
    /// False: the bytes are read and dropped.
    pub wanted: bool,
    /// The current receive targets name its buffers.
    pub in_plan: bool,
}

/// Bytes of the current block's bulk section that belong to one transfer.
struct Piece {
    id: u64,
    serial: u64,
    len: u64,
}

/// The state of the scratch buffer.
pub enum Parsed {
    /// Not enough bytes for the next step.
    Wait,
    /// The frames of a checked control section: `scratch[from..to]`.
    Section { from: usize, to: usize },
    /// The same of a section that does not end with the right code: nothing in it is the peer's.
    Forged { from: usize, to: usize },
}

pub struct Incoming {
    scratch: Vec<u8>,
    start: usize,
    end: usize,
    header: Option<BlockHeader>,
    sequence: u64,
    /// The blocks from the next one on must be authenticated by it.
    pub key: Option<BlockKey>,
    pieces: VecDeque<Piece>,
    transfers: IdMap<Transfer>,
    planned: Vec<u64>,
    planned_bulk: u64,
    planned_scratch: usize,
    serial: u64,
    /// Server: `Target::Call`, client: `Target::Reply`.
    calls: bool,
    /// The peer may lend.
    pub borrows: bool,
    /// The current block's bulk bytes, if they are lent instead of sent.
    pub loan: Option<Loan>,
}

impl Incoming {
    pub fn new(hash: IdHash, calls: bool) -> Self {
        Incoming {
            scratch: Vec::new(),
            start: 0,
            end: 0,
            header: None,
            sequence: 0,
            key: None,
            pieces: VecDeque::new(),
            transfers: IdMap::with_hasher(hash),
            planned: Vec::new(),
            planned_bulk: 0,
            planned_scratch: 0,
            serial: 0,
            calls,
            borrows: false,
            loan: None,
        }
    }

    pub fn plan(&mut self, out: &mut Vec<Target>) {
        out.clear();
        self.unplan();
        let mut targets = MAX_TARGETS;
        for piece in &self.pieces {
            let Some(transfer) =
                self.transfers.get_mut(&piece.id).filter(|transfer| transfer.serial == piece.serial && transfer.wanted)
            else {
                if targets == 0 {
                    return;
                }
                targets -= 1;
                out.push(Target::Discard { len: piece.len });
                self.planned_bulk += piece.len;
                continue;
            };
            let (mut next, mut offset, mut left) = (transfer.next, transfer.offset, piece.len);
            while left != 0 {
                let Some(&(part, part_len)) = transfer.parts.get(next).filter(|_| targets != 0) else { return };
                targets -= 1;
                let len = left.min(part_len - offset);
                let id = piece.id;
                out.push(match self.calls {
                    true => Target::Call { id, part, offset, len },
                    false => Target::Reply { id, part, offset, len },
                });
                if !transfer.in_plan {
                    transfer.in_plan = true;
                    self.planned.push(id);
                }
                self.planned_bulk += len;
                left -= len;
                offset = 0;
                next += 1;
            }
        }
        if targets == 0 || self.loan.is_some() {
            return;
        }
        let have = self.end - self.start;
        let len = match &self.header {
            // Without a bulk section, the beginning of the next block can be read as well.
            Some(header) if self.pieces.is_empty() => {
                let rest = HEADER + header.control - have;
                if header.bulk == 0 { rest + FIRST_READ } else { rest }
            }
            _ => FIRST_READ - have,
        };
        let offset = self.make_room(len);
        self.planned_scratch = len;
        out.push(Target::Scratch { offset, len });
    }

    /// Makes room for `len` bytes behind the received ones.
    fn make_room(&mut self, len: usize) -> usize {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
            // Between two blocks a connection keeps only what the beginning of one needs.
            if self.scratch.len() > SCRATCH_KEPT {
                spare::give_in(std::mem::take(&mut self.scratch));
            }
        }
        if self.end + len > self.scratch.len() && self.start != 0 {
            self.scratch.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let needed = self.end + len;
        if needed > self.scratch.len() {
            if needed <= SCRATCH_KEPT {
                self.scratch.resize(needed.next_power_of_two(), 0);
            } else {
                let mut larger = spare::take_in(needed.next_power_of_two());
                larger[..self.end].copy_from_slice(&self.scratch[..self.end]);
                let smaller = std::mem::replace(&mut self.scratch, larger);
                if smaller.len() > SCRATCH_KEPT {
                    spare::give_in(smaller);
                }
            }
        }
        self.end
    }

    pub fn scratch_mut(&mut self, offset: usize, len: usize) -> &mut [u8] {
        let end = offset.saturating_add(len).min(self.scratch.len());
        &mut self.scratch[offset.min(end)..end]
    }

    pub fn unread(&self) -> &[u8] {
        &self.scratch[self.start..self.end]
    }

    /// Forgets the plan: its targets are no longer written to.
    pub fn unplan(&mut self) {
        for id in self.planned.drain(..) {
            if let Some(transfer) = self.transfers.get_mut(&id) {
                transfer.in_plan = false;
            }
        }
        self.planned_bulk = 0;
        self.planned_scratch = 0;
    }

    /// `n` bytes arrived in the planned targets. Returns how many of them are bulk bytes, for `take_bulk`.
    pub fn arrived(&mut self, n: usize) -> Result<u64, ConnectionError> {
        let bulk = usize::try_from(self.planned_bulk).map_or(n, |planned| planned.min(n));
        let scratch = n - bulk;
        if scratch > self.planned_scratch {
            return Err(ConnectionError::Misuse("more bytes reported than the receive targets hold"));
        }
        self.end += scratch;
        self.unplan();
        Ok(bulk as u64)
    }

    /// Advances the front piece by up to `n` arrived bulk bytes. Returns by how many, and the transfer's id if it is
    /// complete.
    pub fn take_bulk(&mut self, n: u64) -> (u64, Option<u64>) {
        let Some(piece) = self.pieces.front_mut() else { return (n, None) };
        let taken = n.min(piece.len);
        piece.len -= taken;
        if let Some(loan) = &mut self.loan {
            loan.taken += taken;
        }
        let (id, serial) = (piece.id, piece.serial);
        if piece.len == 0 {
            self.pieces.pop_front();
        }
        let mut done = None;
        if let Some(transfer) = self.transfers.get_mut(&id).filter(|transfer| transfer.serial == serial) {
            transfer.advance(taken);
            if transfer.left == 0 {
                self.transfers.remove(&id);
                done = Some(id);
            }
        }
        if self.pieces.is_empty() {
            self.header = None;
        }
        (taken, done)
    }

    /// Looks for the next complete control section.
    pub fn step(&mut self, max_control: usize) -> Result<Parsed, ConnectionError> {
        if self.loan.is_some() {
            // The bytes in the buffer follow the loan.
            return Ok(Parsed::Wait);
        }
        if !self.pieces.is_empty() {
            return if self.start == self.end {
                Ok(Parsed::Wait)
            } else {
                Err(ConnectionError::Misuse("bulk bytes were stored as control bytes"))
            };
        }
        let have = &self.scratch[self.start..self.end];
        let header = match self.header {
            Some(header) => header,
            None => {
                if self.sequence == 0 && !have.is_empty() {
                    match sniff(have) {
                        Sniff::Starwire => {}
                        Sniff::NeedMore => return Ok(Parsed::Wait),
                        other => return Err(ConnectionError::NotStarwire(other)),
                    }
                }
                let Some(bytes) = have.first_chunk::<HEADER>() else { return Ok(Parsed::Wait) };
                let header = BlockHeader::parse(bytes, self.sequence, max_control)?;
                self.header = Some(header);
                header
            }
        };
        let len = HEADER + header.control;
        let Some(block) = have.get(..len) else { return Ok(Parsed::Wait) };
        header.verify(block)?;
        let from = self.start + HEADER;
        self.start += len;
        self.sequence += 1;
        Ok(match &self.key {
            None => Parsed::Section { from, to: self.start },
            Some(key) if key.verify(block) => Parsed::Section { from, to: self.start - TAG },
            Some(_) => Parsed::Forged { from, to: self.start },
        })
    }

    /// All frames of a section were processed: its bulk section follows, or the next block.
    pub fn section_done(&mut self) -> Result<(), ProtocolError> {
        let Some(header) = &self.header else { return Ok(()) };
        let claimed: u64 = self.pieces.iter().map(|piece| piece.len).sum();
        let bulk = match &self.loan {
            None => header.bulk,
            Some(loan) => {
                let lent = loan.pieces.iter().try_fold(0u64, |sum, (address, len)| {
                    // A piece must end within the address space.
                    address.checked_add(*len).and(sum.checked_add(*len)).filter(|_| *len != 0)
                });
                let why = "its pieces are not a valid range of memory, or the block also has bulk bytes";
                let lent = lent.filter(|&lent| lent != 0 && lent <= MAX_BULK && header.bulk == 0);
                lent.ok_or(ProtocolError::Frame { frame: "LEND", why })?
            }
        };
        if claimed != bulk {
            return Err(ProtocolError::BulkMismatch { block: header.sequence, bulk, claimed });
        }
        if claimed == 0 {
            self.header = None;
        }
        Ok(())
    }

    /// True once, after the last byte of a loan was taken.
    pub fn loan_is_over(&mut self) -> bool {
        self.pieces.is_empty() && self.loan.take_if(|loan| loan.taken != 0).is_some()
    }

    /// Takes the scratch buffer while its frames are processed.
    pub fn lend_scratch(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.scratch)
    }

    pub fn return_scratch(&mut self, scratch: Vec<u8>) {
        self.scratch = scratch;
    }

    /// Expects the bulk parts of a payload.
    pub fn expect(&mut self, id: u64, parts: &Parts<'_>, wanted: bool) {
        self.serial += 1;
        let bulk = parts.iter().enumerate().filter(|(_, part)| part.inline.is_none());
        let transfer = Transfer {
            serial: self.serial,
            parts: bulk.map(|(number, part)| (number, part.len)).collect(),
            next: 0,
            offset: 0,
            unclaimed: parts.bulk(),
            left: parts.bulk(),
            last_block: None,
            wanted,
            in_plan: false,
        };
        self.transfers.insert(id, transfer);
    }

    /// A DATA frame: `len` of this block's bulk bytes belong to the transfer.
    pub fn claim(&mut self, id: u64, len: u64) -> Result<(), ProtocolError> {
        let bad = |why| ProtocolError::BadId { frame: "DATA", id, why };
        let transfer = self.transfers.get_mut(&id).ok_or_else(|| bad("expects no bytes"))?;
        if len > transfer.unclaimed {
            return Err(bad("expects fewer bytes"));
        }
        if transfer.last_block == Some(self.sequence) {
            return Err(bad("has another DATA frame in the same block"));
        }
        transfer.last_block = Some(self.sequence);
        transfer.unclaimed -= len;
        self.pieces.push_back(Piece { id, serial: transfer.serial, len });
        Ok(())
    }

    pub fn transfer_mut(&mut self, id: u64) -> Option<&mut Transfer> {
        self.transfers.get_mut(&id)
    }

    pub fn has_transfer(&self, id: u64) -> bool {
        !self.transfers.is_empty() && self.transfers.contains_key(&id)
    }

    pub fn transfer_count(&self) -> usize {
        self.transfers.len()
    }

    /// No more bytes come for this id.
    pub fn forget(&mut self, id: u64) {
        self.transfers.remove(&id);
    }

    /// The connection is gone.
    pub fn clear(&mut self) {
        self.unplan();
        self.transfers.clear();
        self.pieces.clear();
        self.loan = None;
    }
}

impl Transfer {
    fn advance(&mut self, mut n: u64) {
        self.left = self.left.saturating_sub(n);
        while n != 0 {
            let Some(&(_, len)) = self.parts.get(self.next) else { return };
            let step = n.min(len - self.offset);
            self.offset += step;
            n -= step;
            if self.offset == len {
                self.next += 1;
                self.offset = 0;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::block;
    use super::*;

    /// Feeds bytes as a socket would; returns the number of sections.
    fn feed(incoming: &mut Incoming, mut bytes: &[u8]) -> usize {
        let (mut targets, mut sections) = (Vec::new(), 0);
        while !bytes.is_empty() {
            incoming.plan(&mut targets);
            let [Target::Scratch { offset, len }] = targets[..] else { panic!("{targets:?}") };
            let n = len.min(bytes.len());
            incoming.scratch_mut(offset, len)[..n].copy_from_slice(&bytes[..n]);
            bytes = &bytes[n..];
            incoming.arrived(n).unwrap();
            while let Parsed::Section { .. } = incoming.step(1 << 20).unwrap() {
                sections += 1;
                incoming.section_done().unwrap();
            }
        }
        sections
    }

    /// Blocks with control sections of these lengths.
    fn stream(controls: &[usize]) -> Vec<u8> {
        let mut stream = Vec::new();
        for (sequence, control) in controls.iter().enumerate() {
            let mut one = vec![0; HEADER + control];
            block::seal(&mut one, 0, sequence as u64, None);
            stream.extend(one);
        }
        stream
    }

    #[test]
    fn between_two_blocks_a_connection_keeps_little() {
        let mut incoming = Incoming::new(IdHash::new(), true);
        let stream = stream(&[8, 300_000, 5000, 300_000]);
        let (first, rest) = stream.split_at(HEADER + 8 + 100_000);
        assert_eq!(feed(&mut incoming, first), 1);
        assert!(incoming.scratch.len() > 100_000, "half of a block is kept");
        assert_eq!(feed(&mut incoming, rest), 3);
        incoming.plan(&mut Vec::new());
        assert!(incoming.scratch.len() <= SCRATCH_KEPT, "{} bytes are kept", incoming.scratch.len());
    }

    #[test]
    fn a_stream_whose_reads_end_within_blocks_needs_no_more_memory() {
        let mut incoming = Incoming::new(IdHash::new(), true);
        let stream = stream(&[8; 2000]);
        assert_eq!(feed(&mut incoming, &stream[..stream.len() - 16]), 1999);
        assert_eq!(incoming.scratch.len(), FIRST_READ);
    }

    #[test]
    fn a_buffer_that_is_just_small_enough_is_kept() {
        let mut incoming = Incoming::new(IdHash::new(), true);
        assert_eq!(feed(&mut incoming, &stream(&[3000])), 1);
        incoming.plan(&mut Vec::new());
        assert_eq!(incoming.scratch.len(), SCRATCH_KEPT);
    }

    #[test]
    fn a_buffer_that_became_too_small_is_left_to_others_if_it_is_large() {
        while !spare::take_in(0).is_empty() {}
        for (control, left) in [(3000, 0), (5000, 8192)] {
            let mut incoming = Incoming::new(IdHash::new(), true);
            assert_eq!(feed(&mut incoming, &stream(&[control, 300_000])), 2);
            assert_eq!(spare::take_in(0).len(), left);
        }
    }

    #[test]
    fn the_rest_of_a_section_is_read_at_once_and_nothing_behind_it() {
        let mut incoming = Incoming::new(IdHash::new(), true);
        let mut one = vec![0; HEADER + 5000];
        block::seal(&mut one, 100, 0, None);
        let mut targets = Vec::new();
        incoming.plan(&mut targets);
        incoming.scratch_mut(0, FIRST_READ).copy_from_slice(&one[..FIRST_READ]);
        incoming.arrived(FIRST_READ).unwrap();
        assert!(matches!(incoming.step(1 << 20), Ok(Parsed::Wait)));
        incoming.plan(&mut targets);
        assert_eq!(targets, [Target::Scratch { offset: FIRST_READ, len: HEADER + 5000 - FIRST_READ }]);
    }
}
