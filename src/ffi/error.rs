//! `sw_error`: a code with a message for an operator.

use super::handle::{self, borrow};
use super::types::{sw_bytes, sw_code};

/// The message of an error, for an operator; its code is what the function returned. Free with sw_error_free.
pub struct sw_error {
    pub(super) message: String,
}

/// Stores an error behind an out-parameter and returns its code.
///
/// # Safety
/// `out` is null or writable.
pub(super) unsafe fn store(out: *mut *mut sw_error, code: sw_code, message: String) -> sw_code {
    if !out.is_null() {
        // SAFETY: the caller's promise.
        unsafe { *out = handle::give(sw_error { message }) }
    }
    code
}

/// Valid until the error is freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_error_message(error: *const sw_error) -> sw_bytes {
    // SAFETY: the caller's promise.
    unsafe { borrow(error) }.map_or(sw_bytes::EMPTY, |e| sw_bytes::of(e.message.as_bytes()))
}

/// NULL is no error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_error_free(error: *mut sw_error) {
    // SAFETY: the caller's promise.
    unsafe { handle::free(error) }
}
