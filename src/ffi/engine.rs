//! `sw_engine`: one TensorFlow server's transport.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::error::sw_error;
use super::guard;
use super::handle::{self, borrow, other_structs, require};
use super::host::{CEngine, CHost};
use super::port::sw_port;
use super::types::{sw_bytes, sw_code, sw_engine_options, sw_handlers, sw_string};
use starwire_engine::config::{Identity, ProcessEnv, UnknownProtocol, unread_variables};
use starwire_net::reactor::topology::Topology;
use starwire_protocol::code;

/// One TensorFlow server: its reactors, its data port, its channels.
pub struct sw_engine {
    pub(super) engine: Arc<CEngine>,
}

/// Reads the environment and .endpoint_map (strictly: an error names file and line), binds the data port, starts the
/// reactors. `handlers` is copied; `ctx` is passed to each handler.
///
/// # Safety
/// `options` and `handlers` are readable and their bytes valid during the call; the handlers accept `ctx` from any
/// thread until sw_engine_stop has returned; `out` is writable, `error` writable or null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_engine_new(
    options: *const sw_engine_options,
    handlers: *const sw_handlers,
    ctx: *mut c_void,
    out: *mut *mut sw_engine,
    error: *mut *mut sw_error,
) -> sw_code {
    let make = || {
        // SAFETY: the caller's promise.
        let (options, handlers) = unsafe { (require(options, "options")?, *require(handlers, "handlers")?) };
        if options.struct_size != size_of::<sw_engine_options>() || handlers.struct_size != size_of::<sw_handlers>() {
            return Err(other_structs());
        }
        // SAFETY: the caller's promise.
        let identity = unsafe { identity(options) }.map_err(|e| (code::INVALID_ARGUMENT, e))?;
        // SAFETY: the caller's promise.
        let host = unsafe { CHost::new(handlers, ctx)? };
        // SAFETY: the caller's promise.
        let port = unsafe { borrow(options.port) }.and_then(sw_port::take);
        WARNED.store(true, Ordering::Relaxed);
        CEngine::start(&ProcessEnv, identity, options.incarnation, host, port).map_err(|e| (e.code(), e.to_string()))
    };
    // SAFETY: the caller's promise.
    unsafe { handle::create("starting the engine", out, error, || make().map(|engine| sw_engine { engine })) }
}

/// # Safety
/// The options' bytes are valid during the call.
pub(super) unsafe fn identity(o: &sw_engine_options) -> Result<Identity, String> {
    let text = |b: &sw_bytes, what: &str| {
        // SAFETY: the caller's promise.
        String::from_utf8(unsafe { b.as_slice() }.to_vec()).map_err(|_| format!("starwire: {what} is not UTF-8"))
    };
    let n = o.cluster_tasks as usize;
    let mut tasks = Vec::with_capacity(n);
    for i in 0..n {
        // SAFETY: the caller's promise: both arrays have cluster_tasks elements.
        let (name, address) = unsafe { (&*o.cluster_names.add(i), &*o.cluster_addresses.add(i)) };
        tasks.push((text(name, "a task's name")?, text(address, "a task's address")?));
    }
    Ok(Identity {
        protocol: text(&o.protocol, "the protocol")?.parse().map_err(|e: UnknownProtocol| e.to_string())?,
        job: text(&o.job, "the job's name")?,
        task: text(&o.task, "the task's name")?,
        grpc_address: text(&o.grpc_address, "the server's address")?,
        tasks,
        cpus_allowed: Topology::detect().map_or(1, |t| t.cores()),
        grpc_gives_way: o.grpc_gives_way != 0,
    })
}

/// One line for the log: "starwire: grpc++ on 2 reactors (epoll, poll=off, pin=off), data port ...". Valid as long as
/// the engine.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_engine_banner(engine: *const sw_engine) -> sw_bytes {
    // SAFETY: the caller's promise.
    unsafe { borrow(engine) }.map_or(sw_bytes::EMPTY, |e| sw_bytes::of(e.engine.banner().as_bytes()))
}

