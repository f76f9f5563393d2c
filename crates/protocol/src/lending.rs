//! Between processes on one host, large payloads need not travel: the sender announces their addresses (LEND), the
//! receiver copies them to their destination and confirms (TAKEN).
//!
//! The protocol only carries addresses and keeps what is lent; the owners know who can read whose memory. A receiver
//! that was suspended may read after the sender has abandoned the connection and reused the memory. So each loan names
//! a *witness*: a word in the sender's memory that the sender changes before it releases anything. If the receiver
//! finds it unchanged after its copy, the copy is valid.

use std::collections::VecDeque;
use std::rc::Rc;

use super::error::ProtocolError;
use super::frame::{Witness, put};
use super::limits::{LEND_MIN, MOST_LOANS};
use super::owner::Payload;
use super::segment::Segment;

/// The addresses of a block's bulk bytes in the peer's memory, in order.
#[derive(Debug)]
pub struct Loan {
    pub witness: Witness,
    /// Address and length.
    pub pieces: Vec<(u64, u64)>,
    /// Bytes taken so far.
    pub taken: u64,
}

/// The lender's side of one connection.
pub struct Lender<P> {
    /// None: this side does not lend.
    witness: Option<Witness>,
    allowed: bool,
    /// Payloads of each block that the peer has not taken.
    lent: VecDeque<Vec<Rc<P>>>,
}

impl<P: Payload> Lender<P> {
    pub fn new() -> Self {
        Lender { witness: None, allowed: false, lent: VecDeque::new() }
    }

    pub fn set_witness(&mut self, witness: Witness) {
        self.witness = Some(witness);
    }

    /// Lends the payloads of a block, the segments from `first` on, instead of sending them. False: they must be sent.
    pub fn lend(
        &mut self,
        control: &mut Vec<u8>,
        out: &mut Vec<Segment<P>>,
        first: usize,
        bulk: u64,
        room: usize,
    ) -> bool {
        let Some(witness) = self.witness.filter(|_| self.allowed) else { return false };
        let count = out.len() - first;
        if bulk < LEND_MIN || self.lent.len() >= MOST_LOANS || put::lend_len(count) > room {
            return false;
        }
        let mut pieces = Vec::with_capacity(count);
        for segment in &out[first..] {
            let Segment::Part { payload, part, offset, len } = segment else { return false };
            let Some(address) = payload.address(*part, *offset) else { return false };
            pieces.push((address, *len));
        }
        put::lend(control, witness, &pieces);
        let payloads = out.drain(first..).filter_map(|segment| match segment {
            Segment::Part { payload, .. } => Some(payload),
            Segment::Control(_) => None,
        });
        self.lent.push_back(payloads.collect());
        true
    }

    /// The peer can read this side's memory.
    pub fn is_allowed(&self) -> bool {
        self.allowed
    }

    pub fn is_empty(&self) -> bool {
        self.lent.is_empty()
    }

    /// Releases everything. After the witness has changed.
    pub fn take_back(&mut self) {
        self.lent.clear();
    }

    /// The peer has taken this many more blocks; 0 announces that it can read.
    pub fn taken(&mut self, blocks: u64) -> Result<(), ProtocolError> {
        self.allowed |= blocks == 0;
        match usize::try_from(blocks) {
            Ok(blocks) if blocks <= self.lent.len() => {
                self.lent.drain(..blocks);
                Ok(())
            }
            _ => Err(ProtocolError::Frame { frame: "TAKEN", why: "it returns more blocks than were lent" }),
        }
    }
}
