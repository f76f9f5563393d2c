//! Star calls on a parameter server. A call lives on the shard of its connection (`shard.rs`), with the values that
//! stay between the calls of its step (`steps.rs`); one that comes again over another connection is recognised
//! (`call_log.rs`). If the server has a state (`state.rs`), calls that change something are before or after each flush;
//! other processes of the task may copy it (`copies.rs`).
//! The plans that all sessions share are in one table (`plans.rs`, `server.rs`), of which each shard keeps a copy. The
//! owner of the kernels is a [`StarHost`].

mod accounts;
mod call_log;
mod copies;
mod plans;
mod server;
mod shard;
mod state;
mod steps;

pub use crate::api::{
    CompiledPlan, Job, Kept, ReplyMeta, Slots, StarCall, StarFailure, StarHost, StarOutcome, StarReply,
};
pub(crate) use accounts::Accounts;
pub(crate) use server::StarServer;
pub(crate) use shard::{Answer, StarShard};
pub(crate) use state::{State, StateThread, folder_of, owner_of};

use starwire_protocol::code;

/// Why a peer's request is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    #[error(
        "starwire: {peer} has {plans} plans of {bytes} bytes on this server, at most {max_plans} of {max_bytes} bytes are allowed (STARWIRE_STAR_LIMITS=plans=…,plan_bytes=…)"
    )]
    Plans { peer: String, plans: u64, bytes: u64, max_plans: u64, max_bytes: u64 },
    #[error(
        "starwire: {peer} keeps {values} values of {bytes} bytes on this server, at most {max_values} of {max_bytes} bytes are allowed (STARWIRE_STAR_LIMITS=values=…,value_bytes=…)"
    )]
    Values { peer: String, values: u64, bytes: u64, max_values: u64, max_bytes: u64 },
    #[error(
        "starwire: {peer} already has {max} star calls in flight on this server, the most allowed (STARWIRE_STAR_LIMITS=calls=…)"
    )]
    Calls { peer: String, max: u64 },
    #[error(
        "starwire: {peer} would hold {bytes} bytes on this server, where {left} of {max} are free: a worker may hold no more than is free (STARWIRE_STAR_MAX_TOTAL_BYTES)"
    )]
    Left { peer: String, bytes: u64, left: u64, max: u64 },
    #[error("starwire: the connection of this star call is closed")]
    Gone,
    #[error("starwire: this star call comes too late: its worker has sent it again, or no longer waits for it")]
    Superseded,
    #[error(
        "starwire: a star call was sent again over a new connection, but may have run, and its reply is no longer here"
    )]
    MayHaveRun,
}

impl Refused {
    pub fn code(&self) -> i32 {
        match self {
            Self::Gone | Self::Superseded => code::CANCELLED,
            Self::MayHaveRun => code::UNAVAILABLE,
            _ => code::RESOURCE_EXHAUSTED,
        }
    }
}
