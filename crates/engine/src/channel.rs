//! A caller's handle of a connection to a task.

use std::cmp::Reverse;
use std::collections::hash_map::Entry;
use std::collections::{BinaryHeap, HashMap};
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::api::Host;
use crate::command::{Command, NewCall, NewRecv, Request};
use crate::error::EngineError;
use crate::joined::ChannelAt;
use crate::peers::Peer;
use crate::shared::Shared;
use starwire_protocol::digest;

/// The part of a channel that all its handles share.
pub struct ChannelShared {
    number: u32,
    shard: usize,
    peer: Arc<Peer>,
    lanes: Arc<Mutex<Lanes>>,
    numbers: Arc<Numbers>,
    next_id: AtomicU64,
}

/// Lends each star call to a task a lane ([`starwire_protocol::star::CallId`]).
#[derive(Default)]
struct Lanes {
    free: BinaryHeap<Reverse<u32>>,
}

/// Numbers the star calls of an engine, and the lanes. A server knows a process by its own name, not by the one that it
/// has for the server, which differs between sessions: no two tasks have the same lane, no two calls the same number.
#[derive(Default)]
struct Numbers {
    lanes: AtomicU32,
    calls: AtomicU64,
}

/// The channels of an engine.
#[derive(Default)]
pub struct Channels {
    /// By task and address in the ClusterSpec.
    open: HashMap<(String, String), Arc<ChannelShared>>,
    next: u32,
    /// By task, whatever its address.
    lanes: HashMap<String, Arc<Mutex<Lanes>>>,
    numbers: Arc<Numbers>,
    /// Of the channels to tasks that have joined: address by task. It stays when the task leaves, which may come back.
    reached: HashMap<String, String>,
}

impl Channels {
    /// The same task at the same address always has the same channel.
    pub fn open<H: Host>(&mut self, shared: &Arc<Shared<H>>, peer: Peer) -> Result<Channel<H>, EngineError> {
        let channel = match self.open.entry((peer.task.clone(), peer.grpc_address.clone())) {
            Entry::Occupied(found) => found.get().clone(),
            Entry::Vacant(place) => {
                let number = self.next;
                self.next = number.checked_add(1).ok_or(EngineError::TooMany)?;
                let shard = number as usize % shared.config.reactors;
                let lanes = self.lanes.entry(peer.task.clone()).or_default().clone();
                let numbers = self.numbers.clone();
                let (peer, next_id) = (Arc::new(peer), AtomicU64::new(1));
                shared.send(shard, Command::OpenChannel { channel: number, peer: peer.clone() });
                place.insert(Arc::new(ChannelShared { number, shard, peer, lanes, numbers, next_id })).clone()
            }
        };
        Ok(Channel::new(shared.clone(), channel))
    }

    /// Opens a channel to a task that has joined, and ends the one to its last address, if it was another. It has no
    /// connection while the task is away.
    pub fn open_to_joined<H: Host>(&mut self, shared: &Arc<Shared<H>>, task: &str) -> Result<Channel<H>, EngineError> {
        let found = shared.joined().address(task).map(|(address, join)| (address.to_owned(), join));
        let (address, join) = found.ok_or_else(|| EngineError::NotJoined(task.into()))?;
        let data = shared.config.data_address(task, &address)?;
        let before = self.reached.insert(task.to_owned(), address.clone()).filter(|before| *before != address);
        let old = before.and_then(|before| self.open.remove(&(task.to_owned(), before)));
        if let Some(ChannelShared { number, shard, .. }) = old.as_deref() {
            shared.send(*shard, Command::CloseChannel { channel: *number });
        }
        let channel =
            self.open(shared, Peer { task: task.to_owned(), grpc_address: address, data, has_joined: true })?;
        let ChannelShared { number, shard, .. } = *channel.channel;
        if !shared.joined().reached(task, join, ChannelAt { shard, number }) {
            shared.send(shard, Command::Disconnect { channel: number });
        }
        Ok(channel)
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

    /// Takes the lowest free lane for a star call. Returns it with the call's number.
    pub fn take_lane(&self) -> (u32, NonZeroU64) {
        let Numbers { lanes: all, calls } = &*self.channel.numbers;
        let mut lanes = self.channel.lanes.lock().unwrap_or_else(PoisonError::into_inner);
        let new = || all.fetch_add(1, Ordering::Relaxed);
        let lane = lanes.free.pop().map_or_else(new, |Reverse(lane)| lane);
        // Under the lock: the numbers of a lane count up.
        let number = calls.fetch_add(1, Ordering::Relaxed) + 1;
        (lane, NonZeroU64::new(number).unwrap_or(NonZeroU64::MAX))
    }

    /// Nobody waits for the lane's call any more.
    pub fn give_lane(&self, lane: u32) {
        self.channel.lanes.lock().unwrap_or_else(PoisonError::into_inner).free.push(Reverse(lane));
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
