//! The heads of star calls (`starwire_protocol::star`), for the workers that make them.

use std::mem::offset_of;
use std::num::NonZeroU64;

use super::error::{self, sw_error};
use super::guard;
use super::handle::{array, other_structs, require};
use super::types::{sw_bytes, sw_code};
use starwire_protocol::code;
use starwire_protocol::star::{self, CallHead, CallId, EndHead, Keep, PlanHash, RegisterHead, ReplyHead, StarError};

/// A fetch that stays on the server for a later call of the step. At most one per fetch.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct sw_star_keep {
    pub fetch: u32,
    pub slot: u32,
    /// 1: the value is in the reply as well.
    pub flags: u32,
}

const _: () = {
    assert!(size_of::<sw_star_keep>() == size_of::<Keep>() && align_of::<sw_star_keep>() == align_of::<Keep>());
    assert!(offset_of!(sw_star_keep, fetch) == offset_of!(Keep, fetch));
    assert!(offset_of!(sw_star_keep, slot) == offset_of!(Keep, slot));
    assert!(offset_of!(sw_star_keep, flags) == offset_of!(Keep, flags));
};

/// SHA-256 of `bytes`: the name of a plan.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_sha256(bytes: sw_bytes, out: *mut u8) {
    // SAFETY: the caller's promise.
    let bytes = unsafe { bytes.as_slice() };
    let digest = guard([0; 32], || star::plan_hash(bytes));
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(digest.as_ptr(), out, digest.len()) }
}

/// The head of a star call.
#[repr(C)]
pub struct sw_star_call_head {
    pub struct_size: usize,
    /// 1: no later call of the step needs a slot on this server. 2: the reply carries the kernels' statistics.
    pub flags: u8,
    pub step_id: i64,
    /// The incarnation of the plan's device as the worker knows it (tensorflow.DeviceAttributes); 0: any.
    pub incarnation: u64,
    /// 32 bytes.
    pub plan: *const u8,
    /// The session's handle, as the server knows it from CreateWorkerSession.
    pub session: sw_bytes,
    pub keeps: *const sw_star_keep,
    pub n_keeps: usize,
    /// From sw_channel_lane_take. number 0: the call is not sent again.
    pub lane: u32,
    /// How often the call was sent before. It runs once.
    pub attempt: u32,
    pub number: u64,
}

/// The head of the reply to a star call.
#[repr(C)]
pub struct sw_star_reply_head {
    /// 1: the server does not know the plan and has done nothing; the call is repeated after a registration.
    pub flags: u8,
    /// From the call's last byte to the first kernel, and from there to the reply.
    pub queue_micros: u32,
    pub run_micros: u32,
    /// The payload's last part, unless this is 0: a serialised StepStats of so many bytes.
    pub stats_bytes: u32,
    /// Where the table of fetches begins.
    pub table: usize,
}

/// The longest head, without its session's handle and kept values.
pub const SW_STAR_HEAD_BYTES: usize = 80;

const _: () = assert!(SW_STAR_HEAD_BYTES == star::CALL_BYTES);

/// # Safety
/// `plan` points at 32 bytes.
unsafe fn hash_at(plan: *const u8) -> PlanHash {
    // SAFETY: the caller's promise; bytes have no alignment.
    unsafe { *plan.cast::<PlanHash>() }
}

/// # Safety
/// `out` has room for `*len` bytes; `len` is writable, `error` writable or null.
unsafe fn written(
    write: impl FnOnce(&mut Vec<u8>) -> Result<(), StarError>,
    out: *mut u8,
    len: *mut usize,
    error: *mut *mut sw_error,
) -> sw_code {
    let mut head = Vec::new();
    let written = write(&mut head).map_err(|reason| (code::INVALID_ARGUMENT, reason.to_string()));
    // SAFETY: the caller's promise.
    let room = unsafe { *len };
    let fits = written.and_then(|()| match head.len() <= room {
        true => Ok(()),
        false => Err((code::INTERNAL, format!("starwire: bug: {room} bytes for a head of {}", head.len()))),
    });
    match fits {
        Ok(()) => {
            // SAFETY: the caller's promise; it fits.
            unsafe {
                std::ptr::copy_nonoverlapping(head.as_ptr(), out, head.len());
                *len = head.len();
            }
            0
        }
        // SAFETY: the caller's promise.
        Err((code, message)) => unsafe { error::store(error, code, message) },
    }
}

