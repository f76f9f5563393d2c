//! A shard's part of a parameter server: the calls of its connections, the values that they keep, and the plans that
//! they use. Nothing here is shared, so nothing is locked.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::Refused;
use super::accounts::Account;
use super::call_log::{Begin, KeptReply, MAX_REPLY};
use super::server::{FoundPlan, ServedPlan, StarServer, TICK, TOO_LONG};
use super::steps::Steps;
use crate::api::{Host, Ticket};
use crate::api::{InBody, OutPayload};
use crate::api::{StarCall, StarFailure, StarHost, StarOutcome, StarReply};
use crate::command::{Command, Meta, StarCommand};
use crate::keys::shard_of;
use crate::metrics::Recorder;
use starwire_marks::fail_point;
use starwire_protocol::code;
use starwire_protocol::star::{
    self, CallHead, CallId, EndHead, Keep, LAST, PlanHash, REPLY_BYTES, ReplyHead, SESSION_AT, TRACE, UNKNOWN_PLAN,
};
use starwire_protocol::state::STATE;

/// The reply to a request of star calls.
pub struct Answer {
    pub id: u64,
    pub code: i32,
    pub meta: Meta,
    pub payload: Option<OutPayload>,
}

impl Answer {
    /// A copy for a call that comes again, if it is short.
    fn copy(&self) -> Option<KeptReply> {
        let parts = || self.payload.iter().flat_map(OutPayload::parts);
        let bytes: usize = self.meta.as_slice().len() + parts().map(<[u8]>::len).sum::<usize>();
        let copy = || KeptReply {
            code: self.code,
            meta: self.meta.as_slice().to_vec(),
            parts: parts().map(<[u8]>::to_vec).collect(),
        };
        (bytes <= MAX_REPLY).then(copy)
    }

    fn again(id: u64, KeptReply { code, meta, parts }: KeptReply) -> Self {
        let payload = (!parts.is_empty()).then(|| OutPayload::of(parts));
        Self { id, code, meta: Meta::from_vec(meta), payload }
    }
}

type Served<H> = Arc<ServedPlan<<<H as Host>::Star as StarHost>::Plan>>;

/// A call from its arrival to its answer.
struct InFlight<H: Host> {
    step: i64,
    /// See [`Steps::call_began`].
    on_record: bool,
    last: bool,
    arrived: Instant,
    bytes: u64,
    cancelled: bool,
    /// It was cancelled because its connection ended.
    lost: bool,
    /// See [`StarServer::enter`].
    entered: bool,
    call_id: Option<CallId>,
    /// Whose log has its run.
    logged: Option<Arc<Account>>,
    stage: Stage<H>,
}

enum Stage<H: Host> {
    /// Its session has not used the plan yet: the owner is asked whether it may.
    Asking(Request, PlanHash),
    Running(Served<H>, Option<<H::Star as StarHost>::Run>),
}

/// The parts of a call that its run needs.
struct Request {
    body: Box<InBody>,
    keeps: Vec<Keep>,
    trace: bool,
    session: Range<usize>,
    table: usize,
}

/// The figures of a run, for the metrics.
struct Ran {
    inline: bool,
    queue: Duration,
    run: Duration,
    bytes: u64,
}

pub struct StarShard<H: Host> {
    server: Arc<StarServer<H>>,
    steps: Steps<<H::Star as StarHost>::Value>,
    calls: HashMap<(u64, u64), InFlight<H>>,
    /// Calls that may not run now.
    held: Vec<Ticket>,
    /// Plans by session, as the shared table had them when it was of this generation.
    known: HashMap<Box<[u8]>, HashMap<PlanHash, FoundPlan<H>>>,
    generation: u64,
    inline: Duration,
    next_tick: Instant,
}

impl<H: Host> StarShard<H> {
    pub fn new(server: Arc<StarServer<H>>) -> Self {
        let config = &server.shared.config.star;
        Self {
            steps: Steps::new(config.steps),
            calls: HashMap::new(),
            held: Vec::new(),
            known: HashMap::new(),
            generation: server.generation.load(Ordering::Acquire),
            inline: config.inline,
            next_tick: server.shared.now(),
            server,
        }
    }

    pub fn peer_came(&mut self, conn: u64, task: &str, incarnation: u64, now: Instant) {
        self.steps.peer_came(conn, self.server.accounts.came(task, incarnation, now));
    }

    /// After the cancellations of its calls.
    pub fn peer_gone(&mut self, conn: u64, now: Instant, metrics: &Recorder) {
        if let Some(account) = self.steps.account(conn) {
            self.server.accounts.gone(account, now);
        }
        drop(self.steps.peer_gone(conn));
        self.server.copy_gone(conn);
        self.count_slots(metrics);
    }

