//! A parameter server's kernels as C callers give them (`starwire_engine::star`).

use std::ffi::c_void;
use std::time::Duration;

use super::engine::sw_engine;
use super::guard;
use super::handle::{self, Failure, array, borrow, other_structs};
use super::host;
use super::star_wire::sw_star_keep;
use super::state::{sw_changes, sw_state};
use super::types::{sw_body, sw_bytes, sw_code, sw_part, sw_payload, sw_ticket};
use starwire_engine::star::{
    CompiledPlan, Job, Kept, ReplyMeta, Slots, StarCall, StarFailure, StarHost, StarOutcome, StarReply,
};
use starwire_protocol::code;
use starwire_state::{Flush, Store};

/// Work for a thread that may block. Ends with sw_star_job_run, once.
pub struct sw_star_job(Job);

/// Receives the reason why something failed: sw_star_failure_set.
pub struct sw_star_failure(Option<StarFailure>);

/// Values that earlier calls of a step kept. Valid during `run`.
pub struct sw_star_slots<'a>(Slots<'a, Object>);

/// A plan that was compiled.
#[repr(C)]
pub struct sw_star_compiled {
    /// One reference, which the engine owns from here.
    pub plan: *mut c_void,
    /// Its kernels have state that belongs to the session.
    pub has_state: u32,
    /// A kernel may wait or take long, so that the plan never runs on a reactor.
    pub may_wait: u32,
    /// Its runs end by themselves: no kernel waits for anything.
    pub ends_alone: u32,
    /// A second run would change something.
    pub has_effects: u32,
}

/// A call to run. Everything in it but `body` is borrowed: `session`, `table` and `parts` lie in the body, the rest is
/// valid during `run`.
#[repr(C)]
pub struct sw_star_request {
    pub ticket: sw_ticket,
    pub plan: *mut c_void,
    pub session: sw_bytes,
    pub step_id: i64,
    /// The reply carries the statistics of the kernels.
    pub trace: u32,
    /// The plan is cheap enough for this thread, with feeds as large as those of a run elsewhere that was short.
    pub run_inline: u32,
    /// The longest run that is short.
    pub short_ns: u64,
    pub keeps: *const sw_star_keep,
    pub n_keeps: usize,
    /// The table of feeds.
    pub table: sw_bytes,
    pub parts: *const sw_part,
    pub n_parts: usize,
    /// For sw_body_free, once.
    pub body: *mut sw_body,
    pub slots: *const sw_star_slots<'static>,
}

/// A fetch that stays in a slot.
#[repr(C)]
pub struct sw_star_kept {
    pub slot: u32,
    /// One reference, which the engine owns from here.
    pub value: *mut c_void,
    pub bytes: u64,
}

/// The end of a run.
#[repr(C)]
pub struct sw_star_outcome {
    pub struct_size: usize,
    /// 0: the fetches follow. Else `message` is the reason, and `details` are for the caller.
    pub code: sw_code,
    /// The request itself is at fault: the message gets the peer's name.
    pub names_peer: u32,
    pub message: sw_bytes,
    pub details: sw_bytes,
    pub kept: *const sw_star_kept,
    pub n_kept: usize,
    /// The table of fetches, and their content.
    pub table: sw_bytes,
    pub payload: *const sw_payload,
    /// The payload's last part, unless this is 0: a serialised StepStats.
    pub stats_bytes: u32,
    /// It ran on the reactor.
    pub ran_inline: u32,
    /// Of the fetches.
    pub bytes: u64,
    /// From the first kernel to here.
    pub run_ns: u64,
    /// The kernels' cost as measured so far; 0: not yet known.
    pub cost_ns: u64,
}

