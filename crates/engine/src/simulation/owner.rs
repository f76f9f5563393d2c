//! The owner of a simulated task: answers requests late, and keeps a ledger of its own.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use super::bytes::{bytes_of, number_of};
use super::requests::{Kind, Need};
use super::star::{self, Kernels, Next};
use crate::api::{Buffers, Host, IncomingCall, Level, Op, OutPayload, RecvRequest, Ticket};
use crate::resolver::LookUp;
use starwire_protocol::{Failure, Outcome, code};

/// A request of a peer that the owner has not answered.
pub struct Unanswered {
    pub ticket: Ticket,
    pub meta: Vec<u8>,
    pub parts: Vec<Vec<u8>>,
}

/// A request that has not ended.
#[derive(Debug)]
pub struct Open {
    pub from: usize,
    pub is_cancelled: bool,
    /// Its reply has begun to arrive.
    pub has_buffers: bool,
    /// Its deadline passes between these two times.
    pub not_before: Option<Instant>,
    pub due: Option<Instant>,
}

/// What all owners of a simulation know.
#[derive(Default)]
pub struct Ledger {
    /// Servers have low limits: star calls may be refused.
    pub is_tight: bool,
    pub open: BTreeMap<u64, Open>,
    /// Calls that a server has got.
    pub executed: HashSet<Vec<u8>>,
    pub ended: BTreeMap<i32, u64>,
    /// Star calls that have run.
    pub ran: HashSet<u64>,
    /// Star calls that succeeded although they had lost a connection.
    pub saved: u64,
    /// Tasks that died at fail points.
    pub deaths: BTreeMap<&'static str, u64>,
    pub next: Vec<Next>,
    /// Requests of each task that have ended before their replies have come, which still may.
    pub given_up: BTreeMap<usize, usize>,
    pub now: Option<Instant>,
    /// Requests from and to which tasks have succeeded.
    pub succeeded: BTreeSet<(usize, usize, Kind)>,
    /// The processes of the tasks that run.
    pub incarnations: BTreeMap<usize, u64>,
    /// How many bytes the replies of star calls have, one for each run.
    pub replies: BTreeMap<u64, Vec<usize>>,
}

impl Ledger {
    /// A request of this task has ended.
    pub fn end(&mut self, from: usize, code: i32) {
        *self.ended.entry(code).or_default() += 1;
        if matches!(code, code::CANCELLED | code::DEADLINE_EXCEEDED | code::RESOURCE_EXHAUSTED) {
            *self.given_up.entry(from).or_default() += 1;
        }
    }

    pub fn is_past(&self, due: Option<Instant>) -> bool {
        due.zip(self.now).is_some_and(|(due, now)| now >= due)
    }
}

#[derive(Default)]
pub struct State {
    pub unanswered: Vec<Unanswered>,
    pub connections: i64,
    pub is_stopped: bool,
}

pub struct Owner {
    pub state: Mutex<State>,
    pub ledger: Arc<Mutex<Ledger>>,
    pub kernels: Kernels,
    pub keys: AtomicI64,
    /// Payloads that were not released.
    pub payloads: Arc<AtomicI64>,
    pub look_ups: Mutex<Vec<LookUp<Owner>>>,
    /// Something was sent to its reactors since they ran.
    pub is_asked: AtomicBool,
    /// Of an early seed: replies say no more than they did.
    is_early: bool,
}

impl Owner {
    pub fn new(incarnation: u64, ledger: &Arc<Mutex<Ledger>>, is_early: bool) -> Self {
        let kernels = Kernels::new(incarnation, ledger);
        let (state, keys, payloads, look_ups, is_asked) = Default::default();
        Self { state, ledger: ledger.clone(), kernels, keys, payloads, look_ups, is_asked, is_early }
    }

    /// Its reactors have a reason to run.
    pub fn ask(&self) {
        self.is_asked.store(true, Ordering::Relaxed);
    }

    fn called(&self) -> std::sync::MutexGuard<'_, State> {
        let state = self.state.lock().unwrap();
        assert!(!state.is_stopped, "a callback after the end");
        state
    }
}

struct Part {
    bytes: Vec<u8>,
    _counted: Arc<Counted>,
}

