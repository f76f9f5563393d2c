//! A worker's two connections as docs/protocol.md has them: its own to the parameter server, and the one that the
//! server opens to it.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, IoSlice, IoSliceMut};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use starwire_protocol::{
    Call, CallHead, Connection, Event as ProtocolEvent, Failure, Outcome, Owner, Payload, Recv, ReplyBuffer, Segment,
    Settings, Target, code,
};
use tokio::io::Interest;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, oneshot};

use crate::link::{Ask, Event, Events, Link, StarRequest, edge_of};
use crate::recording::Recording;
use crate::star;
use crate::tensor::Tensor;
use crate::worker::nothing;

/// What one system call may read of tensors.
const SINK: usize = 256 << 10;
/// Pieces of one system call.
const MAX_PARTS: usize = 512;
/// System calls for one connection before others get their turn.
const READS_PER_TURN: usize = 4;

pub struct Starwire {
    conn: Rc<Conn>,
    /// The server's connections to this worker.
    incoming: Rc<Incoming>,
    requests: Cell<u64>,
}

/// Who answers at which address, for connections that come in.
pub type Doors = Rc<RefCell<HashMap<SocketAddr, Rc<Incoming>>>>;

/// What the server's connections to one worker share.
pub struct Incoming {
    identity: Identity,
    events: Events,
    /// By the number that is an asker's upper half.
    conns: RefCell<Vec<Rc<Conn>>>,
}

struct Conn {
    proto: RefCell<Connection<Inbox>>,
    inbox: RefCell<Inbox>,
    /// There is something to send.
    wake: Notify,
}

/// Who a worker says that it is.
#[derive(Clone)]
pub struct Identity {
    protocol: &'static str,
    task: String,
    /// Of its process: another one for each worker.
    incarnation: u64,
}

impl Identity {
    pub fn new(protocol: &'static str, task: String) -> Self {
        Self { protocol, task, incarnation: random() }
    }
}

impl Starwire {
    /// Connects a worker that answers at `own`, and waits for the handshake.
    pub async fn connect(
        server: SocketAddr,
        own: SocketAddr,
        identity: Identity,
        recording: &Recording,
        doors: &Doors,
        events: Events,
    ) -> Result<Self, String> {
        let stream = TcpStream::connect(server).await.map_err(|error| format!("{server}: {error}"))?;
        let mut settings = settings(&identity);
        let protocol = identity.protocol;
        let incoming = Rc::new(Incoming { identity, events: events.clone(), conns: RefCell::default() });
        doors.borrow_mut().insert(own, incoming.clone());
        settings.expected_task = Some(recording.ps.clone());
        let (ready, is_ready) = oneshot::channel();
        let inbox = Inbox { ready: Some(ready), ..Inbox::new(events.clone()) };
        let conn = Conn::new(Connection::client(settings, Instant::now()), inbox);
        let driven = conn.clone();
        tokio::task::spawn_local(async move {
            let why = drive(&driven, &stream, |_, _, _| ()).await;
            driven.end(&why);
            let _ = events.send(Event::Lost(why));
        });
        if is_ready.await.is_err() {
            return Err(format!("{server} is not a server of {} over {protocol}", recording.ps));
        }
        Ok(Self { conn, incoming, requests: Cell::new(0) })
    }

    fn next_id(&self) -> u64 {
        let id = self.requests.get() + 1;
        self.requests.set(id);
        id
    }
}

impl Link for Starwire {
    fn call(&self, token: u64, _: &str, method: u16, request: Vec<u8>) {
        let (mut proto, mut inbox) = (self.conn.proto.borrow_mut(), self.conn.inbox.borrow_mut());
        let payload = (!request.is_empty()).then(|| Out::One(request.into()));
        let op = Waiting { token, content: Some(Vec::new()), bytes: 0, wanted: None, star: false };
        let call = Call { id: self.next_id(), method, meta: Vec::new(), payload, deadline: None, op };
        proto.call(Instant::now(), call);
        inbox.take_events(&mut proto);
        self.conn.wake.notify_one();
    }