/// The owner of a parameter server's kernels. Plans, kept values and runs are its objects, and counted. `run`,
/// `cancel`, `retain` and `release` are called on reactors and must not block; nothing may throw.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct sw_star_handlers {
    pub struct_size: usize,
    pub retain: Option<unsafe extern "C" fn(object: *mut c_void)>,
    /// May end the object.
    pub release: Option<unsafe extern "C" fn(object: *mut c_void)>,
    /// Calls sw_star_job_run(job) soon, on another thread that may block.
    pub spawn: Option<unsafe extern "C" fn(ctx: *mut c_void, job: *mut sw_star_job)>,
    /// Whether there is such a session, and (not 0) whether it has its own devices. May block.
    pub session: Option<
        unsafe extern "C" fn(
            ctx: *mut c_void,
            session: sw_bytes,
            is_isolated: *mut u32,
            failure: *mut sw_star_failure,
        ) -> sw_code,
    >,
    /// Compiles a serialised GraphDef for all sessions, or for this one if it is isolated or the plan has state. May
    /// block.
    pub compile: Option<
        unsafe extern "C" fn(
            ctx: *mut c_void,
            session: sw_bytes,
            plan: sw_bytes,
            compiled: *mut sw_star_compiled,
            failure: *mut sw_star_failure,
        ) -> sw_code,
    >,
    /// Runs a plan, which ends with sw_engine_star_done. Returns one reference to a run that can be cancelled, or NULL.
    pub run: Option<unsafe extern "C" fn(ctx: *mut c_void, request: *const sw_star_request) -> *mut c_void>,
    /// The run's result is no longer needed. It still ends with sw_engine_star_done.
    pub cancel: Option<unsafe extern "C" fn(ctx: *mut c_void, run: *mut c_void)>,
    /// If the server has a state: makes its variables, and gives the devices its incarnations. Before everything else.
    pub restore: Option<
        unsafe extern "C" fn(
            ctx: *mut c_void,
            state: *const sw_state<'static>,
            failure: *mut sw_star_failure,
        ) -> sw_code,
    >,
    /// Adds what has changed since the last time. Not 0, `early`: plans still run; only what takes long is worth it.
    pub changes: Option<unsafe extern "C" fn(ctx: *mut c_void, changes: *mut sw_changes<'static, 'static>, early: u32)>,
    /// What `changes` added was not written: everything counts as changed.
    pub changes_were_lost: Option<unsafe extern "C" fn(ctx: *mut c_void)>,
    /// Of this server's devices.
    pub incarnations: *const u64,
    pub n_incarnations: usize,
}

/// One reference to an object of C++'s.
pub struct Object {
    pointer: *mut c_void,
    retain: Option<unsafe extern "C" fn(object: *mut c_void)>,
    release: Option<unsafe extern "C" fn(object: *mut c_void)>,
}

// SAFETY: sw_star_handlers' contract: its functions run on any thread; the pointer is only handed back.
unsafe impl Send for Object {}
// SAFETY: as above.
unsafe impl Sync for Object {}

impl Clone for Object {
    fn clone(&self) -> Self {
        if let Some(retain) = self.retain {
            // SAFETY: sw_star_handlers' contract; this reference keeps the object alive.
            unsafe { retain(self.pointer) }
        }
        Self { ..*self }
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        if let Some(release) = self.release {
            // SAFETY: sw_star_handlers' contract; this reference ends here.
            unsafe { release(self.pointer) }
        }
    }
}

/// sw_star_handlers and their context.
pub struct CStar {
    handlers: sw_star_handlers,
    incarnations: Vec<u64>,
    ctx: *mut c_void,
}

// SAFETY: sw_star_handlers' contract: every function may be called from every thread with this ctx.
unsafe impl Send for CStar {}
// SAFETY: as above.
unsafe impl Sync for CStar {}

impl CStar {
    /// # Safety
    /// `handlers` is null or readable; its functions accept `ctx` until the engine was stopped and all jobs have run.
    pub unsafe fn new(handlers: *const sw_star_handlers, ctx: *mut c_void) -> Result<Option<Self>, Failure> {
        // SAFETY: the caller's promise.
        let Some(handlers) = (unsafe { handlers.as_ref() }) else { return Ok(None) };
        if handlers.struct_size != size_of::<sw_star_handlers>() {
            return Err(other_structs());
        }
        // SAFETY: the caller's promise.
        let incarnations = unsafe { array(handlers.incarnations, handlers.n_incarnations) }.to_vec();
        Ok(Some(Self { handlers: *handlers, incarnations, ctx }))
    }

    /// Takes a reference over.
    pub fn object(&self, pointer: *mut c_void) -> Object {
        Object { pointer, retain: self.handlers.retain, release: self.handlers.release }
    }
}

fn failed(code: sw_code, failure: sw_star_failure) -> StarFailure {
    failure.0.unwrap_or_else(|| StarFailure::new(code, "starwire: a handler failed without a reason"))
}

fn missing(handler: &str) -> StarFailure {
    StarFailure::new(code::UNIMPLEMENTED, format!("starwire: bug: no handler {handler}"))
}

// In each method: the functions accept the ctx (`CStar::new`), and what they are given is valid during the call.
impl StarHost for CStar {
    type Plan = Object;
    type Value = Object;
    type Run = Object;

    fn incarnations(&self) -> &[u64] {
        &self.incarnations
    }

