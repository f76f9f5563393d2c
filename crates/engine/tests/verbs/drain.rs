//! The last message of a server arrives through a queue pair.

#![allow(clippy::undocumented_unsafe_blocks, reason = "memory outlives the operations, each of which is waited for")]

use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use starwire_net::reactor::driver::{Completion, Driver, IoPart, Token};
use starwire_net::reactor::epoll::EpollDriver;
use starwire_net::reactor::verbs::VerbsDriver;
use starwire_protocol::{
    CallHead, Connection, ConnectionError, Event, FEATURE_QUEUE_PAIRS, Failure, Owner, Payload, ReplyBuffer, Segment,
    Settings, Target,
};

use super::faults::{PS, task};
use super::pair::config;
use crate::harness::{Task, fake_library};

struct Nothing;

impl Payload for Nothing {
    fn part_count(&self) -> usize {
        0
    }
    fn part_len(&self, _part: usize) -> u64 {
        0
    }
    fn copy_part(&self, _part: usize, _out: &mut Vec<u8>) {}
}

struct NoOp;

impl ReplyBuffer for NoOp {
    fn alloc(&mut self, _meta: &[u8], _lens: &[u64]) -> Result<(), Failure> {
        Ok(())
    }
    fn write(&mut self, _part: usize, _bytes: &[u8]) {}
}

/// The owner of a client that sends no requests.
struct Ear;

impl Owner for Ear {
    type Op = NoOp;
    type Payload = Nothing;
    type Body = ();

    fn call_memory(&mut self, _call: &CallHead<'_>) -> Result<(), Failure> {
        Ok(())
    }
}

struct Client {
    driver: VerbsDriver,
    token: Token,
    conn: Connection<Ear>,
    seen: Vec<Completion>,
}

impl Client {
    /// Connects and moves the connection to a queue pair.
    fn new(server: &Task, device: &str) -> Client {
        let socket = TcpStream::connect(server.engine().bound()).unwrap();
        socket.set_nonblocking(true).unwrap();
        let mut driver = match VerbsDriver::new(Box::new(EpollDriver::new().unwrap()), &config(device), false) {
            Ok(driver) => driver,
            Err((error, _)) => panic!("{error}"),
        };
        let token = driver.register(OwnedFd::from(socket)).unwrap();
        let mut settings = Settings::new("/job:worker/replica:0/task:0", "grpc++", 7, [3; 32]);
        settings.features = FEATURE_QUEUE_PAIRS;
        let conn = Connection::client(settings, Instant::now());
        let mut client = Client { driver, token, conn, seen: Vec::new() };
        while !client.conn.is_ready() {
            client.say();
            client.hear().unwrap();
            let mut step = None;
            while let Some(event) = client.conn.poll_event() {
                step = match event {
                    Event::MayMove => Some(None),
                    Event::MoveAnswered(answer) => Some(Some(answer.unwrap().to_vec())),
                    _ => step,
                };
            }
            let offload = client.driver.offload().unwrap();
            match step {
                None => {}
                Some(None) => client.conn.propose_move(&offload.prepare(token).unwrap()),
                Some(Some(endpoint)) => {
                    offload.connect_pair(token, &endpoint).unwrap();
                    offload.move_sends(token);
                    client.conn.moved();
                }
            }
        }
        client
    }

    fn say(&mut self) {
        let mut out = Vec::new();
        while self.conn.poll_transmit(Instant::now(), &mut out) > 0 {}
        for segment in out {
            if let Segment::Control(bytes) = segment {
                self.send(&bytes);
            }
        }
    }

    fn send(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let part = IoPart { ptr: bytes.as_ptr().cast_mut(), len: bytes.len() };
            unsafe { self.driver.send(self.token, &[part]).unwrap() };
            let sent = self.wait(|completion| match completion {
                Completion::Send { result, .. } => Some(result.as_ref().map_or(0, |n| *n)),
                _ => None,
            });
            assert_ne!(sent, 0);
            bytes = &bytes[sent..];
        }
    }

    fn hear(&mut self) -> Result<(), ConnectionError> {
        let mut targets = Vec::new();
        self.conn.receive_targets(&mut targets);
        let [Target::Scratch { offset, len }] = targets[..] else { panic!("{targets:?}") };
        let scratch = self.conn.scratch_mut(offset, len);
        let part = IoPart { ptr: scratch.as_mut_ptr(), len: scratch.len() };
        unsafe { self.driver.recv(self.token, &[part]).unwrap() };
        let received = self.wait(|completion| match completion {
            Completion::Recv { result, .. } => Some(result.as_ref().map_or(0, |n| *n)),
            _ => None,
        });
        assert_ne!(received, 0, "the connection ended without a word");
        self.conn.on_received(Instant::now(), received, &mut Ear)
    }

    fn wait<R>(&mut self, find: impl Fn(&Completion) -> Option<R>) -> R {
        let until = Instant::now() + Duration::from_secs(20);
        loop {
            if let Some(at) = self.seen.iter().position(|completion| find(completion).is_some()) {
                return find(&self.seen.remove(at)).unwrap();
            }
            assert!(Instant::now() < until, "it did not happen");
            self.driver.wait(Some(Duration::from_millis(10)), &mut self.seen).unwrap();
        }
    }
}

#[test]
fn a_peer_that_breaks_the_protocol_is_told_why() {
    fake_library::device("drain", "");
    let server = task(PS, "drain", &[]).unwrap();
    for late in [0, 50] {
        let mut client = Client::new(&server, "drain");
        let mut garbage = b"SWB1\x09".to_vec();
        garbage.resize(1000, 0);
        client.send(&garbage);
        std::thread::sleep(Duration::from_millis(late));
        let error = loop {
            if let Err(error) = client.hear() {
                break error.to_string();
            }
        };
        assert!(error.contains("has version 9 of the starwire protocol, this side speaks version 3"), "{error}");
    }
}