/// After this many seconds without a connection to its task, a session may be deleted.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_engine_session_idle_s(engine: *const sw_engine) -> u64 {
    // SAFETY: the caller's promise.
    unsafe { borrow(engine) }.map_or(u64::MAX, |e| e.engine.session_idle().as_secs())
}

/// Ends every call (Cancelled/Unavailable), closes every connection, joins every thread. When it returns no handler
/// runs or will run again. Idempotent. Do not call it from a reactor thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_engine_stop(engine: *mut sw_engine) {
    // SAFETY: the caller's promise.
    if let Some(e) = unsafe { borrow(engine) } {
        guard((), || e.engine.stop());
    }
}

/// Stops and frees the engine. Do not call sw_engine_reply afterwards; channels may be released later.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_engine_free(engine: *mut sw_engine) {
    // SAFETY: the caller's promise.
    if let Some(engine) = unsafe { borrow(engine) } {
        guard((), || engine.engine.stop());
    }
    // SAFETY: the caller's promise.
    unsafe { handle::free(engine) }
}

/// Stores in `out` where TensorFlow's gRPC clients of this process have to connect to reach the server of the task with
/// this address in the ClusterSpec: there, or with a secret or TLS, at "127.0.0.1:port" of this process. Free `out`
/// with sw_string_free.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_engine_tunnel_address(
    engine: *const sw_engine,
    grpc_address: sw_bytes,
    out: *mut sw_string,
    error: *mut *mut sw_error,
) -> sw_code {
    // SAFETY: the caller's promise.
    let (engine, address) = unsafe { (require(engine, "an engine"), grpc_address.as_slice()) };
    let read = || {
        let address = String::from_utf8(address.to_vec())
            .map_err(|_| (code::INVALID_ARGUMENT, "starwire: a task's address is not UTF-8".to_string()))?;
        let tunnel = engine?.engine.tunnel_address(&address).map_err(|e| (e.code(), e.to_string()))?;
        Ok(tunnel.map_or(address, |tunnel| tunnel.to_string()))
    };
    // SAFETY: the caller's promise.
    unsafe { handle::answer("opening a tunnel", out, error, || read().map(string)) }
}

/// Counters of the engine as Prometheus text. Free with sw_string_free.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_engine_metrics(engine: *const sw_engine) -> sw_string {
    // SAFETY: the caller's promise.
    let text = unsafe { borrow(engine) }.map_or_else(String::new, |e| guard(String::new(), || e.engine.metrics_text()));
    string(text)
}

/// Set once the warnings about the environment have been given.
static WARNED: AtomicBool = AtomicBool::new(false);

/// Warnings about STARWIRE variables that have no effect, one per line. Empty after the first call, and after an engine
/// has started, which logs them itself. For processes without a server. Free with sw_string_free.
#[unsafe(no_mangle)]
pub extern "C" fn sw_environment_warnings() -> sw_string {
    let text = guard(String::new(), || match WARNED.swap(true, Ordering::Relaxed) {
        true => String::new(),
        false => unread_variables(&ProcessEnv).join("\n"),
    });
    string(text)
}

fn string(text: String) -> sw_string {
    let mut bytes = std::mem::ManuallyDrop::new(text.into_bytes());
    sw_string { data: bytes.as_mut_ptr(), len: bytes.len(), cap: bytes.capacity() }
}

/// For the metrics: counts a sent reply that carries `tensors` tensors as one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_engine_count_fused(engine: *const sw_engine, tensors: u64) {
    // SAFETY: the caller's promise.
    let engine = unsafe { borrow(engine) };
    guard((), || engine.map_or((), |engine| engine.engine.count_fused(tensors)));
}

/// Frees a string that a function of this library returned.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_string_free(string: sw_string) {
    if !string.data.is_null() {
        // SAFETY: taken apart from a Vec in `string`.
        drop(unsafe { Vec::from_raw_parts(string.data, string.len, string.cap) });
    }
}
