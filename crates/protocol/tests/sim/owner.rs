//! The owner of a connection in tests: keeps what it is told and checks what it can at once.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use starwire_protocol::{CallBuffer, CallHead, Event, Failure, Outcome, Payload, PeerInfo, RecvFrame, ReplyBuffer};

/// Counts things that must be given back.
pub type Live = Rc<Cell<i64>>;

/// The parts of a payload.
type Parts = Rc<Vec<Vec<u8>>>;

thread_local! {
    /// What can be read by whoever was told its address: payloads that exist.
    static MEMORY: RefCell<BTreeMap<u64, Parts>> = const { RefCell::new(BTreeMap::new()) };
    static NEXT_ADDRESS: Cell<u64> = const { Cell::new(1) };
}

/// Of one payload's addresses, how many bits say where in a part, and which part.
const OFFSET_BITS: u32 = 32;
const PART_BITS: u32 = 12;

/// What lies at an address. Panics if it is not there any more.
pub fn read_memory(address: u64, len: usize) -> Vec<u8> {
    let (payload, part) = (address >> (OFFSET_BITS + PART_BITS), address >> OFFSET_BITS & ((1 << PART_BITS) - 1));
    let offset = (address & ((1 << OFFSET_BITS) - 1)) as usize;
    MEMORY.with_borrow(|memory| {
        let parts = memory.get(&payload).expect("what was lent is kept until it was taken");
        parts[part as usize][offset..offset + len].to_vec()
    })
}

/// A payload that counts how many of its kind exist.
pub struct TestPayload {
    pub parts: Parts,
    address: u64,
    live: Live,
}

impl TestPayload {
    pub fn new(parts: Vec<Vec<u8>>, live: &Live) -> Self {
        live.set(live.get() + 1);
        let (parts, address) = (Rc::new(parts), NEXT_ADDRESS.get());
        NEXT_ADDRESS.set(address + 1);
        MEMORY.with_borrow_mut(|memory| memory.insert(address, parts.clone()));
        TestPayload { parts, address, live: live.clone() }
    }
}

impl Drop for TestPayload {
    fn drop(&mut self) {
        self.live.set(self.live.get() - 1);
        // Not when the thread ends.
        let _ = MEMORY.try_with(|memory| memory.borrow_mut().remove(&self.address));
    }
}

impl Payload for TestPayload {
    fn part_count(&self) -> usize {
        self.parts.len()
    }
    fn part_len(&self, part: usize) -> u64 {
        self.parts[part].len() as u64
    }
    fn copy_part(&self, part: usize, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.parts[part]);
    }
    fn address(&self, part: usize, offset: u64) -> Option<u64> {
        Some((self.address << PART_BITS | part as u64) << OFFSET_BITS | offset)
    }
}

/// Buffers that bytes are received into. `ended`: nobody may write any more.
#[derive(Default)]
pub struct Buffers {
    pub parts: RefCell<Vec<Vec<u8>>>,
    pub ended: Cell<bool>,
}

impl Buffers {
    fn allocate(&self, lens: &[u64]) {
        *self.parts.borrow_mut() = lens.iter().map(|len| vec![0xAA; *len as usize]).collect();
    }

    pub fn write(&self, part: usize, offset: usize, bytes: &[u8]) {
        assert!(!self.ended.get(), "bytes written into the buffers of an ended operation");
        self.parts.borrow_mut()[part][offset..offset + bytes.len()].copy_from_slice(bytes);
    }
}

pub struct Op {
    pub id: u64,
    pub buffers: Rc<Buffers>,
}

pub struct Body {
    pub id: u64,
    pub meta: Vec<u8>,
    pub buffers: Rc<Buffers>,
    live: Live,
}

