//! What a parameter server keeps for star calls (`starwire_engine::star`), shared by its threads.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};

use super::engine::sw_engine;
use super::error::{self, sw_error};
use super::guard;
use super::handle::{self, borrow, other_structs, require};
use super::host::CEngine;
use super::types::{sw_bytes, sw_code};
use starwire_engine::star::{Accounts, Claim, Hash, Made, Plans, Steps};
use starwire_protocol::code;

/// How often old things are looked for, while there are calls.
const TICK: Duration = Duration::from_secs(5);
/// Steps are spread over so many tables, by connection.
const SHARDS: usize = 16;

/// How plans and values are counted. Both functions run on any thread, must not block for long and must not throw;
/// `release` may end the object.
#[repr(C)]
#[allow(non_camel_case_types)]
#[derive(Clone, Copy)]
pub struct sw_star_objects {
    pub struct_size: usize,
    pub retain: Option<unsafe extern "C" fn(object: *mut c_void)>,
    pub release: Option<unsafe extern "C" fn(object: *mut c_void)>,
}

/// One reference to an object of C++'s.
struct Object {
    pointer: *mut c_void,
    functions: sw_star_objects,
}

// SAFETY: sw_star_objects' contract: its functions run on any thread; the pointer is only handed back.
unsafe impl Send for Object {}
// SAFETY: as above.
unsafe impl Sync for Object {}

impl Object {
    /// The reference goes to C++.
    fn into_raw(self) -> *mut c_void {
        std::mem::ManuallyDrop::new(self).pointer
    }
}

impl Clone for Object {
    fn clone(&self) -> Self {
        if let Some(retain) = self.functions.retain {
            // SAFETY: sw_star_objects' contract; this reference keeps the object alive.
            unsafe { retain(self.pointer) }
        }
        Self { pointer: self.pointer, functions: self.functions }
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        if let Some(release) = self.functions.release {
            // SAFETY: sw_star_objects' contract; this reference ends here.
            unsafe { release(self.pointer) }
        }
    }
}

/// Only handed back.
struct Waiter(*mut c_void);

// SAFETY: the pointer is not used here.
unsafe impl Send for Waiter {}
// SAFETY: as above.
unsafe impl Sync for Waiter {}

/// The tables of one parameter server.
#[allow(non_camel_case_types)]
pub struct sw_star_tables {
    engine: Arc<CEngine>,
    functions: sw_star_objects,
    started: Instant,
    next_tick: AtomicU64,
    plans: RwLock<Plans<Object, Waiter>>,
    steps: Vec<Mutex<Steps<Object>>>,
    accounts: Accounts,
    evicted: AtomicU64,
}

impl sw_star_tables {
    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    fn plans(&self) -> RwLockReadGuard<'_, Plans<Object, Waiter>> {
        self.plans.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn plans_mut(&self) -> RwLockWriteGuard<'_, Plans<Object, Waiter>> {
        self.plans.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn steps(&self, connection: u64) -> MutexGuard<'_, Steps<Object>> {
        // The reactor's number is in the upper bits, a counter in the lower.
        let mixed = (connection ^ (connection >> 48)).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
        let at = mixed as usize % self.steps.len();
        self.steps[at].lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn object(&self, pointer: *mut c_void) -> Object {
        Object { pointer, functions: self.functions }
    }

    fn tick(&self, now: Duration) {
        let millis = |time: Duration| time.as_millis() as u64;
        let due = self.next_tick.load(Ordering::Relaxed);
        let next = millis(now + TICK);
        if millis(now) < due
            || self.next_tick.compare_exchange(due, next, Ordering::Relaxed, Ordering::Relaxed).is_err()
        {
            return;
        }
        let removed = self.plans_mut().expire(now);
        drop(removed);
        for steps in &self.steps {
            let over = steps.lock().unwrap_or_else(PoisonError::into_inner).expire(now);
            drop(over);
        }
        self.count_plans();
        self.count_slots();
    }

