//! The one trait behind which epoll and io_uring stand. Completion style: an operation is started, owns what it needs,
//! and its end is reported by `wait`.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use crate::transport::verbs::{VerbsError, VerbsStats};

/// Names one descriptor inside a driver; never reused while a completion of its old owner can still arrive (generation
/// inside).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Token(pub u64);

/// Memory of an operation in flight. The caller guarantees that the memory stays valid until the operation's completion
/// or `Completion::Closed` was seen.
#[derive(Clone, Copy)]
pub struct IoPart {
    pub ptr: *mut u8,
    pub len: usize,
}

pub enum Completion {
    /// Bytes moved; Ok(0) of a Recv is end of stream. Short counts are normal.
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
    /// A watched descriptor has something to read.
    Readable {
        token: Token,
    },
    /// After `close`: no operation of this token touches memory any more.
    Closed {
        token: Token,
    },
}

/// A connection that was made over a socket moves its bytes to a queue pair, under the same token. The socket stays:
/// its end is the end of the connection.
pub trait Offload {
    /// Makes a queue pair for a connected socket, and returns what the peer has to know to reach it.
    fn prepare(&mut self, token: Token) -> Result<Vec<u8>, VerbsError>;
    /// Connects the queue pair with the peer's. From now on the token's receives come from there; no receive may be in
    /// flight.
    fn connect_pair(&mut self, token: Token, peer: &[u8]) -> Result<(), VerbsError>;
    /// From now on the token's sends go there, too; no send may be in flight.
    fn move_sends(&mut self, token: Token);
    /// Forgets a queue pair that was prepared: the connection stays on its socket.
    fn abandon(&mut self, token: Token);
    /// Since the last time.
    fn take_stats(&mut self) -> VerbsStats;
}

pub trait Driver {
    fn name(&self) -> &str;
    /// Takes a non-blocking stream socket or listener.
    fn register(&mut self, fd: OwnedFd) -> io::Result<Token>;
    /// Starts accepting; completions until closed.
    fn accept(&mut self, listener: Token) -> io::Result<()>;
    /// Starts connecting a registered socket.
    fn connect(&mut self, token: Token, address: &crate::transport::SocketAddress) -> io::Result<()>;
    /// At most one receive in flight per token.
    ///
    /// # Safety
    /// The memory of every part must be writable and stay valid until the completion (or `Closed`) was returned by
    /// `wait`.
    unsafe fn recv(&mut self, token: Token, parts: &[IoPart]) -> io::Result<()>;
    /// At most one send in flight per token.
    ///
    /// # Safety
    /// The memory of every part must be readable and stay valid and unchanged until the completion (or `Closed`) was
    /// returned by `wait`.
    unsafe fn send(&mut self, token: Token, parts: &[IoPart]) -> io::Result<()>;
    /// Reports `Readable` when something arrives at a descriptor that is no socket. Each time, all of it has to be
    /// read: what is left is not reported again.
    fn watch(&mut self, fd: OwnedFd) -> io::Result<Token>;
    /// Queue pairs beside sockets, where this driver has them.
    fn offload(&mut self) -> Option<&mut dyn Offload> {
        None
    }
    /// Ends the outgoing half of a stream after what was sent; receives go on. Only when no send is in flight.
    fn finish(&mut self, token: Token);
    /// Some `finish` has not happened yet, because what was sent before it is still on its way.
    fn is_finishing(&self) -> bool {
        false
    }
    /// Shuts the descriptor down, cancels what is in flight and reports `Closed` when the kernel is done with its
    /// memory.
    fn close(&mut self, token: Token);
    /// Takes the descriptor out again without closing it (hand-over to another reactor or to the control service). Only
    /// when nothing is in flight.
    fn release(&mut self, token: Token) -> io::Result<OwnedFd>;
    /// The end of all operations: closes everything, reports nothing, and waits for at most `patience` until the kernel
    /// touches no memory any more. False: it still may, and then that memory has to be leaked.
    #[must_use]
    fn quiesce(&mut self, patience: Duration) -> bool;
    /// Starts what was queued and waits for completions: `Some(ZERO)` polls, `None` waits for ever. Returns early when
    /// woken.
    fn wait(&mut self, timeout: Option<Duration>, out: &mut Vec<Completion>) -> io::Result<()>;
    /// The descriptor that wakes `wait` when 8 bytes are written to it (an eventfd owned by the driver).
    fn wake_fd(&self) -> std::os::fd::RawFd;
}
