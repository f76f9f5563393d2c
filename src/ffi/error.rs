//! `sw_error`: a code with a message for an operator.

use super::types::{sw_bytes, sw_code};

/// An error with a code of tensorflow::error::Code and a message for an operator. Free with sw_error_free.
#[allow(non_camel_case_types)]
pub struct sw_error {
    pub(super) code: sw_code,
    pub(super) message: String,
}

/// Stores an error behind an out-parameter and returns its code.
///
/// # Safety
/// `out` is null or writable.
pub(super) unsafe fn store(out: *mut *mut sw_error, code: sw_code, message: String) -> sw_code {
    if !out.is_null() {
        // SAFETY: the caller's promise.
        unsafe { *out = Box::into_raw(Box::new(sw_error { code, message })) }
    }
    code
}

/// What a function that makes something ends with: the thing behind `out`, or the reason behind `error`.
///
/// # Safety
/// `out` is writable, `error` writable or null.
pub(super) unsafe fn hand_out<T>(
    made: Result<T, (sw_code, String)>,
    out: *mut *mut T,
    error: *mut *mut sw_error,
) -> sw_code {
    match made {
        Ok(thing) => {
            // SAFETY: the caller's promise.
            unsafe { *out = Box::into_raw(Box::new(thing)) }
            0
        }
        // SAFETY: the caller's promise.
        Err((code, message)) => unsafe { store(error, code, message) },
    }
}

/// # Safety
/// `error` is null or came from a function of this ABI and was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_error_code(error: *const sw_error) -> sw_code {
    // SAFETY: the caller's promise.
    unsafe { error.as_ref() }.map_or(0, |e| e.code)
}

/// Valid until the error is freed.
///
/// # Safety
/// As sw_error_code.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_error_message(error: *const sw_error) -> sw_bytes {
    // SAFETY: the caller's promise.
    unsafe { error.as_ref() }.map_or(sw_bytes::EMPTY, |e| sw_bytes::of(e.message.as_bytes()))
}

/// # Safety
/// As sw_error_code; the error is not used afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_error_free(error: *mut sw_error) {
    if !error.is_null() {
        // SAFETY: made by Box::into_raw in `store`; the caller gives it back once.
        drop(unsafe { Box::from_raw(error) });
    }
}
