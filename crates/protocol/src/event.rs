//! What a connection reports to its owner: a queue of events, in the order in which they happened.
//!
//! Events reuse memory: ops and bodies wait in vectors of their own (so that an event stays small), and the bytes and
//! text of all queued events share one buffer.

use super::frame::RecvFrame;
use super::owner::{Failure, Owner};
use super::settings::PeerInfo;

/// Events for which a drained queue keeps memory …
const EVENTS_KEPT: usize = 4096;
/// … and their bytes.
const BYTES_KEPT: usize = 256 << 10;

/// An event of a connection: see `Connection::poll_event`.
pub enum Event<'a, O: Owner> {
    /// The handshake is done; requests flow from now on. The first event of a connection, unless it moves.
    Ready(&'a PeerInfo),
    /// The peer will not answer (server) or send (client) new requests; it closes when it is idle.
    Goodbye { reason: &'a str },

    /// Client: both sides can move this connection to a queue pair. Call `Connection::propose_move` or `stay`.
    MayMove,
    /// Client: the server's answer to the proposal, its endpoint or a refusal. Call `Connection::moved` or, after a
    /// refusal, `stay`.
    MoveAnswered(Result<&'a [u8], Failure>),
    /// Server: the client proposes to move. Call `Connection::accept_move` or `refuse_move`.
    MoveProposed { endpoint: &'a [u8] },

    /// Server: the client defined a key. Keys count up from 0, so they can index a table. If the owner finds the
    /// prefix malformed, it refuses the requests that use the key, not the connection.
    KeyDefined { key: u64, prefix: &'a [u8] },
    /// Server: no further request uses a key defined so far; keys start from 0 again.
    KeysForgotten,
    /// Server: a rendezvous request. Its key is defined.
    RecvRequest(RecvFrame),
    /// Server: a call, whose payload is complete. `deadline_ms` 0: none.
    CallReady { id: u64, method: u16, deadline_ms: u32, body: O::Body },
    /// Server: the client cancelled an unanswered request, or (`peer_gone`) the connection ended. Method 0 is a
    /// rendezvous request, `tag` its step. A reply is ignored from now on.
    RequestCancelled { id: u64, method: u16, tag: i64, peer_gone: bool },

    /// Client: a request ended. Reported once for each op.
    ReplyDone { op: O::Op, outcome: Outcome<'a> },
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome<'a> {
    Ok {
        meta: &'a [u8],
    },
    /// The peer's answer; `details` is the optional error-details part.
    PeerError {
        code: i32,
        message: &'a str,
        details: &'a [u8],
    },
    /// This side ended it: not sent, cancelled, deadline, reply refused.
    Local {
        code: i32,
        message: &'a str,
    },
    /// The connection was lost, or the peer leaves it: it may have done what was requested.
    Lost {
        code: i32,
        message: &'a str,
    },
}

/// Bytes in the buffer of the queue.
#[derive(Clone, Copy)]
pub struct Kept {
    start: usize,
    len: usize,
}

/// An `Outcome` whose bytes are in the buffer of the queue.
#[derive(Clone, Copy)]
pub enum Ending {
    Ok { meta: Kept },
    PeerError { code: i32, message: Kept, details: Kept },
    Local { code: i32, message: Kept },
    Lost { code: i32, message: Kept },
}

#[derive(Clone, Copy)]
enum Queued {
    Ready,
    Goodbye { reason: Kept },
    MayMove,
    MoveAccepted { endpoint: Kept },
    MoveRefused { code: i32, reason: Kept },
    MoveProposed { endpoint: Kept },
    KeyDefined { key: u64, prefix: Kept },
    KeysForgotten,
    RecvRequest(RecvFrame),
    CallReady { id: u64, method: u16, deadline_ms: u32 },
    RequestCancelled { id: u64, method: u16, tag: i64, peer_gone: bool },
    ReplyDone(Ending),
}

/// The vectors are emptied as a whole, when every event was polled.
pub struct Events<O: Owner> {
    queue: Vec<Queued>,
    /// The op of each `ReplyDone` in the queue.
    ops: Vec<Option<O::Op>>,
    /// The body of each `CallReady` in the queue.
    bodies: Vec<Option<O::Body>>,
    bytes: Vec<u8>,
    /// How many of each have been polled.
    polled: Polled,
}

#[derive(Clone, Copy, Default)]
struct Polled {
    events: usize,
    ops: usize,
    bodies: usize,
}

impl<O: Owner> Events<O> {
    pub fn new() -> Self {
        Events { queue: Vec::new(), ops: Vec::new(), bodies: Vec::new(), bytes: Vec::new(), polled: Polled::default() }
    }

    /// Copies bytes or text for events that are pushed next.
    #[inline]
    pub fn keep(&mut self, bytes: &[u8]) -> Kept {
        let start = self.bytes.len();
        self.bytes.extend_from_slice(bytes);
        Kept { start, len: bytes.len() }
    }

    pub fn ready(&mut self) {
        self.queue.push(Queued::Ready);
    }

    pub fn goodbye(&mut self, reason: &str) {
        let reason = self.keep(reason.as_bytes());
        self.queue.push(Queued::Goodbye { reason });
    }

    pub fn may_move(&mut self) {
        self.queue.push(Queued::MayMove);
    }

    pub fn move_accepted(&mut self, endpoint: &[u8]) {
        let endpoint = self.keep(endpoint);
        self.queue.push(Queued::MoveAccepted { endpoint });
    }

    pub fn move_refused(&mut self, code: i32, reason: &str) {
        let reason = self.keep(reason.as_bytes());
        self.queue.push(Queued::MoveRefused { code, reason });
    }

    pub fn move_proposed(&mut self, endpoint: &[u8]) {
        let endpoint = self.keep(endpoint);
        self.queue.push(Queued::MoveProposed { endpoint });
    }

    pub fn key_defined(&mut self, key: u64, prefix: &[u8]) {
        let prefix = self.keep(prefix);
        self.queue.push(Queued::KeyDefined { key, prefix });
    }

    pub fn keys_forgotten(&mut self) {
        self.queue.push(Queued::KeysForgotten);
    }

    #[inline]
    pub fn recv_request(&mut self, recv: RecvFrame) {
        self.queue.push(Queued::RecvRequest(recv));
    }

    #[inline]
    pub fn call_ready(&mut self, id: u64, method: u16, deadline_ms: u32, body: O::Body) {
        self.bodies.push(Some(body));
        self.queue.push(Queued::CallReady { id, method, deadline_ms });
    }

    pub fn request_cancelled(&mut self, id: u64, method: u16, tag: i64, peer_gone: bool) {
        self.queue.push(Queued::RequestCancelled { id, method, tag, peer_gone });
    }

    #[inline]
    pub fn reply_done(&mut self, op: O::Op, ending: Ending) {
        self.ops.push(Some(op));
        self.queue.push(Queued::ReplyDone(ending));
    }

    /// A request that this side ends.
    pub fn end(&mut self, op: O::Op, code: i32, message: &str) {
        let message = self.keep(message.as_bytes());
        self.reply_done(op, Ending::Local { code, message });
    }

    /// A request that the end of the connection ends.
    pub fn lose(&mut self, op: O::Op, code: i32, message: &str) {
        let message = self.keep(message.as_bytes());
        self.reply_done(op, Ending::Lost { code, message });
    }

    pub fn is_empty(&self) -> bool {
        self.polled.events == self.queue.len()
    }

    #[inline]
    pub fn poll<'a>(&'a mut self, peer: Option<&'a PeerInfo>) -> Option<Event<'a, O>> {
        let Some(next) = self.queue.get(self.polled.events) else {
            self.drained();
            return None;
        };
        self.polled.events += 1;
        let bytes = &self.bytes;
        let bytes = |kept: Kept| bytes.get(kept.start..kept.start + kept.len).unwrap_or_default();
        let text = |kept: Kept| std::str::from_utf8(bytes(kept)).unwrap_or_default();
        Some(match *next {
            Queued::Ready => Event::Ready(peer?),
            Queued::Goodbye { reason } => Event::Goodbye { reason: text(reason) },
            Queued::MayMove => Event::MayMove,
            Queued::MoveAccepted { endpoint } => Event::MoveAnswered(Ok(bytes(endpoint))),
            Queued::MoveRefused { code, reason } => {
                Event::MoveAnswered(Err(Failure { code, message: text(reason).to_owned() }))
            }
            Queued::MoveProposed { endpoint } => Event::MoveProposed { endpoint: bytes(endpoint) },
            Queued::KeyDefined { key, prefix } => Event::KeyDefined { key, prefix: bytes(prefix) },
            Queued::KeysForgotten => Event::KeysForgotten,
            Queued::RecvRequest(recv) => Event::RecvRequest(recv),
            Queued::CallReady { id, method, deadline_ms } => {
                let body = self.bodies.get_mut(self.polled.bodies)?.take()?;
                self.polled.bodies += 1;
                Event::CallReady { id, method, deadline_ms, body }
            }
            Queued::RequestCancelled { id, method, tag, peer_gone } => {
                Event::RequestCancelled { id, method, tag, peer_gone }
            }
            Queued::ReplyDone(ending) => {
                let outcome = match ending {
                    Ending::Ok { meta } => Outcome::Ok { meta: bytes(meta) },
                    Ending::PeerError { code, message, details } => {
                        Outcome::PeerError { code, message: text(message), details: bytes(details) }
                    }
                    Ending::Local { code, message } => Outcome::Local { code, message: text(message) },
                    Ending::Lost { code, message } => Outcome::Lost { code, message: text(message) },
                };
                let op = self.ops.get_mut(self.polled.ops)?.take()?;
                self.polled.ops += 1;
                Event::ReplyDone { op, outcome }
            }
        })
    }

    /// No event refers to the buffer any more.
    #[inline]
    fn drained(&mut self) {
        self.polled = Polled::default();
        self.queue.clear();
        self.ops.clear();
        self.bodies.clear();
        self.bytes.clear();
        if self.queue.capacity() > EVENTS_KEPT || self.bytes.capacity() > BYTES_KEPT {
            self.slim();
        }
    }

    /// Releases memory that only a busy connection needs.
    pub fn slim(&mut self) {
        if self.is_empty() {
            *self = Events::new();
        }
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// An owner that refuses nothing and sends nothing.
    pub struct Nothing;

    impl super::super::owner::Payload for Nothing {
        fn part_count(&self) -> usize {
            0
        }
        fn part_len(&self, _part: usize) -> u64 {
            0
        }
        fn copy_part(&self, _part: usize, _out: &mut Vec<u8>) {}
    }

    pub struct Op([u64; 20]);

    impl super::super::owner::ReplyBuffer for Op {
        fn alloc(&mut self, _meta: &[u8], _lens: &[u64]) -> Result<(), Failure> {
            Ok(())
        }
        fn write(&mut self, _part: usize, _bytes: &[u8]) {}
    }

    impl Owner for Nothing {
        type Op = Op;
        type Payload = Nothing;
        type Body = ();

        fn call_memory(&mut self, _call: &super::super::owner::CallHead<'_>) -> Result<(), Failure> {
            Ok(())
        }
    }

    #[test]
    fn events_keep_their_order_their_ops_and_their_bytes() {
        let mut events = Events::<Nothing>::new();
        for n in 0..3 * EVENTS_KEPT as u64 {
            events.key_defined(n, &n.to_le_bytes());
            events.end(Op([n; 20]), 1, &n.to_string());
        }
        assert!(events.queue.capacity() > EVENTS_KEPT);
        for n in 0..3 * EVENTS_KEPT as u64 {
            assert!(matches!(events.poll(None), Some(Event::KeyDefined { key, prefix })
                if key == n && prefix == n.to_le_bytes()));
            assert!(matches!(events.poll(None), Some(Event::ReplyDone { op, outcome: Outcome::Local { message, .. } })
                if op.0 == [n; 20] && message == n.to_string()));
        }
        assert!(events.poll(None).is_none());
        assert_eq!(events.queue.capacity() + events.ops.capacity() + events.bytes.capacity(), 0);
    }

    #[test]
    fn a_few_events_need_no_new_memory() {
        let mut events = Events::<Nothing>::new();
        let mut memory = None;
        for _ in 0..3 {
            (0..256).for_each(|_| events.end(Op([0; 20]), 1, "message"));
            while events.poll(None).is_some() {}
            assert!(events.queue.capacity() >= 256 && events.ops.capacity() >= 256);
            assert!(events.bytes.capacity() >= 256 * "message".len());
            let now = (events.queue.as_ptr(), events.ops.as_ptr(), events.bytes.as_ptr());
            assert_eq!(*memory.get_or_insert(now), now);
        }
    }

    #[test]
    fn a_queued_event_is_small() {
        assert!(size_of::<Queued>() <= 48);
    }

    #[test]
    fn memory_is_kept_up_to_a_limit() {
        for (count, bytes, is_kept) in [
            (EVENTS_KEPT, 0, true),
            (EVENTS_KEPT + 1, 0, false),
            (1, 1000, true),
            (1, BYTES_KEPT, true),
            (1, BYTES_KEPT + 1, false),
        ] {
            let mut events = Events::<Nothing>::new();
            events.key_defined(0, &vec![7u8; bytes]);
            (1..count).for_each(|_| events.keys_forgotten());
            while events.poll(None).is_some() {}
            assert_eq!(events.queue.capacity() != 0, is_kept, "{count} events, {bytes} bytes");
        }
    }

    #[test]
    fn what_was_not_polled_is_not_released() {
        let mut events = Events::<Nothing>::new();
        assert!(events.is_empty());
        events.keys_forgotten();
        assert!(!events.is_empty());
        events.slim();
        assert!(matches!(events.poll(None), Some(Event::KeysForgotten)));
        assert!(events.is_empty());
    }
}
