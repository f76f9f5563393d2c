//! The state of a parameter server that outlives its process: a thread that writes what has changed, every second.
//!
//! A call that changes something and ends by itself is before or after a flush as a whole, with its entry in the log
//! of calls: the gate keeps new ones waiting on their reactors until those that run have ended and the changes are
//! copied. Nobody waits for the disk, unless the state is synchronous, or a flush may be the last one: then whoever has
//! changed something is answered when that is in the folder, and all that wait are written together.

mod hand_over;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::StarHost;
use super::accounts::Accounts;
use super::copies::{Copies, FAREWELL, PATIENCE};
use super::server::StarServer;
use crate::api::{Host, Level, StarFailure};
use crate::command::{Command, StarCommand};
use crate::config::{Identity, StateMode};
use crate::error::EngineError;
use crate::shared::Shared;
use starwire_marks::fail_point;
use starwire_state::{Committed, StateError, Store};

/// How old the state in the folder may be.
const INTERVAL: Duration = Duration::from_secs(1);
/// For so long, calls wait for those that run already; then these get more time, up to …
const LEAST_WAIT: Duration = Duration::from_millis(100);
/// … so much.
const LONGEST_WAIT: Duration = Duration::from_secs(10);

/// Lets calls in, or waits until none is inside.
#[derive(Default)]
struct Gate {
    /// The calls inside, and [`CLOSED`].
    state: AtomicU64,
    /// Whoever closes it.
    waits: OnceLock<Thread>,
}

const CLOSED: u64 = 1 << 63;

impl Gate {
    fn enter(&self) -> bool {
        let enter = |state| (state & CLOSED == 0).then_some(state + 1);
        self.state.fetch_update(Ordering::Acquire, Ordering::Relaxed, enter).is_ok()
    }

    fn leave(&self) {
        if self.state.fetch_sub(1, Ordering::Release) == CLOSED + 1 {
            if let Some(thread) = self.waits.get() {
                thread.unpark();
            }
        }
    }

    /// Returns whether nobody is inside.
    fn close(&self, limit: Duration) -> bool {
        self.state.fetch_or(CLOSED, Ordering::Relaxed);
        let until = Instant::now() + limit;
        loop {
            if self.state.load(Ordering::Acquire) == CLOSED {
                return true;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            std::thread::park_timeout(left);
        }
    }

    fn is_closed(&self) -> bool {
        self.state.load(Ordering::Acquire) & CLOSED != 0
    }

    fn open(&self) {
        self.state.fetch_and(!CLOSED, Ordering::Release);
    }
}

/// A flush, and what follows it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Flush {
    Usual,
    /// Nothing changes afterwards, unless the take-over is given up.
    HandOver,
    /// The server stops.
    Last,
}

/// Called with whether what had changed is in the folder. If it is not, the server has stopped.
pub(crate) type Then = Box<dyn FnOnce(bool) + Send>;

/// Those that wait for a flush.
#[derive(Default)]
struct Waiting {
    /// With the number of the flush.
    list: Vec<(u64, Then)>,
    is_over: bool,
}

pub(crate) struct State {
    gate: Gate,
    mode: StateMode,
    folder: PathBuf,
    copies: Copies,
    /// A change that is not written yet may be lost with this process: whoever makes it waits, whatever the mode.
    hands_over: AtomicBool,
    /// Flushes that have begun to copy what has changed. Whatever changes before the next one is in that.
    begun: AtomicU64,
    waiting: Mutex<Waiting>,
    incarnations: Vec<u64>,
    /// None: the server was stopped, and another one may use the folder.
    store: Mutex<Option<Store>>,
    stops: AtomicBool,
}

