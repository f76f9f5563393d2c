//! Star calls in the simulation: kernels that note their runs, and workers that send calls again when they have lost
//! their connection. No call runs twice, and one that succeeds has run.

use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::bytes::bytes_of;
use super::owner::{Any, Counted, Ledger, Owner, payload};
use super::requests::Kind;
use crate::api::{Buffers, CompiledPlan, Job, Kept, PendingOp, ReplyMeta, StarCall, StarFailure};
use crate::api::{StarHost, StarOutcome, StarReply, Ticket};
use crate::command::NewCall;
use starwire_protocol::star::{
    self, CallHead, CallId, EndHead, Keep, LAST, REPLY_BYTES, RegisterHead, ReplyHead, UNKNOWN_PLAN, plan_hash,
};
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

/// A plan on a server, counted until nothing has it any more.
#[derive(Clone)]
pub struct Compiled {
    plan: Plan,
    _counted: Arc<Counted>,
}

/// A value that stays on a server, and where.
pub struct Value {
    conn: u64,
    step: i64,
    slot: u32,
    _counted: Counted,
}

pub struct Running {
    pub ticket: Ticket,
    id: u64,
    step: i64,
    slots: Vec<u32>,
    cancelled: Arc<AtomicBool>,
}

/// A server's kernels.
pub struct Kernels {
    incarnations: [u64; 1],
    ledger: Arc<Mutex<Ledger>>,
    pub jobs: Mutex<Vec<Job>>,
    pub running: Mutex<Vec<Running>>,
    /// Those that were not dropped.
    pub plans: Arc<AtomicI64>,
    pub values: Arc<AtomicI64>,
}

impl Kernels {
    pub fn new(incarnation: u64, ledger: &Arc<Mutex<Ledger>>) -> Self {
        let (jobs, running, plans, values) = Default::default();
        Self { incarnations: [incarnation], ledger: ledger.clone(), jobs, running, plans, values }
    }
}

impl Running {
    /// How the run ends. `bytes`: of its reply.
    pub fn outcome(self, bytes: usize, host: &Owner) -> StarOutcome<Value> {
        let Self { ticket, id, step, slots, cancelled } = self;
        let keep = |slot| {
            let value = Value { conn: ticket.conn, step, slot, _counted: Counted::new(&host.kernels.values) };
            Kept { slot, value, bytes: 8 }
        };
        let result = if cancelled.load(Ordering::Relaxed) {
            Err(StarFailure::new(code::CANCELLED, "cancelled while it ran"))
        } else {
            host.ledger.lock().unwrap().replies.entry(id).or_default().push(bytes);
            let parts = if bytes > 0 { vec![bytes_of(id, bytes)] } else { Vec::new() };
            Ok(StarReply {
                kept: slots.into_iter().map(keep).collect(),
                meta: ReplyMeta::new(&id.to_le_bytes()),
                payload: payload(parts, &host.payloads),
                stats_bytes: 0,
                bytes: bytes as u64,
            })
        };
        StarOutcome { result, run: Duration::ZERO, cost: Duration::ZERO, inline: false }
    }
}

impl StarHost for Kernels {
    type Plan = Compiled;
    type Value = Value;
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

    fn compile(&self, _session: &[u8], plan: &[u8]) -> Result<CompiledPlan<Compiled>, StarFailure> {
        let plan = Plan::ALL.into_iter().find(|known| known.bytes() == plan).unwrap();
        let (ends_alone, has_effects) = (plan != Plan::Wait, plan != Plan::Read);
        let plan = Compiled { plan, _counted: Arc::new(Counted::new(&self.plans)) };
        Ok(CompiledPlan { plan, has_state: false, may_wait: !ends_alone, ends_alone, has_effects })
    }

