//! A parameter server's kernels, without TensorFlow. A plan is a text whose words say how it behaves. It answers with
//! the table that it was given; a table "slot N" stands for the value in that slot.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, Weak};
use std::time::Duration;

use starwire_engine::star::{
    CompiledPlan, Job, Kept, ReplyMeta, StarCall, StarFailure, StarHost, StarOutcome, StarReply,
};
use starwire_engine::{OutPayload, Ticket};
use starwire_protocol::code;
use starwire_state::{Definition, Flush, Store};

use super::{Engine, PATIENCE, eventually};

pub const INCARNATION: u64 = 77;

#[derive(Default)]
pub struct Seen {
    pub engine: Mutex<Weak<Engine>>,
    /// Plans and values that exist.
    pub alive: Arc<AtomicUsize>,
    pub compiled: AtomicU64,
    pub inline: AtomicU64,
    pub cancelled: AtomicU64,
    pub running: AtomicU64,
    /// Runs that have begun.
    pub runs: AtomicU64,
    /// Runs of plans that "hold" go on.
    pub released: AtomicBool,
    /// Updates that have ended: the only variable, which the state keeps. And what was written of it, by its id there.
    pub updates: AtomicU64,
    pub written: Mutex<Option<(u32, u64)>>,
    /// A flush that finds so many updates waits until this is another number.
    pub holds: AtomicU64,
    /// Flushes that have begun, those for which no call was under way any more, and those of which nothing was written.
    pub begun: AtomicU64,
    pub copied: AtomicU64,
    pub lost: AtomicU64,
    /// The session "two" was deleted, and the engine has not been told.
    pub two_is_gone: AtomicBool,
    /// Questions whether the sessions "one" and "two" are still there.
    pub asked: [AtomicU64; 2],
}

pub struct Alive(Arc<AtomicUsize>);

impl Alive {
    fn new(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(count.clone())
    }
}

