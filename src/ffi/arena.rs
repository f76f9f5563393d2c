//! `sw_arena`: memory for tensors that travel over RDMA.

use std::ffi::c_void;

use super::error::{self, sw_error};
use super::guard;
use super::types::{sw_bytes, sw_code};
use starwire_engine::config::{ProcessEnv, Protocol, TransportChoice, verbs_config};
use starwire_net::transport::verbs::{Arena, Device, Library};

/// A range of memory of this process that is never unmapped, so that an RDMA device may keep it registered. Physical
/// memory is used only where it is written to.
#[repr(C)]
pub struct sw_arena {
    /// NULL if there is no arena.
    pub data: *mut c_void,
    pub len: usize,
    /// Smaller tensors do not benefit from the arena.
    pub min_bytes: usize,
}

/// The arena for servers of this protocol; always the same one. There is none if the environment does not select RDMA,
/// turns the arena off or is invalid (which sw_engine_new reports), or if this host has no device that works. An error
/// means that the arena cannot be reserved; servers work without it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_arena_reserve(
    protocol: sw_bytes,
    out: *mut sw_arena,
    error: *mut *mut sw_error,
) -> sw_code {
    // SAFETY: the caller's promise.
    let protocol = String::from_utf8_lossy(unsafe { protocol.as_slice() }).parse();
    let none = sw_arena { data: std::ptr::null_mut(), len: 0, min_bytes: 0 };
    let found = guard(Ok(None), || protocol.map_or(Ok(None), reserve));
    let (arena, code) = match found {
        Ok(arena) => (arena.unwrap_or(none), 0),
        // SAFETY: the caller's promise.
        Err(message) => (none, unsafe { error::store(error, 8, message) }),
    };
    // SAFETY: the caller's promise.
    unsafe { *out = arena };
    code
}

fn reserve(protocol: Protocol) -> Result<Option<sw_arena>, String> {
    let Ok(config) = verbs_config(&ProcessEnv, protocol) else { return Ok(None) };
    if config.transport != TransportChoice::Verbs || config.arena_bytes == 0 {
        return Ok(None);
    }
    if Library::load(&config.library).and_then(|library| Device::open(library, &config)).is_err() {
        return Ok(None);
    }
    let arena = Arena::reserve(config.arena_bytes).map_err(|error| format!("starwire: {error}"))?;
    // More than an address space has is never reached.
    let min_bytes = usize::try_from(config.direct_min).unwrap_or(usize::MAX);
    Ok(Some(sw_arena { data: arena.start().cast(), len: arena.len(), min_bytes }))
}
