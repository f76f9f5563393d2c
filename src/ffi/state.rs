//! The state of a parameter server: the variables that are restored, and the changes that are written.

use std::ffi::c_void;

use super::error::sw_error;
use super::guard;
use super::handle::{self, array, borrow, require};
use super::types::{sw_bytes, sw_code};
use starwire_protocol::code;
use starwire_state::{Content, Definition, Flush, Store};

/// What a server has restored. Valid during sw_star_handlers.restore.
pub struct sw_state<'a>(pub(super) &'a Store);

/// A flush that is being written. Valid during sw_star_handlers.changes.
pub struct sw_changes<'a, 'b>(pub(super) &'a mut Flush<'b>);

#[repr(C)]
pub struct sw_state_variable {
    pub id: u32,
    /// How to create it.
    pub definition: sw_bytes,
    pub dims: *const u64,
    pub n_dims: usize,
    pub rows: u64,
    pub row_bytes: u64,
}

/// The incarnations that the server's devices had.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_state_incarnations(state: *const sw_state<'static>, n: *mut usize) -> *const u64 {
    // SAFETY: the caller's promise.
    let incarnations = unsafe { borrow(state) }.map_or(&[][..], |state| state.0.incarnations());
    // SAFETY: the caller's promise.
    unsafe { *n = incarnations.len() }
    incarnations.as_ptr()
}

/// Stores the variable number `at`. 0: there is none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_state_variable_at(
    state: *const sw_state<'static>,
    at: usize,
    out: *mut sw_state_variable,
) -> u32 {
    // SAFETY: the caller's promise.
    let Some((id, definition)) = unsafe { borrow(state) }.and_then(|state| state.0.variables().nth(at)) else {
        return 0;
    };
    let Definition { bytes, dims, rows, row_bytes } = definition;
    let variable = sw_state_variable {
        id,
        definition: sw_bytes::of(bytes),
        dims: dims.as_ptr(),
        n_dims: dims.len(),
        rows: *rows,
        row_bytes: *row_bytes,
    };
    // SAFETY: the caller's promise.
    unsafe { out.write(variable) }
    1
}

/// Reads all rows of a variable into `content`.
///
/// # Safety
/// `content` has `len` writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_state_read(
    state: *const sw_state<'static>,
    id: u32,
    content: *mut c_void,
    len: usize,
    error: *mut *mut sw_error,
) -> sw_code {
    let read = || {
        // SAFETY: the caller's promise.
        let state = unsafe { require(state, "a state")? };
        if len == 0 {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        let content = unsafe { std::slice::from_raw_parts_mut(content.cast(), len) };
        state.0.read(id, content).map_err(|error| (code::DATA_LOSS, error.to_string()))
    };
    // SAFETY: the caller's promise.
    unsafe { handle::answer("reading the state", &mut (), error, read) }
}

/// Rows that were read before the server had its state.
pub struct sw_rows(Content);

/// Takes all rows of a variable that were read before the server had its state; once. NULL: there are none, and
/// sw_state_read reads them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_state_take(state: *const sw_state<'static>, id: u32) -> *mut sw_rows {
    // SAFETY: the caller's promise.
    let rows = unsafe { borrow(state) }.and_then(|state| state.0.take(id));
    rows.map_or(std::ptr::null_mut(), |rows| handle::give(sw_rows(rows)))
}

/// Their first byte, which may be written, at a multiple of 64. Valid until sw_rows_free.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_rows_data(rows: *mut sw_rows, len: *mut usize) -> *mut c_void {
    // SAFETY: the caller's promise.
    let rows = unsafe { (*rows).0.bytes_mut() };
    // SAFETY: the caller's promise.
    unsafe { *len = rows.len() }
    rows.as_mut_ptr().cast()
}

/// May be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_rows_free(rows: *mut sw_rows) {
    // SAFETY: the caller's promise.
    unsafe { handle::free(rows) }
}

/// A variable that the state does not have yet, or not with this type and shape. Returns its id; `variable.id` is not
/// used. All of its rows must follow.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_changes_variable(
    changes: *mut sw_changes<'static, 'static>,
    variable: *const sw_state_variable,
) -> u32 {
    // SAFETY: the caller's promise.
    let (Some(changes), Some(variable)) = (unsafe { (changes.as_mut(), variable.as_ref()) }) else { return 0 };
    // SAFETY: the caller's promise.
    let (bytes, dims) =
        unsafe { (variable.definition.as_slice().to_vec(), array(variable.dims, variable.n_dims).to_vec()) };
    let definition = Definition { bytes, dims, rows: variable.rows, row_bytes: variable.row_bytes };
    guard(0, || changes.0.variable(definition))
}

/// Whole rows, from row `first` on.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_changes_rows(
    changes: *mut sw_changes<'static, 'static>,
    id: u32,
    first: u64,
    content: sw_bytes,
) {
    // SAFETY: the caller's promise.
    let (Some(changes), content) = (unsafe { (changes.as_mut(), content.as_slice()) }) else { return };
    guard((), || changes.0.rows(id, first, content));
}

/// The variable does not exist any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_changes_gone(changes: *mut sw_changes<'static, 'static>, id: u32) {
    // SAFETY: the caller's promise.
    let Some(changes) = (unsafe { changes.as_mut() }) else { return };
    guard((), || changes.0.gone(id));
}