impl State {
    /// Opens the state if this server has one, and restores what is there.
    pub fn open<H: Host>(shared: &Shared<H>, accounts: &Accounts) -> Result<Option<Self>, StateError> {
        let (Some(config), Some(host)) = (&shared.config.state, shared.host.star()) else { return Ok(None) };
        let identity = &shared.config.identity;
        let (folder, owner) = (folder_of(&config.folder, identity), owner_of(&shared.config.cluster_id, identity));
        let store = Store::open(&folder, &owner, host.incarnations())?;
        let failed = |failure: StarFailure| StateError::Restore { folder: folder.clone(), message: failure.message };
        fail_point!("a state is open, and its variables are not restored");
        let loaded = store.loaded();
        host.restore(&store).map_err(failed)?;
        // Workers cannot come back before this, so their time begins here.
        if accounts.load(store.calls(), Instant::now()).is_none() && !store.calls().is_empty() {
            return Err(StateError::Calls { folder });
        }
        let line = match store.last_flush() {
            (0, _) => format!("starwire: {} keeps its state in {}", identity.task, folder.display()),
            (flush, time) => format!(
                "starwire: {} has its state back from {}: {} variables, {} bytes ({loaded} read before), of flush {flush}, which began {:.1} s ago",
                identity.task,
                folder.display(),
                store.variables().count(),
                store.bytes(),
                SystemTime::now()
                    .duration_since(UNIX_EPOCH + Duration::from_millis(time))
                    .unwrap_or_default()
                    .as_secs_f64()
            ),
        };
        shared.host.log(Level::Info, &line);
        let incarnations = store.incarnations().to_vec();
        let copies = Copies::default();
        copies.flushed(store.journals(), 0);
        Ok(Some(Self {
            gate: Gate::default(),
            mode: config.mode,
            folder,
            copies,
            hands_over: AtomicBool::new(false),
            begun: AtomicU64::new(0),
            waiting: Mutex::default(),
            incarnations,
            store: Mutex::new(Some(store)),
            stops: AtomicBool::new(false),
        }))
    }

    pub fn is_sync(&self) -> bool {
        self.mode == StateMode::Sync
    }

    /// Whether an answer waits until what has changed is written.
    pub fn answers_wait(&self) -> bool {
        self.is_sync() || self.hands_over.load(Ordering::SeqCst)
    }

    /// Calls `then` when everything that has changed by now is in the folder.
    pub fn when_written(&self, then: Then) {
        let mut waiting = self.waiting();
        if waiting.is_over {
            drop(waiting);
            return then(false);
        }
        waiting.list.push((self.begun.load(Ordering::SeqCst), then));
        drop(waiting);
        self.wake();
    }