    fn count_plans(&self) {
        let (plans, evicted) = {
            let plans = self.plans();
            (plans.len(), plans.evicted())
        };
        let news = evicted.saturating_sub(self.evicted.fetch_max(evicted, Ordering::Relaxed));
        self.engine.count(|cells| {
            cells.star_plans.set(plans as i64);
            cells.star_evictions.add(news);
        });
    }

    fn count_slots(&self) {
        let all: u64 = self.steps.iter().map(|s| s.lock().unwrap_or_else(PoisonError::into_inner).len()).sum();
        self.engine.count(|cells| cells.star_slots.set(all as i64));
    }
}

/// SHA-256 of `bytes`: the name of a plan.
///
/// # Safety
/// `bytes` is readable; `out` has room for 32 bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_sha256(bytes: sw_bytes, out: *mut u8) {
    // SAFETY: the caller's promise.
    let bytes = unsafe { bytes.as_slice() };
    let digest = guard([0; 32], || Sha256::digest(bytes).into());
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(digest.as_ptr(), out, digest.len()) }
}

/// Makes the tables of a server, with the limits that its environment sets.
///
/// # Safety
/// `engine` is live; `objects` is readable and its functions keep to their contract as long as there are tables; `out`
/// is writable, `error` writable or null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_star_tables_new(
    engine: *const sw_engine,
    objects: *const sw_star_objects,
    out: *mut *mut sw_star_tables,
    error: *mut *mut sw_error,
) -> sw_code {
    let made = guard(Err((code::INTERNAL, "starwire: internal error while making tables".to_string())), || {
        // SAFETY: the caller's promise.
        let (engine, functions) = unsafe { (require(engine, "an engine")?, *objects) };
        if functions.struct_size != size_of::<sw_star_objects>() {
            return Err(other_structs());
        }
        let limits = engine.engine.star();
        Ok(sw_star_tables {
            engine: engine.engine.clone(),
            functions,
            started: Instant::now(),
            next_tick: AtomicU64::new(0),
            plans: RwLock::new(Plans::new(limits.plans)),
            steps: (0..SHARDS).map(|_| Mutex::new(Steps::new(limits.steps))).collect(),
            accounts: Accounts::default(),
            evicted: AtomicU64::new(0),
        })
    });
    // SAFETY: the caller's promise.
    unsafe { handle::hand_out(made, out, error) }
}

/// Frees the tables and releases what is in them.
///
/// # Safety
/// `star` is null, or from sw_star_tables_new and not used afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_star_tables_free(star: *mut sw_star_tables) {
    // SAFETY: the caller's promise.
    unsafe { handle::free(star) }
}

/// Plans whose kernels take no longer are to run on the reactor.
///
/// # Safety
/// `star` is live. The same holds for the functions below.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_star_tables_inline_ns(star: *const sw_star_tables) -> u64 {
    // SAFETY: the caller's promise.
    let Some(star) = (unsafe { borrow(star) }) else { return 0 };
    star.engine.star().inline.as_nanos() as u64
}

/// sw_handlers.on_peer_came.
///
/// # Safety
/// See sw_star_tables_inline_ns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_star_tables_peer_came(
    star: *const sw_star_tables,
    conn: u64,
    task: sw_bytes,
    incarnation: u64,
) {
    // SAFETY: the caller's promise.
    let Some(star) = (unsafe { borrow(star) }) else { return };
    // SAFETY: the caller's promise.
    let task = unsafe { task.as_slice() };
    guard((), || {
        let account = star.accounts.of(&String::from_utf8_lossy(task), incarnation);
        star.steps(conn).peer_came(conn, account);
    });
}

/// sw_handlers.on_peer_gone.
///
/// # Safety
/// See sw_star_tables_inline_ns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_star_tables_peer_gone(star: *const sw_star_tables, conn: u64) {
    // SAFETY: the caller's promise.
    let Some(star) = (unsafe { borrow(star) }) else { return };
    guard((), || {
        let values = star.steps(conn).peer_gone(conn);
        if !values.is_empty() {
            drop(values);
            star.count_slots();
        }
    });
}

