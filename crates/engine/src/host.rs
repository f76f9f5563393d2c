//! The engine's owner: what it is asked for and told. `ffi` implements this for C callers, starctl and the tests in
//! safe Rust.

use crate::memory::{Buffers, ForeignMemory, InBody};
use starwire_protocol::{Failure, Outcome};

/// Names a peer's request until it is answered. Answering twice, or after the connection went, is harmless.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket {
    /// The connection's number: its shard's index in the upper bits. Never used again.
    pub conn: u64,
    pub id: u64,
}

/// A peer's rendezvous request.
#[repr(C)]
#[derive(Clone, Debug)]
pub struct RecvRequest<Key> {
    pub ticket: Ticket,
    pub step: i64,
    /// What [`Host::key`] made of the rendezvous key's prefix.
    pub key: Key,
    /// The two numbers behind the last ';' of the rendezvous key.
    pub frame: u64,
    pub iter: u64,
}

/// A peer's method call.
pub struct IncomingCall {
    pub ticket: Ticket,
    pub method: u16,
    /// 0: none.
    pub deadline_ms: u32,
    pub body: Box<InBody>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    Info = 0,
    Warning = 1,
    Error = 2,
}

/// The owner of an engine. Every method runs on reactor threads and must not block; requests are answered with
/// [`crate::Engine::reply`], now or later, from any thread.
pub trait Host: Send + Sync + Sized + 'static {
    /// A rendezvous key's prefix as the owner knows it, one per connection and prefix.
    type Key: Clone + Send;
    /// The owner of an outgoing request.
    type Op: Op;

    /// Whether [`Host::resolve`] answers.
    fn resolves(&self) -> bool;
    /// Finds out where the task, whose channel was opened with this gRPC address, can be reached; to be answered once
    /// with [`crate::Engine::resolved`]. Asked at each (re)connect for channels without an entry in `.endpoint_map`,
    /// and for the others when the entry leads nowhere or to a task of another name.
    fn resolve(&self, task: &str, grpc_address: &str, token: u64);

    /// None: the key is malformed, and the requests that use it are refused.
    fn key(&self, prefix: &[u8]) -> Option<Self::Key>;
    /// No request that uses the key will be delivered any more.
    fn key_gone(&self, key: Self::Key);
    fn recv(&self, requests: &[RecvRequest<Self::Key>]);

    /// Whether [`Host::call`] answers.
    fn takes_calls(&self) -> bool;
    /// Memory for a call's payload, 64-byte aligned. None: the engine takes its own.
    fn call_memory(&self, _len: usize) -> Option<ForeignMemory> {
        None
    }
    fn call(&self, call: IncomingCall);

    /// The caller of an unanswered request gave up, or its connection went. Method 0 is a rendezvous request, `tag` its
    /// step. An answer is still allowed, and dropped.
    fn cancelled(&self, _ticket: Ticket, _method: u16, _tag: i64, _peer_gone: bool) {}

    /// A connection was established, in either direction: before anything else of it.
    fn peer_came(&self, _conn: u64, _task: &str, _incarnation: u64) {}
    /// It went: after everything else of it.
    fn peer_gone(&self, _conn: u64) {}

    /// Everything that a reactor had for the owner in one round was delivered. Also called once when a reactor starts.
    fn round_end(&self) {}

    /// Whether peers of the same machine may copy payloads from this process's memory.
    fn lends(&self) -> bool {
        true
    }

    fn log(&self, level: Level, line: &str);
}

/// The owner of one outgoing request. Its methods run on a reactor thread, or on the thread that starts or stops
/// something when a request fails at once; they must not block.
pub trait Op: Send + 'static {
    /// Memory for the parts of a reply, of these lengths. An error ends the request with it, and the payload is read
    /// and dropped. Not called for a reply without parts.
    fn alloc(&mut self, meta: &[u8], lens: &[u64]) -> Result<Buffers, Failure>;
    /// Exactly once, and last. `buffers` are those of `alloc`, filled if the outcome is `Ok`.
    fn done(self, outcome: &Outcome<'_>, buffers: Buffers);
}
