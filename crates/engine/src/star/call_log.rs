//! The numbered calls of a worker process: one that comes again, over another connection, does not run again. It gets
//! the reply of its first run, which stays here until the worker's next call in the same lane.

use std::collections::HashMap;
use std::num::NonZeroU64;

use super::Refused;
use crate::api::Ticket;
use starwire_protocol::star::CallId;

/// The longest reply that stays.
pub const MAX_REPLY: usize = 16 << 10;

/// A reply for a call that comes again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeptReply {
    pub code: i32,
    pub meta: Vec<u8>,
    pub parts: Vec<Vec<u8>>,
}

#[derive(Debug, PartialEq, Eq)]
pub enum Begin {
    Run,
    /// It runs already, and [`CallLog::end`] returns the ticket.
    Waits,
    Repeat(KeptReply),
}

struct Lane {
    turn: CallId,
    state: State,
}

enum State {
    /// The ticket of the call that came again.
    Running(Option<Ticket>),
    /// None: the reply was too long.
    Done(Option<KeptReply>),
}

pub struct CallLog {
    lanes: HashMap<u32, Lane>,
    last: u64,
    /// Calls up to this number may have run although no lane has them.
    forgotten: u64,
    /// The same for all calls that come again.
    is_complete: bool,
}

impl CallLog {
    /// Of a process whose earlier calls, if there were any, are all known.
    pub fn complete() -> Self {
        Self { lanes: HashMap::new(), last: 0, forgotten: 0, is_complete: true }
    }

    /// Of a process that may have made calls of which nothing is known.
    pub fn incomplete() -> Self {
        Self { is_complete: false, ..Self::complete() }
    }

    /// A call arrives. `most`: lanes.
    pub fn begin(&mut self, turn: CallId, ticket: Ticket, most: usize) -> Result<Begin, Refused> {
        if let Some(lane) = self.lanes.get_mut(&turn.lane).filter(|lane| lane.turn.number >= turn.number) {
            if lane.turn.number > turn.number || lane.turn.attempt >= turn.attempt {
                return Err(Refused::Superseded);
            }
            lane.turn = turn;
            return match &mut lane.state {
                State::Running(again) => {
                    *again = Some(ticket);
                    Ok(Begin::Waits)
                }
                State::Done(Some(reply)) => Ok(Begin::Repeat(reply.clone())),
                State::Done(None) => Err(Refused::MayHaveRun),
            };
        }
        if turn.number.get() <= self.forgotten || (turn.attempt > 0 && !self.is_complete) {
            return Err(Refused::MayHaveRun);
        }
        if self.lanes.len() >= most && !self.lanes.contains_key(&turn.lane) {
            self.forget_oldest();
        }
        self.last = self.last.max(turn.number.get());
        self.lanes.insert(turn.lane, Lane { turn, state: State::Running(None) });
        Ok(Begin::Run)
    }

    /// A call's run is over. Returns the ticket of the call if it came again meanwhile.
    pub fn end(&mut self, lane: u32, number: NonZeroU64, reply: impl FnOnce() -> Option<KeptReply>) -> Option<Ticket> {
        let lane = self.lanes.get_mut(&lane).filter(|lane| lane.turn.number == number)?;
        let State::Running(again) = &mut lane.state else { return None };
        let again = again.take();
        lane.state = State::Done(reply());
        again
    }

    /// Drops all replies: the process has been gone for too long.
    pub fn forget(&mut self) {
        self.lanes = HashMap::new();
        self.forgotten = self.last;
    }

    /// Calls that run count as well: with more of them than lanes, the oldest are not recognised.
    fn forget_oldest(&mut self) {
        let Some((lane, number)) = self.lanes.iter().map(|(at, lane)| (*at, lane.turn.number)).min_by_key(|l| l.1)
        else {
            return;
        };
        self.lanes.remove(&lane);
        self.forgotten = self.forgotten.max(number.get());
    }
}

#[cfg(test)]
#[path = "call_log_tests.rs"]
mod tests;
