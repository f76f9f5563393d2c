//! Loans of a connection: what this side lends, and what it takes from the peer.

use super::Connection;
use crate::error::ProtocolError;
use crate::frame::{Witness, put};
use crate::hello::FEATURE_LENDING;
use crate::lending::Loan;
use crate::outgoing::Answers;
use crate::owner::Owner;

impl<O: Owner> Connection<O> {
    /// Lets this side lend, if the peer can read. The word must change before this connection is dropped, which keeps
    /// what is lent until then.
    pub fn lend(&mut self, witness: Witness) {
        self.out.lender.set_witness(witness);
    }

    /// Releases everything lent. After `fail`, and after the witness has changed.
    pub fn take_back(&mut self) {
        self.out.lender.take_back();
    }

    /// This side can read the peer's memory. Call it once the handshake is done; no effect if the peer does not
    /// understand loans.
    pub fn allow_lending(&mut self) {
        if self.is_ready() && self.peer_lends() {
            self.incoming.borrows = true;
            self.say(|out| put::taken(out, 0));
        }
    }

    /// The source of the next bytes, if they are not in the stream: they are copied to the planned targets, and
    /// `on_received` takes how many were.
    pub fn loan(&self) -> Option<&Loan> {
        self.incoming.loan.as_ref()
    }

    fn peer_lends(&self) -> bool {
        self.peer.as_ref().is_some_and(|peer| peer.features & FEATURE_LENDING != 0)
    }

    pub(super) fn on_lend(&mut self, witness: Witness, pieces: Vec<(u64, u64)>) -> Result<(), ProtocolError> {
        if !self.incoming.borrows || self.incoming.loan.is_some() {
            return Err(ProtocolError::Unexpected { frame: "LEND", when: "at this point in the connection" });
        }
        self.incoming.loan = Some(Loan { witness, pieces, taken: 0 });
        Ok(())
    }

    pub(super) fn on_taken(&mut self, blocks: u64) -> Result<(), ProtocolError> {
        if !self.peer_lends() {
            return Err(ProtocolError::Unexpected { frame: "TAKEN", when: "from a peer that does not support loans" });
        }
        self.out.lender.taken(blocks)
    }

    /// The last bytes of a block were taken.
    pub(super) fn return_loan(&mut self) {
        if self.incoming.loan_is_over() {
            self.out.frame(Answers::default(), |out| put::taken(out, 1));
        }
    }
}
