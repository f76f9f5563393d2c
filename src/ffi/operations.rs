//! The op table: properties of TensorFlow's operations.

use super::error::sw_error;
use super::guard;
use super::handle;
use super::types::{sw_bytes, sw_code};
use starwire_engine::config::{Config, ProcessEnv};
use starwire_planner::ops::{self, Added, Knowledge};
use starwire_protocol::code;

/// sw_op_knowledge: the operation is in the table.
pub const SW_OP_KNOWN: u32 = 1;
/// A function of its inputs' values, or part of the control flow: no effects beyond its outputs.
pub const SW_OP_IS_PURE: u32 = 2;
/// A variable.
pub const SW_OP_IS_VARIABLE: u32 = 4;
/// A constant, a variable or another object of the session that is found by name: a copy of the node is the same
/// object.
pub const SW_OP_IS_NAMED: u32 = 8;
/// Reads the variable behind input 0 and does nothing else.
pub const SW_OP_READS: u32 = 16;
/// Changes the variables behind the references and handles that it takes.
pub const SW_OP_UPDATES: u32 = 32;
/// Output 0 is the reference of input 0.
pub const SW_OP_FORWARDS: u32 = 64;
/// May wait for something other than an edge of its graph, or is waited for in this way.
pub const SW_OP_WAITS: u32 = 128;
/// Takes time and memory linear in its inputs and outputs, and the dimensions of its outputs follow from those of its
/// inputs, if its last inputs are constants: as many as the flags shifted right by SW_OP_CONSTANTS_SHIFT say.
pub const SW_OP_IS_LINEAR: u32 = 256;
/// All state of its kernel is found by name: several sessions may share a kernel.
pub const SW_OP_IS_SHAREABLE: u32 = 512;
/// Added by sw_ops_load.
pub const SW_OP_IS_ADDED: u32 = 1024;
pub const SW_OP_CONSTANTS_SHIFT: u32 = 16;

/// The SW_OP_... flags of an operation of TensorFlow. 0: it is not in the table, and nothing may be assumed about it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_op_knowledge(op: sw_bytes) -> u32 {
    guard(0, || {
        // SAFETY: the caller's promise.
        let name = unsafe { op.as_slice() };
        std::str::from_utf8(name).ok().and_then(ops::knowledge).map_or(0, flags)
    })
}

/// Reads STARWIRE_OPS, and adds the operations of its file to the table for the rest of the process. An error names
/// file and line. `added`: their number.
///
/// # Safety
/// `added` is writable, `error` writable or null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_ops_load(added: *mut usize, error: *mut *mut sw_error) -> sw_code {
    let load = || {
        let invalid = |text: String| (code::INVALID_ARGUMENT, text);
        let table = Config::operations_from_env(&ProcessEnv).map_err(|error| invalid(error.to_string()))?;
        table.map_or(Ok(()), Added::install).map_err(|error| invalid(format!("STARWIRE_OPS: {error}")))?;
        Ok(ops::added().count())
    };
    // SAFETY: the caller's promise.
    unsafe { handle::answer("reading the op table", added, error, load) }
}

/// The name of the added operation number `at`, and where it is added: FILE:LINE. Empty after the last one.
///
/// # Safety
/// `place` is writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_op_added(at: usize, place: *mut sw_bytes) -> sw_bytes {
    guard(sw_bytes::EMPTY, || {
        let Some((name, file_and_line)) = ops::added().nth(at) else { return sw_bytes::EMPTY };
        // SAFETY: the caller's promise.
        unsafe { *place = sw_bytes::of(file_and_line.as_bytes()) };
        sw_bytes::of(name.as_bytes())
    })
}

/// The name of the table's operation number `at`; empty after the last one. For checks of the table.
#[unsafe(no_mangle)]
pub extern "C" fn sw_op_name(at: usize) -> sw_bytes {
    guard(sw_bytes::EMPTY, || ops::entries().nth(at).map_or(sw_bytes::EMPTY, |(name, _)| sw_bytes::of(name.as_bytes())))
}

fn flags(it: Knowledge) -> u32 {
    [
        (SW_OP_IS_PURE, it.is_pure()),
        (SW_OP_IS_VARIABLE, it.variable),
        (SW_OP_IS_NAMED, it.named),
        (SW_OP_READS, it.reads),
        (SW_OP_UPDATES, it.updates),
        (SW_OP_FORWARDS, it.forwards),
        (SW_OP_WAITS, it.waits),
        (SW_OP_IS_LINEAR, it.linear.is_some()),
        (SW_OP_IS_SHAREABLE, it.is_shareable()),
        (SW_OP_IS_ADDED, it.added),
    ]
    .into_iter()
    .filter(|(_, set)| *set)
    .fold(SW_OP_KNOWN, |all, (flag, _)| all | flag)
        | u32::from(it.linear.unwrap_or(0)) << SW_OP_CONSTANTS_SHIFT
}
