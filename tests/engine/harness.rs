//! Engines in one process, with an owner written in Rust: echoes calls, produces tensors, counts what it is told.

// SAFETY of every block: ctx is the Host given to Owner::new, which outlives the engine (Task drops the engine first);
// what the engine hands to a handler is valid while the handler runs; a key is given back once, to key_free.
#![allow(clippy::undocumented_unsafe_blocks, reason = "one reason for all of them, above")]

use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use starwire::config::{Identity, MapEnv};
use starwire::engine::{Channel, ClientOp, Engine, EngineError, NewCall, NewRecv, OutPayload, Owner};
use starwire::ffi::call::sw_body_release;
use starwire::ffi::types::*;

#[path = "../verbs/library.rs"]
pub mod fake_library;

pub const PATIENCE: Duration = Duration::from_secs(20);

/// Methods of the echo owner.
pub const ECHO: u32 = 1;
pub const FAIL: u32 = 2;
pub const NEVER: u32 = 3;
pub const SEND_MUCH: u32 = 4;

/// An advertisement, or code and message of an error.
pub type Answer = Result<String, (i32, String)>;

#[derive(Default)]
pub struct Seen {
    pub lines: Mutex<Vec<String>>,
    pub cancels: Mutex<Vec<(u32, i64, bool)>>,
    pub keys_alive: AtomicU64,
    pub never: Mutex<Vec<sw_ticket>>,
    pub addresses: Mutex<Vec<(String, Answer)>>,
    /// What is answered before these, in order, whoever is asked for.
    pub first: Mutex<Vec<Answer>>,
    questions: AtomicU64,
    pub released: Arc<AtomicU64>,
}

impl Seen {
    /// How often somebody's gRPC port would have been asked.
    pub fn asked(&self) -> u64 {
        self.questions.load(Ordering::Relaxed)
    }
}

pub struct Task {
    pub engine: Option<Arc<Engine>>,
    pub seen: Box<Host>,
}

pub struct Host {
    pub seen: Seen,
    engine: Mutex<Option<Arc<Engine>>>,
}

impl std::ops::Deref for Host {
    type Target = Seen;
    fn deref(&self) -> &Seen {
        &self.seen
    }
}

impl Host {
    fn with_engine<R>(&self, f: impl FnOnce(&Engine) -> R) -> Option<R> {
        let engine = self.engine.lock().unwrap().clone();
        engine.map(|e| f(&e))
    }
}

unsafe fn host<'a>(ctx: *mut c_void) -> &'a Host {
    unsafe { &*ctx.cast::<Host>() }
}

unsafe extern "C" fn resolve(ctx: *mut c_void, task: sw_bytes, _grpc_address: sw_bytes, token: u64) {
    let host = unsafe { host(ctx) };
    let task = String::from_utf8(unsafe { task.as_slice() }.to_vec()).unwrap();
    let answer = host.addresses.lock().unwrap().iter().rev().find(|a| a.0 == task).map(|a| a.1.clone());
    let answer = answer.unwrap_or(Err((14, format!("nobody answers for {task}"))));
    let mut first = host.first.lock().unwrap();
    let answer = if first.is_empty() { answer } else { first.remove(0) };
    host.questions.fetch_add(1, Ordering::Relaxed);
    host.with_engine(|e| e.resolved(token, answer));
}

/// The value of a rendezvous key "…;N bytes of B": N bytes B.
unsafe extern "C" fn on_recv(ctx: *mut c_void, requests: *const sw_recv_request, n: usize) {
    let host = unsafe { host(ctx) };
    for request in unsafe { std::slice::from_raw_parts(requests, n) } {
        let key = unsafe { &*request.key.cast::<String>() };
        if key.contains("never") {
            host.never.lock().unwrap().push(request.ticket);
            continue;
        }
        let size: usize = key.rsplit(';').next().unwrap().parse().unwrap_or(0);
        let fill = (request.step_id as u8) ^ (request.frame_id as u8) ^ (request.iter_id as u8);
        let payload = payload(vec![vec![fill; size]], &host.released);
        host.with_engine(|e| e.reply(request.ticket, 0, format!("meta of {key}").as_bytes(), Some(payload)));
    }
}

unsafe extern "C" fn on_call(ctx: *mut c_void, call: *const sw_call_request) {
    let (host, call) = unsafe { (host(ctx), &*call) };
    let (meta, parts) =
        unsafe { (call.meta.as_slice().to_vec(), std::slice::from_raw_parts(call.parts, call.n_parts)) };
    assert!(parts.iter().all(|p| p.len == 0 || p.data.align_offset(64) == 0), "parts are aligned");
    let copies: Vec<Vec<u8>> = parts
        .iter()
        .map(|p| {
            if p.len == 0 { vec![] } else { unsafe { std::slice::from_raw_parts(p.data.cast::<u8>(), p.len) }.to_vec() }
        })
        .collect();
    unsafe { sw_body_release(call.body) };
    match call.method {
        ECHO => {
            let payload = (!copies.is_empty()).then(|| payload(copies, &host.released));
            host.with_engine(|e| e.reply(call.ticket, 0, &meta, payload));
        }
        FAIL => {
            host.with_engine(|e| {
                e.reply(call.ticket, 5, b"no such thing", Some(payload(vec![b"details".to_vec()], &host.released)))
            });
        }
        NEVER => host.never.lock().unwrap().push(call.ticket),
        SEND_MUCH => {
            let size: usize = String::from_utf8(meta).unwrap().parse().unwrap();
            let payload = payload(vec![vec![7; size]], &host.released);
            host.with_engine(|e| e.reply(call.ticket, 0, b"", Some(payload)));
        }
        other => {
            host.with_engine(|e| e.reply(call.ticket, 12, format!("method {other}").as_bytes(), None));
        }
    }
}

