//! Calls, rendezvous requests and their answers.

use std::ffi::c_void;

use super::channel::sw_channel;
use super::engine::sw_engine;
use super::guard;
use super::handle::{self, borrow};
use super::host;
use super::types::{
    SW_CALL_DEADLINE_TO_CONNECT, SW_CALL_WAIT_FOR_READY, sw_body, sw_bytes, sw_code, sw_op_vtable, sw_payload,
    sw_ticket,
};
use starwire_engine::{NewCall, NewRecv};

/// Starts a call. meta is copied. payload may be NULL. deadline_ms 0: none. Returns the id for sw_channel_cancel. A
/// failure is always reported to vt->done, possibly before this returns.
///
/// # Safety
/// `channel` is live; `vt` stays valid for the life of the process (make it static) and accepts `op` until its `done`;
/// the rest as the structs specify.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_channel_call(
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
    let (payload, op, meta) = unsafe { (host::payload(payload), host::pending(vt, op), meta.as_slice()) };
    // SAFETY: the caller's promise. Without a channel the op ends here, as it is dropped.
    let Some(channel) = (unsafe { borrow(channel) }) else { return 0 };
    guard(0, move || {
        channel.channel.call(NewCall {
            method,
            meta: meta.to_vec(),
            payload,
            deadline_ms,
            wait_for_ready: flags & SW_CALL_WAIT_FOR_READY != 0,
            deadline_to_connect: flags & SW_CALL_DEADLINE_TO_CONNECT != 0,
            op,
        })
    })
}

/// Starts a rendezvous request. `prefix` is the rendezvous key up to, not including, its last ';'.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_channel_recv(
    channel: *mut sw_channel,
    step_id: i64,
    prefix: sw_bytes,
    frame_id: u64,
    iter_id: u64,
    vt: *const sw_op_vtable,
    op: *mut c_void,
) -> u64 {
    // SAFETY: the caller's promise.
    let (op, prefix) = unsafe { (host::pending(vt, op), prefix.as_slice()) };
    // SAFETY: the caller's promise. Without a channel the op ends here, as it is dropped.
    let Some(channel) = (unsafe { borrow(channel) }) else { return 0 };
    guard(0, move || {
        channel.channel.recv(NewRecv { step: step_id, prefix: prefix.into(), frame: frame_id, iter: iter_id, op })
    })
}

/// Ends a call with `code` (usually Cancelled) and tells the peer. Its `done` runs soon, unless it already ran. Unknown
/// ids are ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_channel_cancel(channel: *mut sw_channel, id: u64, code: sw_code, message: sw_bytes) {
    // SAFETY: the caller's promise.
    let Some(channel) = (unsafe { borrow(channel) }) else { return };
    // SAFETY: the caller's promise.
    let message = unsafe { message.as_slice() };
    guard((), || channel.channel.cancel(id, code, String::from_utf8_lossy(message).into_owned()));
}

/// Answers a request. code 0: meta + payload. Else: meta is the message, payload (optional) carries error details as
/// one part. Takes over the payload in every case. May be called on any thread, also inside a handler.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_engine_reply(
    engine: *mut sw_engine,
    ticket: sw_ticket,
    code: sw_code,
    meta: sw_bytes,
    payload: *const sw_payload,
) {
    // SAFETY: the caller's promise.
    let (payload, meta) = unsafe { (host::payload(payload), meta.as_slice()) };
    // SAFETY: the caller's promise.
    let Some(engine) = (unsafe { borrow(engine) }) else { return };
    guard((), move || engine.engine.reply(ticket.into(), code, meta, payload));
}

/// Frees an incoming call's metadata and payload.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_body_free(body: *mut sw_body) {
    // SAFETY: the caller's promise.
    unsafe { handle::free(body) }
}
