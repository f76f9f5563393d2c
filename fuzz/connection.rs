//! Feeds bytes and blocks to connections of the protocol.

use std::collections::HashMap;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use starwire_protocol::{
    Call, CallBuffer, CallHead, Connection, ConnectionError, Event, FEATURE_LENDING, Failure, Payload, Recv,
    ReplyBuffer, Secret, Segment, Settings, Target, Witness,
};

static SECRET: LazyLock<Secret> = LazyLock::new(|| Secret::new(b"a secret of some length"));

/// The first bytes of a stream, fed to a server and to a client, without and with a secret.
pub fn raw(data: &[u8]) {
    let now = Instant::now();
    let (cut, data) = data.split_first().unwrap_or((&0, &[]));
    let with_secret = |nonce| Settings { secret: Some(SECRET.clone()), ..settings(nonce) };
    let plain = [Connection::server(settings(1), now), Connection::client(settings(2), now)];
    let secret = [Connection::server(with_secret(1), now), Connection::client(with_secret(2), now)];
    for connection in plain.into_iter().chain(secret) {
        let mut end = End::new(connection, now);
        end.feed(data, usize::from(*cut) + 1);
        end.talk();
        end.over();
    }
}

/// A script of one-byte commands with operands; `Script` yields zeros once the input is used up.
pub fn framed(data: &[u8]) {
    let now = Instant::now();
    let mut script = Script(data);
    let kind = script.byte();
    let (server, lends) = (kind & 1 == 0, kind & 2 != 0);
    let settings = |nonce| Settings { features: if lends { FEATURE_LENDING } else { 0 }, ..settings(nonce) };
    let mut end = match server {
        true => End::new(Connection::server(settings(1), now), now),
        false => End::new(Connection::client(settings(2), now), now),
    };
    end.connection.lend(Witness { address: 8, value: 1 });
    end.talk();
    // A real peer performs the handshake.
    let mut peer = match server {
        true => End::new(Connection::client(settings(3), now), now),
        false => End::new(Connection::server(settings(4), now), now),
    };
    let mut sequence = 0;
    if !server {
        peer.feed(&std::mem::take(&mut end.sent), usize::MAX);
    }
    peer.talk();
    end.feed(&peer.sent, usize::MAX);
    assert!(end.connection.is_ready() && end.error.is_none());
    sequence += 1;
    end.connection.allow_lending();
    end.talk();
    end.sent.clear();
    let mut next_id = 1;
    while !script.0.is_empty() {
        match script.byte() % 8 {
            0..=2 => {
                let control = script.bytes();
                let bulk = script.bytes();
                let cut = usize::from(script.byte()) + 1;
                end.feed(&block(sequence, control, bulk), cut * 16);
                sequence += 1;
            }
            3 => end.talk(),
            4 => {
                let (len, error) = (u64::from(script.byte()) * 400, script.byte());
                if let Some(id) = end.owner.requests.pop() {
                    end.connection.reply(id, i32::from(error % 4), b"meta", Some(Blob(len)));
                }
            }
            5 => {
                let len = u64::from(script.byte()) * 400;
                end.owner.ops.insert(next_id, false);
                let (id, op) = (next_id, Op { id: next_id, lens: Vec::new() });
                if len % 3 == 0 {
                    let recv = Recv { id, step: 1, prefix: b"key", frame: len, iter: 0, deadline: None, op };
                    end.connection.recv(end.now, recv);
                } else {
                    let deadline = (len % 3 == 1).then(|| end.now + Duration::from_millis(len));
                    let payload = Some(Blob(len));
                    end.connection.call(end.now, Call { id, method: 1, meta: vec![1], payload, deadline, op });
                }
                end.poll_events();
                next_id += 1;
            }
            6 => {
                let id = u64::from(script.byte());
                end.connection.cancel(end.now, id, 1, "cancel");
                end.poll_events();
            }
            _ => {
                end.now += Duration::from_millis(u64::from(script.byte()));
                if end.connection.next_timeout().is_some_and(|at| at <= end.now) {
                    let result = end.connection.on_timeout(end.now);
                    end.note(result);
                }
            }
        }
    }
    end.talk();
    end.over();
}

