//! A task without TensorFlow: hands out tensors of any size and asks others for them. What `starctl bench` measures
//! with; all of it goes through the same C-shaped callbacks that TensorFlow's side uses.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use super::call::sw_body_release;
use super::types::{
    sw_bytes, sw_call_request, sw_code, sw_handlers, sw_op_vtable, sw_part, sw_payload, sw_recv_request, sw_result,
};
use crate::config::{Env, Identity};
use crate::engine::{Channel, ClientOp, Engine, EngineError, NewCall, NewRecv, OutPayload, Owner};
use starwire_protocol::code;

/// Largest tensor that is handed out.
pub const MAX_SIZE: usize = 1 << 30;
/// What tensors are made of.
const FILL: u8 = 0xA5;
/// The only method: answers with what it was sent.
const ECHO: u32 = 1;

/// A running task.
pub struct Rehearsal {
    // Dropped before `host`, which its reactors use until it was stopped.
    engine: Arc<Engine>,
    host: Arc<Host>,
    tasks: Vec<(String, String)>,
}

impl Rehearsal {
    pub fn start(env: &dyn Env, identity: Identity, incarnation: u64) -> Result<Self, EngineError> {
        let host = Arc::new(Host::default());
        let handlers = sw_handlers {
            struct_size: size_of::<sw_handlers>(),
            resolve: Some(resolve),
            on_recv: Some(on_recv),
            on_call: Some(on_call),
            body_alloc: None,
            body_free: None,
            on_cancel: None,
            key_new: Some(key_new),
            key_free: Some(key_free),
            on_peer_came: None,
            on_peer_gone: None,
            round_end: None,
            private_payloads: 0,
            log: Some(log),
        };
        // SAFETY: the handlers take a Host; `drop` stops the engine, which ends all handlers, before the host can go.
        let owner = unsafe { Owner::new(handlers, Arc::as_ptr(&host).cast_mut().cast()) };
        let tasks = identity.tasks.clone();
        let engine = Engine::start(env, identity, incarnation, owner)?;
        // Nobody can have asked before: no address is known yet.
        let _ = host.engine.set(Arc::downgrade(&engine));
        Ok(Self { engine, host, tasks })
    }

    pub fn banner(&self) -> &str {
        self.engine.banner()
    }

    pub fn advertisement(&self) -> &str {
        self.engine.advertisement()
    }

    /// Its numbers, as Prometheus reads them.
    pub fn metrics(&self) -> String {
        self.engine.metrics_text()
    }

    /// The way to another task, which said this about itself.
    pub fn way(&self, task: &str, advertisement: &str) -> Result<Way, EngineError> {
        self.host.lock_addresses().insert(task.to_owned(), advertisement.to_owned());
        // Only tasks of the own cluster are held to their name.
        let grpc_address = self.tasks.iter().find(|(name, _)| name == task).map_or(task, |(_, address)| address);
        Ok(Way { channel: self.engine.channel(task, grpc_address)?, spare: Arc::default() })
    }
}

impl Drop for Rehearsal {
    fn drop(&mut self) {
        self.engine.stop();
    }
}

/// The way to one peer.
pub struct Way {
    channel: Channel,
    spare: Arc<Mutex<Vec<Vec<u8>>>>,
}

impl Way {
    /// One method call without payload, there and back.
    pub fn call(&self, patience: Duration) -> Result<Duration, String> {
        let batch = Arc::new(Batch::new(1));
        let begun = Instant::now();
        let deadline_ms = u32::try_from(patience.as_millis()).unwrap_or(u32::MAX);
        let op = self.op(&batch, Vec::new());
        self.channel.call(NewCall {
            method: ECHO,
            meta: Vec::new(),
            payload: None,
            deadline_ms,
            wait_for_ready: false,
            op,
        });
        batch.wait(begun, patience)
    }

    /// Asks for `count` tensors of `size` bytes at once and waits for the last byte of the last. Each one is looked at.
    pub fn tensors(&self, step: i64, keys: &Keys, patience: Duration) -> Result<Duration, String> {
        let batch = Arc::new(Batch::new(keys.prefixes.len()));
        let buffers: Vec<Vec<u8>> = keys.prefixes.iter().map(|_| self.spare_buffer(keys.size)).collect();
        let begun = Instant::now();
        for (prefix, buffer) in keys.prefixes.iter().zip(buffers) {
            let op = self.op(&batch, buffer);
            self.channel.recv(NewRecv { step, prefix: prefix.clone(), frame: 0, iter: 0, op });
        }
        batch.wait(begun, patience)
    }