    fn wake(&self) {
        if let Some(thread) = self.gate.waits.get() {
            thread.unpark();
        }
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A flush is in the folder.
    fn written(&self, number: u64) {
        let mut waiting = self.waiting();
        let (written, left): (Vec<_>, _) =
            std::mem::take(&mut waiting.list).into_iter().partition(|(at, _)| *at <= number);
        waiting.list = left;
        drop(waiting);
        written.into_iter().for_each(|(_, then)| then(true));
    }

    /// No flush follows.
    fn end(&self) {
        let mut waiting = self.waiting();
        waiting.is_over = true;
        let left = std::mem::take(&mut waiting.list);
        drop(waiting);
        left.into_iter().for_each(|(_, then)| then(false));
    }

    pub fn incarnations(&self) -> Vec<u64> {
        self.incarnations.clone()
    }

    /// A call that changes something begins. False: not before [`StarCommand::Opened`].
    pub fn enter(&self) -> bool {
        self.gate.enter()
    }

    /// A call that has entered is over, and in the log.
    pub fn leave(&self) {
        self.gate.leave();
    }

    fn store(&self) -> MutexGuard<'_, Option<Store>> {
        self.store.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes what has changed. Nothing may run afterwards if this is the last time. None: nothing has changed.
    fn flush<H: Host>(&self, server: &StarServer<H>, kind: Flush) -> Result<Option<Committed>, StateError> {
        let Some(host) = server.host() else { return Ok(None) };
        let mut store = self.store();
        let Some(store) = store.as_mut() else { return Ok(None) };
        if self.copies.wants_journal() {
            store.ask_for_journal();
        }
        let before = store.calls().to_vec();
        let mut flush = store.begin()?;
        if !self.is_sync() {
            host.changes(&mut flush, true);
        }
        let mut limit = LEAST_WAIT;
        let closed = loop {
            let closed = Instant::now();
            if self.gate.close(limit) {
                break closed;
            }
            // Whoever is inside does not end now: the others must not wait for it.
            limit = (limit * 2).min(LONGEST_WAIT);
            if kind == Flush::Last && limit == LONGEST_WAIT {
                break closed;
            }
            self.let_in(server);
            if kind == Flush::HandOver && limit == LONGEST_WAIT {
                return Ok(None);
            }
            if server.shared.frozen.load(Ordering::Acquire) {
                return Ok(None);
            }
            std::thread::park_timeout(if kind != Flush::Usual || self.is_sync() { LEAST_WAIT } else { INTERVAL });
            if kind == Flush::Usual && self.stops.load(Ordering::Acquire) {
                // The last flush does not wait for ever, and has to write what was copied early for this one.
                host.changes_were_lost();
                return Ok(None);
            }
        };
        fail_point!("no call that changes something is under way");
        let number = self.begun.fetch_add(1, Ordering::SeqCst);
        // A call that waits may still run, and end in between: then its changes are there, not its answer alone.
        let calls = server.accounts.save();
        host.changes(&mut flush, false);
        if kind == Flush::Usual {
            self.let_in(server);
        }
        server.shared.metrics.count(|cells| cells.state_pause_time.record(closed.elapsed()));
        let committed = match flush.is_empty() && calls == before {
            true => None,
            false => Some(flush.commit(&calls)?),
        };
        fail_point!("a flush is on the disk, and nobody knows");
        let must_confirm = self.copies.flushed(store.journals(), number);
        if !(must_confirm && self.is_sync()) {
            self.written(number);
        }
        Ok(committed)
    }

    fn let_in<H: Host>(&self, server: &StarServer<H>) {
        self.gate.open();
        for shard in 0..server.shared.config.reactors {
            server.shared.send(shard, Command::Star(Box::new(StarCommand::Opened)));
        }
    }

    fn run<H: Host>(&self, server: &Arc<StarServer<H>>) {
        let _ = self.gate.waits.set(std::thread::current());
        let (mut due, mut fails) = (Instant::now() + INTERVAL, false);
        let (mut offered, mut left_at) = (None, None);
        loop {
            let left = due.saturating_duration_since(Instant::now());
            let stops = self.stops.load(Ordering::Acquire);
            // The process is exiting: whoever waits may be gone.
            if server.shared.frozen.load(Ordering::Acquire) {
                return;
            }
            let now = Instant::now();
            self.answer_copies(server);
            if let Some(sleep) = self.hand_over(server, now) {
                if server.shared.moved_to.get().is_some() && stops {
                    // The other process has to hear of it, and peers where it is.
                    let [least, most] = *left_at.get_or_insert([now + FAREWELL, now + PATIENCE]);
                    if now >= most || (now >= least && !self.copies.is_any()) {
                        *self.store() = None;
                        return self.end();
                    }
                }
                std::thread::park_timeout(if stops { sleep.min(LEAST_WAIT) } else { sleep });
                continue;
            }
            // A copy that has everything may take over from a server that stops.
            if stops && offered.is_none() && self.copies.offer() {
                offered = Some(now + PATIENCE);
                continue;
            }
            if stops && offered.is_some_and(|until| until > now && self.copies.count() > 0) {
                std::thread::park_timeout(LEAST_WAIT);
                continue;
            }
            // After an error, those that wait must not make it a busy loop.
            // Those that wait for a copy only need no other flush.
            let begun = self.begun.load(Ordering::SeqCst);
            let is_asked = !fails && self.is_sync() && self.waiting().list.iter().any(|(at, _)| *at >= begun);
            if !stops && !is_asked && !left.is_zero() {
                std::thread::park_timeout(left);
                continue;
            }
            due = Instant::now() + INTERVAL;
            if stops {
                // The copy that follows is the last one: of a change that misses it, nobody hears that it was made.
                self.hands_over.store(true, Ordering::SeqCst);
            }
            let flushed = self.flush(server, if stops { Flush::Last } else { Flush::Usual });
            fails = flushed.is_err();
            match flushed {
                Ok(None) => {}
                Ok(Some(Committed { bytes })) => server.shared.metrics.count(|cells| {
                    cells.state_flushes.add(1);
                    cells.state_bytes.add(bytes);
                }),
                Err(error) => {
                    if let Some(host) = server.host() {
                        host.changes_were_lost();
                    }
                    server.shared.metrics.count(|cells| cells.state_failures.add(1));
                    if server.shared.log_limiter.allows_event("state", Instant::now()) {
                        let task = &server.shared.config.identity.task;
                        let line = format!(
                            "starwire: the state of {task} was not written, and stays as old as it is: {error} (repeats are suppressed for a minute)"
                        );
                        server.shared.host.log(Level::Error, &line);
                    }
                }
            }
            if stops {
                *self.store() = None;
                return self.end();
            }
        }
    }
}

/// `ps-0`: the task's part of STARWIRE_STATE.
pub(crate) fn folder_of(all: &str, identity: &Identity) -> PathBuf {
    let number = identity.task.rsplit(':').next().unwrap_or_default();
    Path::new(all).join(format!("{}-{number}", identity.job))
}

/// Whose state it is.
pub(crate) fn owner_of(cluster: &str, identity: &Identity) -> String {
    match cluster {
        "" => identity.task.clone(),
        cluster => format!("{} of cluster {cluster}", identity.task),
    }
}

/// The thread that writes.
pub(crate) struct StateThread {
    thread: JoinHandle<()>,
    stop: Box<dyn Fn() + Send>,
}

impl StateThread {
    /// If the server has a state.
    pub fn start<H: Host>(server: &Arc<StarServer<H>>, unfinished: &Arc<()>) -> Option<Result<Self, EngineError>> {
        server.state.as_ref()?;
        let (own, server, unfinished) = (server.clone(), server.clone(), unfinished.clone());
        let run = move || {
            let _unfinished = unfinished;
            server.state.iter().for_each(|state| state.run(&server));
        };
        let thread = std::thread::Builder::new().name("starwire-state".into()).spawn(run);
        let stop = move || own.state.iter().for_each(|state| state.stops.store(true, Ordering::Release));
        Some(thread.map(|thread| Self { thread, stop: Box::new(stop) }).map_err(EngineError::StateThread))
    }

