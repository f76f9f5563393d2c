//! The interface to the engine's owner. `ffi` implements it for C callers, starctl and the tests in safe Rust.

use super::memory::{Buffers, ForeignMemory, InBody};
use super::star::StarHost;
use starwire_protocol::{Failure, Outcome};

/// Identifies a peer's request until it is answered. Answering twice, or after the connection ended, is harmless.
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
    /// The result of [`Host::key`] for the rendezvous key's prefix.
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
    /// The owner's form of a rendezvous key's prefix, one per connection and prefix.
    type Key: Clone + Send;
    /// The owner of an outgoing request.
    type Op: Op;
    /// The owner of a parameter server's kernels; `Infallible` without one.
    type Star: StarHost;

    /// None: the key is malformed, and the requests that use it are refused.
    fn key(&self, prefix: &[u8]) -> Option<Self::Key>;
    /// No request that uses the key will be delivered any more.
    fn key_gone(&self, key: Self::Key);
    fn recv(&self, requests: &[RecvRequest<Self::Key>]);

    /// Whether [`Host::call`] is implemented.
    fn takes_calls(&self) -> bool;
    /// Memory for a call's payload, 64-byte aligned. None: the engine allocates.
    fn call_memory(&self, _len: usize) -> Option<ForeignMemory> {
        None
    }
    fn call(&self, call: IncomingCall);

    /// The caller of an unanswered request cancelled it, or its connection ended. Method 0 is a rendezvous request,
    /// `tag` its step. A reply is still allowed, and dropped.
    fn cancelled(&self, _ticket: Ticket, _method: u16, _tag: i64, _peer_gone: bool) {}

    /// If this task serves star calls. They are not given to [`Host::call`].
    fn star(&self) -> Option<&Self::Star> {
        None
    }

    /// A connection opened, in either direction. Called before any other callback for it.
    fn peer_came(&self, _conn: u64, _task: &str, _incarnation: u64) {}
    /// It closed. Called after every other callback for it.
    fn peer_gone(&self, _conn: u64) {}

    /// All callbacks of a reactor's round were made. Also called once when a reactor starts.
    fn round_end(&self) {}

    /// Whether peers on this host may copy payloads from this process's memory.
    fn lends(&self) -> bool {
        true
    }

    fn log(&self, level: Level, line: &str);
}

/// The owner of an outgoing request. Its methods run on a reactor thread, or, if a request fails at once, on the
/// calling thread; they must not block.
pub trait Op: Send + 'static {
    /// Memory for the parts of a reply, of these lengths. An error ends the request with it, and the payload is read
    /// and dropped. Not called for a reply without parts.
    fn alloc(&mut self, meta: &[u8], lens: &[u64]) -> Result<Buffers, Failure>;
    /// Exactly once, and last. `buffers` are those of `alloc`, filled if the outcome is `Ok`.
    fn done(self, outcome: &Outcome<'_>, buffers: Buffers);
}
