//! RDMA without hardware: all tests run against the fake libibverbs of `fake/`, loaded with `dlopen` like a real one.

#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    clippy::print_stderr,
    reason = "a test may panic, and its numbers are small"
)]

mod drain;
mod driver;
mod faults;
#[path = "../engine/harness.rs"]
#[allow(dead_code, reason = "shared with the tests of the engine")]
mod harness;
mod layout;
mod pair;
mod registrations;