    /// Writes what is left, unless a reactor asks for it, and ends.
    pub fn stop(self, is_reactor: bool) {
        (self.stop)();
        self.wake();
        if !is_reactor {
            let _ = self.thread.join();
        }
    }

    pub fn wake(&self) {
        self.thread.thread().unpark();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gate_that_is_closed_waits_for_those_inside_and_lets_nobody_in() {
        let gate = Arc::new(Gate::default());
        let _ = gate.waits.set(std::thread::current());
        assert!(gate.enter() && gate.enter());
        assert!(!gate.close(Duration::from_millis(1)));
        assert!(!gate.enter());
        gate.open();
        assert!(gate.enter());
        let other = gate.clone();
        let thread = std::thread::spawn(move || (0..3).for_each(|_| other.leave()));
        assert!(gate.close(Duration::from_secs(60)));
        assert!(!gate.enter());
        thread.join().unwrap();
        gate.open();
        assert!(gate.enter());
    }

    #[test]
    fn no_call_is_inside_while_the_gate_is_closed() {
        let gate = Arc::new(Gate::default());
        let _ = gate.waits.set(std::thread::current());
        let inside = Arc::new(AtomicU64::new(0));
        let threads: Vec<_> = (0..3)
            .map(|_| {
                let (gate, inside) = (gate.clone(), inside.clone());
                std::thread::spawn(move || {
                    let mut passed = 0;
                    while passed < 20_000 {
                        if gate.enter() {
                            inside.fetch_add(1, Ordering::Relaxed);
                            passed += 1;
                            inside.fetch_sub(1, Ordering::Relaxed);
                            gate.leave();
                        }
                    }
                })
            })
            .collect();
        for _ in 0..1000 {
            assert!(gate.close(Duration::from_secs(60)));
            assert_eq!(inside.load(Ordering::Relaxed), 0);
            gate.open();
        }
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    }
}