    /// A peer's request. None: it is answered later.
    pub fn request(
        &mut self,
        ticket: Ticket,
        method: u16,
        body: Box<InBody>,
        now: Instant,
        metrics: &Recorder,
    ) -> Option<Answer> {
        let answered = match method {
            star::CALL => self.call(ticket, body, now, metrics),
            star::REGISTER => {
                let peer = self.peer(ticket.conn).unwrap_or("a disconnected worker");
                self.server.register(ticket, peer, body).map(|()| None)
            }
            STATE => {
                let peer = self.peer(ticket.conn).unwrap_or("a disconnected process");
                self.server.copy(ticket, peer, body.meta()).map(|()| None)
            }
            _ => {
                let ended = self.end_step(ticket.conn, body.meta(), metrics);
                ended.map(|()| Some(Answer { id: ticket.id, code: 0, meta: Meta::of(b""), payload: None }))
            }
        };
        answered.unwrap_or_else(|failure| Some(self.refusal(ticket, failure)))
    }

    fn peer(&self, conn: u64) -> Option<&str> {
        self.steps.account(conn).map(|account| account.name())
    }

    fn end_step(&mut self, conn: u64, meta: &[u8], metrics: &Recorder) -> Result<(), StarFailure> {
        let head = EndHead::read(meta).map_err(|error| StarFailure::malformed(error.to_string()))?;
        drop(self.steps.step_ended(conn, head.step));
        self.count_slots(metrics);
        Ok(())
    }

    fn call(
        &mut self,
        ticket: Ticket,
        body: Box<InBody>,
        now: Instant,
        metrics: &Recorder,
    ) -> Result<Option<Answer>, StarFailure> {
        self.tick(now);
        let (head, table) = CallHead::read(body.meta()).map_err(|error| StarFailure::malformed(error.to_string()))?;
        self.server.check_incarnation(head.incarnation)?;
        // Free again on the connection since the call was cancelled, but its run is not over.
        if self.calls.contains_key(&(ticket.conn, ticket.id)) {
            return Err(StarFailure::malformed(format!("starwire: malformed star call: id {} is in use", ticket.id)));
        }
        let CallHead { flags, step, plan: hash, call_id, session, keeps, .. } = head;
        let time = self.time(now);
        let on_record = self.steps.call_began(ticket.conn, step, !keeps.is_empty())?;
        let plan = self.find(session, &hash, time);
        let session = SESSION_AT..SESSION_AT + session.len();
        let (last, trace) = (flags & LAST != 0, flags & TRACE != 0);
        let bytes = body.pieces().iter().map(|piece| piece.len as u64).sum();
        let request = Request { body, keeps, trace, session, table };
        let stage = Stage::Asking(request, hash);
        let (cancelled, lost, entered, logged) = (false, false, false, None);
        let call =
            InFlight { step, on_record, last, arrived: now, bytes, cancelled, lost, entered, call_id, logged, stage };
        if let Some(plan) = plan {
            return Ok(self.begin(ticket, call, plan, metrics));
        }
        if let Stage::Asking(request, hash) = &call.stage {
            self.ask(ticket, request, *hash);
        }
        self.calls.insert((ticket.conn, ticket.id), call);
        Ok(None)
    }

    /// Runs a call whose plan is known, unless it has run already.
    fn begin(&mut self, ticket: Ticket, mut call: InFlight<H>, plan: Served<H>, metrics: &Recorder) -> Option<Answer> {
        call.entered = plan.has_effects && plan.ends_alone;
        if call.entered && !self.server.enter() {
            call.entered = false;
            self.held.push(ticket);
            self.calls.insert((ticket.conn, ticket.id), call);
            return None;
        }
        let call_id = call.call_id.filter(|_| plan.has_effects);
        let account = self.steps.account(ticket.conn).filter(|_| call_id.is_some()).cloned();
        let most = usize::try_from(self.server.shared.config.star.steps.calls).unwrap_or(usize::MAX);
        let begun = match (call_id, &account) {
            (Some(call_id), Some(account)) => account.change_log(|log| log.begin(call_id, ticket, most)),
            (Some(_), None) => Err(Refused::Gone),
            (None, _) => Ok(Begin::Run),
        };
        if matches!(begun, Ok(Begin::Run)) {
            call.logged = account;
            call.stage = match call.stage {
                Stage::Asking(request, _) => self.run(ticket, call.step, request, plan),
                running => running,
            };
            self.calls.insert((ticket.conn, ticket.id), call);
            return None;
        }
        if call.entered {
            self.server.leave();
        }
        self.end(ticket, &call, None, metrics);
        match begun {
            Ok(Begin::Repeat(reply)) => {
                metrics.star_calls_repeated.add(1);
                let answer = Answer::again(ticket.id, reply);
                if !self.server.answers_wait() {
                    return Some(answer);
                }
                self.server.reply(ticket, answer);
                None
            }
            Ok(_) => None,
            Err(refused) => Some(self.refusal(ticket, refused.into())),
        }
    }