    fn run(&self, call: StarCall<'_, Self>) -> Option<Arc<AtomicBool>> {
        let (id, feeds) = call.table().split_at(8);
        let id = u64::from_le_bytes(id.try_into().unwrap());
        let feeds = if feeds.is_empty() { 0 } else { u64::from_le_bytes(feeds.try_into().unwrap()) };
        let got: Vec<u8> = call.body.parts().flatten().copied().collect();
        assert!(got == bytes_of(!id, feeds as usize), "the feeds of star call {id} are wrong");
        let is_first = self.ledger.lock().unwrap().ran.insert(id);
        assert!(is_first || call.plan.plan == Plan::Read, "star call {id} runs twice");
        for slot in 0..8 {
            let is_right = |value: &Value| (value.conn, value.step, value.slot) == (call.ticket.conn, call.step, slot);
            assert!(call.slots.get(slot).is_none_or(is_right), "another step's value");
        }
        let cancelled = Arc::new(AtomicBool::new(false));
        let slots = call.keeps.iter().map(|keep| keep.slot).collect();
        let running = Running { ticket: call.ticket, id, step: call.step, slots, cancelled: cancelled.clone() };
        self.running.lock().unwrap().push(running);
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
    /// It can be sent again.
    pub call_id: Option<CallId>,
    pub attempt: u32,
    /// It waits for a connection, if there is none.
    pub waits: bool,
    /// There are no faults that it could fail by.
    pub must_succeed: bool,
    /// Bytes of its feeds.
    pub feeds: usize,
    pub step: Step,
    /// It says how many bytes its feeds have.
    pub has_table: bool,
}

/// What a call has to do with its step.
#[derive(Clone, Debug)]
pub struct Step {
    pub number: i64,
    /// The request is no call, but the end of the step.
    pub ends: bool,
    pub is_last: bool,
    /// Where it keeps values.
    pub slots: Vec<u32>,
}

impl Default for Step {
    fn default() -> Self {
        Self { number: 1, ends: false, is_last: false, slots: Vec::new() }
    }
}

impl Step {
    /// As `cc/star` says: a value that stays belongs to a connection.
    pub fn can_repeat(&self) -> bool {
        !self.ends && !self.is_last && self.slots.is_empty()
    }
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
    /// The request for a channel. `counter`: of payloads.
    pub fn request(
        &self,
        ledger: &Arc<Mutex<Ledger>>,
        registers: bool,
        counter: &Arc<AtomicI64>,
        now: Instant,
    ) -> NewCall<Any> {
        let (mut meta, plan) = (Vec::new(), plan_hash(self.plan.bytes()));
        let incarnation = self.incarnations.1;
        let (method, parts) = if self.step.ends {
            EndHead { step: self.step.number, session: b"" }.write(&mut meta).unwrap();
            (star::END, Vec::new())
        } else if registers {
            RegisterHead { incarnation, plan, session: b"" }.write(&mut meta).unwrap();
            (star::REGISTER, vec![self.plan.bytes().to_vec()])
        } else {
            let call_id = self.call_id.map(|id| CallId { attempt: self.attempt, ..id });
            let flags = if self.step.is_last { LAST } else { 0 };
            let keeps = self.step.slots.iter().map(|slot| Keep { fetch: 0, slot: *slot, flags: 0 }).collect();
            let head = CallHead { flags, step: self.step.number, incarnation, plan, call_id, session: b"", keeps };
            head.write(&mut meta).unwrap();
            meta.extend(self.id.to_le_bytes());
            meta.extend(self.has_table.then_some((self.feeds as u64).to_le_bytes()).iter().flatten());
            let is_fed = self.feeds > 0;
            (star::CALL, is_fed.then(|| bytes_of(!self.id, self.feeds)).into_iter().collect())
        };
        let payload = payload(parts, counter);
        let deadline_ms = if self.attempt == 0 { 0 } else { RECONNECT_MS };
        let not_before = (self.attempt > 0).then(|| now + Duration::from_millis(RECONNECT_MS.into()));
        let (wait_for_ready, deadline_to_connect) = (self.waits, true);
        let request = Request { call: self.clone(), ledger: ledger.clone(), registers, not_before };
        let op = PendingOp::new(Any::Star(request));
        NewCall { method: method.into(), meta, payload, deadline_ms, wait_for_ready, deadline_to_connect, op }
    }
}

pub struct Request {
    call: Call,
    ledger: Arc<Mutex<Ledger>>,
    registers: bool,
    /// Its deadline does not pass before.
    not_before: Option<Instant>,
}

impl Request {
    pub fn alloc(&self, lens: &[u64]) -> Buffers {
        Buffers::owned(lens.iter().map(|len| vec![0xEE; *len as usize]).collect())
    }

    pub fn done(self, outcome: &Outcome<'_>, buffers: Buffers) {
        let Self { mut call, ledger, registers, not_before } = self;
        // Poisoned: the simulation has failed.
        let Ok(mut ledger) = ledger.lock() else { return };
        let was_cancelled = ledger.open.get(&call.id).is_none_or(|open| open.is_cancelled);
        let code = match outcome {
            Outcome::Ok { meta } if call.step.ends => {
                assert!(meta.is_empty() && buffers.into_owned().is_empty(), "the end of a step has an answer");
                ledger.succeeded.insert((call.from, call.to, Kind::Star));
                0
            }
            Outcome::Ok { .. } if registers => return ledger.next.push(Next::Call(call)),
            Outcome::Ok { meta } if ReplyHead::read(meta).unwrap().flags == UNKNOWN_PLAN => {
                return ledger.next.push(Next::Register(call));
            }
            Outcome::Ok { meta } => {
                call.check_reply(&ledger, meta, buffers);
                ledger.succeeded.insert((call.from, call.to, Kind::Star));
                0
            }
            Outcome::Lost { .. } if !was_cancelled && call.call_id.is_some() && call.attempt < MAX_ATTEMPTS => {
                call.attempt += 1;
                return ledger.next.push(Next::Call(call));
            }
            Outcome::PeerError { code, .. } | Outcome::Local { code, .. } | Outcome::Lost { code, .. } => {
                // Nobody makes a call again that is cancelled.
                let may_fail = !call.must_succeed || was_cancelled;
                let expected = match *code {
                    code::UNAVAILABLE => may_fail,
                    code::DEADLINE_EXCEEDED => may_fail && ledger.is_past(not_before),
                    code::ABORTED => may_fail && ledger.incarnations[&call.to] != call.incarnations.1,
                    code::CANCELLED => was_cancelled,
                    code::RESOURCE_EXHAUSTED => ledger.is_tight,
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
        ledger.end(call.from, code);
        if call.call_id.is_some() {
            ledger.next.push(Next::GiveLane(call));
        }
    }
}

impl Call {
    /// It has run, and this is the whole reply of one of its runs.
    fn check_reply(&self, ledger: &Ledger, meta: &[u8], buffers: Buffers) {
        assert_eq!(meta[REPLY_BYTES..], self.id.to_le_bytes(), "another call's reply");
        assert!(ledger.ran.contains(&self.id), "star call {} has not run", self.id);
        let parts = buffers.into_owned();
        let bytes = parts.concat();
        let lens = ledger.replies.get(&self.id).map_or(&[][..], Vec::as_slice);
        assert!(lens.contains(&bytes.len()), "star call {} got {} bytes, not {lens:?}", self.id, bytes.len());
        assert_eq!(parts.len(), usize::from(!bytes.is_empty()), "parts of the reply to star call {}", self.id);
        assert!(bytes == bytes_of(self.id, bytes.len()), "another call's reply");
    }
}