unsafe extern "C" fn on_cancel(ctx: *mut c_void, _ticket: sw_ticket, method: u32, tag: i64, peer_gone: u32) {
    unsafe { host(ctx) }.cancels.lock().unwrap().push((method, tag, peer_gone == 1));
}

unsafe extern "C" fn key_new(ctx: *mut c_void, prefix: sw_bytes) -> *mut c_void {
    let text = String::from_utf8(unsafe { prefix.as_slice() }.to_vec()).unwrap();
    if text.starts_with("bad") {
        return std::ptr::null_mut();
    }
    unsafe { host(ctx) }.keys_alive.fetch_add(1, Ordering::Relaxed);
    Box::into_raw(Box::new(text)).cast()
}

unsafe extern "C" fn key_free(ctx: *mut c_void, key: *mut c_void) {
    unsafe { host(ctx) }.keys_alive.fetch_sub(1, Ordering::Relaxed);
    drop(unsafe { Box::from_raw(key.cast::<String>()) });
}

unsafe extern "C" fn log(ctx: *mut c_void, _level: i32, line: sw_bytes) {
    let line = String::from_utf8_lossy(unsafe { line.as_slice() }).into_owned();
    unsafe { host(ctx) }.lines.lock().unwrap().push(line);
}

struct Held {
    bytes: Vec<Vec<u8>>,
    released: Arc<AtomicU64>,
}

unsafe extern "C" fn release(owner: *mut c_void) {
    let held = unsafe { Box::from_raw(owner.cast::<Held>()) };
    held.released.fetch_add(1, Ordering::Relaxed);
}

/// A payload that counts its release.
pub fn payload(bytes: Vec<Vec<u8>>, released: &Arc<AtomicU64>) -> OutPayload {
    let held = Box::new(Held { bytes, released: released.clone() });
    let parts: Vec<sw_part> = held.bytes.iter().map(|b| sw_part { data: b.as_ptr().cast(), len: b.len() }).collect();
    let owner = Box::into_raw(held).cast();
    unsafe {
        OutPayload::take(&sw_payload { parts: parts.as_ptr(), n_parts: parts.len(), owner, release: Some(release) })
    }
}

impl Task {
    pub fn start(name: &str, env: &[(&str, &str)]) -> Self {
        Self::try_start(name, "grpc++", 1, env).unwrap()
    }

    pub fn try_start(name: &str, protocol: &str, incarnation: u64, env: &[(&str, &str)]) -> Result<Self, EngineError> {
        let seen = Box::new(Host { seen: Seen::default(), engine: Mutex::new(None) });
        let handlers = sw_handlers {
            struct_size: size_of::<sw_handlers>(),
            resolve: Some(resolve),
            on_recv: Some(on_recv),
            on_call: Some(on_call),
            body_alloc: None,
            body_free: None,
            on_cancel: Some(on_cancel),
            key_new: Some(key_new),
            key_free: Some(key_free),
            on_peer_came: None,
            on_peer_gone: None,
            round_end: None,
            private_payloads: 0,
            log: Some(log),
        };
        let ctx = (&raw const *seen).cast_mut().cast();
        let owner = unsafe { Owner::new(handlers, ctx) };
        let mut vars = MapEnv::new("/nonexistent");
        // STARWIRE_TEST_TRANSPORT=verbs: the same tests over queue pairs of the fake libibverbs.
        if std::env::var("STARWIRE_TEST_TRANSPORT").is_ok_and(|transport| transport == "verbs") {
            vars = vars.set("STARWIRE_TRANSPORT", "verbs").set("STARWIRE_VERBS_FALLBACK", "false");
            vars = vars.set("STARWIRE_VERBS_LIBRARY", fake_library::path()).set("STARWIRE_UNIX", "off");
        }
        for (name, value) in env {
            vars = vars.set(name, value);
        }
        let identity = Identity {
            protocol: protocol.into(),
            job: name.split(['/', ':']).nth(2).unwrap().into(),
            task: name.into(),
            grpc_address: "localhost:0".into(),
            // Tasks of the cluster are held to their names.
            tasks: vec![("/job:ps/replica:0/task:0".into(), "somewhere:1".into())],
            cpus_allowed: 2,
        };
        let engine = Engine::start(&vars, identity, incarnation, owner)?;
        *seen.engine.lock().unwrap() = Some(engine.clone());
        Ok(Self { engine: Some(engine), seen })
    }

