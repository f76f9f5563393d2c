//! The sans-I/O connection state machine. `docs/protocol.md` is its specification.
//!
//! A [`Connection`] never sees a socket, a clock or a raw pointer. Its owner (the engine's shard, or a test) moves
//! bytes:
//!
//! * *out*: [`Connection::poll_transmit`] hands out one block at a time as a list of [`Segment`]s to write in order;
//! * *in*: [`Connection::recv_plan`] says where the next bytes of the stream belong, [`Connection::on_received`] says
//!   how many arrived there;
//! * *time*: every input takes `now`; [`Connection::next_timeout`] / [`Connection::on_timeout`].
//!
//! What the bytes mean is reported by [`Connection::poll_event`].

#![forbid(unsafe_code)]

mod block;
mod client;
mod connection;
mod error;
mod event;
mod frame;
mod handshake;
mod hello;
mod idmap;
mod incoming;
mod keys;
mod lending;
pub mod limits;
mod moving;
mod open_steps;
mod outgoing;
mod owner;
mod segment;
mod server;
mod settings;
mod sniff;
mod spare;
mod stats;

pub use block::VERSION as WIRE_VERSION;
pub use client::{Call, Recv};
pub use connection::Connection;
pub use error::{ConnectionError, ProtocolError, code};
pub use event::{Event, Outcome};
pub use frame::{LAYOUTS, Layout, RecvFrame, Sender};
pub use lending::{FEATURE_LENDING, Loan, Witness};
pub use limits::Limits;
pub use moving::FEATURE_QUEUE_PAIRS;
pub use owner::{CallBuffer, CallHead, Failure, Owner, Payload, ReplyBuffer};
pub use segment::{Segment, Target};
pub use settings::{PeerInfo, Secret, Settings};
pub use sniff::{Sniff, sniff};
pub use stats::Stats;
