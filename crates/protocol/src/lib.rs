//! The sans-I/O connection state machine. `docs/protocol.md` is its specification.
//!
//! A [`Connection`] never sees a socket, a clock or a raw pointer. Its owner (the engine's shard, or a test) calls it
//! with inputs and polls its outputs:
//!
//! * *bytes in*: [`Connection::receive_targets`] returns the destinations of the next bytes of the stream, and
//!   [`Connection::on_received`] takes how many have arrived there;
//! * *requests*: [`Connection::recv`], [`Connection::call`], [`Connection::cancel`], [`Connection::reply`];
//! * *time*: [`Connection::next_timeout`] and [`Connection::on_timeout`]; every input takes `now`;
//! * *bytes out*: [`Connection::poll_transmit`] returns one block at a time, as [`Segment`]s to write in order;
//! * *events*: [`Connection::poll_event`], after each input.
//!
//! Only memory for payloads is requested while bytes are processed: from the [`Owner`] and its types.

#![cfg_attr(
    test,
    allow(
        clippy::unwrap_used,
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        reason = "a test may panic, and its numbers are small"
    )
)]
#![forbid(unsafe_code)]
// The wire is little-endian on every machine.
#![deny(clippy::host_endian_bytes)]

mod block;
mod connection;
pub mod digest;
mod error;
mod event;
mod frame;
mod hello;
mod idmap;
mod incoming;
mod keys;
mod lending;
pub mod limits;
pub mod measure;
mod open_steps;
mod outgoing;
mod owner;
mod role;
mod secret;
mod segment;
mod settings;
mod sniff;
mod spare;
pub mod star;
pub mod state;
mod stats;
pub mod tunnel;

pub use connection::{Call, ClientCheck, Connection, Recv};
pub use error::{ConnectionError, ProtocolError, code};
pub use event::{Event, Outcome};
pub use frame::{Field, LAYOUTS, Layout, RecvFrame, Sender, Witness};
pub use hello::{FEATURE_LENDING, FEATURE_QUEUE_PAIRS};
pub use lending::Loan;
pub use limits::Limits;
pub use owner::{CallBuffer, CallHead, Failure, Owner, Payload, ReplyBuffer};
pub use secret::Secret;
pub use segment::{Segment, Target};
pub use settings::{Claim, PeerInfo, Settings};
pub use sniff::{Sniff, VERSION as WIRE_VERSION, sniff};
pub use stats::Stats;