    fn op(&self, batch: &Arc<Batch>, buffer: Vec<u8>) -> ClientOp {
        let op = Box::new(Op { batch: Arc::clone(batch), buffer, spare: Arc::clone(&self.spare) });
        // SAFETY: the vtable is static and its functions take an Op; `done`, which comes once and last, frees it.
        unsafe { ClientOp::new(&VTABLE, Box::into_raw(op).cast()) }
    }

    /// Memory that was used before, so that the kernel's page faults are not measured.
    fn spare_buffer(&self, size: usize) -> Vec<u8> {
        let mut buffer = lock(&self.spare).pop().unwrap_or_default();
        buffer.resize(size, 0);
        // A reply that never came must not look like one that did.
        mark_unwritten(&mut buffer);
        buffer
    }
}

/// The rendezvous keys of a step: as long as TensorFlow's.
pub struct Keys {
    prefixes: Vec<Box<[u8]>>,
    size: usize,
}

impl Keys {
    pub fn new(count: usize, size: usize) -> Self {
        let prefix = |i| {
            format!(
                "/job:starctl/replica:0/task:0/device:CPU:0;0123456789abcdef;/job:starctl/replica:0/task:1/device:CPU:0;edge_{i}_variable/read:0;{size}"
            )
        };
        Self { prefixes: (0..count).map(|i| prefix(i).into_bytes().into_boxed_slice()).collect(), size }
    }

    /// Payload of a step.
    pub fn bytes(&self) -> usize {
        self.size * self.prefixes.len()
    }

    pub fn count(&self) -> usize {
        self.prefixes.len()
    }
}

/// What the callbacks of one engine share.
#[derive(Default)]
struct Host {
    engine: OnceLock<std::sync::Weak<Engine>>,
    addresses: Mutex<HashMap<String, String>>,
    /// The bytes of all tensors that are handed out: the longest so far.
    content: Mutex<Arc<Vec<u8>>>,
}

impl Host {
    fn lock_addresses(&self) -> MutexGuard<'_, HashMap<String, String>> {
        lock(&self.addresses)
    }

    fn engine(&self) -> Option<Arc<Engine>> {
        self.engine.get()?.upgrade()
    }

    fn tensor(&self, size: usize) -> OutPayload {
        let content = {
            let mut content = lock(&self.content);
            if content.len() < size {
                *content = Arc::new(vec![FILL; size]);
            }
            Arc::clone(&content)
        };
        let part = sw_part { data: content.as_ptr().cast(), len: size };
        let owner = Arc::into_raw(content).cast_mut().cast();
        // SAFETY: the part lies within `content`, which nobody changes and which lives until `release_content`.
        unsafe {
            OutPayload::take(&sw_payload { parts: &raw const part, n_parts: 1, owner, release: Some(release_content) })
        }
    }
}

unsafe extern "C" fn release_content(owner: *mut c_void) {
    // SAFETY: made by Arc::into_raw in `tensor`, released once.
    drop(unsafe { Arc::from_raw(owner.cast_const().cast::<Vec<u8>>()) });
}

/// # Safety
/// `ctx` is the Host of `Rehearsal::start`, which lives as long as handlers run.
unsafe fn host<'a>(ctx: *mut c_void) -> &'a Host {
    // SAFETY: the caller's promise.
    unsafe { &*ctx.cast::<Host>() }
}

unsafe extern "C" fn resolve(ctx: *mut c_void, task: sw_bytes, _grpc_address: sw_bytes, token: u64) {
    // SAFETY: handlers get the ctx that they were registered with, and bytes that live through the call.
    let (host, task) = unsafe { (host(ctx), String::from_utf8_lossy(task.as_slice()).into_owned()) };
    let answer = host.lock_addresses().get(&task).cloned();
    if let Some(engine) = host.engine() {
        engine.resolved(token, answer.ok_or_else(|| (code::UNAVAILABLE, format!("nobody knows {task}"))));
    }
}

unsafe extern "C" fn on_recv(ctx: *mut c_void, requests: *const sw_recv_request, n: usize) {
    // SAFETY: as in `resolve`; `requests` has n elements.
    let (host, requests) = unsafe { (host(ctx), std::slice::from_raw_parts(requests, n)) };
    let Some(engine) = host.engine() else { return };
    for request in requests {
        // SAFETY: what `key_new` returned, not yet given to `key_free`.
        let size = unsafe { *request.key.cast::<usize>() };
        engine.reply(request.ticket, 0, b"", Some(host.tensor(size)));
    }
}