impl AsRef<[u8]> for Part {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// One of the things that a counter counts, until it is dropped.
pub struct Counted(Arc<AtomicI64>);

impl Counted {
    pub fn new(counter: &Arc<AtomicI64>) -> Self {
        counter.fetch_add(1, Ordering::Relaxed);
        Self(counter.clone())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A payload, counted until it is released. `None`: there are no parts.
pub fn payload(parts: Vec<Vec<u8>>, counter: &Arc<AtomicI64>) -> Option<OutPayload> {
    if parts.is_empty() {
        return None;
    }
    let counted = Arc::new(Counted::new(counter));
    Some(OutPayload::of(parts.into_iter().map(|bytes| Part { bytes, _counted: counted.clone() }).collect()))
}

/// The value of a rendezvous key.
pub fn value(key: &[u8], step: i64, frame: u64, iter: u64) -> Vec<Vec<u8>> {
    let text = std::str::from_utf8(key).unwrap();
    let size: usize = text.rsplit(';').next().unwrap().parse().unwrap();
    let number = number_of(key.iter().map(|byte| u64::from(*byte)).chain([step.cast_unsigned(), frame, iter]));
    vec![bytes_of(number, size)]
}

/// Which value it is, also if it has no bytes.
pub fn reply_meta(key: &[u8], step: i64, frame: u64, iter: u64, is_early: bool) -> Vec<u8> {
    if is_early {
        return key.to_vec();
    }
    [key, format!(";{step};{frame};{iter}").as_bytes()].concat()
}

impl Host for Owner {
    type Key = Vec<u8>;
    type Op = Any;
    type Star = Kernels;

    fn key(&self, prefix: &[u8]) -> Option<Vec<u8>> {
        self.keys.fetch_add(1, Ordering::Relaxed);
        Some(prefix.to_vec())
    }

    fn key_gone(&self, _key: Vec<u8>) {
        self.keys.fetch_sub(1, Ordering::Relaxed);
    }

    fn recv(&self, requests: &[RecvRequest<Vec<u8>>]) {
        let mut state = self.called();
        for RecvRequest { ticket, step, key, frame, iter } in requests {
            let parts = value(key, *step, *frame, *iter);
            let meta = reply_meta(key, *step, *frame, *iter, self.is_early);
            state.unanswered.push(Unanswered { ticket: *ticket, meta, parts });
        }
    }

    fn takes_calls(&self) -> bool {
        true
    }

    fn star(&self) -> Option<&Kernels> {
        Some(&self.kernels)
    }

    fn call(&self, call: IncomingCall) {
        let meta = call.body.meta().to_vec();
        assert!(self.ledger.lock().unwrap().executed.insert(meta.clone()), "a call was executed twice");
        let id = u64::from_le_bytes(meta[..].try_into().unwrap());
        let parts: Vec<Vec<u8>> = call.body.parts().map(<[u8]>::to_vec).collect();
        let is_right = |(part, bytes): (u64, &Vec<u8>)| *bytes == bytes_of(id << 2 | part, bytes.len());
        assert!((0..).zip(&parts).all(is_right), "the payload of call {id} is wrong");
        self.called().unanswered.push(Unanswered { ticket: call.ticket, meta, parts });
    }

    fn peer_came(&self, _conn: u64, _task: &str, _incarnation: u64) {
        self.called().connections += 1;
    }

    fn peer_gone(&self, conn: u64) {
        let mut state = self.called();
        state.connections -= 1;
        // It may be answered all the same.
        if conn % 2 == 0 {
            state.unanswered.retain(|request| request.ticket.conn != conn);
        }
    }

    fn log(&self, _level: Level, _line: &str) {}
}

pub enum Any {
    Plain(Request),
    Star(star::Request),
}

impl Op for Any {
    fn alloc(&mut self, meta: &[u8], lens: &[u64]) -> Result<Buffers, Failure> {
        match self {
            Self::Plain(request) => request.alloc(meta, lens),
            Self::Star(request) => Ok(request.alloc(lens)),
        }
    }

    fn done(self, outcome: &Outcome<'_>, buffers: Buffers) {
        match self {
            Self::Plain(request) => request.done(outcome, buffers),
            Self::Star(request) => request.done(outcome, buffers),
        }
    }
}

/// A request of a simulated task, and what its answer has to be.
pub struct Request {
    pub id: u64,
    pub ledger: Arc<Mutex<Ledger>>,
    pub route: (usize, usize, Kind),
    pub need: Need,
    pub meta: Vec<u8>,
    pub parts: Vec<Vec<u8>>,
    pub refuses: bool,
}

impl Op for Request {
    fn alloc(&mut self, _meta: &[u8], lens: &[u64]) -> Result<Buffers, Failure> {
        if self.refuses {
            return Err(Failure { code: code::RESOURCE_EXHAUSTED, message: "no memory".into() });
        }
        if let Some(open) = self.ledger.lock().unwrap().open.get_mut(&self.id) {
            open.has_buffers = true;
        }
        Ok(Buffers::owned(lens.iter().map(|len| vec![0xEE; *len as usize]).collect()))
    }

    fn done(self, outcome: &Outcome<'_>, buffers: Buffers) {
        // Poisoned: the simulation has failed.
        let Ok(mut ledger) = self.ledger.lock() else { return };
        let Open { is_cancelled: was_cancelled, not_before, .. } =
            ledger.open.remove(&self.id).expect("a request ends once");
        let code = match outcome {
            Outcome::Ok { meta } => {
                assert!(!self.refuses || self.parts.is_empty());
                assert_eq!(*meta, self.meta);
                assert!(buffers.into_owned() == self.parts, "the bytes of request {} are wrong", self.id);
                ledger.succeeded.insert(self.route);
                0
            }
            Outcome::PeerError { code, message, .. }
            | Outcome::Local { code, message }
            | Outcome::Lost { code, message } => {
                let expected = match *code {
                    code::UNAVAILABLE => self.need != Need::Now,
                    code::DEADLINE_EXCEEDED => ledger.is_past(not_before),
                    code::CANCELLED => was_cancelled,
                    code::RESOURCE_EXHAUSTED => self.refuses,
                    _ => false,
                };
                assert!(expected, "request {} {:?}: {code}: {message}", self.id, self.route);
                *code
            }
        };
        ledger.end(self.route.0, code);
    }
}