    /// The plan as this session may use it.
    fn find(&mut self, session: &[u8], hash: &PlanHash, time: Duration) -> Option<Served<H>> {
        // Before the look at the table: what leaves it later changes the generation once more.
        let generation = self.server.generation.load(Ordering::Acquire);
        if self.generation != generation {
            self.known.clear();
            self.generation = generation;
        }
        if let Some(found) = self.known.get(session).and_then(|plans| plans.get(hash)) {
            found.note_use(time);
            return Some(found.plan.clone());
        }
        let found = self.server.find(session, hash)?;
        let plan = found.plan.clone();
        self.known.entry(session.into()).or_default().insert(*hash, found);
        Some(plan)
    }

    /// Whether the session exists is a question that may block.
    fn ask(&self, ticket: Ticket, request: &Request, hash: PlanHash) {
        let Some(host) = self.server.host() else { return };
        let session: Box<[u8]> = request.body.meta()[request.session.clone()].into();
        let server = self.server.clone();
        host.spawn(Box::new(move || server.adopt(ticket, &session, &hash)));
    }

    fn run(&self, ticket: Ticket, step: i64, request: Request, plan: Served<H>) -> Stage<H> {
        let Request { body, keeps, trace, session, table } = request;
        let inline = !trace && plan.runs_inline(self.inline);
        let slots = self.steps.slots(ticket.conn, step);
        let short = self.inline * TOO_LONG;
        let call =
            StarCall { ticket, plan: &plan.plan, step, keeps, trace, inline, short, slots, body, session, table };
        let run = self.server.host().and_then(|host| host.run(call));
        Stage::Running(plan, run)
    }

    /// The caller of a request no longer needs its answer, or (`peer_gone`) has lost its connection.
    pub fn cancelled(&mut self, ticket: Ticket, peer_gone: bool) {
        let Some(call) = self.calls.get_mut(&(ticket.conn, ticket.id)) else { return };
        let may_come_again = match (&call.logged, &call.stage) {
            (Some(_), Stage::Running(plan, _)) => plan.ends_alone,
            _ => false,
        };
        if peer_gone && may_come_again {
            return;
        }
        call.lost = peer_gone;
        call.cancelled = true;
        if let (Stage::Running(_, Some(run)), Some(host)) = (&call.stage, self.server.host()) {
            host.cancel(run);
        }
    }

    pub fn execute(&mut self, command: StarCommand<H>, now: Instant, metrics: &Recorder) -> Option<(u64, Answer)> {
        let (ticket, answer) = match command {
            StarCommand::Done { ticket, outcome } => {
                fail_point!("a star call has run, and has no answer yet");
                let call = self.calls.remove(&(ticket.conn, ticket.id))?;
                let has_effects = matches!(&call.stage, Stage::Running(plan, _) if plan.has_effects);
                let (to, answer) = self.done(ticket, &call, outcome, now, metrics);
                let answer = if to != ticket || (has_effects && self.server.answers_wait()) {
                    self.server.reply(to, answer);
                    None
                } else {
                    Some(answer)
                };
                if call.entered {
                    self.server.leave();
                }
                (ticket, answer)
            }
            StarCommand::Adopted { ticket, result } => (ticket, self.adopted(ticket, result, now, metrics)),
            StarCommand::Forget => {
                self.known.clear();
                return None;
            }
            StarCommand::Opened => {
                for ticket in std::mem::take(&mut self.held) {
                    let again = StarCommand::Adopted { ticket, result: Ok(()) };
                    self.server.shared.send(shard_of(ticket.conn), Command::Star(Box::new(again)));
                }
                return None;
            }
        };
        answer.map(|answer| (ticket.conn, answer))
    }

