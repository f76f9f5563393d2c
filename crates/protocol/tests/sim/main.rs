//! The protocol without a network: the promises of `docs/protocol.md` one by one, then a deterministic simulation.

#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "test data is small"
)]

mod endings;
mod handshake;
mod lending;
mod migration;
mod owner;
mod pair;
mod promises;
mod random;
mod raw_peers;
mod relay;
mod requests;
mod wire;
mod world;
