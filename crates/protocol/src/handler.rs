//! What the owner of a connection provides, and what it is told.

use std::rc::Rc;

use super::settings::PeerInfo;

/// A payload on its way out. Dropped when its last byte was written, or will never be.
pub trait Payload {
    fn part_count(&self) -> usize;
    fn part_len(&self, part: usize) -> u64;
    /// Appends the whole part: used for inline parts only.
    fn copy_part(&self, part: usize, out: &mut Vec<u8>);
    /// Where a bulk part lies from `offset` on, in a process whose memory the peer may be able to read. None: it cannot
    /// be lent.
    fn address(&self, _part: usize, _offset: u64) -> Option<u64> {
        None
    }
}

/// What the owner of a connection is told. Client-side functions get the `Op` that was given to
/// `Connection::call`/`recv`.
pub trait Handler {
    type Op;
    type Payload: Payload;
    /// Received payload of an incoming call: created by `call_alloc`, filled by `write_call` and through
    /// [`Target::Call`], handed over by `call_ready`. Dropped without `call_ready` if the call was cancelled or the
    /// connection went before it was complete.
    type Body;

    /// Handshake done, from now on requests flow.
    fn ready(&mut self, peer: &PeerInfo);
    /// The peer will not answer (server) or send (client) new requests; it closes when it is idle.
    fn goodbye(&mut self, reason: &str);

    /// Client: both sides can move this connection to a queue pair. To be answered by `Connection::propose_move` or
    /// `stay`, after this input.
    fn may_move(&mut self) {}
    /// Client: what the server says to the proposal. To be answered by `Connection::moved` or (only to an error)
    /// `stay`, after this input.
    fn move_answered(&mut self, _answer: Result<&[u8], Failure>) {}
    /// Server: the client proposes to move. To be answered by `Connection::accept_move` or `refuse_move`, after this
    /// input.
    fn move_proposed(&mut self, _endpoint: &[u8]) {}

    // Server side.
    /// `key` counts up from 0 (so it can index a table). Must validate the prefix; false refuses the requests that use
    /// it (not the connection).
    fn key_defined(&mut self, key: u64, prefix: &[u8]) -> bool;
    /// No request that uses a key defined so far will be delivered any more; numbers start from 0 again.
    fn keys_forgotten(&mut self);
    fn recv_request(&mut self, id: u64, step: i64, key: u64, frame: u64, iter: u64);
    /// Err refuses the call; its payload is read and dropped.
    fn call_alloc(&mut self, id: u64, method: u16, meta: &[u8], lens: &[u64]) -> Result<Self::Body, Failure>;
    /// Inline part: copy into the body.
    fn write_call(&mut self, body: &mut Self::Body, part: usize, bytes: &[u8]);
    fn call_ready(&mut self, id: u64, method: u16, deadline_ms: u32, body: Self::Body);
    /// The client cancelled an unanswered request (method 0: rendezvous request, then `tag` is its step). An answer is
    /// ignored from now on.
    fn request_cancelled(&mut self, id: u64, method: u16, tag: i64, peer_gone: bool);

    // Client side.
    /// Not called for a reply without parts.
    fn reply_alloc(&mut self, op: &mut Self::Op, meta: &[u8], lens: &[u64]) -> Result<(), Failure>;
    /// Inline part: copy into the buffer.
    fn write_reply(&mut self, op: &mut Self::Op, part: usize, bytes: &[u8]);
    /// Exactly once for each op, and last.
    fn reply_done(&mut self, op: Self::Op, result: Outcome<'_>);
}

/// Where the next bytes of the stream belong: fill the targets in order. Only the last one can be scratch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// `Connection::scratch_mut(offset, len)` (control bytes)
    Scratch { offset: usize, len: usize },
    /// Bytes `offset..offset+len` of part `part` of the reply to client request `id` (buffer from `reply_alloc`;
    /// `Connection::op_mut(id)`).
    Reply { id: u64, part: usize, offset: u64, len: u64 },
    /// Bytes of part `part` of incoming call `id` (buffer from `call_alloc`; `Connection::body_mut(id)`).
    Call { id: u64, part: usize, offset: u64, len: u64 },
    /// Bytes nobody wants any more.
    Discard { len: u64 },
}

/// A piece of an outgoing block.
pub enum Segment<P> {
    /// Give the vector back with `Connection::recycle` once it is written.
    Control(Vec<u8>),
    Part {
        payload: Rc<P>,
        part: usize,
        offset: u64,
        len: u64,
    },
}

impl<P> Segment<P> {
    /// Bytes of this segment.
    pub fn len(&self) -> u64 {
        match self {
            Segment::Control(bytes) => bytes.len() as u64,
            Segment::Part { len, .. } => *len,
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Why the owner refuses something.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    pub code: i32,
    pub message: String,
}

/// How an operation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome<'a> {
    Ok {
        meta: &'a [u8],
    },
    /// The peer's answer; `details` is the optional single error-details part.
    PeerError {
        code: i32,
        message: &'a str,
        details: &'a [u8],
    },
    /// We ended it: connection lost, cancelled, deadline, reply refused.
    Local {
        code: i32,
        message: &'a str,
    },
}