impl Drop for Alive {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

pub struct Plan(String, #[allow(dead_code, reason = "only dropped")] Alive);
pub struct Value(Vec<u8>, #[allow(dead_code, reason = "only dropped")] Alive);

#[derive(Default)]
pub struct Run {
    cancelled: Mutex<bool>,
    changed: Condvar,
}

pub struct Kernels(pub Arc<Seen>);

impl StarHost for Kernels {
    type Plan = Arc<Plan>;
    type Value = Value;
    type Run = Arc<Run>;

    fn incarnations(&self) -> &[u64] {
        &[INCARNATION]
    }

    fn spawn(&self, job: Job) {
        std::thread::spawn(job);
    }

    fn is_isolated(&self, session: &[u8]) -> Result<bool, StarFailure> {
        for (name, asked) in [b"one", b"two"].into_iter().zip(&self.0.asked) {
            asked.fetch_add(u64::from(session == name), Ordering::Relaxed);
        }
        match session {
            b"two" if self.0.two_is_gone.load(Ordering::Relaxed) => {
                Err(StarFailure::new(code::ABORTED, "it was deleted"))
            }
            b"one" | b"two" => Ok(false),
            b"alone" => Ok(true),
            _ => Err(StarFailure::new(code::ABORTED, "no such session")),
        }
    }

    fn compile(&self, _session: &[u8], plan: &[u8]) -> Result<CompiledPlan<Arc<Plan>>, StarFailure> {
        let text = String::from_utf8(plan.to_vec()).unwrap();
        self.0.compiled.fetch_add(1, Ordering::Relaxed);
        if text.contains("slowly") {
            std::thread::sleep(Duration::from_millis(100));
        }
        if text.contains("bad") {
            let details = b"details".to_vec();
            let failure = StarFailure::new(code::INVALID_ARGUMENT, "a bad plan");
            return Err(StarFailure { details, names_peer: true, ..failure });
        }
        let (has_state, may_wait) = (text.contains("state"), text.contains("block"));
        let (ends_alone, has_effects) = (!may_wait, text.contains("update"));
        let plan = Arc::new(Plan(text, Alive::new(&self.0.alive)));
        Ok(CompiledPlan { plan, has_state, may_wait, ends_alone, has_effects })
    }

    fn run(&self, call: StarCall<'_, Self>) -> Option<Arc<Run>> {
        self.0.inline.fetch_add(u64::from(call.inline), Ordering::Relaxed);
        self.0.runs.fetch_add(1, Ordering::Relaxed);
        let slot = std::str::from_utf8(call.table()).ok().and_then(|table| table.strip_prefix("slot ")?.parse().ok());
        let table = match slot {
            None => Ok(call.table().to_vec()),
            Some(slot) => match call.slots.get(slot) {
                Some(value) => Ok(value.0.clone()),
                None => Err(StarFailure::new(code::FAILED_PRECONDITION, "the slot is empty")),
            },
        };
        let kept = call.keeps.iter().map(|keep| {
            let value = Value(call.table().to_vec(), Alive::new(&self.0.alive));
            Kept { slot: keep.slot, bytes: value.0.len() as u64, value }
        });
        let payload = call.plan.0.contains("much").then(|| OutPayload::of(vec![vec![7u8; 20_000]]));
        let reply = |table: Vec<u8>| StarReply {
            kept: kept.collect(),
            meta: ReplyMeta::new(&table),
            payload,
            stats_bytes: 0,
            bytes: 3,
        };
        let (run, cost) = (Duration::from_micros(5), Duration::from_micros(1));
        let outcome = StarOutcome { result: table.map(reply), run, cost, inline: call.inline };
        let (seen, ticket, plan) = (self.0.clone(), call.ticket, call.plan.clone());
        if call.inline {
            seen.updates.fetch_add(u64::from(plan.0.contains("update")), Ordering::Relaxed);
            done(&seen, ticket, outcome);
            return None;
        }
        let run = Arc::new(Run::default());
        let waiting = run.clone();
        std::thread::spawn(move || {
            if plan.0.contains("hold") {
                eventually("the test releases the run", || seen.released.load(Ordering::Relaxed));
            }
            seen.updates.fetch_add(u64::from(plan.0.contains("update")), Ordering::Relaxed);
            if !plan.0.contains("block") {
                return done(&seen, ticket, outcome);
            }
            seen.running.fetch_add(1, Ordering::Relaxed);
            let cancelled = waiting.cancelled.lock().unwrap();
            let (cancelled, _) = waiting.changed.wait_timeout_while(cancelled, PATIENCE, |no| !*no).unwrap();
            assert!(*cancelled, "it is cancelled in time");
            seen.running.fetch_sub(1, Ordering::Relaxed);
            let result = Err(StarFailure::new(code::CANCELLED, "cancelled while it ran"));
            done(&seen, ticket, StarOutcome { result, ..outcome });
        });
        Some(run)
    }

    fn restore(&self, state: &Store) -> Result<(), StarFailure> {
        assert_eq!(state.incarnations(), [INCARNATION]);
        if let Some((id, _)) = state.variables().next() {
            let mut updates = [0; 8];
            state.read(id, &mut updates).unwrap();
            let updates = u64::from_le_bytes(updates);
            self.0.updates.store(updates, Ordering::Relaxed);
            *self.0.written.lock().unwrap() = Some((id, updates));
        }
        Ok(())
    }

    fn changes(&self, flush: &mut Flush<'_>, early: bool) {
        if early { &self.0.begun } else { &self.0.copied }.fetch_add(1, Ordering::Relaxed);
        let updates = self.0.updates.load(Ordering::Relaxed);
        while !early && updates != 0 && self.0.holds.load(Ordering::Relaxed) == updates {
            std::thread::sleep(Duration::from_millis(1));
        }
        let mut written = self.0.written.lock().unwrap();
        if early || written.is_some_and(|(_, before)| before == updates) {
            return;
        }
        let new = || flush.variable(Definition { bytes: b"updates".to_vec(), dims: Vec::new(), rows: 1, row_bytes: 8 });
        let id = written.map_or_else(new, |(id, _)| id);
        flush.rows(id, 0, &updates.to_le_bytes());
        *written = Some((id, updates));
    }

    fn changes_were_lost(&self) {
        self.0.lost.fetch_add(1, Ordering::Relaxed);
    }

    fn cancel(&self, run: &Arc<Run>) {
        self.0.cancelled.fetch_add(1, Ordering::Relaxed);
        *run.cancelled.lock().unwrap() = true;
        run.changed.notify_all();
    }
}

fn done(seen: &Seen, ticket: Ticket, outcome: StarOutcome<Value>) {
    let engine = seen.engine.lock().unwrap().upgrade();
    if let Some(engine) = engine {
        engine.star_done(ticket, outcome);
    }
}