/// Writes the head of a star call to `out`; the table of feeds follows it in the metadata. `len` is the room,
/// SW_STAR_HEAD_BYTES + session.len + n_keeps * sizeof(sw_star_keep) bytes, and then the head's length.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_star_call_head_write(
    head: *const sw_star_call_head,
    out: *mut u8,
    len: *mut usize,
    error: *mut *mut sw_error,
) -> sw_code {
    // SAFETY: the caller's promise.
    let head = match unsafe { require(head, "head") } {
        Ok(head) => head,
        // SAFETY: the caller's promise.
        Err((code, message)) => return unsafe { error::store(error, code, message) },
    };
    if head.struct_size != size_of::<sw_star_call_head>() {
        let (code, message) = other_structs();
        // SAFETY: the caller's promise.
        return unsafe { error::store(error, code, message) };
    }
    // SAFETY: the caller's promise.
    let (plan, session, keeps) =
        unsafe { (hash_at(head.plan), head.session.as_slice(), array(head.keeps, head.n_keeps)) };
    let keeps = keeps.iter().map(|keep| Keep { fetch: keep.fetch, slot: keep.slot, flags: keep.flags }).collect();
    let (flags, step, incarnation) = (head.flags, head.step_id, head.incarnation);
    let call_id = NonZeroU64::new(head.number).map(|number| CallId { lane: head.lane, attempt: head.attempt, number });
    let call = CallHead { flags, step, incarnation, plan, call_id, session, keeps };
    // SAFETY: the caller's promise.
    unsafe { written(|meta| call.write(meta), out, len, error) }
}

/// Reads the head of a reply to a star call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_star_reply_head_read(
    meta: sw_bytes,
    head: *mut sw_star_reply_head,
    error: *mut *mut sw_error,
) -> sw_code {
    // SAFETY: the caller's promise.
    match ReplyHead::read(unsafe { meta.as_slice() }) {
        Ok(ReplyHead { flags, queue_micros, run_micros, stats_bytes }) => {
            let read = sw_star_reply_head { flags, queue_micros, run_micros, stats_bytes, table: star::REPLY_BYTES };
            // SAFETY: the caller's promise.
            unsafe { *head = read }
            0
        }
        // SAFETY: the caller's promise.
        Err(reason) => unsafe { error::store(error, code::INVALID_ARGUMENT, reason.to_string()) },
    }
}

/// Writes the metadata of a registration, whose payload is the plan in one part.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_star_register_head_write(
    incarnation: u64,
    plan: *const u8,
    session: sw_bytes,
    out: *mut u8,
    len: *mut usize,
    error: *mut *mut sw_error,
) -> sw_code {
    // SAFETY: the caller's promise.
    let (plan, session) = unsafe { (hash_at(plan), session.as_slice()) };
    // SAFETY: the caller's promise.
    unsafe { written(|meta| RegisterHead { incarnation, plan, session }.write(meta), out, len, error) }
}

/// Writes the metadata of the end of a step, which frees the values that its calls kept.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_star_end_head_write(
    step_id: i64,
    session: sw_bytes,
    out: *mut u8,
    len: *mut usize,
    error: *mut *mut sw_error,
) -> sw_code {
    // SAFETY: the caller's promise.
    let session = unsafe { session.as_slice() };
    // SAFETY: the caller's promise.
    unsafe { written(|meta| EndHead { step: step_id, session }.write(meta), out, len, error) }
}