    fn spawn(&self, job: Job) {
        if let Some(spawn) = self.handlers.spawn {
            // SAFETY: see the impl; C++ owns the job from here.
            unsafe { spawn(self.ctx, handle::give(sw_star_job(job))) }
        }
    }

    fn is_isolated(&self, session: &[u8]) -> Result<bool, StarFailure> {
        let function = self.handlers.session.ok_or_else(|| missing("session"))?;
        let (mut isolated, mut failure) = (0, sw_star_failure(None));
        // SAFETY: see the impl.
        match unsafe { function(self.ctx, sw_bytes::of(session), &raw mut isolated, &raw mut failure) } {
            0 => Ok(isolated != 0),
            code => Err(failed(code, failure)),
        }
    }

    fn compile(&self, session: &[u8], plan: &[u8]) -> Result<CompiledPlan<Object>, StarFailure> {
        let function = self.handlers.compile.ok_or_else(|| missing("compile"))?;
        let nothing = std::ptr::null_mut();
        let mut compiled = sw_star_compiled { plan: nothing, has_state: 0, may_wait: 1, ends_alone: 0, has_effects: 1 };
        let mut failure = sw_star_failure(None);
        let (session, plan) = (sw_bytes::of(session), sw_bytes::of(plan));
        // SAFETY: see the impl.
        match unsafe { function(self.ctx, session, plan, &raw mut compiled, &raw mut failure) } {
            0 => Ok(CompiledPlan {
                plan: self.object(compiled.plan),
                has_state: compiled.has_state != 0,
                may_wait: compiled.may_wait != 0,
                ends_alone: compiled.ends_alone != 0,
                has_effects: compiled.has_effects != 0,
            }),
            code => Err(failed(code, failure)),
        }
    }

    fn run(&self, call: StarCall<'_, Self>) -> Option<Object> {
        let run = self.handlers.run?;
        let (session, table) = (sw_bytes::of(call.session()), sw_bytes::of(call.table()));
        let StarCall { ticket, plan, step, keeps, trace, inline, short, slots, body, .. } = call;
        // They lie in the body, which stays where it is until sw_body_free.
        let (parts, n_parts) = (body.pieces().as_ptr().cast(), body.pieces().len());
        let slots = sw_star_slots(slots);
        let request = sw_star_request {
            ticket: ticket.into(),
            plan: plan.pointer,
            session,
            step_id: step,
            trace: trace.into(),
            run_inline: inline.into(),
            short_ns: u64::try_from(short.as_nanos()).unwrap_or(u64::MAX),
            keeps: keeps.as_ptr().cast(),
            n_keeps: keeps.len(),
            table,
            parts,
            n_parts,
            body: handle::give(sw_body(body)),
            slots: (&raw const slots).cast(),
        };
        // SAFETY: see the impl; the handler owns the body from here, and uses the slots only until it returns.
        let run = unsafe { run(self.ctx, &raw const request) };
        (!run.is_null()).then(|| self.object(run))
    }

    fn cancel(&self, run: &Object) {
        if let Some(cancel) = self.handlers.cancel {
            // SAFETY: see the impl.
            unsafe { cancel(self.ctx, run.pointer) }
        }
    }

    fn restore(&self, state: &Store) -> Result<(), StarFailure> {
        let function = self.handlers.restore.ok_or_else(|| missing("restore"))?;
        let (state, mut failure) = (sw_state(state), sw_star_failure(None));
        // SAFETY: see the impl.
        match unsafe { function(self.ctx, (&raw const state).cast(), &raw mut failure) } {
            0 => Ok(()),
            code => Err(failed(code, failure)),
        }
    }

    fn changes(&self, flush: &mut Flush<'_>, early: bool) {
        let mut changes = sw_changes(flush);
        if let Some(function) = self.handlers.changes {
            // SAFETY: see the impl.
            unsafe { function(self.ctx, (&raw mut changes).cast(), early.into()) }
        }
    }

    fn changes_were_lost(&self) {
        if let Some(function) = self.handlers.changes_were_lost {
            // SAFETY: see the impl.
            unsafe { function(self.ctx) }
        }
    }
}

/// Runs and frees the job.
///
/// # Safety
/// `job` is from sw_star_handlers.spawn and not used afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_star_job_run(job: *mut sw_star_job) {
    if job.is_null() {
        return;
    }
    // SAFETY: made by `handle::give`, and the caller gives it back once.
    let job = unsafe { Box::from_raw(job) };
    guard((), move || (job.0)());
}