struct Script<'a>(&'a [u8]);

impl<'a> Script<'a> {
    fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    /// A two-byte length and as many bytes.
    fn bytes(&mut self) -> &'a [u8] {
        let len = usize::from(u16::from_le_bytes([self.byte(), self.byte()]));
        let (bytes, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        bytes
    }
}

/// Wraps arbitrary content in a valid block.
fn block(sequence: u64, control: &[u8], bulk: &[u8]) -> Vec<u8> {
    let mut control = control.to_vec();
    control.resize(control.len().next_multiple_of(8), 0);
    if !bulk.is_empty() && control.len() < 992 {
        control.resize(992, 0);
    }
    let mut out = b"SWB1\x02\0\0\0".to_vec();
    out.extend_from_slice(&(control.len() as u32).to_le_bytes());
    out.extend_from_slice(&[0; 4]);
    out.extend_from_slice(&(bulk.len() as u64).to_le_bytes());
    out.extend_from_slice(&sequence.to_le_bytes());
    out.extend_from_slice(&control);
    let sum = crc32c::crc32c(&out);
    out[12..16].copy_from_slice(&sum.to_le_bytes());
    out.extend_from_slice(bulk);
    out
}

fn settings(nonce: u8) -> Settings {
    let mut settings = Settings::new("/job:ps/task:0", "grpc++", 1, [nonce; 32]);
    settings.limits.max_recvs = 20;
    settings.limits.max_calls = 10;
    settings.limits.max_call_bytes = 100_000;
    settings.limits.max_keys = 8;
    settings.limits.max_payload = 1 << 20;
    settings
}

struct Blob(u64);

impl Payload for Blob {
    fn part_count(&self) -> usize {
        2
    }
    fn part_len(&self, part: usize) -> u64 {
        if part == 0 { 3 } else { self.0 }
    }
    fn copy_part(&self, part: usize, out: &mut Vec<u8>) {
        out.resize(out.len() + self.part_len(part) as usize, 7);
    }
    fn address(&self, _: usize, offset: u64) -> Option<u64> {
        Some(4096 + offset)
    }
}

struct Op {
    id: u64,
    lens: Vec<u64>,
}

impl ReplyBuffer for Op {
    fn alloc(&mut self, _: &[u8], lens: &[u64]) -> Result<(), Failure> {
        self.lens = checked(lens);
        match self.id % 4 {
            0 => Err(Failure { code: 8, message: "no".to_owned() }),
            _ => Ok(()),
        }
    }
    fn write(&mut self, part: usize, bytes: &[u8]) {
        assert_eq!(self.lens[part], bytes.len() as u64);
    }
}

struct Body(Vec<u64>);

impl CallBuffer for Body {
    fn write(&mut self, part: usize, bytes: &[u8]) {
        assert_eq!(self.0[part], bytes.len() as u64);
    }
}

fn checked(lens: &[u64]) -> Vec<u64> {
    let total = lens.iter().try_fold(0u64, |sum, len| sum.checked_add(*len));
    assert!(total.is_some_and(|total| total <= 1 << 20), "allocation beyond the limit");
    lens.to_vec()
}

#[derive(Default)]
struct Owner {
    ops: HashMap<u64, bool>,
    requests: Vec<u64>,
    /// Of each key: its requests are refused.
    refused: Vec<bool>,
}

impl starwire_protocol::Owner for Owner {
    type Op = Op;
    type Payload = Blob;
    type Body = Body;

    fn call_memory(&mut self, call: &CallHead<'_>) -> Result<Body, Failure> {
        match call.id % 5 {
            0 => Err(Failure { code: 8, message: "no".to_owned() }),
            _ => Ok(Body(checked(call.lens))),
        }
    }
}

struct End {
    connection: Connection<Owner>,
    owner: Owner,
    now: Instant,
    error: Option<ConnectionError>,
    sent: Vec<u8>,
}

