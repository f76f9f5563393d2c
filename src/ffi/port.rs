//! `sw_port`: the only port of a task, if it has one.

use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

use super::engine::identity;
use super::error::sw_error;
use super::handle::{self, borrow, other_structs, require};
use super::types::{sw_bytes, sw_code, sw_engine_options};
use starwire_engine::config::ProcessEnv;
use starwire_engine::{Level, Port};
use starwire_protocol::code;

/// The port of the ClusterSpec, bound before TensorFlow's gRPC server is made, which then listens behind it.
pub struct sw_port {
    number: u16,
    grpc_address: String,
    /// Until an engine takes it.
    port: Mutex<Option<Port>>,
}

impl sw_port {
    pub(super) fn take(&self) -> Option<Port> {
        self.port.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// Reads the environment and binds the port of the server's own ClusterSpec entry, or `requested` if that is not 0.
/// Connections wait until an engine takes the port over. A port whose number is 0: the server has two ports
/// (STARWIRE_PORTS), and nothing was bound.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_port_bind(
    options: *const sw_engine_options,
    requested: u16,
    out: *mut *mut sw_port,
    error: *mut *mut sw_error,
) -> sw_code {
    let make = || {
        // SAFETY: the caller's promise.
        let options = unsafe { require(options, "options") }?;
        if options.struct_size != size_of::<sw_engine_options>() {
            return Err(other_structs());
        }
        // SAFETY: the caller's promise.
        let identity = unsafe { identity(options) }.map_err(|e| (code::INVALID_ARGUMENT, e))?;
        let port = Port::bind(&ProcessEnv, identity, requested).map_err(|e| (e.code(), e.to_string()))?;
        Ok(sw_port {
            number: port.as_ref().map_or(0, Port::number),
            grpc_address: port.as_ref().map_or_else(String::new, Port::grpc_address),
            port: Mutex::new(port),
        })
    };
    // SAFETY: the caller's promise.
    unsafe { handle::create("binding the port", out, error, make) }
}

/// If STARWIRE_STATE_FROM names another process of the task, takes over its state: returns when this process has it,
/// which may take for ever. Before sw_port_bind. `log` is called with `ctx`, by any thread, until this returns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_take_over(
    options: *const sw_engine_options,
    log: unsafe extern "C" fn(ctx: *mut c_void, level: i32, line: sw_bytes),
    ctx: *mut c_void,
    error: *mut *mut sw_error,
) -> sw_code {
    let ctx = Ctx(ctx);
    let take_over = || {
        // SAFETY: the caller's promise.
        let options = unsafe { require(options, "options") }?;
        if options.struct_size != size_of::<sw_engine_options>() {
            return Err(other_structs());
        }
        // SAFETY: the caller's promise.
        let identity = unsafe { identity(options) }.map_err(|e| (code::INVALID_ARGUMENT, e))?;
        let log = move |level: Level, line: &str| {
            let ctx = &ctx;
            // SAFETY: the caller's promise.
            unsafe { log(ctx.0, level as i32, sw_bytes::of(line.as_bytes())) }
        };
        starwire_engine::take_over(&ProcessEnv, identity, Arc::new(log)).map_err(|e| (e.code(), e.to_string()))
    };
    // SAFETY: the caller's promise.
    unsafe { handle::answer("taking over a state", &mut (), error, take_over) }
}

struct Ctx(*mut c_void);

// SAFETY: the caller of sw_take_over allows calls with it from any thread.
unsafe impl Send for Ctx {}
// SAFETY: the same.
unsafe impl Sync for Ctx {}

/// The number of the bound port; 0: the server has two ports.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_port_number(port: *const sw_port) -> u16 {
    // SAFETY: the caller's promise.
    unsafe { borrow(port) }.map_or(0, |port| port.number)
}

/// Where TensorFlow's gRPC server has to listen before sw_engine_new is called: an address as gRPC writes it. Valid as
/// long as the port.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_port_grpc_address(port: *const sw_port) -> sw_bytes {
    // SAFETY: the caller's promise.
    unsafe { borrow(port) }.map_or(sw_bytes::EMPTY, |port| sw_bytes::of(port.grpc_address.as_bytes()))
}

/// Closes the port, unless an engine has taken it over.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_port_free(port: *mut sw_port) {
    // SAFETY: the caller's promise.
    unsafe { handle::free(port) }
}