    fn pull(&self, token: u64, pull: Ask<'_>) {
        let (mut proto, mut inbox) = (self.conn.proto.borrow_mut(), self.conn.inbox.borrow_mut());
        let prefix = pull.key.rsplit_once(';').map_or(pull.key, |(prefix, _)| prefix);
        let op = Waiting { token, content: None, bytes: 0, wanted: Some(pull.bytes), star: false };
        let step = i64::try_from(pull.step).expect("a step's number has 57 bits (Disguise::step_id)");
        let (id, prefix) = (self.next_id(), prefix.as_bytes());
        proto.recv(Instant::now(), Recv { id, step, prefix, frame: 0, iter: 0, deadline: None, op });
        inbox.take_events(&mut proto);
        self.conn.wake.notify_one();
    }

    fn star(&self, token: u64, request: StarRequest) {
        let (mut proto, mut inbox) = (self.conn.proto.borrow_mut(), self.conn.inbox.borrow_mut());
        let payload = (!request.parts.is_empty()).then_some(Out::Many(request.parts));
        let star = request.method == star::CALL;
        let op = Waiting { token, content: None, bytes: 0, wanted: Some(request.bytes), star };
        let StarRequest { method, meta, .. } = request;
        let call = Call { id: self.next_id(), method, meta, payload, deadline: None, op };
        proto.call(Instant::now(), call);
        inbox.take_events(&mut proto);
        self.conn.wake.notify_one();
    }

    fn answer(&self, asker: u64, tensor: &Arc<Tensor>) {
        let (number, id) = (asker >> 48, asker & ((1 << 48) - 1));
        let conns = self.incoming.conns.borrow();
        let Some(conn) = usize::try_from(number).ok().and_then(|n| conns.get(n)) else { return };
        let payload = (!tensor.content.is_empty()).then(|| Out::One(tensor.content.clone()));
        conn.proto.borrow_mut().reply(id, 0, &tensor.meta, payload);
        conn.wake.notify_one();
    }
}

/// Takes the server's connections for ever.
pub async fn accept(listener: TcpListener, doors: Doors) {
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            // Out of descriptors, most likely: not in a tight loop.
            tokio::time::sleep(Duration::from_millis(10)).await;
            continue;
        };
        let found = stream.local_addr().ok().and_then(|own| doors.borrow().get(&own).cloned());
        if let Some(incoming) = found {
            tokio::task::spawn_local(serve(stream, incoming));
        }
    }
}

async fn serve(stream: TcpStream, incoming: Rc<Incoming>) {
    let proto = Connection::server(settings(&incoming.identity), Instant::now());
    let conn = Conn::new(proto, Inbox::new(incoming.events.clone()));
    let number = incoming.conns.borrow().len() as u64;
    incoming.conns.borrow_mut().push(conn.clone());
    let events = incoming.events.clone();
    let why = drive(&conn, &stream, |id, step, edge| {
        let asker = number << 48 | id & ((1 << 48) - 1);
        let _ = events.send(match u64::try_from(step) {
            Ok(step) => Event::Asked { step, edge, asker },
            Err(_) => Event::Lost(format!("the server requested {edge} of step {step}")),
        });
    })
    .await;
    conn.end(&why);
    let _ = incoming.events.send(Event::Lost(why));
}

/// The hash seeds of the standard library are as random as a benchmark needs.
pub fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

fn settings(identity: &Identity) -> Settings {
    let mut nonce = [0; 32];
    for chunk in nonce.chunks_exact_mut(8) {
        chunk.copy_from_slice(&random().to_le_bytes());
    }
    let mut settings = Settings::new(&identity.task, identity.protocol, identity.incarnation, nonce);
    // As the engine's defaults: see STARWIRE_KEEPALIVE.
    settings.keepalive_interval = Duration::from_secs(5);
    settings.keepalive_timeout = Duration::from_secs(15);
    settings
}

/// A payload on its way out: shared by all workers.
enum Out {
    One(Bytes),
    Many(Arc<[Bytes]>),
}

