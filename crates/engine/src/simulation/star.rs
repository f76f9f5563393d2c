//! Star calls in the simulation: kernels that note their runs, and workers that send calls again when they have lost
//! their connection. No call runs twice, and one that succeeds has run.

use std::convert::Infallible;
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::owner::{Any, Ledger};
use crate::api::{Buffers, CompiledPlan, Job, OutPayload, PendingOp, ReplyMeta, StarCall, StarFailure};
use crate::api::{StarHost, StarOutcome, StarReply, Ticket};
use crate::command::NewCall;
use starwire_protocol::star::{self, CallHead, CallId, REPLY_BYTES, RegisterHead, ReplyHead, UNKNOWN_PLAN, plan_hash};
use starwire_protocol::{Outcome, code};

/// As often as `cc/star/client.cc` sends a call again.
const MAX_ATTEMPTS: u32 = 10;
const RECONNECT_MS: u32 = 10_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plan {
    Read,
    Update,
    /// An update that waits for something.
    Wait,
}

impl Plan {
    const ALL: [Plan; 3] = [Plan::Read, Plan::Update, Plan::Wait];

    pub fn of(number: u64) -> Self {
        Self::ALL[number as usize % Self::ALL.len()]
    }

    fn bytes(self) -> &'static [u8] {
        match self {
            Self::Read => b"read",
            Self::Update => b"update",
            Self::Wait => b"wait",
        }
    }
}

pub struct Running {
    pub ticket: Ticket,
    id: u64,
    cancelled: Arc<AtomicBool>,
}

/// A server's kernels.
pub struct Kernels {
    incarnations: [u64; 1],
    ledger: Arc<Mutex<Ledger>>,
    pub jobs: Mutex<Vec<Job>>,
    pub running: Mutex<Vec<Running>>,
}

impl Kernels {
    pub fn new(incarnation: u64, ledger: &Arc<Mutex<Ledger>>) -> Self {
        let (jobs, running) = Default::default();
        Self { incarnations: [incarnation], ledger: ledger.clone(), jobs, running }
    }
}

impl Running {
    /// How the run ends. `bytes`: of its reply.
    pub fn outcome(&self, bytes: usize) -> StarOutcome<Infallible> {
        let result = match self.cancelled.load(Ordering::Relaxed) {
            true => Err(StarFailure::new(code::CANCELLED, "cancelled while it ran")),
            false => Ok(StarReply {
                kept: Vec::new(),
                meta: ReplyMeta::new(&self.id.to_le_bytes()),
                payload: (bytes > 0).then(|| OutPayload::of(vec![vec![self.id as u8; bytes]])),
                stats_bytes: 0,
                bytes: bytes as u64,
            }),
        };
        StarOutcome { result, run: Duration::ZERO, cost: Duration::ZERO, inline: false }
    }
}

impl StarHost for Kernels {
    type Plan = Plan;
    type Value = Infallible;
    type Run = Arc<AtomicBool>;

    fn incarnations(&self) -> &[u64] {
        &self.incarnations
    }

    fn spawn(&self, job: Job) {
        self.jobs.lock().unwrap().push(job);
    }

    fn is_isolated(&self, _session: &[u8]) -> Result<bool, StarFailure> {
        Ok(false)
    }

    fn compile(&self, _session: &[u8], plan: &[u8]) -> Result<CompiledPlan<Plan>, StarFailure> {
        let plan = Plan::ALL.into_iter().find(|known| known.bytes() == plan).unwrap();
        let (ends_alone, has_effects) = (plan != Plan::Wait, plan != Plan::Read);
        Ok(CompiledPlan { plan, has_state: false, may_wait: !ends_alone, ends_alone, has_effects })
    }

    fn run(&self, call: StarCall<'_, Self>) -> Option<Arc<AtomicBool>> {
        let id = u64::from_le_bytes(call.table().try_into().unwrap());
        let is_first = self.ledger.lock().unwrap().ran.insert(id);
        assert!(is_first || *call.plan == Plan::Read, "star call {id} runs twice");
        let cancelled = Arc::new(AtomicBool::new(false));
        self.running.lock().unwrap().push(Running { ticket: call.ticket, id, cancelled: cancelled.clone() });
        Some(cancelled)
    }

    fn cancel(&self, run: &Arc<AtomicBool>) {
        run.store(true, Ordering::Relaxed);
    }
}

