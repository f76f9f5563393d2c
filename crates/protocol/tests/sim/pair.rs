//! Two connections and the bytes between them, in memory and virtual time.

use std::cell::Cell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::{Duration, Instant};

use starwire_protocol::{
    Call, Connection, ConnectionError, FEATURE_LENDING, Payload, Recv, Segment, Settings, Target, Witness,
};

use crate::owner::{Buffers, Live, Owner, TestPayload, read_memory};

/// One side: a connection, its owner and its socket's memory.
pub struct End {
    pub connection: Connection<Owner>,
    pub owner: Owner,
    /// The receive in flight: where it writes, resolved when it began as a kernel would have it.
    plan: Option<Vec<Place>>,
    pub error: Option<ConnectionError>,
    /// Payloads given away and not yet dropped.
    pub payloads: Live,
    /// Blocks sent so far: control bytes and bulk bytes.
    pub blocks: Vec<(usize, u64)>,
    /// It can read the peer's memory, and says so when it can.
    pub reads_peer: bool,
    /// What vouches for its loans: still as it was.
    vouches: Rc<Cell<bool>>,
    /// The same of the peer.
    peer_vouches: Option<Rc<Cell<bool>>>,
}

enum Place {
    Scratch { offset: usize, len: usize },
    Buffer { buffers: Rc<Buffers>, part: usize, offset: usize, len: usize },
    Discard { len: usize },
}

impl Place {
    fn len(&self) -> usize {
        match self {
            Place::Scratch { len, .. } | Place::Buffer { len, .. } | Place::Discard { len } => *len,
        }
    }
}

impl End {
    pub fn client(settings: Settings, now: Instant) -> End {
        End::new(Connection::client(settings, now))
    }

    pub fn server(settings: Settings, now: Instant) -> End {
        End::new(Connection::server(settings, now))
    }

    fn new(connection: Connection<Owner>) -> End {
        End {
            connection,
            owner: Owner::default(),
            plan: None,
            error: None,
            payloads: Rc::new(Cell::new(0)),
            blocks: Vec::new(),
            reads_peer: false,
            vouches: Rc::new(Cell::new(true)),
            peer_vouches: None,
        }
    }

    /// Both can read each other's memory.
    pub fn make_neighbours(a: &mut End, b: &mut End) {
        for (end, number) in [(&mut *a, 1), (&mut *b, 2)] {
            end.connection.lend(Witness { address: number, value: 100 + number });
            end.reads_peer = true;
        }
        (a.peer_vouches, b.peer_vouches) = (Some(b.vouches.clone()), Some(a.vouches.clone()));
    }

    /// The next bytes are to be copied from the peer's memory. False also if the peer has taken them back: this
    /// connection gets no further.
    pub fn borrows(&self) -> bool {
        self.connection.loan().is_some() && self.peer_vouches.as_ref().is_some_and(|vouches| vouches.get())
    }

    pub fn payload(&self, parts: Vec<Vec<u8>>) -> Option<TestPayload> {
        Some(TestPayload::new(parts, &self.payloads))
    }

    /// Starts a receive if none is in flight. False: the connection does not want to read.
    pub fn begin_receive(&mut self) -> bool {
        if self.plan.is_none() {
            let mut targets = Vec::new();
            self.connection.receive_targets(&mut targets);
            let count = targets.len();
            let places: Vec<Place> = targets
                .into_iter()
                .enumerate()
                .map(|(at, target)| match target {
                    Target::Scratch { offset, len } => {
                        assert_eq!(at + 1, count, "scratch is last");
                        Place::Scratch { offset, len }
                    }
                    Target::Reply { id, part, offset, len } => {
                        let op = self.connection.op_mut(id).expect("the plan names an op");
                        let buffers = op.buffers.clone();
                        Place::Buffer { buffers, part, offset: offset as usize, len: len as usize }
                    }
                    Target::Call { id, part, offset, len } => {
                        let body = self.connection.body_mut(id).expect("the plan names a body");
                        let buffers = body.buffers.clone();
                        Place::Buffer { buffers, part, offset: offset as usize, len: len as usize }
                    }
                    Target::Discard { len } => Place::Discard { len: len as usize },
                })
                .collect();
            assert!(places.len() <= 513);
            assert!(places.iter().all(|place| place.len() != 0));
            if places.is_empty() {
                return false;
            }
            self.plan = Some(places);
        }
        true
    }