/// Says why a handler fails. `names_peer` is not 0 if the request itself is at fault: the message then gets the peer's
/// name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_star_failure_set(
    failure: *mut sw_star_failure,
    code: sw_code,
    message: sw_bytes,
    details: sw_bytes,
    names_peer: u32,
) {
    // SAFETY: the caller's promise.
    let (Some(failure), message, details) = (unsafe { (failure.as_mut(), message.as_slice(), details.as_slice()) })
    else {
        return;
    };
    failure.0 = Some(failure_of(code, message, details, names_peer));
}

fn failure_of(code: sw_code, message: &[u8], details: &[u8], names_peer: u32) -> StarFailure {
    let message = String::from_utf8_lossy(message).into_owned();
    StarFailure { code, message, details: details.to_vec(), names_peer: names_peer != 0 }
}

/// The value in a slot, as a new reference; NULL: the slot is empty.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_star_slots_get(slots: *const sw_star_slots<'static>, slot: u32) -> *mut c_void {
    // SAFETY: the caller's promise.
    let Some(slots) = (unsafe { borrow(slots) }) else { return std::ptr::null_mut() };
    let value = slots.0.get(slot).cloned();
    value.map_or(std::ptr::null_mut(), |value| std::mem::ManuallyDrop::new(value).pointer)
}

/// Ends a run. Takes the kept values and the payload over in every case.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_engine_star_done(
    engine: *const sw_engine,
    ticket: sw_ticket,
    outcome: *const sw_star_outcome,
) {
    // SAFETY: the caller's promise.
    let (Some(engine), Some(outcome)) = (unsafe { (borrow(engine), outcome.as_ref()) }) else { return };
    debug_assert_eq!(outcome.struct_size, size_of::<sw_star_outcome>());
    guard((), || {
        // SAFETY: the caller's promise.
        let (payload, table) = unsafe { (host::payload(outcome.payload), outcome.table.as_slice()) };
        let Some(star) = engine.engine.star_host() else { return };
        // SAFETY: the caller's promise.
        let kept = unsafe { array(outcome.kept, outcome.n_kept) };
        let kept = kept.iter().map(|kept| {
            let value = star.object(kept.value);
            Kept { slot: kept.slot, value, bytes: kept.bytes }
        });
        let kept = kept.collect();
        let result = match outcome.code {
            0 => Ok(StarReply {
                kept,
                meta: ReplyMeta::new(table),
                payload,
                stats_bytes: outcome.stats_bytes,
                bytes: outcome.bytes,
            }),
            code => {
                // SAFETY: the caller's promise.
                let (message, details) = unsafe { (outcome.message.as_slice(), outcome.details.as_slice()) };
                Err(failure_of(code, message, details, outcome.names_peer))
            }
        };
        let (run, cost) = (Duration::from_nanos(outcome.run_ns), Duration::from_nanos(outcome.cost_ns));
        engine.engine.star_done(ticket.into(), StarOutcome { result, run, cost, inline: outcome.ran_inline != 0 });
    });
}

/// The session was deleted: drops its plans.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_engine_star_session_closed(engine: *const sw_engine, session: sw_bytes) {
    // SAFETY: the caller's promise.
    let (Some(engine), session) = (unsafe { (borrow(engine), session.as_slice()) }) else { return };
    guard((), || engine.engine.star_session_closed(session));
}

/// What sw_engine_when_written calls.
struct Then(unsafe extern "C" fn(ctx: *mut c_void, is_written: u32), *mut c_void);

// SAFETY: the context may be used on any thread.
unsafe impl Send for Then {}

/// Calls `then` once, on any thread: at once, or when all that has changed by now is in the server's state if that is
/// synchronous. `is_written` 0: the server has stopped before.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_engine_when_written(
    engine: *const sw_engine,
    then: Option<unsafe extern "C" fn(ctx: *mut c_void, is_written: u32)>,
    ctx: *mut c_void,
) {
    // SAFETY: the caller's promise.
    let (Some(engine), Some(then)) = (unsafe { borrow(engine) }, then) else { return };
    let then = Then(then, ctx);
    let call = move |is_written| {
        let Then(then, ctx) = { then };
        // SAFETY: the caller's promise; once, as this is an FnOnce.
        unsafe { then(ctx, u32::from(is_written)) }
    };
    guard((), || engine.engine.when_written(Box::new(call)));
}

/// Drops all plans.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_engine_star_forget_plans(engine: *const sw_engine) {
    // SAFETY: the caller's promise.
    let Some(engine) = (unsafe { borrow(engine) }) else { return };
    guard((), || engine.engine.star_forget_plans());
}
