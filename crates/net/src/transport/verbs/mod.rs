//! RDMA over libibverbs: reliable connected queue pairs that carry the same byte stream as a socket. See
//! `docs/verbs.md`.

pub mod abi;
mod arena;
mod buffers;
mod config;
mod device;
mod error;
mod ledger;
mod library;
mod ops;
mod queue;
mod registrations;
mod shortages;
mod stats;
mod stream;
mod wire;

pub use arena::Arena;
pub use config::{TransportChoice, VerbsConfig};
pub use device::{Device, GidFacts, PortFacts, survey};
pub use error::{VerbsError, memlock};
pub use library::Library;
pub use queue::CompletionChannel;
pub use stats::VerbsStats;
pub use stream::Stream;
pub use wire::Endpoint;