impl Drop for Body {
    fn drop(&mut self) {
        self.buffers.ended.set(true);
        self.live.set(self.live.get() - 1);
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ended {
    Ok { meta: Vec<u8>, parts: Vec<Vec<u8>> },
    Peer { code: i32, message: String, details: Vec<u8> },
    Local { code: i32, message: String },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    Recv { id: u64, step: i64, prefix: Vec<u8>, frame: u64, iter: u64 },
    Call { id: u64, method: u16, deadline_ms: u32, meta: Vec<u8>, parts: Vec<Vec<u8>> },
}

impl Request {
    pub fn id(&self) -> u64 {
        match self {
            Request::Recv { id, .. } | Request::Call { id, .. } => *id,
        }
    }
}

/// Malformed: requests with it are refused.
pub const BAD_PREFIX: &[u8] = b"bad";
/// Refused by `call_memory`.
pub const REFUSED_METHOD: u16 = 666;
/// Refused by `alloc`.
pub const REFUSED_META: &[u8] = b"refuse me";

#[derive(Default)]
pub struct Owner {
    pub ready: Option<PeerInfo>,
    pub goodbyes: Vec<String>,
    pub ended: BTreeMap<u64, Ended>,
    /// Those of them that the end of the connection has ended.
    pub lost: BTreeSet<u64>,
    pub requests: Vec<Request>,
    /// id, method, tag, peer_gone
    pub cancelled: Vec<(u64, u16, i64, bool)>,
    pub keys: Vec<Vec<u8>>,
    pub keys_forgotten: u64,
    /// What a server was told, in order.
    pub order: Vec<String>,
    pub bodies: Live,
    /// What the connection asked about a move.
    pub may_move: u32,
    pub proposed: Option<Vec<u8>>,
    pub answered: Option<Result<Vec<u8>, Failure>>,
}

impl Owner {
    pub fn op(&self, id: u64) -> Op {
        Op { id, buffers: Rc::default() }
    }

    pub fn take_request(&mut self, id: u64) -> Option<Request> {
        let at = self.requests.iter().position(|request| request.id() == id)?;
        Some(self.requests.remove(at))
    }
}

impl CallBuffer for Body {
    fn write(&mut self, part: usize, bytes: &[u8]) {
        self.buffers.write(part, 0, bytes);
    }
}

impl ReplyBuffer for Op {
    fn alloc(&mut self, meta: &[u8], lens: &[u64]) -> Result<(), Failure> {
        assert!(!lens.is_empty());
        if meta == REFUSED_META {
            return Err(Failure { code: 8, message: "no memory".to_owned() });
        }
        self.buffers.allocate(lens);
        Ok(())
    }
    fn write(&mut self, part: usize, bytes: &[u8]) {
        self.buffers.write(part, 0, bytes);
    }
}

impl starwire_protocol::Owner for Owner {
    type Op = Op;
    type Payload = TestPayload;
    type Body = Body;

    fn call_memory(&mut self, call: &CallHead<'_>) -> Result<Body, Failure> {
        if call.method == REFUSED_METHOD {
            return Err(Failure { code: 12, message: "no such method".to_owned() });
        }
        let buffers = Rc::<Buffers>::default();
        buffers.allocate(call.lens);
        self.bodies.set(self.bodies.get() + 1);
        Ok(Body { id: call.id, meta: call.meta.to_vec(), buffers, live: self.bodies.clone() })
    }
}

impl Owner {
    /// Notes an event. Some: a request to refuse.
    pub fn note(&mut self, event: Event<'_, Owner>) -> Option<u64> {
        let told = match &event {
            Event::Ready(_) => Some("ready".to_owned()),
            Event::Goodbye { .. } => Some("goodbye".to_owned()),
            Event::KeyDefined { key, .. } => Some(format!("key {key}")),
            Event::KeysForgotten => Some("keys forgotten".to_owned()),
            Event::RecvRequest(recv) => Some(format!("recv {}", recv.id)),
            Event::CallReady { id, .. } => Some(format!("call {id}")),
            Event::RequestCancelled { id, .. } => Some(format!("cancelled {id}")),
            _ => None,
        };
        self.order.extend(told);
        match event {
            Event::Ready(peer) => {
                assert!(self.ready.is_none(), "ready twice");
                self.ready = Some(peer.clone());
            }
            Event::Goodbye { reason } => self.goodbyes.push(reason.to_owned()),
            Event::MayMove => {
                assert!(self.ready.is_none());
                self.may_move += 1;
            }
            Event::MoveAnswered(answer) => {
                assert!(self.answered.replace(answer.map(<[u8]>::to_vec)).is_none(), "one answer");
            }
            Event::MoveProposed { endpoint } => {
                assert!(self.proposed.replace(endpoint.to_vec()).is_none(), "one proposal");
            }
            Event::KeyDefined { key, prefix } => {
                assert_eq!(key, self.keys.len() as u64, "keys count up from 0");
                self.keys.push(prefix.to_vec());
            }
            Event::KeysForgotten => {
                self.keys.clear();
                self.keys_forgotten += 1;
            }
            Event::RecvRequest(RecvFrame { id, step, key, frame, iter }) => {
                assert!(self.ready.is_some());
                let prefix = self.keys[key as usize].clone();
                if prefix == BAD_PREFIX {
                    return Some(id);
                }
                self.requests.push(Request::Recv { id, step, prefix, frame, iter });
            }
            Event::CallReady { id, method, deadline_ms, body } => {
                assert!(self.ready.is_some());
                assert_eq!(id, body.id);
                let parts = body.buffers.parts.borrow().clone();
                self.requests.push(Request::Call { id, method, deadline_ms, meta: body.meta.clone(), parts });
            }
            Event::RequestCancelled { id, method, tag, peer_gone } => {
                self.take_request(id);
                self.cancelled.push((id, method, tag, peer_gone));
            }
            Event::ReplyDone { op, outcome } => {
                assert!(!op.buffers.ended.replace(true));
                if matches!(outcome, Outcome::Lost { .. }) {
                    self.lost.insert(op.id);
                }
                let ended = match outcome {
                    Outcome::Ok { meta } => Ended::Ok { meta: meta.to_vec(), parts: op.buffers.parts.borrow().clone() },
                    Outcome::PeerError { code, message, details } => {
                        Ended::Peer { code, message: message.to_owned(), details: details.to_vec() }
                    }
                    Outcome::Local { code, message } | Outcome::Lost { code, message } => {
                        Ended::Local { code, message: message.to_owned() }
                    }
                };
                assert!(self.ended.insert(op.id, ended).is_none(), "operation {} ended twice", op.id);
            }
        }
        None
    }
}