    /// Returns the answer, and whose it is: the call may have come again.
    fn done(
        &mut self,
        ticket: Ticket,
        call: &InFlight<H>,
        outcome: StarOutcome<<H::Star as StarHost>::Value>,
        now: Instant,
        metrics: &Recorder,
    ) -> (Ticket, Answer) {
        let StarOutcome { result, run, cost, inline } = outcome;
        let queue = now.saturating_duration_since(call.arrived).saturating_sub(run);
        let result = result.and_then(|reply| self.keep(ticket, call.step, reply));
        let bytes = result.as_ref().map_or(0, |reply| reply.bytes);
        if let (Ok(_), Stage::Running(plan, _)) = (&result, &call.stage) {
            plan.ran(run, cost, inline, self.inline);
        }
        self.end(ticket, call, Some(Ran { inline, queue, run, bytes }), metrics);
        let answer = match result {
            Ok(StarReply { meta, payload, stats_bytes, .. }) => {
                let head = ReplyHead { flags: 0, queue_micros: micros(queue), run_micros: micros(run), stats_bytes };
                let mut meta = meta.0;
                meta[..REPLY_BYTES].copy_from_slice(&head.bytes());
                Answer { id: ticket.id, code: 0, meta: Meta::from_vec(meta), payload }
            }
            Err(_) if call.lost => self.refusal(ticket, Refused::MayHaveRun.into()),
            Err(failure) => self.refusal(ticket, failure),
        };
        let Some((account, call_id)) = call.logged.as_ref().zip(call.call_id) else { return (ticket, answer) };
        let limits = &self.server.shared.config.star.steps;
        let copy = || answer.copy().filter(|copy| account.take(0, copy.bytes(), 0, limits).is_ok());
        let again = account.log().end(call_id.lane, call_id.number, copy);
        metrics.star_calls_repeated.add(u64::from(again.is_some()));
        (again.unwrap_or(ticket), answer)
    }

    fn keep(
        &mut self,
        ticket: Ticket,
        step: i64,
        mut reply: StarReply<<H::Star as StarHost>::Value>,
    ) -> Result<StarReply<<H::Star as StarHost>::Value>, StarFailure> {
        for kept in std::mem::take(&mut reply.kept) {
            let kept = self.steps.keep(ticket.conn, step, kept.slot, kept.value, kept.bytes);
            kept.map_err(|(_, refused)| refused)?;
        }
        Ok(reply)
    }

    fn adopted(
        &mut self,
        ticket: Ticket,
        result: Result<(), StarFailure>,
        now: Instant,
        metrics: &Recorder,
    ) -> Option<Answer> {
        let call = self.calls.remove(&(ticket.conn, ticket.id))?;
        let found = match (result, &call.stage) {
            (Ok(()), _) if call.cancelled => Err(StarFailure::new(code::CANCELLED, "cancelled before it was started")),
            (Ok(()), Stage::Asking(request, hash)) => {
                Ok(self.find(&request.body.meta()[request.session.clone()], hash, self.time(now)))
            }
            (Ok(()), Stage::Running(..)) => Ok(None),
            (Err(failure), _) => Err(failure),
        };
        match found {
            Ok(Some(plan)) => self.begin(ticket, call, plan, metrics),
            Ok(None) => {
                self.end(ticket, &call, None, metrics);
                let head = ReplyHead { flags: UNKNOWN_PLAN, ..ReplyHead::default() };
                Some(Answer { id: ticket.id, code: 0, meta: Meta::of(&head.bytes()), payload: None })
            }
            Err(failure) => {
                self.end(ticket, &call, None, metrics);
                Some(self.refusal(ticket, failure))
            }
        }
    }

    /// A call is over. `ran`: its plan was known.
    fn end(&mut self, ticket: Ticket, call: &InFlight<H>, ran: Option<Ran>, metrics: &Recorder) {
        // A call that asks for its plan comes again.
        let last = call.last && ran.is_some();
        drop(self.steps.call_ended(ticket.conn, call.step, call.on_record, last));
        metrics.star_calls.add(1);
        metrics.star_bytes_received.add(call.bytes);
        if let Some(Ran { inline, queue, run, bytes }) = ran {
            metrics.star_plan_hits.add(1);
            metrics.star_calls_inline.add(u64::from(inline));
            metrics.star_bytes_sent.add(bytes);
            metrics.star_queue_time.record(queue);
            metrics.star_run_time.record(run);
        }
        self.count_slots(metrics);
    }

    fn refusal(&self, ticket: Ticket, failure: StarFailure) -> Answer {
        let (code, meta, payload) = failure.into_reply(self.peer(ticket.conn));
        Answer { id: ticket.id, code, meta, payload }
    }

    fn time(&self, now: Instant) -> Duration {
        self.server.time(now)
    }

    /// Drops plans that were not used for too long, while there are calls.
    fn tick(&mut self, now: Instant) {
        if now >= self.next_tick {
            self.next_tick = now + TICK;
            self.server.tick(now);
        }
    }

    fn count_slots(&self, metrics: &Recorder) {
        // Memory ends before these numbers do.
        metrics.star_slots.set(i64::try_from(self.steps.len()).unwrap_or(i64::MAX));
    }

    /// The shard is over: cancels what still runs.
    pub fn stop(self) {
        for call in self.calls.into_values() {
            if let (Stage::Running(_, Some(run)), Some(host)) = (&call.stage, self.server.host()) {
                host.cancel(run);
            }
        }
    }
}

/// An hour and more reads as 71 minutes.
fn micros(time: Duration) -> u32 {
    u32::try_from(time.as_micros()).unwrap_or(u32::MAX)
}
