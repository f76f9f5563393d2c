//! The owner of a simulated task: answers requests late, and keeps a ledger of its own.

use std::collections::{BTreeMap, HashSet};
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

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
    pub is_cancelled: bool,
    /// Its reply has begun to arrive.
    pub has_buffers: bool,
    pub due: Option<Instant>,
}

/// What all owners of a simulation know.
#[derive(Default)]
pub struct Ledger {
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
}

impl Owner {
    pub fn new(incarnation: u64, ledger: &Arc<Mutex<Ledger>>) -> Self {
        let kernels = Kernels::new(incarnation, ledger);
        let (state, keys, payloads, look_ups) = Default::default();
        Self { state, ledger: ledger.clone(), kernels, keys, payloads, look_ups }
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

struct Counted(Arc<AtomicI64>);

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
    counter.fetch_add(1, Ordering::Relaxed);
    let counted = Arc::new(Counted(counter.clone()));
    Some(OutPayload::of(parts.into_iter().map(|bytes| Part { bytes, _counted: counted.clone() }).collect()))
}

/// The value of a rendezvous key.
pub fn value(key: &[u8], step: i64, frame: u64, iter: u64) -> Vec<Vec<u8>> {
    let text = std::str::from_utf8(key).unwrap();
    let size: usize = text.rsplit(';').next().unwrap().parse().unwrap();
    vec![vec![(step as u8) ^ (frame as u8) ^ (iter as u8); size]]
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
            state.unanswered.push(Unanswered { ticket: *ticket, meta: key.clone(), parts });
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
        let parts = call.body.parts().map(<[u8]>::to_vec).collect();
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
        let was_cancelled = ledger.open.remove(&self.id).expect("a request ends once").is_cancelled;
        let code = match outcome {
            Outcome::Ok { meta } => {
                assert!(!self.refuses || self.parts.is_empty());
                assert_eq!(*meta, self.meta);
                assert!(buffers.into_owned() == self.parts, "the bytes of request {} are wrong", self.id);
                0
            }
            Outcome::PeerError { code, message, .. }
            | Outcome::Local { code, message }
            | Outcome::Lost { code, message } => {
                let expected = match *code {
                    code::UNAVAILABLE | code::DEADLINE_EXCEEDED => true,
                    code::CANCELLED => was_cancelled,
                    code::RESOURCE_EXHAUSTED => self.refuses,
                    _ => false,
                };
                assert!(expected, "{code}: {message}");
                *code
            }
        };
        *ledger.ended.entry(code).or_default() += 1;
    }
}