    /// At most `max` bytes arrive in the receive in flight.
    pub fn finish_receive(&mut self, now: Instant, wire: &mut VecDeque<u8>, max: usize) -> usize {
        let Some(places) = self.plan.take() else { return 0 };
        let mut total = 0;
        let mut lent = self.connection.loan().map(|loan| {
            let passed = loan.taken as usize;
            let bytes = loan.pieces.iter().flat_map(|(address, len)| read_memory(*address, *len as usize));
            bytes.skip(passed).collect::<VecDeque<u8>>()
        });
        let source = lent.as_mut().unwrap_or(wire);
        for place in places {
            let len = place.len().min(source.len()).min(max - total);
            if len == 0 {
                break;
            }
            let bytes: Vec<u8> = source.drain(..len).collect();
            match place {
                Place::Scratch { offset, len: room } => {
                    self.connection.scratch_mut(offset, room)[..len].copy_from_slice(&bytes);
                }
                Place::Buffer { buffers, part, offset, .. } => buffers.write(part, offset, &bytes),
                Place::Discard { .. } => {}
            }
            total += len;
        }
        let result = self.connection.on_received(now, total, &mut self.owner);
        self.note(result);
        self.poll_events();
        total
    }

    /// Hands all events to the owner.
    pub fn poll_events(&mut self) {
        while let Some(event) = self.connection.poll_event() {
            if let Some(id) = self.owner.note(event) {
                self.connection.reply(id, 3, b"malformed key", None);
            }
        }
    }

    pub fn recv(&mut self, now: Instant, recv: Recv<'_, ()>) {
        let Recv { id, step, prefix, frame, iter, deadline, .. } = recv;
        let op = self.owner.op(id);
        self.connection.recv(now, Recv { id, step, prefix, frame, iter, deadline, op });
        self.poll_events();
    }

    /// A RECV of step 7 with this key.
    pub fn recv_key(&mut self, now: Instant, id: u64, prefix: &[u8]) {
        self.recv(now, Recv { id, step: 7, prefix, frame: 0, iter: 0, deadline: None, op: () });
    }

    pub fn call(&mut self, now: Instant, call: Call<TestPayload, ()>) {
        let Call { id, method, meta, payload, deadline, .. } = call;
        let op = self.owner.op(id);
        self.connection.call(now, Call { id, method, meta, payload, deadline, op });
        self.poll_events();
    }

    pub fn cancel(&mut self, now: Instant, id: u64, message: &str) {
        self.connection.cancel(now, id, 1, message);
        self.poll_events();
    }

    pub fn goodbye(&mut self, reason: &str) {
        self.connection.goodbye(reason);
        self.poll_events();
    }

    pub fn on_timeout(&mut self, now: Instant) {
        let result = self.connection.on_timeout(now);
        self.note(result);
        self.poll_events();
    }

    pub fn note(&mut self, result: Result<(), ConnectionError>) {
        if let Err(error) = result {
            self.error.get_or_insert(error);
        }
    }

    /// Moves one block to the wire. False: there is none.
    pub fn send(&mut self, now: Instant, wire: &mut VecDeque<u8>) -> bool {
        if self.connection.is_ready() && std::mem::take(&mut self.reads_peer) {
            self.connection.allow_lending();
        }
        let mut segments = Vec::new();
        let wanted = self.connection.wants_transmit();
        let len = self.connection.poll_transmit(now, &mut segments);
        assert_eq!(wanted, len != 0, "wants_transmit says what poll_transmit does");
        if len == 0 {
            assert!(segments.is_empty());
            return false;
        }
        assert!(segments.len() <= 512);
        let before = wire.len();
        let mut block = (0, 0);
        for segment in segments {
            assert!(!segment.is_empty());
            match segment {
                Segment::Control(bytes) => {
                    wire.extend(&bytes);
                    block.0 += bytes.len();
                    self.connection.recycle(bytes);
                }
                Segment::Part { payload, part, offset, len } => {
                    let (offset, len) = (offset as usize, len as usize);
                    assert!(offset + len <= payload.part_len(part) as usize);
                    wire.extend(&payload.parts[part][offset..offset + len]);
                    block.1 += len as u64;
                }
            }
        }
        self.blocks.push(block);
        assert_eq!((wire.len() - before) as u64, len);
        true
    }

