//! Calls, rendezvous requests and their answers.

use std::ffi::c_void;

use super::channel::sw_channel;
use super::engine::sw_engine;
use super::guard;
use super::host;
use super::types::{SW_CALL_WAIT_FOR_READY, sw_bytes, sw_code, sw_op_vtable, sw_payload, sw_ticket};
use starwire_engine::{InBody, NewCall, NewRecv};

/// Starts a call. meta is copied. payload may be NULL. deadline_ms 0: none. Returns the id for sw_cancel. Never fails
/// directly: a failure arrives in vt->done (possibly before this returns).
///
/// # Safety
/// `channel` is live; `vt` is valid for ever (make it static) and accepts `op` until its `done`; the rest as said at
/// the structs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_call(
    channel: *mut sw_channel,
    method: u32,
    meta: sw_bytes,
    payload: *const sw_payload,
    deadline_ms: u32,
    flags: u32,
    vt: *const sw_op_vtable,
    op: *mut c_void,
) -> u64 {
    // SAFETY: the caller's promise.
    let (channel, payload, op, meta) =
        unsafe { (&*channel, host::payload(payload), host::pending(vt, op), meta.as_slice()) };
    guard(0, move || {
        channel.channel.call(NewCall {
            method,
            meta: meta.to_vec(),
            payload,
            deadline_ms,
            wait_for_ready: flags & SW_CALL_WAIT_FOR_READY != 0,
            op,
        })
    })
}

/// Starts a rendezvous request. `prefix` is the rendezvous key up to, not including, its last ';'.
///
/// # Safety
/// As sw_call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_recv(
    channel: *mut sw_channel,
    step_id: i64,
    prefix: sw_bytes,
    frame_id: u64,
    iter_id: u64,
    vt: *const sw_op_vtable,
    op: *mut c_void,
) -> u64 {
    // SAFETY: the caller's promise.
    let (channel, op, prefix) = unsafe { (&*channel, host::pending(vt, op), prefix.as_slice()) };
    guard(0, move || {
        channel.channel.recv(NewRecv { step: step_id, prefix: prefix.into(), frame: frame_id, iter: iter_id, op })
    })
}

/// Ends a call with `code` (usually Cancelled) and tells the peer. Its `done` runs soon, unless it already ran. Unknown
/// ids are ignored.
///
/// # Safety
/// `channel` is live; the bytes are valid during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_cancel(channel: *mut sw_channel, id: u64, code: sw_code, message: sw_bytes) {
    // SAFETY: the caller's promise.
    let (channel, message) = unsafe { (&*channel, message.as_slice()) };
    guard((), || channel.channel.cancel(id, code, String::from_utf8_lossy(message).into_owned()));
}

/// Answers a request. code 0: meta + payload. Else: meta is the message, payload (optional) carries error details as
/// one part. Takes the payload over in every case. May be called on any thread, also inside a handler.
///
/// # Safety
/// `engine` is live; the rest as said at the structs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_reply(
    engine: *mut sw_engine,
    ticket: sw_ticket,
    code: sw_code,
    meta: sw_bytes,
    payload: *const sw_payload,
) {
    // SAFETY: the caller's promise.
    let (engine, payload, meta) = unsafe { (&*engine, host::payload(payload), meta.as_slice()) };
    guard((), move || engine.engine.reply(ticket.into(), code, meta, payload));
}

/// Gives an incoming call's metadata and payload back.
///
/// # Safety
/// `body` is from an sw_call_request and is given back once.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_body_release(body: *mut c_void) {
    if !body.is_null() {
        // SAFETY: made by Box::into_raw in CHost::call; the caller gives it back once.
        drop(unsafe { Box::from_raw(body.cast::<InBody>()) });
    }
}
