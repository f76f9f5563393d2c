//! The last message of a server arrives through a queue pair.

#![allow(clippy::undocumented_unsafe_blocks, reason = "memory outlives the operations, each of which is waited for")]

use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use starwire_engine::config::Advertisement;
use starwire_net::reactor::driver::{Completion, Driver, IoPart, Token};
use starwire_net::reactor::epoll::EpollDriver;
use starwire_net::reactor::verbs::VerbsDriver;
use starwire_protocol::{
    Connection, ConnectionError, FEATURE_QUEUE_PAIRS, Failure, Handler, Outcome, Payload, PeerInfo, Segment, Settings,
    Target,
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

/// Records the events of a client that sends no requests.
#[derive(Default)]
struct Ear {
    ready: bool,
    may_move: bool,
    answer: Option<Vec<u8>>,
}

impl Handler for Ear {
    type Op = ();
    type Payload = Nothing;
    type Body = ();

    fn ready(&mut self, _peer: &PeerInfo) {
        self.ready = true;
    }
    fn goodbye(&mut self, _reason: &str) {}
    fn may_move(&mut self) {
        self.may_move = true;
    }
    fn move_answered(&mut self, answer: Result<&[u8], Failure>) {
        self.answer = Some(answer.unwrap().to_vec());
    }
    fn key_defined(&mut self, _key: u64, _prefix: &[u8]) -> bool {
        false
    }
    fn keys_forgotten(&mut self) {}
    fn recv_request(&mut self, _id: u64, _step: i64, _key: u64, _frame: u64, _iter: u64) {}
    fn call_alloc(&mut self, _id: u64, _method: u16, _meta: &[u8], _lens: &[u64]) -> Result<(), Failure> {
        Ok(())
    }
    fn write_call(&mut self, _body: &mut (), _part: usize, _bytes: &[u8]) {}
    fn call_ready(&mut self, _id: u64, _method: u16, _deadline_ms: u32, _body: ()) {}
    fn request_cancelled(&mut self, _id: u64, _method: u16, _tag: i64, _peer_gone: bool) {}
    fn reply_alloc(&mut self, _op: &mut (), _meta: &[u8], _lens: &[u64]) -> Result<(), Failure> {
        Ok(())
    }
    fn write_reply(&mut self, _op: &mut (), _part: usize, _bytes: &[u8]) {}
    fn reply_done(&mut self, _op: (), _result: Outcome<'_>) {}
}

struct Client {
    driver: VerbsDriver,
    token: Token,
    conn: Connection<Ear>,
    ear: Ear,
    seen: Vec<Completion>,
}

impl Client {
    /// Connects and moves the connection to a queue pair.
    fn new(server: &Task, device: &str) -> Client {
        let advertisement: Advertisement = server.engine().advertisement().parse().unwrap();
        let socket = TcpStream::connect(("127.0.0.1", advertisement.data[0].port)).unwrap();
        socket.set_nonblocking(true).unwrap();
        let mut driver = match VerbsDriver::new(Box::new(EpollDriver::new().unwrap()), &config(device), false) {
            Ok(driver) => driver,
            Err((error, _)) => panic!("{error}"),
        };
        let token = driver.register(OwnedFd::from(socket)).unwrap();
        let mut settings = Settings::new("/job:worker/replica:0/task:0", "grpc++", 7, [3; 32]);
        settings.features = FEATURE_QUEUE_PAIRS;
        let conn = Connection::client(settings, Instant::now());
        let mut client = Client { driver, token, conn, ear: Ear::default(), seen: Vec::new() };
        while !client.ear.ready {
            client.say();
            client.hear().unwrap();
            if std::mem::take(&mut client.ear.may_move) {
                let endpoint = client.driver.offload().unwrap().prepare(token).unwrap();
                client.conn.propose_move(&endpoint);
            }
            if let Some(endpoint) = client.ear.answer.take() {
                let offload = client.driver.offload().unwrap();
                offload.connect_pair(token, &endpoint).unwrap();
                offload.move_sends(token);
                client.conn.moved();
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
        self.conn.recv_plan(&mut targets);
        let [Target::Scratch { offset, len }] = targets[..] else { panic!("{targets:?}") };
        let scratch = self.conn.scratch_mut(offset, len);
        let part = IoPart { ptr: scratch.as_mut_ptr(), len: scratch.len() };
        unsafe { self.driver.recv(self.token, &[part]).unwrap() };
        let received = self.wait(|completion| match completion {
            Completion::Recv { result, .. } => Some(result.as_ref().map_or(0, |n| *n)),
            _ => None,
        });
        assert_ne!(received, 0, "the connection ended without a word");
        self.conn.on_received(Instant::now(), received, &mut self.ear)
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
    fake_library::device("farewell", "");
    let server = task(PS, "farewell", &[]).unwrap();
    for late in [0, 50] {
        let mut client = Client::new(&server, "farewell");
        let mut garbage = b"SWB1\x09".to_vec();
        garbage.resize(1000, 0);
        client.send(&garbage);
        std::thread::sleep(Duration::from_millis(late));
        let error = loop {
            if let Err(error) = client.hear() {
                break error.to_string();
            }
        };
        assert!(error.contains("has version 9, this side speaks version 1"), "{error}");
    }
}