impl End {
    fn new(connection: Connection<Owner>, now: Instant) -> End {
        End { connection, owner: Owner::default(), now, error: None, sent: Vec::new() }
    }

    fn note(&mut self, result: Result<(), ConnectionError>) {
        if let Err(error) = result {
            assert!(!matches!(error, ConnectionError::Misuse(_)), "the harness is used wrongly: {error}");
            self.error = Some(error);
        }
        self.poll_events();
    }

    fn poll_events(&mut self) {
        let owner = &mut self.owner;
        while let Some(event) = self.connection.poll_event() {
            match event {
                Event::KeyDefined { key, prefix } => {
                    assert!(prefix.len() <= 4096 && key == owner.refused.len() as u64);
                    owner.refused.push(prefix.len() % 3 == 0);
                }
                Event::KeysForgotten => owner.refused.clear(),
                Event::RecvRequest(recv) if owner.refused[recv.key as usize] => {
                    self.connection.reply(recv.id, 3, b"malformed", None);
                }
                Event::RecvRequest(recv) => owner.requests.push(recv.id),
                Event::CallReady { id, .. } => owner.requests.push(id),
                Event::RequestCancelled { id, .. } => owner.requests.retain(|known| *known != id),
                Event::ReplyDone { op, .. } => {
                    let ended = owner.ops.get_mut(&op.id).expect("an op that was given");
                    assert!(!std::mem::replace(ended, true), "an op ended twice");
                }
                _ => {}
            }
        }
    }

    /// Feeds bytes, at most `cut` at a time.
    fn feed(&mut self, mut bytes: &[u8], cut: usize) {
        let mut targets = Vec::new();
        while !bytes.is_empty() && self.error.is_none() {
            self.connection.receive_targets(&mut targets);
            if targets.is_empty() {
                self.talk();
                continue;
            }
            let mut received = 0;
            if self.connection.loan().is_some() {
                // A loan is copied out of band, as far as `cut` allows.
                received = targets.iter().map(target_len).sum::<usize>().min(cut * 4096);
                targets.clear();
            }
            for target in &targets {
                let len = match target {
                    Target::Scratch { len, .. } => *len,
                    Target::Reply { id, .. } => {
                        assert!(self.connection.op_mut(*id).is_some());
                        target_len(target)
                    }
                    Target::Call { id, .. } => {
                        assert!(self.connection.body_mut(*id).is_some());
                        target_len(target)
                    }
                    Target::Discard { .. } => target_len(target),
                };
                let len = len.min(bytes.len()).min(cut - received);
                let (now, rest) = bytes.split_at(len);
                if let Target::Scratch { offset, .. } = target {
                    self.connection.scratch_mut(*offset, len).copy_from_slice(now);
                }
                bytes = rest;
                received += len;
            }
            assert!(received != 0);
            let result = self.connection.on_received(self.now, received, &mut self.owner);
            self.note(result);
        }
    }

    /// Collects everything that the connection sends.
    fn talk(&mut self) {
        let mut segments = Vec::new();
        while self.connection.poll_transmit(self.now, &mut segments) != 0 {
            for segment in segments.drain(..) {
                match segment {
                    Segment::Control(bytes) => {
                        self.sent.extend_from_slice(&bytes);
                        self.connection.recycle(bytes);
                    }
                    Segment::Part { len, .. } => self.sent.resize(self.sent.len() + len as usize, 7),
                }
            }
        }
        assert!(!self.connection.wants_transmit());
    }

    fn over(mut self) {
        self.connection.fail(14, "over");
        self.poll_events();
        assert!(self.owner.ops.values().all(|ended| *ended), "an op never ended");
        assert_eq!(self.connection.in_flight(), 0);
    }
}

fn target_len(target: &Target) -> usize {
    match target {
        Target::Scratch { len, .. } => *len,
        Target::Reply { len, .. } | Target::Call { len, .. } | Target::Discard { len } => *len as usize,
    }
}