impl Out {
    fn parts(&self) -> &[Bytes] {
        match self {
            Self::One(part) => std::slice::from_ref(part),
            Self::Many(parts) => parts,
        }
    }
}

impl Payload for Out {
    fn part_count(&self) -> usize {
        self.parts().len()
    }
    fn part_len(&self, part: usize) -> u64 {
        self.parts()[part].len() as u64
    }
    fn copy_part(&self, part: usize, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.parts()[part]);
    }
}

/// A request of ours that is under way.
struct Waiting {
    token: u64,
    /// Answers to calls are kept; those to pulls are only counted.
    content: Option<Vec<u8>>,
    bytes: u64,
    wanted: Option<u64>,
    /// The answer may be that the plan is wanted first.
    star: bool,
}

/// What the protocol reports.
struct Inbox {
    events: Events,
    ready: Option<oneshot::Sender<()>>,
    keys: Vec<Option<String>>,
    /// Tensors that the server wants: request, step, edge.
    asks: Vec<(u64, i64, String)>,
}

impl Inbox {
    fn new(events: Events) -> Self {
        Self { events, ready: None, keys: Vec::new(), asks: Vec::new() }
    }
}

impl Owner for Inbox {
    type Op = Waiting;
    type Payload = Out;
    type Body = ();

    fn call_memory(&mut self, _: &CallHead<'_>) -> Result<(), Failure> {
        Err(Failure { code: code::UNIMPLEMENTED, message: "a simulated worker has no methods".to_owned() })
    }
}

impl ReplyBuffer for Waiting {
    fn alloc(&mut self, _: &[u8], lens: &[u64]) -> Result<(), Failure> {
        self.bytes = lens.iter().sum();
        if let Some(content) = &mut self.content {
            let refuse = || Failure { code: code::RESOURCE_EXHAUSTED, message: "the answer is too long".to_owned() };
            content.resize(usize::try_from(self.bytes).ok().filter(|n| *n < 1 << 30).ok_or_else(refuse)?, 0);
        }
        Ok(())
    }

    fn write(&mut self, part: usize, bytes: &[u8]) {
        self.write_at(part, 0, bytes);
    }
}

impl Inbox {
    fn take_events(&mut self, proto: &mut Connection<Inbox>) {
        while let Some(event) = proto.poll_event() {
            match event {
                ProtocolEvent::Ready(_) => {
                    if let Some(ready) = self.ready.take() {
                        let _ = ready.send(());
                    }
                }
                ProtocolEvent::KeyDefined { prefix, .. } => {
                    let edge = std::str::from_utf8(prefix).ok().and_then(edge_of).map(str::to_owned);
                    self.keys.push(edge);
                }
                ProtocolEvent::KeysForgotten => self.keys.clear(),
                ProtocolEvent::RecvRequest(recv) => {
                    match usize::try_from(recv.key).ok().and_then(|key| self.keys.get(key)?.clone()) {
                        Some(edge) => self.asks.push((recv.id, recv.step, edge)),
                        None => proto.reply(recv.id, code::INVALID_ARGUMENT, b"not a rendezvous key", None),
                    }
                }
                ProtocolEvent::ReplyDone { op, outcome } => self.reply_done(op, outcome),
                _ => {}
            }
        }
    }

    fn reply_done(&mut self, op: Waiting, result: Outcome<'_>) {
        let result = match result {
            Outcome::Ok { meta } if op.star && star::asks_for_plan(meta) != Some(false) => {
                let event = match star::asks_for_plan(meta) {
                    Some(_) => Event::Unknown { token: op.token },
                    None => {
                        Event::Ended { token: op.token, result: Err("the answer is not one to a star call".to_owned()) }
                    }
                };
                let _ = self.events.send(event);
                return;
            }
            Outcome::Ok { .. } => match op.wanted {
                Some(wanted) if wanted != op.bytes => {
                    Err(format!("the tensor has {} bytes, the recorded one has {wanted}", op.bytes))
                }
                _ => Ok(op.content.map_or_else(nothing, Bytes::from)),
            },
            Outcome::PeerError { message, .. } | Outcome::Local { message, .. } | Outcome::Lost { message, .. } => {
                Err(message.to_owned())
            }
        };
        let _ = self.events.send(Event::Ended { token: op.token, result });
    }
}