/// A call arrived; `keeps` is not 0 if it keeps values or uses kept ones. If it is not refused, sw_star_tables_call_end
/// follows.
///
/// # Safety
/// See sw_star_tables_inline_ns; `error` is writable or null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_star_tables_call_begin(
    star: *const sw_star_tables,
    conn: u64,
    step: i64,
    keeps: u32,
    error: *mut *mut sw_error,
) -> sw_code {
    // SAFETY: the caller's promise.
    let star = match unsafe { require(star, "a parameter server's tables") } {
        Ok(star) => star,
        // SAFETY: the caller's promise.
        Err((code, message)) => return unsafe { error::store(error, code, message) },
    };
    let began = guard(Ok(()), || {
        let now = star.now();
        star.tick(now);
        star.steps(conn).call_began(conn, step, keeps != 0, now)
    });
    match began {
        Ok(()) => 0,
        // SAFETY: the caller's promise.
        Err(refused) => unsafe { error::store(error, refused.code(), refused.to_string()) },
    }
}

/// What a call came to, for the metrics.
#[repr(C)]
#[allow(non_camel_case_types)]
#[derive(Clone, Copy)]
pub struct sw_star_counts {
    pub struct_size: usize,
    /// Its plan was known.
    pub hit: u32,
    pub ran_inline: u32,
    pub bytes_in: u64,
    pub bytes_out: u64,
    pub queue_ns: u64,
    pub run_ns: u64,
}

/// The call is over; `last` is not 0 if its step needs nothing of this server any more.
///
/// # Safety
/// See sw_star_tables_inline_ns; `counts` is readable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_star_tables_call_end(
    star: *const sw_star_tables,
    conn: u64,
    step: i64,
    keeps: u32,
    last: u32,
    counts: *const sw_star_counts,
) {
    // SAFETY: the caller's promise.
    let Some(star) = (unsafe { borrow(star) }) else { return };
    // SAFETY: the caller's promise.
    let counts = unsafe { &*counts };
    guard((), || {
        let values = star.steps(conn).call_ended(conn, step, keeps != 0, last != 0, star.now());
        let changed = keeps != 0 || !values.is_empty();
        drop(values);
        star.engine.count(|cells| {
            cells.star_calls.add(1);
            cells.star_plan_hits.add(u64::from(counts.hit != 0));
            cells.star_calls_inline.add(u64::from(counts.ran_inline != 0));
            cells.star_bytes_received.add(counts.bytes_in);
            cells.star_bytes_sent.add(counts.bytes_out);
            if counts.hit != 0 {
                cells.star_queue_time.record(Duration::from_nanos(counts.queue_ns));
                cells.star_run_time.record(Duration::from_nanos(counts.run_ns));
            }
        });
        if changed {
            star.count_slots();
        }
    });
}

/// Keeps a value of `bytes` bytes for the step; takes the reference over in every case.
///
/// # Safety
/// See sw_star_tables_inline_ns; `value` is a reference; `error` is writable or null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_star_tables_slot_keep(
    star: *const sw_star_tables,
    conn: u64,
    step: i64,
    slot: u32,
    value: *mut c_void,
    bytes: u64,
    error: *mut *mut sw_error,
) -> sw_code {
    // SAFETY: the caller's promise.
    let star = match unsafe { require(star, "a parameter server's tables") } {
        Ok(star) => star,
        // SAFETY: the caller's promise.
        Err((code, message)) => return unsafe { error::store(error, code, message) },
    };
    let kept = guard(Ok(()), || {
        // What falls out is dropped when the table is no longer locked.
        let kept = star.steps(conn).keep(conn, step, slot, star.object(value), bytes);
        kept.map(drop).map_err(|(value, refused)| {
            drop(value);
            refused
        })
    });
    match kept {
        Ok(()) => 0,
        // SAFETY: the caller's promise.
        Err(refused) => unsafe { error::store(error, refused.code(), refused.to_string()) },
    }
}

