//! What the engine and its owner have in common: the traits that the owner implements, and the memory that they share.
//! Imports nothing of the rest of the engine but allocations (`system::slabs`).

mod host;
#[allow(unsafe_code)]
mod memory;
mod op;
mod star;

pub use host::{Host, IncomingCall, Level, Op, RecvRequest, Ticket};
pub use memory::{Buffers, ForeignMemory, InBody, OutPayload, Piece};
pub use op::PendingOp;
pub use star::{CompiledPlan, Job, Kept, ReplyMeta, Slots, StarCall, StarFailure, StarHost, StarOutcome, StarReply};
