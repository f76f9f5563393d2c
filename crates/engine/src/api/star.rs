//! The owner of a parameter server's kernels, as the engine sees it.

use std::collections::HashMap;
use std::convert::Infallible;
use std::ops::Range;
use std::time::Duration;

use super::host::Ticket;
use super::memory::{InBody, OutPayload};
use starwire_protocol::code;
use starwire_protocol::star::{Keep, REPLY_BYTES};
use starwire_state::{Flush, Store};

/// Work for a thread that may block.
pub type Job = Box<dyn FnOnce() + Send>;

/// Compiles plans, and runs them.
pub trait StarHost: Send + Sync + Sized + 'static {
    /// A compiled plan. Cloned for each table that holds it; its last clone may be dropped on a reactor.
    type Plan: Clone + Send + Sync + 'static;
    /// A value that stays between two calls of a step. May be dropped on a reactor.
    type Value: Send + 'static;
    /// A run that can be cancelled.
    type Run: Send + 'static;

    /// Incarnations of this server's devices.
    fn incarnations(&self) -> &[u64];
    /// Runs the job soon, on another thread.
    fn spawn(&self, job: Job);
    /// Whether the session has its own devices; `ABORTED`: there is no such session. May block.
    fn is_isolated(&self, session: &[u8]) -> Result<bool, StarFailure>;
    /// Compiles a plan for all sessions, or for this one if it is isolated or the plan has state. May block.
    fn compile(&self, session: &[u8], plan: &[u8]) -> Result<CompiledPlan<Self::Plan>, StarFailure>;

    /// Runs a plan. Called on a reactor: a run that is not `inline`, or could take long, continues on another thread.
    /// Ends with [`crate::Engine::star_done`], which may be called before this returns; then no run is returned.
    fn run(&self, call: StarCall<'_, Self>) -> Option<Self::Run>;
    /// The caller no longer needs the result, or is gone. The run still ends with [`crate::Engine::star_done`].
    fn cancel(&self, run: &Self::Run);

    /// Makes the variables of this state, and gives the devices its incarnations. Before anything else is called.
    fn restore(&self, _state: &Store) -> Result<(), StarFailure> {
        Ok(())
    }
    /// Adds what has changed since the last time to the flush, which must be committed. `early`: calls still run, so
    /// that the same may change again until the next time; only what takes long is worth it.
    fn changes(&self, _flush: &mut Flush<'_>, _early: bool) {}
    /// What [`StarHost::changes`] last said was not committed: everything counts as changed.
    fn changes_were_lost(&self) {}
}

/// For owners that serve no star calls.
impl StarHost for Infallible {
    type Plan = Infallible;
    type Value = Infallible;
    type Run = Infallible;

    fn incarnations(&self) -> &[u64] {
        match *self {}
    }
    fn spawn(&self, _job: Job) {
        match *self {}
    }
    fn is_isolated(&self, _session: &[u8]) -> Result<bool, StarFailure> {
        match *self {}
    }
    fn compile(&self, _session: &[u8], _plan: &[u8]) -> Result<CompiledPlan<Infallible>, StarFailure> {
        match *self {}
    }
    fn run(&self, _call: StarCall<'_, Self>) -> Option<Infallible> {
        match *self {}
    }
    fn cancel(&self, _run: &Infallible) {
        match *self {}
    }
}

pub struct CompiledPlan<P> {
    pub plan: P,
    /// Its kernels have state that belongs to the session.
    pub has_state: bool,
    /// A kernel may wait or take long, so that the plan never runs on a reactor.
    pub may_wait: bool,
    /// Its runs end by themselves: no kernel waits for anything.
    pub ends_alone: bool,
    /// A second run would change something.
    pub has_effects: bool,
}

/// A call of a plan that the server knows.
pub struct StarCall<'a, S: StarHost> {
    pub ticket: Ticket,
    pub plan: &'a S::Plan,
    pub step: i64,
    pub keeps: Vec<Keep>,
    /// The reply carries the statistics of the kernels.
    pub trace: bool,
    /// The plan is cheap enough for this thread, with feeds as large as those of a run elsewhere that was `short`.
    pub inline: bool,
    pub short: Duration,
    pub slots: Slots<'a, S::Value>,
    pub body: Box<InBody>,
    pub(crate) session: Range<usize>,
    pub(crate) table: usize,
}

impl<S: StarHost> StarCall<'_, S> {
    /// The session's handle.
    pub fn session(&self) -> &[u8] {
        &self.body.meta()[self.session.clone()]
    }

    /// The table of feeds.
    pub fn table(&self) -> &[u8] {
        &self.body.meta()[self.table..]
    }
}

/// Values that earlier calls of a step kept.
pub struct Slots<'a, V>(Option<&'a HashMap<u32, (V, u64)>>);

impl<'a, V> Slots<'a, V> {
    pub(crate) fn new(slots: Option<&'a HashMap<u32, (V, u64)>>) -> Self {
        Self(slots)
    }

    pub fn get(&self, slot: u32) -> Option<&V> {
        self.0?.get(&slot).map(|(value, _)| value)
    }
}

/// The end of a run.
pub struct StarOutcome<V> {
    pub result: Result<StarReply<V>, StarFailure>,
    /// From its first kernel to its end.
    pub run: Duration,
    /// The kernels' cost as measured so far; zero: not yet known.
    pub cost: Duration,
    /// It ran on the reactor.
    pub inline: bool,
}

pub struct StarReply<V> {
    pub kept: Vec<Kept<V>>,
    /// Room for the reply's head, and the table of fetches.
    pub meta: ReplyMeta,
    pub payload: Option<OutPayload>,
    /// The payload's last part, unless this is 0: a serialised StepStats.
    pub stats_bytes: u32,
    /// Of the fetches.
    pub bytes: u64,
}

/// A fetch that stays in a slot.
pub struct Kept<V> {
    pub slot: u32,
    pub value: V,
    pub bytes: u64,
}

/// A reply's metadata, whose head is written at the end.
pub struct ReplyMeta(pub(crate) Vec<u8>);

impl ReplyMeta {
    pub fn new(table: &[u8]) -> Self {
        let mut meta = Vec::with_capacity(REPLY_BYTES + table.len());
        meta.resize(REPLY_BYTES, 0);
        meta.extend_from_slice(table);
        Self(meta)
    }
}

/// The reason why a call or a registration fails.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StarFailure {
    /// Of tensorflow::error::Code.
    pub code: i32,
    pub message: String,
    /// Details for the caller, opaque to the engine.
    pub details: Vec<u8>,
    /// The request itself is at fault: the message gets the peer's name.
    pub names_peer: bool,
}

impl StarFailure {
    pub fn new(code: i32, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), details: Vec::new(), names_peer: false }
    }

    pub(crate) fn malformed(message: impl Into<String>) -> Self {
        Self { names_peer: true, ..Self::new(code::INVALID_ARGUMENT, message) }
    }
}
