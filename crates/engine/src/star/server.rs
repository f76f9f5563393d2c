//! A parameter server's part that all shards share: the table of plans, and registrations, which run on the owner's
//! threads.

use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::Refused;
use super::accounts::Accounts;
use super::plans::{Claim, Found, Made, Plans};
use super::shard::Answer;
use super::state::{State, Then};
use crate::api::{CompiledPlan, StarFailure, StarHost};
use crate::api::{Host, Ticket};
use crate::api::{InBody, OutPayload};
use crate::command::{Command, Meta, StarCommand};
use crate::keys::shard_of;
use crate::shared::Shared;
use starwire_marks::fail_point;
use starwire_protocol::code;
use starwire_protocol::star::{PlanHash, RegisterHead, plan_hash};

/// How often unused entries are looked for while there are calls.
pub(super) const TICK: Duration = Duration::from_secs(5);
/// The first runs create variables, allocate memory, and are measured.
const TRIAL_RUNS: u32 = 3;
/// After a run on a reactor that took this many times as long as it may, the next ones take place elsewhere: another
/// thread may be holding a variable.
pub(super) const TOO_LONG: u32 = 4;
const BANISHED_FOR: i32 = 100;

/// A compiled plan and its history.
pub struct ServedPlan<P> {
    pub plan: P,
    may_wait: bool,
    pub ends_alone: bool,
    pub has_effects: bool,
    runs: AtomicU32,
    cost_ns: AtomicU64,
    /// Runs that still take place elsewhere because one on a reactor took too long.
    banished: AtomicI32,
}

impl<P> ServedPlan<P> {
    fn new(compiled: CompiledPlan<P>) -> Self {
        let CompiledPlan { plan, may_wait, ends_alone, has_effects, .. } = compiled;
        let (runs, cost_ns, banished) = (AtomicU32::new(0), AtomicU64::new(0), AtomicI32::new(0));
        Self { plan, may_wait, ends_alone, has_effects, runs, cost_ns, banished }
    }

    /// Whether a run may take place on a reactor: no kernel can wait, and they have been measured to take no more than
    /// `limit` together.
    pub fn runs_inline(&self, limit: Duration) -> bool {
        if self.may_wait || self.runs.load(Ordering::Relaxed) < TRIAL_RUNS {
            return false;
        }
        if self.banished.load(Ordering::Relaxed) > 0 {
            self.banished.fetch_sub(1, Ordering::Relaxed);
            return false;
        }
        let cost = self.cost_ns.load(Ordering::Relaxed);
        cost > 0 && u128::from(cost) <= limit.as_nanos()
    }

