//! Objects that C callers hold behind a pointer, and the arrays that they lend.
//!
//! Ownership, everywhere in this ABI:
//!
//! * `sw_x_new` (or `_open`) hands the object out through `out`; the caller owns it until `sw_x_free`, once. Whatever
//!   else an object hands out is borrowed from it, unless its documentation says otherwise.
//! * A NULL handle or struct is never an abort: functions that can fail return InvalidArgument, the others do nothing
//!   and return nothing, and `_free` accepts it. Out-parameters are not NULL, except `error`, whose message is then
//!   dropped.

use super::error::{self, sw_error};
use super::guard;
use super::types::sw_code;
use starwire_protocol::code;

/// What went wrong: a code, and a message for an operator.
pub type Failure = (sw_code, String);

/// Gives an object to the caller.
pub fn give<T>(object: T) -> *mut T {
    Box::into_raw(Box::new(object))
}

/// The object behind a handle.
///
/// # Safety
/// `handle` is null, or from [`give`] and not yet freed while the result is in use.
pub unsafe fn borrow<'a, T>(handle: *const T) -> Option<&'a T> {
    // SAFETY: the caller's promise.
    unsafe { handle.as_ref() }
}

/// The object behind a handle, or the caller's struct, that must not be NULL.
///
/// # Safety
/// As [`borrow`]; or `handle` is null or readable while the result is in use.
pub unsafe fn require<'a, T>(handle: *const T, what: &str) -> Result<&'a T, Failure> {
    // SAFETY: the caller's promise.
    unsafe { borrow(handle) }.ok_or_else(|| (code::INVALID_ARGUMENT, format!("starwire: bug: {what} is NULL")))
}

/// Takes an object back and drops it.
///
/// # Safety
/// `handle` is null, or from [`give`] and not used afterwards.
pub unsafe fn free<T>(handle: *mut T) {
    if !handle.is_null() {
        // SAFETY: made by Box::into_raw in `give`, and the caller gives it back once.
        let object = unsafe { Box::from_raw(handle) };
        guard((), move || drop(object));
    }
}

/// A function that can fail: stores the result of `work` behind `out`, or the reason behind `error`. `doing` is for the
/// message if it panics.
///
/// # Safety
/// `out` is writable, `error` writable or null.
pub unsafe fn answer<T>(
    doing: &str,
    out: *mut T,
    error: *mut *mut sw_error,
    work: impl FnOnce() -> Result<T, Failure>,
) -> sw_code {
    let panicked = || Err((code::INTERNAL, format!("starwire: internal error while {doing}")));
    match guard(None, || Some(work())).unwrap_or_else(panicked) {
        Ok(value) => {
            // SAFETY: the caller's promise.
            unsafe { out.write(value) }
            0
        }
        // SAFETY: the caller's promise.
        Err((code, message)) => unsafe { error::store(error, code, message) },
    }
}

/// The same for a function that creates an object.
///
/// # Safety
/// `out` is writable, `error` writable or null.
pub unsafe fn create<T>(
    doing: &str,
    out: *mut *mut T,
    error: *mut *mut sw_error,
    work: impl FnOnce() -> Result<T, Failure>,
) -> sw_code {
    // SAFETY: the caller's promise.
    unsafe { answer(doing, out, error, || work().map(give)) }
}

/// An array that the caller lends.
///
/// # Safety
/// `data` points at `len` readable elements that outlive `'a`, or `len` is 0.
pub unsafe fn array<'a, T>(data: *const T, len: usize) -> &'a [T] {
    if data.is_null() || len == 0 {
        return &[];
    }
    // SAFETY: the caller's promise, passed on.
    unsafe { std::slice::from_raw_parts(data, len) }
}

/// The variant with this number, of variants that are numbered from 0.
pub fn numbered<T: Copy>(variants: &[T], number: u32) -> Option<T> {
    variants.get(usize::try_from(number).ok()?).copied()
}

/// The caller was compiled with other structs of the ABI.
pub fn other_structs() -> Failure {
    (
        code::FAILED_PRECONDITION,
        "starwire: the Rust core and the C++ shim disagree on the C ABI's structs: rebuild with `make clean build`"
            .to_string(),
    )
}
