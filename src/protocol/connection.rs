//! The state machine itself: bytes and time in, frames and events out.

use std::time::Instant;

use super::error::ConnectionError;
use super::handler::{Handler, Segment, Target};
use super::settings::{PeerInfo, Settings};
use super::stats::Stats;

/// One side of one connection.
pub struct Connection<H: Handler> {
    marker: std::marker::PhantomData<H>,
}

impl<H: Handler> Connection<H> {
    /// The side that connected. HELLO waits in `poll_transmit`; requests may be made at once and wait for the handshake.
    pub fn client(settings: Settings, now: Instant) -> Self {
        let _ = (settings, now);
        unimplemented!()
    }
    /// The side that accepted.
    pub fn server(settings: Settings, now: Instant) -> Self {
        let _ = (settings, now);
        unimplemented!()
    }

    // Client side.
    /// Starts a rendezvous request. Ids are the owner's, never used twice on a connection. The op may end before this returns.
    #[allow(clippy::too_many_arguments)]
    pub fn recv(
        &mut self,
        now: Instant,
        id: u64,
        step: i64,
        prefix: &[u8],
        frame: u64,
        iter: u64,
        deadline: Option<Instant>,
        op: H::Op,
        handler: &mut H,
    ) {
        let _ = (now, id, step, prefix, frame, iter, deadline, op, handler);
        unimplemented!()
    }
    /// Starts a call. `method` is not 0. The op may end before this returns.
    #[allow(clippy::too_many_arguments)]
    pub fn call(
        &mut self,
        now: Instant,
        id: u64,
        method: u16,
        meta: Vec<u8>,
        payload: Option<H::Payload>,
        deadline: Option<Instant>,
        op: H::Op,
        handler: &mut H,
    ) {
        let _ = (now, id, method, meta, payload, deadline, op, handler);
        unimplemented!()
    }
    /// Ends a request with `Outcome::Local` and tells the peer. Unknown ids are ignored. The op ends at once, or, if the receive plan that the owner is
    /// filling at the moment names its buffers, in the next `on_received` or `fail`.
    pub fn cancel(&mut self, id: u64, code: i32, message: &str, handler: &mut H) {
        let _ = (id, code, message, handler);
        unimplemented!()
    }
    /// The op of a `Target::Reply`. None for other ids.
    pub fn op_mut(&mut self, id: u64) -> Option<&mut H::Op> {
        let _ = id;
        unimplemented!()
    }

    // Server side.
    /// Answers a request. An id that is unknown, answered or cancelled is ignored and the payload dropped. With `code` ≠ 0 `meta` is the message and
    /// the payload's first part (optional) the error details.
    pub fn reply(&mut self, id: u64, code: i32, meta: &[u8], payload: Option<H::Payload>) {
        let _ = (id, code, meta, payload);
        unimplemented!()
    }
    /// The body of a `Target::Call`. None for other ids.
    pub fn body_mut(&mut self, id: u64) -> Option<&mut H::Body> {
        let _ = id;
        unimplemented!()
    }

    // Bytes in.
    /// Replaces `out` by where the next bytes of the stream belong. Empty: do not read now, ask again after the next `poll_transmit` that returned a block.
    /// The targets (and the scratch memory) stay valid until `on_received` or `fail`.
    pub fn recv_plan(&mut self, out: &mut Vec<Target>) {
        let _ = out;
        unimplemented!()
    }
    /// The memory of a `Target::Scratch`. Does not move until `on_received`.
    pub fn scratch_mut(&mut self, offset: usize, len: usize) -> &mut [u8] {
        let _ = (offset, len);
        unimplemented!()
    }
    /// `n` bytes were stored into the targets of the last plan, from its beginning.
    pub fn on_received(&mut self, now: Instant, n: usize, handler: &mut H) -> Result<(), ConnectionError> {
        let _ = (now, n, handler);
        unimplemented!()
    }
    /// What was received but not understood: after `ConnectionError::NotStarwire`, everything since the beginning.
    pub fn unread(&self) -> &[u8] {
        unimplemented!()
    }

    // Bytes out.
    /// Appends the segments of the next block to `out` and returns their total length; 0: nothing to send. Blocks must be written in order.
    pub fn poll_transmit(&mut self, now: Instant, out: &mut Vec<Segment<H::Payload>>) -> u64 {
        let _ = (now, out);
        unimplemented!()
    }
    /// True if `poll_transmit` would return a block.
    pub fn wants_transmit(&self) -> bool {
        unimplemented!()
    }
    /// Gives a written `Segment::Control` back for reuse.
    pub fn recycle(&mut self, control: Vec<u8>) {
        let _ = control;
        unimplemented!()
    }

    // Time.
    pub fn next_timeout(&self) -> Option<Instant> {
        unimplemented!()
    }
    pub fn on_timeout(&mut self, now: Instant, handler: &mut H) -> Result<(), ConnectionError> {
        let _ = (now, handler);
        unimplemented!()
    }

    // The end.
    /// Says GOODBYE: a server answers new requests with Unavailable from now on, a client sends no new ones.
    pub fn goodbye(&mut self, reason: &str) {
        let _ = reason;
        unimplemented!()
    }
    /// The connection is gone (or will be): ends each op with `code` and tells the server's owner that its callers are gone. Call it when the driver no longer
    /// touches any memory of this connection. Idempotent; requests made afterwards end at once with the same failure.
    pub fn fail(&mut self, code: i32, message: &str, handler: &mut H) {
        let _ = (code, message, handler);
        unimplemented!()
    }

    // Looking.
    pub fn peer(&self) -> Option<&PeerInfo> {
        unimplemented!()
    }
    pub fn is_ready(&self) -> bool {
        unimplemented!()
    }
    /// No request in flight in either direction and nothing to send.
    pub fn is_idle(&self) -> bool {
        unimplemented!()
    }
    /// Requests without an answer (client: ours, server: the peer's).
    pub fn in_flight(&self) -> usize {
        unimplemented!()
    }
    pub fn stats(&self) -> &Stats {
        unimplemented!()
    }
}