unsafe extern "C" fn on_call(ctx: *mut c_void, call: *const sw_call_request) {
    // SAFETY: as in `resolve`; the call and its metadata live until the body was released, which is below.
    let (host, call) = unsafe { (host(ctx), &*call) };
    // SAFETY: as above.
    let meta = unsafe { call.meta.as_slice() };
    if let Some(engine) = host.engine() {
        match call.method {
            ECHO => engine.reply(call.ticket, 0, meta, None),
            _ => engine.reply(call.ticket, 12, b"a rehearsal has no such method", None),
        }
    }
    // SAFETY: released once, and `meta` is not used any more.
    unsafe { sw_body_release(call.body) };
}

/// A key says how long its tensor is: "...;SIZE".
unsafe extern "C" fn key_new(_ctx: *mut c_void, prefix: sw_bytes) -> *mut c_void {
    // SAFETY: the bytes live through the call.
    let text = unsafe { prefix.as_slice() };
    let size = std::str::from_utf8(text).ok().and_then(|t| t.rsplit(';').next()?.parse::<usize>().ok());
    match size.filter(|size| *size <= MAX_SIZE) {
        Some(size) => Box::into_raw(Box::new(size)).cast(),
        None => std::ptr::null_mut(),
    }
}

unsafe extern "C" fn key_free(_ctx: *mut c_void, key: *mut c_void) {
    // SAFETY: made by `key_new`, freed once.
    drop(unsafe { Box::from_raw(key.cast::<usize>()) });
}

unsafe extern "C" fn log(_ctx: *mut c_void, level: i32, line: sw_bytes) {
    if level > 0 {
        // SAFETY: the bytes live through the call.
        eprintln!("{}", String::from_utf8_lossy(unsafe { line.as_slice() }));
    }
}

/// Requests that are waited for together.
struct Batch {
    state: Mutex<Pending>,
    done: Condvar,
}

struct Pending {
    left: usize,
    ended: Instant,
    failure: Option<String>,
}

impl Batch {
    fn new(count: usize) -> Self {
        Self { state: Mutex::new(Pending { left: count, ended: Instant::now(), failure: None }), done: Condvar::new() }
    }

    fn finish(&self, failure: Option<String>) {
        let mut state = lock(&self.state);
        state.left = state.left.saturating_sub(1);
        state.failure = state.failure.take().or(failure);
        if state.left == 0 {
            state.ended = Instant::now();
            self.done.notify_one();
        }
    }

    fn wait(&self, begun: Instant, patience: Duration) -> Result<Duration, String> {
        let state = lock(&self.state);
        let (state, timeout) = self
            .done
            .wait_timeout_while(state, patience, |state| state.left > 0)
            .unwrap_or_else(PoisonError::into_inner);
        if timeout.timed_out() && state.left > 0 {
            return Err(format!("{} answers did not come within {patience:?}", state.left));
        }
        match &state.failure {
            Some(failure) => Err(failure.clone()),
            None => Ok(state.ended.saturating_duration_since(begun)),
        }
    }
}

/// One request and the memory for its answer.
struct Op {
    batch: Arc<Batch>,
    buffer: Vec<u8>,
    spare: Arc<Mutex<Vec<Vec<u8>>>>,
}

static VTABLE: sw_op_vtable =
    sw_op_vtable { struct_size: size_of::<sw_op_vtable>(), alloc: Some(alloc), done: Some(done) };

unsafe extern "C" fn alloc(
    op: *mut c_void,
    _: sw_bytes,
    n: usize,
    lens: *const u64,
    bufs: *mut *mut c_void,
) -> sw_code {
    // SAFETY: an Op of `Way::op` that `done` has not freed; lens and bufs have n elements.
    let (op, lens, bufs) = unsafe {
        (&mut *op.cast::<Op>(), std::slice::from_raw_parts(lens, n), std::slice::from_raw_parts_mut(bufs, n))
    };
    match (lens, bufs) {
        ([len], [buf]) if usize::try_from(*len) == Ok(op.buffer.len()) => {
            *buf = op.buffer.as_mut_ptr().cast();
            0
        }
        _ => code::INVALID_ARGUMENT,
    }
}