impl Waiting {
    /// Answers to calls have one part.
    fn write_at(&mut self, part: usize, offset: u64, bytes: &[u8]) {
        let Some(content) = self.content.as_mut().filter(|_| part == 0) else { return };
        let to = usize::try_from(offset).ok().and_then(|from| content.get_mut(from..from.checked_add(bytes.len())?));
        if let Some(to) = to {
            to.copy_from_slice(bytes);
        }
    }
}

impl Conn {
    fn new(proto: Connection<Inbox>, inbox: Inbox) -> Rc<Self> {
        Rc::new(Self { proto: RefCell::new(proto), inbox: RefCell::new(inbox), wake: Notify::new() })
    }

    fn end(&self, why: &str) {
        let (mut proto, mut inbox) = (self.proto.borrow_mut(), self.inbox.borrow_mut());
        proto.fail(code::UNAVAILABLE, why);
        inbox.take_events(&mut proto);
        inbox.ready = None;
    }
}

thread_local! {
    /// Where tensors go that nobody looks at: one for all.
    static SINK_MEMORY: RefCell<Vec<u8>> = RefCell::new(vec![0; SINK]);
}

/// Moves bytes between a socket and its connection until one of them ends, and says why.
async fn drive(conn: &Conn, stream: &TcpStream, mut asked: impl FnMut(u64, i64, String)) -> String {
    let _ = stream.set_nodelay(true);
    let mut out = Outgoing::default();
    let timer = tokio::time::sleep(Duration::from_secs(1));
    tokio::pin!(timer);
    loop {
        if let Err(error) = out.send(conn, stream) {
            return format!("cannot send: {error}");
        }
        let interest = if out.is_empty() { Interest::READABLE } else { Interest::READABLE | Interest::WRITABLE };
        tokio::select! {
            biased;
            () = conn.wake.notified() => {}
            ready = stream.ready(interest) => {
                if let Err(error) = ready {
                    return error.to_string();
                }
                if let Err(why) = receive(conn, stream) {
                    return why;
                }
                let mut inbox = conn.inbox.borrow_mut();
                for (id, step, edge) in inbox.asks.drain(..) {
                    asked(id, step, edge);
                }
            }
            () = &mut timer => {
                let now = Instant::now();
                if conn.proto.borrow().next_timeout().is_some_and(|at| at <= now) {
                    let ticked = conn.proto.borrow_mut().on_timeout(now);
                    conn.inbox.borrow_mut().take_events(&mut conn.proto.borrow_mut());
                    if let Err(error) = ticked {
                        return error.to_string();
                    }
                }
                // One that fires too early only looks.
                timer.as_mut().reset(tokio::time::Instant::now() + Duration::from_secs(1));
            }
        }
    }
}

fn receive(conn: &Conn, stream: &TcpStream) -> Result<(), String> {
    let mut targets = Vec::new();
    for _ in 0..READS_PER_TURN {
        let mut proto = conn.proto.borrow_mut();
        proto.receive_targets(&mut targets);
        let Some(n) = SINK_MEMORY.with_borrow_mut(|sink| read(&mut proto, &targets, stream, sink))? else {
            return Ok(());
        };
        let mut inbox = conn.inbox.borrow_mut();
        let received = proto.on_received(Instant::now(), n, &mut inbox);
        inbox.take_events(&mut proto);
        received.map_err(|error| error.to_string())?;
    }
    Ok(())
}

