//! The sans-I/O connection state machine. `docs/protocol.md` is its specification.
//!
//! A [`Connection`] never sees a socket, a clock or a raw pointer. Its owner (the engine's shard, or a test) moves bytes:
//!
//! * *out*: [`Connection::poll_transmit`] hands out one block at a time as a list of [`Segment`]s to write in order;
//! * *in*: [`Connection::recv_plan`] says where the next bytes of the stream belong, [`Connection::on_received`] says how many arrived there;
//! * *time*: every input takes `now`; [`Connection::next_timeout`] / [`Connection::on_timeout`].
//!
//! What the bytes mean is reported through [`Handler`].

use std::time::Instant;

/// A payload on its way out. Dropped when its last byte was written, or will never be.
pub trait Payload {
    fn part_count(&self) -> usize;
    fn part_len(&self, part: usize) -> u64;
    /// Appends the whole part: used for inline parts only.
    fn copy_part(&self, part: usize, out: &mut Vec<u8>);
}

/// What the owner of a connection is told. Client-side functions get the `Op` that was given to `Connection::call`/`recv`.
pub trait Handler {
    type Op;
    type Payload: Payload;
    /// Received payload of an incoming call: created by `call_alloc`, filled by `write_call`, handed over by `call_ready`.
    type Body;

    /// Handshake done, from now on requests flow.
    fn ready(&mut self, peer: &PeerInfo);

    // Server side.
    /// Must validate the prefix; Err refuses the requests that use it (not the connection).
    fn key_defined(&mut self, key: u64, prefix: &[u8]) -> bool;
    fn recv_request(&mut self, id: u64, step: i64, key: u64, frame: u64, iter: u64);
    /// Err(code, message) refuses the call; its payload is read and dropped.
    fn call_alloc(&mut self, id: u64, method: u16, meta: &[u8], lens: &[u64]) -> Result<Self::Body, Failure>;
    fn write_call(&mut self, body: &mut Self::Body, part: usize, bytes: &[u8]);
    fn call_ready(&mut self, id: u64, method: u16, deadline_ms: u32, body: Self::Body);
    /// The client cancelled an unanswered request (method 0: rendezvous request, then `tag` is its step).
    fn request_cancelled(&mut self, id: u64, method: u16, tag: i64, peer_gone: bool);

    // Client side.
    fn reply_alloc(&mut self, op: &mut Self::Op, meta: &[u8], lens: &[u64]) -> Result<(), Failure>;
    /// Inline part: copy into the buffer.
    fn write_reply(&mut self, op: &mut Self::Op, part: usize, bytes: &[u8]);
    fn reply_done(&mut self, op: Self::Op, result: Outcome<'_>);
}

/// Where the next bytes of the stream belong: fill the targets in order. The last one is always scratch or the list is all payload.
pub enum Target {
    /// `Connection::scratch_mut()[offset..offset+len]` (control bytes)
    Scratch { offset: usize, len: usize },
    /// Bytes `offset..offset+len` of part `part` of the reply to client request `id` (buffer from `reply_alloc`).
    Reply { id: u64, part: usize, offset: u64, len: u64 },
    /// Bytes of part `part` of incoming call `id` (buffer from `call_alloc`).
    Call { id: u64, part: usize, offset: u64, len: u64 },
    /// Bytes nobody wants any more.
    Discard { len: u64 },
}

/// A piece of an outgoing block.
pub enum Segment<P> {
    Control(Vec<u8>),
    Part { payload: std::rc::Rc<P>, part: usize, offset: u64, len: u64 },
}

pub struct PeerInfo {/* task name, incarnation, protocol, features, limits, pid, host id: helper A fills */}
pub struct Failure { pub code: i32, pub message: String }
pub enum Outcome<'a> {
    Ok { meta: &'a [u8] },
    /// The peer's answer; `details` is the optional single error-details part.
    PeerError { code: i32, message: &'a str, details: &'a [u8] },
    /// We ended it: connection lost, cancelled, deadline.
    Local { code: i32, message: &'a str },
}
#[allow(dead_code)]
fn placeholder(_: Instant) {}
