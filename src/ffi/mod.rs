//! Every `extern "C"` function, one file per noun. `include/starwire.h` is generated from here.
//!
//! Conventions: handles are opaque; a function whose name begins with a handle's type belongs to that type; who owns
//! what, and what NULL means, is in [`handle`]. What calls the engine, an executor or a planner is a panic boundary
//! ([`guard`]); what only reads or writes fields is none, where Rust ends the process rather than unwind. Errors are a
//! code plus a message in an out-parameter that comes last; callbacks take their context first. Numbers that C callers
//! fill in are checked before they become an enum.
//!
//! # Safety
//!
//! What each function relies on, and what its `// SAFETY: the caller's promise` means; a function that relies on more
//! says so.
//!
//! * A handle is NULL, or came from this library and has not been freed; nobody uses it after `_free`.
//! * Bytes, structs and arrays are readable during the call; out-parameters are writable, `error` is writable or NULL.
//! * Tables of callbacks stay valid for the life of the process. They and their contexts may be used from any thread,
//!   and an operation's until its `done`.

#![allow(non_camel_case_types, reason = "the C names")]
#![allow(clippy::missing_safety_doc, reason = "above")]

pub mod arena;
pub mod call;
pub mod channel;
pub mod engine;
pub mod error;
pub mod executor;
pub mod handle;
pub mod host;
pub mod operations;
pub mod plan;
pub mod port;
pub mod star;
pub mod star_server;
pub mod star_wire;
pub mod state;
pub mod types;

/// Version of this ABI: the shim refuses to run with another one.
pub const ABI_VERSION: u32 = 1;

/// Version of this ABI. The shim refuses to run with another one.
#[unsafe(no_mangle)]
pub extern "C" fn sw_abi_version() -> u32 {
    ABI_VERSION
}

/// Runs one entry point of the ABI: a panic must not unwind into C++.
fn guard<R>(on_panic: R, f: impl FnOnce() -> R) -> R {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(f)).unwrap_or(on_panic)
}

#[cfg(test)]
mod tests {
    use super::guard;

    #[test]
    fn a_panic_is_a_value_for_the_caller() {
        assert_eq!(guard(7, || 1), 1);
        // As a panic, without a message on stderr.
        assert_eq!(guard(7, || std::panic::resume_unwind(Box::new("planted"))), 7);
    }
}
