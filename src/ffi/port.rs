//! `sw_port`: the only port of a task, if it has one.

use std::sync::{Mutex, PoisonError};

use super::engine::identity;
use super::error::sw_error;
use super::handle::{self, borrow, other_structs, require};
use super::types::{sw_bytes, sw_code, sw_engine_options};
use starwire_engine::Port;
use starwire_engine::config::ProcessEnv;
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