unsafe extern "C" fn done(op: *mut c_void, result: *const sw_result) {
    // SAFETY: made by `Way::op`, finished once; the result lives through the call.
    let (op, result) = unsafe { (Box::from_raw(op.cast::<Op>()), &*result) };
    let failure = if result.code != 0 {
        // SAFETY: as above.
        Some(String::from_utf8_lossy(unsafe { result.message.as_slice() }).into_owned())
    } else if !is_written(&op.buffer) {
        Some("a tensor arrived with the wrong content".to_owned())
    } else {
        None
    };
    let Op { batch, buffer, spare } = *op;
    lock(&spare).push(buffer);
    batch.finish(failure);
}

fn mark_unwritten(buffer: &mut [u8]) {
    for at in probes(buffer.len()) {
        buffer[at] = 0;
    }
}

fn is_written(buffer: &[u8]) -> bool {
    probes(buffer.len()).all(|at| buffer[at] == FILL)
}

/// Looking at every byte would be measured as well: the ends and the middle tell.
fn probes(len: usize) -> impl Iterator<Item = usize> {
    [0, len / 2, len.saturating_sub(1)].into_iter().filter(move |at| *at < len)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::MapEnv;

    const PATIENCE: Duration = Duration::from_secs(20);

    fn start(index: usize, env: &MapEnv) -> Rehearsal {
        let identity = Identity {
            protocol: "grpc++".to_owned(),
            job: "starctl".to_owned(),
            task: format!("/job:starctl/replica:0/task:{index}"),
            grpc_address: "localhost:0".to_owned(),
            tasks: (0..3).map(|i| (format!("/job:starctl/replica:0/task:{i}"), format!("localhost:{i}"))).collect(),
            cpus_allowed: 2,
        };
        Rehearsal::start(env, identity, 7).unwrap()
    }

    #[test]
    fn calls_and_tensors_go_there_and_back() {
        for unix in ["off", "auto"] {
            let env = MapEnv::new("/nonexistent").set("STARWIRE_UNIX", unix);
            let (server, client) = (start(0, &env), start(1, &env));
            let way = client.way("/job:starctl/replica:0/task:0", server.advertisement()).unwrap();
            way.call(PATIENCE).unwrap();
            for (count, size) in [(1, 0), (3, 100), (2, 1 << 20)] {
                let keys = Keys::new(count, size);
                assert_eq!((keys.count(), keys.bytes()), (count, count * size));
                for step in 0..3 {
                    way.tensors(step, &keys, PATIENCE).unwrap();
                }
            }
        }
    }

    #[test]
    fn reactors_without_connections_do_not_hold_up_the_end() {
        let env = MapEnv::new("/nonexistent").set("STARWIRE_REACTORS", "4");
        let (server, client) = (start(0, &env), start(1, &env));
        client.way("/job:starctl/replica:0/task:0", server.advertisement()).unwrap().call(PATIENCE).unwrap();
        let begun = Instant::now();
        drop(client);
        drop(server);
        assert!(begun.elapsed() < Duration::from_secs(1), "took {:?}", begun.elapsed());
    }

    #[test]
    fn failures_say_why() {
        let env = MapEnv::new("/nonexistent");
        let client = start(1, &env);
        let way = client.way("/job:starctl/replica:0/task:0", "nonsense").unwrap();
        assert!(way.call(PATIENCE).unwrap_err().contains("advertisement"));
        let server = start(0, &env);
        let way = client.way("/job:starctl/replica:0/task:2", server.advertisement()).unwrap();
        // Whoever answers at the address is the peer, whatever the client calls it.
        eventually_ok(&way);
        let way = client.way("/job:starctl/replica:0/task:0", server.advertisement()).unwrap();
        eventually_ok(&way);
        let too_large = Keys { size: 8, ..Keys::new(1, MAX_SIZE + 1) };
        assert!(way.tensors(1, &too_large, PATIENCE).is_err());
        let not_what_was_asked_for = Keys { size: 8, ..Keys::new(1, 9) };
        assert!(way.tensors(1, &not_what_was_asked_for, PATIENCE).is_err());
    }

    /// The first attempts may still meet the back-off of the failure before.
    fn eventually_ok(way: &Way) {
        let begun = Instant::now();
        while let Err(error) = way.call(PATIENCE) {
            assert!(begun.elapsed() < PATIENCE, "{error}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}