    pub fn engine(&self) -> &Arc<Engine> {
        self.engine.as_ref().unwrap()
    }

    /// Lets this task find the other.
    pub fn knows(&self, name: &str, other: &Task) {
        let address = other.engine().advertisement().to_string();
        self.seen.addresses.lock().unwrap().push((name.into(), Ok(address)));
    }

    pub fn channel(&self, task: &str) -> Channel {
        self.engine().channel(task, "somewhere:1").unwrap()
    }

    pub fn stop(&mut self) {
        self.seen.engine.lock().unwrap().take();
        if let Some(engine) = self.engine.take() {
            engine.stop();
        }
    }

    pub fn logged(&self, part: &str) -> usize {
        self.seen.lines.lock().unwrap().iter().filter(|l| l.contains(part)).count()
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        self.stop();
    }
}

/// What a call came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct End {
    pub code: i32,
    pub message: String,
    pub meta: Vec<u8>,
    pub from_peer: bool,
    pub parts: Vec<Vec<u8>>,
}

#[derive(Default)]
pub struct Waiter {
    end: Mutex<Option<End>>,
    changed: Condvar,
}

struct Op {
    waiter: Arc<Waiter>,
    parts: Vec<Vec<u8>>,
    refuse: bool,
}

impl Waiter {
    pub fn wait(&self) -> End {
        let until = Instant::now() + PATIENCE;
        let mut end = self.end.lock().unwrap();
        while end.is_none() {
            let left = until.checked_duration_since(Instant::now()).expect("the call ends in time");
            end = self.changed.wait_timeout(end, left).unwrap().0;
        }
        end.clone().unwrap()
    }

    pub fn is_done(&self) -> bool {
        self.end.lock().unwrap().is_some()
    }
}

unsafe extern "C" fn alloc(
    op: *mut c_void,
    _meta: sw_bytes,
    n: usize,
    lens: *const u64,
    bufs: *mut *mut c_void,
) -> sw_code {
    let op = unsafe { &mut *op.cast::<Op>() };
    if op.refuse {
        return 8;
    }
    let lens = unsafe { std::slice::from_raw_parts(lens, n) };
    op.parts = lens.iter().map(|l| vec![0xEE; *l as usize]).collect();
    for (i, part) in op.parts.iter_mut().enumerate() {
        unsafe { *bufs.add(i) = part.as_mut_ptr().cast() };
    }
    0
}

unsafe extern "C" fn done(op: *mut c_void, result: *const sw_result) {
    let (op, result) = unsafe { (Box::from_raw(op.cast::<Op>()), &*result) };
    let end = unsafe {
        End {
            code: result.code,
            message: String::from_utf8_lossy(result.message.as_slice()).into_owned(),
            meta: result.meta.as_slice().to_vec(),
            from_peer: result.from_peer == 1,
            parts: op.parts,
        }
    };
    let mut place = op.waiter.end.lock().unwrap();
    assert!(place.is_none(), "a call ends once");
    *place = Some(end);
    op.waiter.changed.notify_all();
}

static VTABLE: sw_op_vtable =
    sw_op_vtable { struct_size: size_of::<sw_op_vtable>(), alloc: Some(alloc), done: Some(done) };

pub fn op(refuse: bool) -> (Arc<Waiter>, ClientOp) {
    let waiter = Arc::new(Waiter::default());
    let op = Box::new(Op { waiter: waiter.clone(), parts: vec![], refuse });
    (waiter, unsafe { ClientOp::new(&VTABLE, Box::into_raw(op).cast()) })
}

#[derive(Default)]
pub struct Options {
    pub deadline_ms: u32,
    pub wait_for_ready: bool,
    pub refuse: bool,
}

pub fn call_with(
    channel: &Channel,
    method: u32,
    meta: &[u8],
    payload: Option<OutPayload>,
    options: &Options,
) -> (u64, Arc<Waiter>) {
    let (waiter, op) = op(options.refuse);
    let id = channel.call(NewCall {
        method,
        meta: meta.to_vec(),
        payload,
        deadline_ms: options.deadline_ms,
        wait_for_ready: options.wait_for_ready,
        op,
    });
    (id, waiter)
}

pub fn call(channel: &Channel, method: u32, meta: &[u8], payload: Option<OutPayload>) -> End {
    call_with(channel, method, meta, payload, &Options::default()).1.wait()
}

pub fn recv(channel: &Channel, step: i64, prefix: &str, frame: u64, iter: u64) -> (u64, Arc<Waiter>) {
    let (waiter, op) = op(false);
    let id = channel.recv(NewRecv { step, prefix: prefix.as_bytes().into(), frame, iter, op });
    (id, waiter)
}

pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < until, "{what} did not happen");
        std::thread::sleep(Duration::from_millis(2));
    }
}
