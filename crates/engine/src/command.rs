//! Commands to a shard, from any thread.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use crate::admission::Listener;
use crate::api::OutPayload;
use crate::api::PendingOp;
use crate::api::{Host, Op, StarFailure, StarHost, StarOutcome, Ticket};
use crate::peers::Peer;
use starwire_net::transport::SocketAddress;
use starwire_protocol::Failure;

/// A method call to start.
pub struct NewCall<O: Op> {
    pub method: u32,
    pub meta: Vec<u8>,
    pub payload: Option<OutPayload>,
    pub deadline_ms: u32,
    /// Keep trying to connect instead of failing at the first failed attempt.
    pub wait_for_ready: bool,
    /// The deadline is over once there is a connection.
    pub deadline_to_connect: bool,
    pub op: PendingOp<O>,
}

/// A rendezvous request to start.
pub struct NewRecv<O: Op> {
    pub step: i64,
    pub prefix: Box<[u8]>,
    pub frame: u64,
    pub iter: u64,
    pub op: PendingOp<O>,
}

pub enum Request<O: Op> {
    Call(NewCall<O>),
    Recv(NewRecv<O>),
}

impl<O: Op> Request<O> {
    /// Notes the start and the kind of the request for the metrics.
    pub fn stamp(&mut self, now: Instant) {
        match self {
            Self::Call(call) => call.op.started = Some(now),
            Self::Recv(recv) => {
                recv.op.started = Some(now);
                recv.op.is_tensor = true;
            }
        }
    }

    pub fn into_op(self) -> PendingOp<O> {
        match self {
            Self::Call(call) => call.op,
            Self::Recv(recv) => recv.op,
        }
    }
}

pub enum Command<H: Host> {
    OpenChannel {
        channel: u32,
        peer: Arc<Peer>,
    },
    /// The task has left, and is back at another address.
    CloseChannel {
        channel: u32,
    },
    /// The task has left. It may come back.
    Disconnect {
        channel: u32,
    },
    Request {
        channel: u32,
        id: u64,
        request: Request<H::Op>,
    },
    Cancel {
        channel: u32,
        id: u64,
        code: i32,
        message: String,
    },
    Reply {
        conn: u64,
        id: u64,
        code: i32,
        meta: Meta,
        payload: Option<OutPayload>,
    },
    /// Name look-up finished.
    Addresses {
        channel: u32,
        result: Result<Vec<SocketAddress>, Failure>,
    },
    Adopt {
        fd: OwnedFd,
        listener: Listener,
    },
    Star(Box<StarCommand<H>>),
    /// Another process has the task, the one at the other end of this connection: closes all others. `last` is dropped
    /// afterwards.
    Moved {
        to: u64,
        last: Arc<dyn Send + Sync>,
    },
    Stop,
}

/// News for the shard that owns a star call's connection.
pub enum StarCommand<H: Host> {
    /// A run ended.
    Done { ticket: Ticket, outcome: StarOutcome<<H::Star as StarHost>::Value> },
    /// The session of a call may use a plan that all share, if the table has it now.
    Adopted { ticket: Ticket, result: Result<(), StarFailure> },
    /// Plans have left the table.
    Forget,
    /// Calls that change something may run again.
    Opened,
}

/// Reply metadata is usually short; then it needs no allocation.
pub enum Meta {
    Short { len: u8, bytes: [u8; Meta::SHORT] },
    Long(Vec<u8>),
}

impl Meta {
    pub const SHORT: usize = 55;

    pub fn of(bytes: &[u8]) -> Self {
        match u8::try_from(bytes.len()) {
            Ok(len) if bytes.len() <= Self::SHORT => {
                let mut short = [0; Self::SHORT];
                short[..bytes.len()].copy_from_slice(bytes);
                Self::Short { len, bytes: short }
            }
            _ => Self::Long(bytes.to_vec()),
        }
    }

    pub fn from_vec(bytes: Vec<u8>) -> Self {
        Self::Long(bytes)
    }

    pub fn as_slice(&self) -> &[u8] {
        match self {
            Self::Short { len, bytes } => &bytes[..usize::from(*len)],
            Self::Long(v) => v,
        }
    }
}
