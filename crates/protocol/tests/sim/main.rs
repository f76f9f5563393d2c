//! The protocol without a network: the promises of `docs/protocol.md` one by one, then a deterministic simulation.

mod endings;
mod handshake;
mod lending;
mod moving;
mod owner;
mod pair;
mod promises;
mod random;
mod strangers;
mod wire;
mod world;
