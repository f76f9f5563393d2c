//! The trait that epoll, io_uring and RDMA implement. Completion-based: a call starts an operation, and `wait` reports
//! its end.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

pub use crate::transport::IoPart;
use crate::transport::verbs::{VerbsError, VerbsStats};

/// Identifies one descriptor in a driver. Contains a generation, so it is never reused while a completion for its
/// previous owner can still arrive.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Token(pub u64);

pub enum Completion {
    /// Bytes moved; `Ok(0)` of a Recv is the end of the stream. Short counts are normal.
    Recv {
        token: Token,
        result: io::Result<usize>,
    },
    Send {
        token: Token,
        result: io::Result<usize>,
    },
    Accepted {
        listener: Token,
        result: io::Result<OwnedFd>,
    },
    Connected {
        token: Token,
        result: io::Result<()>,
    },
    /// A watched descriptor is readable.
    Readable {
        token: Token,
    },
    /// After `close`: no operation of this token touches memory any more.
    Closed {
        token: Token,
    },
}

impl Completion {
    /// The descriptor that it is about.
    pub fn token(&self) -> Token {
        match self {
            Completion::Recv { token, .. }
            | Completion::Send { token, .. }
            | Completion::Accepted { listener: token, .. }
            | Completion::Connected { token, .. }
            | Completion::Readable { token }
            | Completion::Closed { token } => *token,
        }
    }
}

/// Moves the bytes of a connection from its socket to a queue pair, under the same token. The socket stays open: its
/// end is the end of the connection.
pub trait Offload {
    /// Makes a queue pair for a connected socket. Returns the endpoint that the peer needs to reach it.
    fn prepare(&mut self, token: Token) -> Result<Vec<u8>, VerbsError>;
    /// Connects the queue pair with the peer's. From now on it serves the token's receives; no receive may be in
    /// flight.
    fn connect_pair(&mut self, token: Token, peer: &[u8]) -> Result<(), VerbsError>;
    /// From now on it serves the token's sends as well; no send may be in flight.
    fn move_sends(&mut self, token: Token);
    /// Drops a prepared queue pair: the connection stays on its socket.
    fn abandon(&mut self, token: Token);
    /// The statistics since the last call.
    fn take_stats(&mut self) -> VerbsStats;
}

pub trait Driver {
    fn name(&self) -> &str;
    /// Takes a non-blocking stream socket or listener.
    fn register(&mut self, fd: OwnedFd) -> io::Result<Token>;
    /// Starts accepting; reports connections until closed.
    fn accept(&mut self, listener: Token) -> io::Result<()>;
    fn connect(&mut self, token: Token, address: &crate::transport::SocketAddress) -> io::Result<()>;
    /// At most one receive in flight per token.
    ///
    /// # Safety
    /// The memory of every part must be writable and stay valid until `wait` has returned the completion (or `Closed`).
    unsafe fn recv(&mut self, token: Token, parts: &[IoPart]) -> io::Result<()>;
    /// At most one send in flight per token.
    ///
    /// # Safety
    /// The memory of every part must be readable and stay valid and unchanged until `wait` has returned the completion
    /// (or `Closed`).
    unsafe fn send(&mut self, token: Token, parts: &[IoPart]) -> io::Result<()>;
    /// Reports `Readable` when data arrives at a descriptor that is not a socket. The caller must read all of it each
    /// time: the rest is not reported again.
    fn watch(&mut self, fd: OwnedFd) -> io::Result<Token>;
    /// Queue pairs beside sockets, if this driver has them.
    fn offload(&mut self) -> Option<&mut dyn Offload> {
        None
    }
    /// Shuts down the sending half of a stream after everything sent; receives continue. Only while no send is in
    /// flight.
    fn finish(&mut self, token: Token);
    /// Whether a `finish` is still pending because earlier data is in flight.
    fn is_finishing(&self) -> bool {
        false
    }
    /// Shuts the descriptor down, cancels its operations and reports `Closed` when the kernel no longer uses their
    /// memory.
    fn close(&mut self, token: Token);
    /// Removes the descriptor without closing it (hand-over to another reactor or to the control service). Only while
    /// nothing is in flight.
    fn release(&mut self, token: Token) -> io::Result<OwnedFd>;
    /// Ends all operations: closes everything, reports nothing, and waits up to `patience` until the kernel no longer
    /// touches any memory. False: it still may, and that memory must be leaked.
    #[must_use]
    fn quiesce(&mut self, patience: Duration) -> bool;
    /// Starts queued operations and waits for completions: `Some(ZERO)` polls, `None` waits indefinitely. Returns early
    /// when woken.
    fn wait(&mut self, timeout: Option<Duration>, out: &mut Vec<Completion>) -> io::Result<()>;
    /// The descriptor that wakes `wait` when 8 bytes are written to it (an eventfd owned by the driver).
    fn wake_fd(&self) -> std::os::fd::RawFd;
}