    pub fn fail(&mut self, code: i32, message: &str) {
        self.plan = None;
        self.connection.fail(code, message);
        self.poll_events();
        self.vouches.set(false);
        self.connection.take_back();
    }
}

/// A client and a server with an ideal wire.
pub struct Pair {
    pub now: Instant,
    pub client: End,
    pub server: End,
    pub to_server: VecDeque<u8>,
    pub to_client: VecDeque<u8>,
    next_id: u64,
}

pub fn settings(task: &str, nonce: u8) -> Settings {
    Settings::new(task, "grpc++", 1000 + u64::from(nonce), [nonce; 32])
}

impl Pair {
    pub fn new(client: Settings, server: Settings) -> Pair {
        let now = Instant::now();
        Pair {
            now,
            client: End::client(client, now),
            server: End::server(server, now),
            to_server: VecDeque::new(),
            to_client: VecDeque::new(),
            next_id: 1,
        }
    }

    /// A pair of neighbours that has shaken hands.
    pub fn of_neighbours() -> Pair {
        let (mut client, mut server) = (settings("/job:worker/task:0", 1), settings("/job:ps/task:0", 2));
        (client.features, server.features) = (FEATURE_LENDING, FEATURE_LENDING);
        let mut pair = Pair::new(client, server);
        End::make_neighbours(&mut pair.client, &mut pair.server);
        pair.run();
        pair
    }

    /// A pair that has shaken hands.
    pub fn ready() -> Pair {
        let mut pair = Pair::new(settings("/job:worker/task:0", 1), settings("/job:ps/task:0", 2));
        pair.run();
        assert!(pair.client.connection.is_ready() && pair.server.connection.is_ready());
        pair
    }

    /// Moves bytes until nothing moves any more.
    pub fn run(&mut self) {
        loop {
            let mut moved = self.client.send(self.now, &mut self.to_server);
            moved |= self.server.send(self.now, &mut self.to_client);
            moved |= self.deliver(usize::MAX);
            if !moved {
                return;
            }
        }
    }

    /// Delivers what is on the wire, at most `max` bytes at a time.
    pub fn deliver(&mut self, max: usize) -> bool {
        let mut moved = false;
        for (end, wire) in [(&mut self.client, &mut self.to_client), (&mut self.server, &mut self.to_server)] {
            while (!wire.is_empty() || end.borrows()) && end.begin_receive() {
                moved |= end.finish_receive(self.now, wire, max) != 0;
            }
        }
        moved
    }

    pub fn advance(&mut self, time: Duration) {
        self.now += time;
        for end in [&mut self.client, &mut self.server] {
            if end.connection.next_timeout().is_some_and(|at| at <= self.now) {
                end.on_timeout(self.now);
            }
        }
    }

    pub fn id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id - 1
    }

    pub fn recv(&mut self, prefix: &[u8]) -> u64 {
        let id = self.id();
        self.client.recv_key(self.now, id, prefix);
        id
    }

    pub fn call(&mut self, method: u16, meta: &[u8], parts: Option<Vec<Vec<u8>>>, timeout: Option<Duration>) -> u64 {
        let id = self.id();
        let client = &mut self.client;
        let payload = parts.and_then(|parts| client.payload(parts));
        let deadline = timeout.map(|timeout| self.now + timeout);
        client.call(self.now, Call { id, method, meta: meta.to_vec(), payload, deadline, op: () });
        id
    }

    pub fn cancel(&mut self, id: u64) {
        self.client.cancel(self.now, id, "changed my mind");
    }

    pub fn reply(&mut self, id: u64, code: i32, meta: &[u8], parts: Option<Vec<Vec<u8>>>) {
        self.server.owner.take_request(id);
        let payload = parts.and_then(|parts| self.server.payload(parts));
        self.server.connection.reply(id, code, meta, payload);
    }
}