/// A call of a worker, until it has ended.
#[derive(Clone, Debug)]
pub struct Call {
    pub id: u64,
    pub from: usize,
    pub to: usize,
    /// Of the two processes.
    pub incarnations: (u64, u64),
    pub plan: Plan,
    pub lane: u32,
    pub number: NonZeroU64,
    pub attempt: u32,
    /// It waits for a connection, if there is none.
    pub waits: bool,
    /// There are no faults that it could fail by.
    pub must_succeed: bool,
}

/// What a worker does when a request has ended.
pub enum Next {
    Call(Call),
    Register(Call),
    GiveLane(Call),
}

impl Next {
    pub fn call(&self) -> &Call {
        match self {
            Self::Call(call) | Self::Register(call) | Self::GiveLane(call) => call,
        }
    }
}

impl Call {
    /// The request for a channel.
    pub fn request(&self, ledger: &Arc<Mutex<Ledger>>, registers: bool) -> NewCall<Any> {
        let (mut meta, plan) = (Vec::new(), plan_hash(self.plan.bytes()));
        let incarnation = self.incarnations.1;
        let (method, payload) = if registers {
            RegisterHead { incarnation, plan, session: b"" }.write(&mut meta).unwrap();
            (star::REGISTER, Some(OutPayload::of(vec![self.plan.bytes()])))
        } else {
            let call_id = Some(CallId { lane: self.lane, attempt: self.attempt, number: self.number });
            let head = CallHead { flags: 0, step: 1, incarnation, plan, call_id, session: b"", keeps: Vec::new() };
            head.write(&mut meta).unwrap();
            meta.extend(self.id.to_le_bytes());
            (star::CALL, None)
        };
        let deadline_ms = if self.attempt == 0 { 0 } else { RECONNECT_MS };
        let (wait_for_ready, deadline_to_connect) = (self.waits, true);
        let op = PendingOp::new(Any::Star(Request { call: self.clone(), ledger: ledger.clone(), registers }));
        NewCall { method: method.into(), meta, payload, deadline_ms, wait_for_ready, deadline_to_connect, op }
    }
}

pub struct Request {
    call: Call,
    ledger: Arc<Mutex<Ledger>>,
    registers: bool,
}

impl Request {
    pub fn alloc(&self, lens: &[u64]) -> Buffers {
        Buffers::owned(lens.iter().map(|len| vec![0xEE; *len as usize]).collect())
    }

    pub fn done(self, outcome: &Outcome<'_>, buffers: Buffers) {
        let Self { mut call, ledger, registers } = self;
        // Poisoned: the simulation has failed.
        let Ok(mut ledger) = ledger.lock() else { return };
        let was_cancelled = ledger.open.get(&call.id).is_none_or(|open| open.is_cancelled);
        let code = match outcome {
            Outcome::Ok { .. } if registers => return ledger.next.push(Next::Call(call)),
            Outcome::Ok { meta } if ReplyHead::read(meta).unwrap().flags == UNKNOWN_PLAN => {
                return ledger.next.push(Next::Register(call));
            }
            Outcome::Ok { meta } => {
                assert_eq!(meta[REPLY_BYTES..], call.id.to_le_bytes(), "another call's reply");
                let parts = buffers.into_owned();
                assert!(parts.iter().flatten().all(|byte| *byte == call.id as u8), "another call's reply");
                assert!(ledger.ran.contains(&call.id), "star call {} has not run", call.id);
                0
            }
            Outcome::Lost { .. } if !was_cancelled && call.attempt < MAX_ATTEMPTS => {
                call.attempt += 1;
                return ledger.next.push(Next::Call(call));
            }
            Outcome::PeerError { code, .. } | Outcome::Local { code, .. } | Outcome::Lost { code, .. } => {
                // Nobody makes a call again that is cancelled.
                let may_fail = !call.must_succeed || was_cancelled;
                let expected = match *code {
                    code::UNAVAILABLE | code::DEADLINE_EXCEEDED | code::ABORTED => may_fail,
                    code::CANCELLED => was_cancelled,
                    _ => false,
                };
                assert!(expected, "{call:?}, cancelled: {was_cancelled}: {outcome:?}");
                *code
            }
        };
        if let (0, 1..) = (code, call.attempt) {
            ledger.saved += 1;
        }
        ledger.open.remove(&call.id);
        *ledger.ended.entry(code).or_default() += 1;
        ledger.next.push(Next::GiveLane(call));
    }
}