/// One read of what `targets` ask for. None: there is nothing to read now.
fn read(
    proto: &mut Connection<Inbox>,
    targets: &[Target],
    stream: &TcpStream,
    sink: &mut [u8],
) -> Result<Option<usize>, String> {
    let mut payload = 0;
    let mut scratch = None;
    for target in targets {
        match target {
            Target::Scratch { offset, len } => scratch = Some((*offset, *len)),
            Target::Reply { len, .. } | Target::Call { len, .. } | Target::Discard { len } => {
                let room = sink.len() - payload;
                payload += usize::try_from(*len).map_or(room, |len| len.min(room));
                if payload == sink.len() {
                    break;
                }
            }
        }
    }
    // What is longer than the sink comes in pieces, and what follows it later.
    let scratch = scratch.filter(|_| payload < sink.len());
    let result = {
        let first = IoSliceMut::new(&mut sink[..payload]);
        match scratch {
            Some((offset, len)) => {
                stream.try_read_vectored(&mut [first, IoSliceMut::new(proto.scratch_mut(offset, len))])
            }
            None if payload == 0 => return Ok(None),
            None => stream.try_read_vectored(&mut [first]),
        }
    };
    match result {
        Ok(0) => Err("it closed the connection".to_owned()),
        Ok(n) => {
            keep(proto, targets, &sink[..payload.min(n)]);
            Ok(Some(n))
        }
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
        Err(error) => Err(error.to_string()),
    }
}

/// Copies what arrived for answers that are kept.
fn keep(proto: &mut Connection<Inbox>, targets: &[Target], mut arrived: &[u8]) {
    for target in targets {
        let (Target::Reply { len, .. } | Target::Call { len, .. } | Target::Discard { len }) = target else { return };
        let len = usize::try_from(*len).map_or(arrived.len(), |len| len.min(arrived.len()));
        let (bytes, rest) = arrived.split_at(len);
        if let Target::Reply { id, part, offset, .. } = target {
            if let Some(op) = proto.op_mut(*id) {
                op.write_at(*part, *offset, bytes);
            }
        }
        arrived = rest;
    }
}

/// Blocks that the kernel has not taken yet.
#[derive(Default)]
struct Outgoing {
    segments: Vec<Segment<Out>>,
    written: usize,
    /// Bytes of the first unwritten segment that are gone.
    offset: usize,
}

impl Outgoing {
    fn is_empty(&self) -> bool {
        self.written == self.segments.len()
    }

    /// Sends until nothing is left or the kernel takes no more.
    fn send(&mut self, conn: &Conn, stream: &TcpStream) -> io::Result<()> {
        loop {
            if self.is_empty() {
                self.segments.clear();
                self.written = 0;
                let mut proto = conn.proto.borrow_mut();
                while self.segments.len() < MAX_PARTS / 2
                    && proto.poll_transmit(Instant::now(), &mut self.segments) != 0
                {}
                if self.segments.is_empty() {
                    return Ok(());
                }
            }
            let mut offset = self.offset;
            let unsent = self.segments.iter().skip(self.written).take(MAX_PARTS);
            let slices: Vec<IoSlice<'_>> =
                unsent.map(|segment| IoSlice::new(&bytes_of(segment)[std::mem::take(&mut offset)..])).collect();
            match stream.try_write_vectored(&slices) {
                Ok(n) => self.sent(n, conn),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
        }
    }

    fn sent(&mut self, mut n: usize, conn: &Conn) {
        while let Some(first) = self.segments.get_mut(self.written) {
            let rest = bytes_of(first).len() - self.offset;
            if n < rest {
                self.offset += n;
                return;
            }
            n -= rest;
            self.offset = 0;
            self.written += 1;
            if let Segment::Control(bytes) = std::mem::replace(first, Segment::Control(Vec::new())) {
                conn.proto.borrow_mut().recycle(bytes);
            }
        }
    }
}

fn bytes_of(segment: &Segment<Out>) -> &[u8] {
    match segment {
        Segment::Control(bytes) => bytes,
        Segment::Part { payload, part, offset, len } => {
            let range = usize::try_from(*offset).ok().zip(usize::try_from(*len).ok());
            range
                .and_then(|(from, len)| payload.parts().get(*part)?.get(from..from.checked_add(len)?))
                .unwrap_or_default()
        }
    }
}
