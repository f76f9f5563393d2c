//! The planners' guarantees, on random graphs and on graphs that once broke them.

#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    reason = "a test may panic, and its numbers are small"
)]

mod fuse;
mod generate;
mod simulate;
mod star;
