//! The operations in progress on a stream.

use std::collections::VecDeque;
use std::ops::Range;

use super::registrations::Lease;
use super::wire::Offer;
use crate::transport::IoPart;

/// The next piece of the stream.
pub enum Item {
    Bytes { slot: usize, range: Range<usize> },
    Offer(Offer),
}

pub struct ReceiveOp {
    pub parts: Vec<IoPart>,
    pub part: usize,
    pub offset: usize,
    pub filled: usize,
    /// Its READs in flight.
    pub read: Option<Reading>,
}

pub struct Reading {
    pub last: u64,
    pub bytes: usize,
    pub finished_offers: u32,
    /// The bytes are in the bounce buffer.
    pub bounced: bool,
    pub leases: Vec<Lease>,
}

pub struct SendOp {
    pub parts: Vec<IoPart>,
    pub part: usize,
    pub offset: usize,
    pub taken: usize,
    /// Memory that the peer reads, in the order of the offers.
    pub offers: VecDeque<Lease>,
    /// This part could not be registered: it is copied.
    pub copy_part: Option<usize>,
}

impl ReceiveOp {
    /// Marks `len` more bytes of its memory as filled.
    pub fn advance(&mut self, len: usize) {
        self.offset += len;
        if self.parts.get(self.part).is_some_and(|part| part.len == self.offset) {
            self.part += 1;
            self.offset = 0;
        }
    }
}