/// What is kept there, as a new reference; NULL if there is nothing.
///
/// # Safety
/// See sw_star_tables_inline_ns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_star_tables_slot_get(
    star: *const sw_star_tables,
    conn: u64,
    step: i64,
    slot: u32,
) -> *mut c_void {
    // SAFETY: the caller's promise.
    let Some(star) = (unsafe { borrow(star) }) else { return std::ptr::null_mut() };
    guard(std::ptr::null_mut(), || {
        star.steps(conn).get(conn, step, slot).map_or(std::ptr::null_mut(), Object::into_raw)
    })
}

/// The step needs nothing of this server any more.
///
/// # Safety
/// See sw_star_tables_inline_ns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_star_tables_step_end(star: *const sw_star_tables, conn: u64, step: i64) {
    // SAFETY: the caller's promise.
    let Some(star) = (unsafe { borrow(star) }) else { return };
    guard((), || {
        let values = star.steps(conn).step_ended(conn, step);
        drop(values);
        star.count_slots();
    });
}

/// # Safety
/// `hash` points at 32 bytes.
unsafe fn hash_at<'a>(hash: *const u8) -> &'a Hash {
    // SAFETY: the caller's promise; bytes have no alignment.
    unsafe { &*hash.cast::<Hash>() }
}

/// The plan of this name as the session may use it, as a new reference; NULL: it has to be registered. `isolated` is
/// not 0 if the session has devices of its own.
///
/// # Safety
/// See sw_star_tables_inline_ns; `session` is readable, `hash` points at 32 bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_star_tables_plan_find(
    star: *const sw_star_tables,
    session: sw_bytes,
    hash: *const u8,
) -> *mut c_void {
    // SAFETY: the caller's promise.
    let Some(star) = (unsafe { borrow(star) }) else { return std::ptr::null_mut() };
    // SAFETY: the caller's promise.
    let (session, hash) = unsafe { (session.as_slice(), hash_at(hash)) };
    guard(std::ptr::null_mut(), || {
        let found = star.plans().find(session, hash, star.now());
        found.map_or(std::ptr::null_mut(), Object::into_raw)
    })
}

/// For a session that has not used the plan yet, if sw_star_tables_plan_find does not know it: the plan that all share,
/// as a new reference. The session must exist. `isolated` is not 0 if it has devices of its own.
///
/// # Safety
/// As sw_star_tables_plan_find.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_star_tables_plan_adopt(
    star: *const sw_star_tables,
    session: sw_bytes,
    hash: *const u8,
    isolated: u32,
) -> *mut c_void {
    // SAFETY: the caller's promise.
    let Some(star) = (unsafe { borrow(star) }) else { return std::ptr::null_mut() };
    // SAFETY: the caller's promise.
    let (session, hash) = unsafe { (session.as_slice(), hash_at(hash)) };
    guard(std::ptr::null_mut(), || {
        let found = star.plans_mut().adopt(session, hash, isolated != 0, star.now());
        found.map_or(std::ptr::null_mut(), Object::into_raw)
    })
}

/// What becomes of a plan that a session registers.
#[repr(u32)]
#[allow(non_camel_case_types)]
#[derive(Clone, Copy)]
pub enum sw_claim {
    /// The session can use it.
    Known,
    /// It has to be compiled, and sw_star_tables_plan_compiled to be called.
    Compile,
    /// Somebody compiles it: `waiter` is handed out by their sw_star_tables_plan_compiled.
    Waits,
}

