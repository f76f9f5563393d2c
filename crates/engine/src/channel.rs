//! A caller's handle of a connection to a task.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::api::Host;
use crate::command::{Command, NewCall, NewRecv, Request};
use crate::peers::Peer;
use crate::shared::Shared;
use starwire_protocol::digest;

/// The part of a channel that all its handles share.
pub struct ChannelShared {
    number: u32,
    shard: usize,
    peer: Arc<Peer>,
    next_id: AtomicU64,
}

impl ChannelShared {
    pub fn new(number: u32, shard: usize, peer: Arc<Peer>) -> Self {
        Self { number, shard, peer, next_id: AtomicU64::new(1) }
    }
}

/// A caller's handle.
pub struct Channel<H: Host> {
    shared: Arc<Shared<H>>,
    channel: Arc<ChannelShared>,
}

impl<H: Host> Clone for Channel<H> {
    fn clone(&self) -> Self {
        Self { shared: self.shared.clone(), channel: self.channel.clone() }
    }
}

impl<H: Host> Channel<H> {
    pub(crate) fn new(shared: Arc<Shared<H>>, channel: Arc<ChannelShared>) -> Self {
        Self { shared, channel }
    }

    /// A reply arrived that carries this many tensors as one.
    pub fn count_fused(&self, tensors: u64) {
        self.shared.metrics.count(|cells| {
            cells.fused_messages_received.add(1);
            cells.fused_tensors_received.add(tensors);
        });
    }

    pub fn call(&self, mut call: NewCall<H::Op>) -> u64 {
        if self.shared.config.secret.is_some() && u16::try_from(call.method).is_ok_and(digest::has_digest) {
            call.meta.extend(call.payload.iter().filter_map(|payload| digest::digest(payload.parts())).flatten());
        }
        self.request(Request::Call(call))
    }

    pub fn recv(&self, recv: NewRecv<H::Op>) -> u64 {
        self.request(Request::Recv(recv))
    }

    pub fn cancel(&self, id: u64, code: i32, message: String) {
        self.send(Command::Cancel { channel: self.channel.number, id, code, message });
    }

    pub fn task(&self) -> &str {
        &self.channel.peer.task
    }

    fn request(&self, request: Request<H::Op>) -> u64 {
        let id = self.channel.next_id.fetch_add(1, Ordering::Relaxed);
        self.send(Command::Request { channel: self.channel.number, id, request });
        id
    }

    fn send(&self, command: Command<H>) {
        self.shared.send(self.channel.shard, command);
    }
}