    /// A run ended.
    pub fn ran(&self, run: Duration, cost: Duration, inline: bool, limit: Duration) {
        if self.runs.load(Ordering::Relaxed) < TRIAL_RUNS {
            self.runs.fetch_add(1, Ordering::Relaxed);
        }
        // Half a millennium does not fit.
        self.cost_ns.store(u64::try_from(cost.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
        if inline && run / TOO_LONG > limit {
            self.banished.store(BANISHED_FOR, Ordering::Relaxed);
        }
    }
}

pub type FoundPlan<H> = Found<Arc<ServedPlan<<<H as Host>::Star as StarHost>::Plan>>>;
type PlanTable<H> = Plans<Arc<ServedPlan<<<H as Host>::Star as StarHost>::Plan>>, Registration>;

/// The state of star calls that all shards share.
pub struct StarServer<H: Host> {
    pub(super) shared: Arc<Shared<H>>,
    started: Instant,
    plans: Mutex<PlanTable<H>>,
    pub(super) generation: Arc<AtomicU64>,
    pub(super) accounts: Accounts,
    pub(super) state: Option<State>,
    /// Of this server's devices.
    incarnations: Vec<u64>,
    next_tick: AtomicU64,
    evicted: AtomicU64,
}

/// A plan on its way into the table.
pub struct Registration {
    ticket: Ticket,
    peer: String,
    hash: PlanHash,
    session: Box<[u8]>,
    body: Box<InBody>,
}

impl<H: Host> StarServer<H> {
    pub fn new(shared: Arc<Shared<H>>, accounts: Accounts, state: Option<State>) -> Self {
        let plans = Plans::new(shared.config.star.plans);
        let own = || shared.host.star().map(|host| host.incarnations().to_vec());
        let incarnations = state.as_ref().map(State::incarnations).or_else(own).unwrap_or_default();
        Self {
            started: shared.now(),
            shared,
            generation: plans.generation(),
            plans: Mutex::new(plans),
            accounts,
            state,
            incarnations,
            next_tick: AtomicU64::new(0),
            evicted: AtomicU64::new(0),
        }
    }

    /// The owner of the kernels.
    pub(super) fn host(&self) -> Option<&H::Star> {
        self.shared.host.star()
    }

    pub(super) fn time(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.started)
    }

    fn now(&self) -> Duration {
        self.time(self.shared.now())
    }

    fn plans(&self) -> MutexGuard<'_, PlanTable<H>> {
        self.plans.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The plan as the session may use it.
    pub(super) fn find(&self, session: &[u8], hash: &PlanHash) -> Option<FoundPlan<H>> {
        self.plans().find(session, hash, self.now())
    }

    // The table's locks are released before anything that left it is dropped.

    /// For a session that has not used the plan yet: looks for one that all share. On a thread that may block.
    pub(super) fn adopt(&self, ticket: Ticket, session: &[u8], hash: &PlanHash) {
        let Some(host) = self.host() else { return };
        let adopt = |isolated| drop(self.plans().adopt(session, hash, isolated, self.now()));
        let result = host.is_isolated(session).map(adopt);
        self.shared.send(shard_of(ticket.conn), Command::Star(Box::new(StarCommand::Adopted { ticket, result })));
    }

    /// Checks a registration's head, and continues on the owner's threads.
    pub(super) fn register(self: &Arc<Self>, ticket: Ticket, peer: &str, body: Box<InBody>) -> Result<(), StarFailure> {
        let Some(host) = self.host() else { return Ok(()) };
        let head = RegisterHead::read(body.meta()).map_err(|error| StarFailure::malformed(error.to_string()))?;
        self.check_incarnation(head.incarnation)?;
        let parts = body.pieces().len();
        if parts != 1 {
            let message = format!("starwire: a plan arrived in {parts} parts instead of one");
            return Err(StarFailure::malformed(message));
        }
        let (hash, session) = (head.plan, head.session.into());
        let registration = Registration { ticket, peer: peer.to_owned(), hash, session, body };
        let server = self.clone();
        // Hashing, parsing and making kernels takes time.
        host.spawn(Box::new(move || server.claim(registration)));
        Ok(())
    }

    pub(super) fn check_incarnation(&self, expected: u64) -> Result<(), StarFailure> {
        if expected == 0 || self.incarnations.contains(&expected) {
            return Ok(());
        }
        let task = &self.shared.config.identity.task;
        // Programs recognise a restarted task by this sentence of TensorFlow's.
        let sentence = "RecvTensor expects a different device incarnation";
        let message = format!("starwire: {task} was restarted: create the session again to use it ({sentence})");
        Err(StarFailure::new(code::ABORTED, message))
    }

    fn claim(self: &Arc<Self>, registration: Registration) {
        let Some(host) = self.host() else { return };
        let plan = registration.body.parts().next().unwrap_or_default();
        let isolated = match host.is_isolated(&registration.session) {
            Ok(isolated) if plan_hash(plan) == registration.hash => isolated,
            Ok(_) => {
                let message = "starwire: plan hash mismatch: the registered bytes do not match the hash in the request";
                return self.answer(&registration, Err(StarFailure::malformed(message)));
            }
            Err(failure) => return self.answer(&registration, Err(failure)),
        };
        let (hash, session) = (registration.hash, registration.session.clone());
        let claimed = self.plans().claim(&session, &hash, isolated, registration, self.now());
        match claimed {
            Claim::Known(registration) => self.answer(&registration, Ok(())),
            Claim::Compile(registration) => {
                let compiled = self.compile(&registration, isolated);
                self.answer(&registration, compiled);
            }
            Claim::Waits => {}
        }
    }

    /// A call begins that changes something; false: not now. See [`State::enter`].
    pub(super) fn enter(&self) -> bool {
        self.state.as_ref().is_none_or(State::enter)
    }

    /// It has ended, or did not begin after all.
    pub(super) fn leave(&self) {
        if let Some(state) = &self.state {
            state.leave();
        }
    }

    /// A call that has changed something is over: sends its answer, when the state may be told.
    pub(super) fn reply(self: &Arc<Self>, Ticket { conn, id }: Ticket, answer: Answer) {
        let Answer { code, meta, payload, .. } = answer;
        let server = self.clone();
        let send = move |is_written| {
            // A server that stops closes its connections.
            if is_written {
                server.shared.send(shard_of(conn), Command::Reply { conn, id, code, meta, payload });
            }
        };
        self.when_written(Box::new(send));
    }

    /// Calls `then` at once, or when all changes that were made by now are in the state if it is synchronous.
    pub(crate) fn when_written(&self, then: Then) {
        match &self.state {
            Some(state) if state.answers_wait() => state.when_written(then),
            _ => then(true),
        }
    }

    pub(super) fn answers_wait(&self) -> bool {
        self.state.as_ref().is_some_and(State::answers_wait)
    }

    fn compile(self: &Arc<Self>, registration: &Registration, isolated: bool) -> Result<(), StarFailure> {
        let Some(host) = self.host() else { return Ok(()) };
        let Registration { peer, hash, session, body, .. } = registration;
        let plan = body.parts().next().unwrap_or_default();
        let (made, failure) = match host.compile(session, plan) {
            Ok(compiled) => {
                let (bytes, peer, has_state) = (plan.len() as u64, peer.clone(), compiled.has_state);
                let value = Arc::new(ServedPlan::new(compiled));
                (Some(Made { value, bytes, peer, has_state, isolated }), None)
            }
            Err(failure) => (None, Some(failure)),
        };
        fail_point!("a plan is compiled, and nobody can use it yet");
        let compiled = self.plans().compiled(session, hash, made, self.now());
        if failure.is_none() {
            self.shared.metrics.count(|cells| cells.star_registrations.add(1));
        }
        fail_point!("a plan is registered, and its worker does not know");
        self.drop_removed(compiled.removed);
        for waiter in compiled.waiters {
            match &failure {
                None => {
                    let server = self.clone();
                    host.spawn(Box::new(move || server.claim(waiter)));
                }
                Some(failure) => self.answer(&waiter, Err(failure.clone())),
            }
        }
        failure.or(compiled.refused.map(StarFailure::from)).map_or(Ok(()), Err)
    }

    fn answer(&self, registration: &Registration, result: Result<(), StarFailure>) {
        let Registration { ticket: Ticket { conn, id }, peer, .. } = registration;
        let (code, meta, payload) = match result {
            Ok(()) => (0, Meta::of(b""), None),
            Err(failure) => failure.into_reply(Some(peer)),
        };
        self.shared.send(shard_of(*conn), Command::Reply { conn: *conn, id: *id, code, meta, payload });
    }

    pub(crate) fn session_closed(&self, session: &[u8]) {
        let removed = self.plans().session_closed(session);
        self.drop_removed(removed);
    }

    pub(crate) fn forget_plans(&self) {
        let removed = self.plans().clear();
        self.drop_removed(removed);
    }

    /// Drops plans that were not used for too long, and what ended sessions have left.
    pub(super) fn tick(self: &Arc<Self>, now: Instant) {
        let Some(host) = self.host() else { return };
        let seconds = |time: Duration| time.as_secs();
        let (due, now) = (self.next_tick.load(Ordering::Relaxed), self.time(now));
        let next = seconds(now + TICK);
        if seconds(now) < due
            || self.next_tick.compare_exchange(due, next, Ordering::Relaxed, Ordering::Relaxed).is_err()
        {
            return;
        }
        let removed = self.plans().expire(now);
        self.drop_removed(removed);
        let resting = self.plans().resting(now);
        if !resting.is_empty() {
            let server = self.clone();
            host.spawn(Box::new(move || server.close_ended(&resting)));
        }
    }

    /// Closes those of these sessions that TensorFlow no longer has. Runs on a thread that may block.
    fn close_ended(&self, sessions: &[Box<[u8]>]) {
        let Some(host) = self.host() else { return };
        for session in sessions {
            if host.is_isolated(session).is_err_and(|failure| failure.code == code::ABORTED) {
                self.session_closed(session);
            }
        }
    }

    /// Drops what left the table of plans, here and in the shards' caches.
    fn drop_removed<P>(&self, removed: Vec<P>) {
        if !removed.is_empty() {
            fail_point!("plans are evicted, and reactors still know them");
            for shard in 0..self.shared.config.reactors {
                self.shared.send(shard, Command::Star(Box::new(StarCommand::Forget)));
            }
        }
        drop(removed);
        let (plans, evicted) = {
            let plans = self.plans();
            (plans.len(), plans.evicted())
        };
        let new = evicted.saturating_sub(self.evicted.fetch_max(evicted, Ordering::Relaxed));
        self.shared.metrics.count(|cells| {
            // Memory ends before these numbers do.
            cells.star_plans.set(i64::try_from(plans).unwrap_or(i64::MAX));
            cells.star_evictions.add(new);
        });
    }
}

impl From<Refused> for StarFailure {
    fn from(refused: Refused) -> Self {
        Self::new(refused.code(), refused.to_string())
    }
}

impl StarFailure {
    /// Code, metadata and payload of a reply.
    pub(super) fn into_reply(self, peer: Option<&str>) -> (i32, Meta, Option<OutPayload>) {
        let message = match peer.filter(|_| self.names_peer) {
            Some(peer) => format!("{} (from {peer})", self.message),
            None => self.message,
        };
        let details = (!self.details.is_empty()).then(|| OutPayload::of(vec![self.details]));
        (self.code, Meta::of(message.as_bytes()), details)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_micros(10);

    fn compiled(may_wait: bool) -> CompiledPlan<()> {
        CompiledPlan { plan: (), has_state: false, may_wait, ends_alone: !may_wait, has_effects: true }
    }

    #[test]
    fn plans_run_on_reactors_after_they_were_measured_cheap() {
        let cost = Duration::from_micros(7);
        let plan = ServedPlan::new(compiled(false));
        for _ in 0..TRIAL_RUNS {
            assert!(!plan.runs_inline(LIMIT));
            plan.ran(cost, cost, false, LIMIT);
        }
        assert!(plan.runs_inline(LIMIT));
        assert!(!plan.runs_inline(cost / 2), "too expensive");
        plan.ran(cost, Duration::ZERO, false, LIMIT);
        assert!(!plan.runs_inline(LIMIT), "the cost is not known");
        let waits = ServedPlan::new(compiled(true));
        for _ in 0..=TRIAL_RUNS {
            waits.ran(cost, cost, false, LIMIT);
        }
        assert!(!waits.runs_inline(LIMIT));
    }

    #[test]
    fn a_plan_that_held_a_reactor_up_runs_elsewhere_for_a_while() {
        let cost = Duration::from_micros(7);
        let plan = ServedPlan::new(compiled(false));
        for _ in 0..TRIAL_RUNS {
            plan.ran(cost, cost, false, LIMIT);
        }
        plan.ran(LIMIT * 3, cost, true, LIMIT);
        assert!(plan.runs_inline(LIMIT), "a little longer");
        plan.ran(LIMIT * 5, cost, false, LIMIT);
        assert!(plan.runs_inline(LIMIT), "it was not on a reactor");
        plan.ran(LIMIT * 5, cost, true, LIMIT);
        for _ in 0..BANISHED_FOR {
            assert!(!plan.runs_inline(LIMIT));
        }
        assert!(plan.runs_inline(LIMIT));
    }
}
