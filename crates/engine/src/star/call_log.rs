//! The numbered calls of a worker process: one that comes again, over another connection, does not run again. It gets
//! the reply of its first run, which stays here until the worker's next call in the same lane.

use std::collections::HashMap;
use std::num::NonZeroU64;

use super::Refused;
use crate::api::Ticket;
use starwire_protocol::star::CallId;
use starwire_state::codec::{Reader, put_bytes, put_u64};

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
    call_id: CallId,
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
    /// Of the replies.
    bytes: u64,
}

impl KeptReply {
    pub fn bytes(&self) -> u64 {
        (self.meta.len() + self.parts.iter().map(Vec::len).sum::<usize>()) as u64
    }
}

impl State {
    fn bytes(&self) -> u64 {
        match self {
            Self::Done(Some(reply)) => reply.bytes(),
            _ => 0,
        }
    }
}

impl CallLog {
    /// Of a process whose earlier calls, if there were any, are all known.
    pub fn complete() -> Self {
        Self { lanes: HashMap::new(), last: 0, forgotten: 0, is_complete: true, bytes: 0 }
    }

    /// Of a process that may have made calls of which nothing is known.
    pub fn incomplete() -> Self {
        Self { is_complete: false, ..Self::complete() }
    }

    /// A call arrives. `most`: lanes, unless more of them run.
    pub fn begin(&mut self, call_id: CallId, ticket: Ticket, most: usize) -> Result<Begin, Refused> {
        if let Some(lane) = self.lanes.get_mut(&call_id.lane).filter(|lane| lane.call_id.number >= call_id.number) {
            if lane.call_id.number > call_id.number || lane.call_id.attempt >= call_id.attempt {
                return Err(Refused::Superseded);
            }
            lane.call_id = call_id;
            return match &mut lane.state {
                State::Running(again) => {
                    *again = Some(ticket);
                    Ok(Begin::Waits)
                }
                State::Done(Some(reply)) => Ok(Begin::Repeat(reply.clone())),
                State::Done(None) => Err(Refused::MayHaveRun),
            };
        }
        if call_id.number.get() <= self.forgotten || (call_id.attempt > 0 && !self.is_complete) {
            return Err(Refused::MayHaveRun);
        }
        if !self.lanes.contains_key(&call_id.lane) {
            while self.lanes.len() >= most && self.forget_oldest() {}
        }
        self.last = self.last.max(call_id.number.get());
        let old = self.lanes.insert(call_id.lane, Lane { call_id, state: State::Running(None) });
        self.bytes -= old.map_or(0, |lane| lane.state.bytes());
        Ok(Begin::Run)
    }

    /// A call's run is over. Returns the ticket of the call if it came again meanwhile.
    pub fn end(&mut self, lane: u32, number: NonZeroU64, reply: impl FnOnce() -> Option<KeptReply>) -> Option<Ticket> {
        let lane = self.lanes.get_mut(&lane).filter(|lane| lane.call_id.number == number)?;
        let State::Running(again) = &mut lane.state else { return None };
        let again = again.take();
        lane.state = State::Done(reply());
        self.bytes += lane.state.bytes();
        again
    }

    /// Drops all replies: the process has been gone for too long.
    pub fn forget(&mut self) {
        self.lanes = HashMap::new();
        self.bytes = 0;
        self.forgotten = self.last;
    }

    /// Of the replies that stay.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// For [`CallLog::load`]. What still runs is then a call that may have run.
    pub fn save(&self, out: &mut Vec<u8>) {
        [self.last, self.forgotten, u64::from(self.is_complete)].iter().for_each(|number| put_u64(out, *number));
        let mut lanes: Vec<&Lane> = self.lanes.values().collect();
        lanes.sort_unstable_by_key(|lane| lane.call_id.lane);
        put_u64(out, lanes.len() as u64);
        for Lane { call_id, state } in lanes {
            [call_id.lane.into(), call_id.attempt.into(), call_id.number.get()]
                .iter()
                .for_each(|number| put_u64(out, *number));
            let State::Done(Some(KeptReply { code, meta, parts })) = state else {
                put_u64(out, 0);
                continue;
            };
            put_u64(out, 1 + parts.len() as u64);
            out.extend(code.to_le_bytes());
            put_bytes(out, meta);
            parts.iter().for_each(|part| put_bytes(out, part));
        }
    }

    pub fn load(saved: &mut Reader<'_>) -> Option<Self> {
        let (last, forgotten, is_complete) = (saved.u64()?, saved.u64()?, saved.u64()? != 0);
        let mut lanes = HashMap::new();
        for _ in 0..saved.count(32)? {
            let (lane, attempt) = (u32::try_from(saved.u64()?).ok()?, u32::try_from(saved.u64()?).ok()?);
            let call_id = CallId { lane, attempt, number: NonZeroU64::new(saved.u64()?)? };
            let reply = match saved.u64()? {
                0 => None,
                parts => {
                    let (code, meta) = (i32::from_le_bytes(saved.take(4)?.try_into().ok()?), saved.bytes()?.to_vec());
                    let parts = (1..parts).map(|_| saved.bytes().map(<[u8]>::to_vec)).collect::<Option<_>>()?;
                    Some(KeptReply { code, meta, parts })
                }
            };
            lanes.insert(lane, Lane { call_id, state: State::Done(reply) });
        }
        let bytes = lanes.values().map(|lane: &Lane| lane.state.bytes()).sum();
        Some(Self { lanes, last, forgotten, is_complete, bytes })
    }

    /// False: all calls still run. These stay, however many there are, as the same call may have come again, and
    /// waits: they are no more than the runs.
    fn forget_oldest(&mut self) -> bool {
        let over = self.lanes.iter().filter(|(_, lane)| matches!(lane.state, State::Done(_)));
        let Some((lane, number)) = over.map(|(at, lane)| (*at, lane.call_id.number)).min_by_key(|l| l.1) else {
            return false;
        };
        self.bytes -= self.lanes.remove(&lane).map_or(0, |lane| lane.state.bytes());
        self.forgotten = self.forgotten.max(number.get());
        true
    }
}

#[cfg(test)]
#[path = "call_log_tests.rs"]
mod tests;