/// A session registers a plan.
///
/// # Safety
/// As sw_star_tables_plan_find.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_star_tables_plan_claim(
    star: *const sw_star_tables,
    session: sw_bytes,
    hash: *const u8,
    isolated: u32,
    waiter: *mut c_void,
) -> sw_claim {
    // SAFETY: the caller's promise.
    let Some(star) = (unsafe { borrow(star) }) else { return sw_claim::Known };
    // SAFETY: the caller's promise.
    let (session, hash) = unsafe { (session.as_slice(), hash_at(hash)) };
    guard(sw_claim::Known, || match star.plans_mut().claim(session, hash, isolated != 0, Waiter(waiter), star.now()) {
        Claim::Known(_) => sw_claim::Known,
        Claim::Compile(_) => sw_claim::Compile,
        Claim::Waits => sw_claim::Waits,
    })
}

/// A plan that was compiled.
#[repr(C)]
#[allow(non_camel_case_types)]
#[derive(Clone, Copy)]
pub struct sw_star_made {
    pub struct_size: usize,
    /// The connection it was registered over.
    pub conn: u64,
    /// A reference, taken over.
    pub plan: *mut c_void,
    /// Of the plan as it was registered.
    pub bytes: u64,
    /// Its kernels carry a state that is the session's own.
    pub has_state: u32,
    /// It is for devices that are the session's own.
    pub isolated: u32,
}

/// The end of what sw_claim::Compile began; `made` is NULL if it failed. `waiting` is called for everybody who waited:
/// if the plan was made, each of them has to claim it again.
///
/// # Safety
/// As sw_star_tables_plan_find; `made` is readable or NULL; `waiting` accepts `ctx`; `error` is writable or null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_star_tables_plan_compiled(
    star: *const sw_star_tables,
    session: sw_bytes,
    hash: *const u8,
    made: *const sw_star_made,
    waiting: unsafe extern "C" fn(ctx: *mut c_void, waiter: *mut c_void),
    ctx: *mut c_void,
    error: *mut *mut sw_error,
) -> sw_code {
    // SAFETY: the caller's promise.
    let star = match unsafe { require(star, "a parameter server's tables") } {
        Ok(star) => star,
        // SAFETY: the caller's promise.
        Err((code, message)) => return unsafe { error::store(error, code, message) },
    };
    // SAFETY: the caller's promise.
    let (session, hash, made) = unsafe { (session.as_slice(), hash_at(hash), made.as_ref()) };
    let refused = guard(None, || {
        let made = made.map(|made| {
            let peer = star.steps(made.conn).name(made.conn).unwrap_or("a disconnected worker").to_string();
            Made {
                value: star.object(made.plan),
                bytes: made.bytes,
                peer,
                has_state: made.has_state != 0,
                isolated: made.isolated != 0,
            }
        });
        let good = made.is_some();
        let compiled = star.plans_mut().compiled(session, hash, made, star.now());
        drop(compiled.removed);
        if good {
            star.engine.count(|cells| cells.star_registrations.add(1));
            star.count_plans();
        }
        for waiter in compiled.waiters {
            // SAFETY: the caller's promise.
            unsafe { waiting(ctx, waiter.0) }
        }
        compiled.refused
    });
    match refused {
        None => 0,
        // SAFETY: the caller's promise.
        Some(refused) => unsafe { error::store(error, refused.code(), refused.to_string()) },
    }
}

/// The session was deleted.
///
/// # Safety
/// As sw_star_tables_plan_find.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_star_tables_session_closed(star: *const sw_star_tables, session: sw_bytes) {
    // SAFETY: the caller's promise.
    let Some(star) = (unsafe { borrow(star) }) else { return };
    // SAFETY: the caller's promise.
    let session = unsafe { session.as_slice() };
    guard((), || {
        let removed = star.plans_mut().session_closed(session);
        drop(removed);
        star.count_plans();
    });
}

/// Forgets all plans.
///
/// # Safety
/// See sw_star_tables_inline_ns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_star_tables_forget_plans(star: *const sw_star_tables) {
    // SAFETY: the caller's promise.
    let Some(star) = (unsafe { borrow(star) }) else { return };
    guard((), || {
        let removed = star.plans_mut().clear();
        drop(removed);
        star.count_plans();
    });
}
