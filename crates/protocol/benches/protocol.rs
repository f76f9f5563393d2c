//! What the protocol costs without a network: time per request for both sides together, in batches as a busy reactor
//! sees them.

#![allow(clippy::cast_possible_truncation, reason = "test data is small")]

use std::cell::RefCell;
use std::time::Instant;

use divan::counter::ItemsCount;
use starwire_protocol::{
    Call, CallHead, Connection, Event, Failure, Outcome, Owner, Payload, Recv, ReplyBuffer, Secret, Segment, Settings,
    Target,
};

fn main() {
    divan::main();
}

struct Tensor(Vec<u8>);

impl Payload for Tensor {
    fn part_count(&self) -> usize {
        1
    }
    fn part_len(&self, _: usize) -> u64 {
        self.0.len() as u64
    }
    fn copy_part(&self, _: usize, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.0);
    }
}

thread_local! {
    /// Memory for the parts of every reply.
    static BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

struct Op;

impl ReplyBuffer for Op {
    fn alloc(&mut self, _: &[u8], lens: &[u64]) -> Result<(), Failure> {
        BUFFER.with_borrow_mut(|buffer| buffer.resize(lens.iter().sum::<u64>() as usize, 0));
        Ok(())
    }
    fn write(&mut self, _: usize, bytes: &[u8]) {
        BUFFER.with_borrow_mut(|buffer| buffer[..bytes.len()].copy_from_slice(bytes));
    }
}

struct Nobody;

impl Owner for Nobody {
    type Op = Op;
    type Payload = Tensor;
    type Body = ();

    fn call_memory(&mut self, _: &CallHead<'_>) -> Result<(), Failure> {
        Ok(())
    }
}

struct Side {
    connection: Connection<Nobody>,
    /// Ids of requests that arrived.
    requests: Vec<u64>,
    /// Replies that arrived.
    done: u64,
    targets: Vec<Target>,
    segments: Vec<Segment<Tensor>>,
}

impl Side {
    fn new(connection: Connection<Nobody>) -> Side {
        Side { connection, requests: Vec::new(), done: 0, targets: Vec::new(), segments: Vec::new() }
    }

    /// Moves everything that waits here to the other side; bulk bytes are accounted for but not copied (the kernel
    /// would do that).
    fn send_to(&mut self, other: &mut Side, now: Instant) {
        while self.connection.poll_transmit(now, &mut self.segments) != 0 {
            for segment in self.segments.drain(..) {
                match segment {
                    Segment::Control(bytes) => {
                        other.receive(now, bytes.len(), Some(&bytes));
                        self.connection.recycle(bytes);
                    }
                    Segment::Part { len, .. } => other.receive(now, len as usize, None),
                }
            }
        }
    }

    fn poll_events(&mut self) {
        while let Some(event) = self.connection.poll_event() {
            match event {
                Event::RecvRequest(recv) => self.requests.push(recv.id),
                Event::CallReady { id, .. } => self.requests.push(id),
                Event::ReplyDone { outcome, .. } => {
                    assert!(matches!(outcome, Outcome::Ok { .. }));
                    self.done += 1;
                }
                _ => {}
            }
        }
    }

    fn receive(&mut self, now: Instant, len: usize, bytes: Option<&[u8]>) {
        let mut at = 0;
        while at < len {
            self.connection.receive_targets(&mut self.targets);
            let mut received = 0;
            for target in &self.targets {
                let step = match target {
                    Target::Scratch { offset, len: room } => {
                        let Some(bytes) = bytes else { break };
                        let step = (*room).min(len - at);
                        self.connection.scratch_mut(*offset, step).copy_from_slice(&bytes[at..at + step]);
                        step
                    }
                    Target::Reply { len: room, .. }
                    | Target::Call { len: room, .. }
                    | Target::Discard { len: room } => (*room as usize).min(len - at),
                };
                at += step;
                received += step;
            }
            self.connection.on_received(now, received, &mut Nobody).expect("the peer keeps the protocol");
            self.poll_events();
        }
    }
}

fn pair(now: Instant, has_secret: bool) -> (Side, Side) {
    let secret = has_secret.then(|| Secret::new(b"a secret of some length"));
    let settings = |task: &str, challenge| Settings {
        secret: secret.clone(),
        ..Settings::new(task, "grpc++", 1, [challenge; 32])
    };
    let mut client = Side::new(Connection::client(settings("/job:worker/task:0", 1), now));
    let mut server = Side::new(Connection::server(settings("/job:ps/task:0", 2), now));
    for _ in 0..2 {
        client.send_to(&mut server, now);
        server.send_to(&mut client, now);
    }
    assert!(client.connection.is_ready() && server.connection.is_ready());
    (client, server)
}

/// Rendezvous requests with known keys: request, delivery, reply of `LEN` bytes, completion.
#[divan::bench(args = [(1, 64), (1, 4096), (100, 64), (100, 4096), (1000, 64), (1000, 4096), (100, 65536)])]
fn recv_round_trip(bencher: divan::Bencher, args: (u64, usize)) {
    recvs(bencher, args, false);
}

/// The same with a secret.
#[divan::bench(args = [(1, 64), (1, 4096), (100, 4096), (1000, 4096), (100, 65536)])]
fn recv_round_trip_with_a_secret(bencher: divan::Bencher, args: (u64, usize)) {
    recvs(bencher, args, true);
}

fn recvs(bencher: divan::Bencher, (batch, len): (u64, usize), has_secret: bool) {
    let now = Instant::now();
    let (mut client, mut server) = pair(now, has_secret);
    let keys: Vec<String> = (0..batch)
        .map(|n| format!("/job:ps/replica:0/task:0/device:CPU:0;0123456789abcdef;/job:worker/replica:0/task:0/device:CPU:0;edge_{n}_weights/read"))
        .collect();
    let mut id = 0;
    let mut step = 0;
    let tensor = vec![7; len];
    bencher.counter(ItemsCount::new(batch)).bench_local(|| {
        step += 1;
        for key in &keys {
            id += 1;
            let prefix = key.as_bytes();
            client.connection.recv(now, Recv { id, step, prefix, frame: 0, iter: 0, deadline: None, op: Op });
        }
        client.send_to(&mut server, now);
        for id in server.requests.drain(..) {
            server.connection.reply(id, 0, b"0123456789abcdef", Some(Tensor(tensor.clone())));
        }
        server.send_to(&mut client, now);
        assert_eq!(client.done, id);
    });
}

/// Calls without payload.
#[divan::bench(args = [1, 100])]
fn call_round_trip(bencher: divan::Bencher, batch: u64) {
    let now = Instant::now();
    let (mut client, mut server) = pair(now, false);
    let mut id = 0;
    bencher.counter(ItemsCount::new(batch)).bench_local(|| {
        for _ in 0..batch {
            id += 1;
            let call = Call { id, method: 1, meta: vec![1; 100], payload: None, deadline: None, op: Op };
            client.connection.call(now, call);
        }
        client.send_to(&mut server, now);
        for id in server.requests.drain(..) {
            server.connection.reply(id, 0, &[2; 100], None);
        }
        server.send_to(&mut client, now);
        assert_eq!(client.done, id);
    });
}
