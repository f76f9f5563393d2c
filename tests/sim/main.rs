//! The protocol without a network: promises of `docs/protocol.md` one by one, then a deterministic simulation.

mod owner;
mod pair;
mod promises;
mod random;
