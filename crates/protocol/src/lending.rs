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

#[cfg(test)]
mod tests {
    use super::*;

    struct Addressed;

    impl Payload for Addressed {
        fn part_count(&self) -> usize {
            1
        }
        fn part_len(&self, _part: usize) -> u64 {
            LEND_MIN
        }
        fn copy_part(&self, _part: usize, _out: &mut Vec<u8>) {}
        fn address(&self, _part: usize, offset: u64) -> Option<u64> {
            Some(4096 + offset)
        }
    }

    struct Elsewhere;

    impl Payload for Elsewhere {
        fn part_count(&self) -> usize {
            1
        }
        fn part_len(&self, _part: usize) -> u64 {
            LEND_MIN
        }
        fn copy_part(&self, _part: usize, _out: &mut Vec<u8>) {}
    }

    fn lends<P: Payload>(payload: P, bulk: u64, room: usize) -> bool {
        let mut lender = Lender::<P>::new();
        lender.set_witness(Witness { address: 1, value: 2 });
        assert!(!lender.is_allowed());
        lender.taken(0).unwrap();
        assert!(lender.is_allowed() && lender.is_empty());
        let part = Segment::Part { payload: Rc::new(payload), part: 0, offset: 0, len: bulk };
        let (mut control, mut out) = (Vec::new(), vec![Segment::Control(Vec::new()), part]);
        let lends = lender.lend(&mut control, &mut out, 1, bulk, room);
        assert_eq!((!lender.is_empty(), out.len() == 1, !control.is_empty()), (lends, lends, lends));
        lends
    }

    #[test]
    fn a_block_is_lent_if_it_is_large_and_can_be_announced() {
        let room = put::lend_len(1);
        assert!(lends(Addressed, LEND_MIN, room) && lends(Addressed, LEND_MIN, room + 1));
        assert!(!lends(Addressed, LEND_MIN - 1, room) && !lends(Addressed, LEND_MIN, room - 1));
        assert!(!lends(Elsewhere, LEND_MIN, room));
    }
}
