//! Two connected verbs drivers in one thread.

#![allow(clippy::undocumented_unsafe_blocks, reason = "buffers outlive the operations, which every test waits for")]

use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use starwire_engine::config::{MapEnv, Protocol, VerbsConfig, verbs_config};
use starwire_net::reactor::driver::{Completion, Driver, IoPart, Token};
use starwire_net::reactor::epoll::EpollDriver;
use starwire_net::reactor::verbs::VerbsDriver;
use starwire_net::transport::verbs::VerbsStats;

use crate::harness::fake_library;

const PATIENCE: Duration = Duration::from_secs(60);

pub struct End {
    pub driver: Box<dyn Driver>,
    pub token: Token,
    pub seen: Vec<Completion>,
}

pub struct Pair {
    pub a: End,
    pub b: End,
}

pub fn config(device: &str) -> VerbsConfig {
    VerbsConfig {
        library: fake_library::path().to_owned(),
        device: (!fake_library::is_real()).then(|| device.to_owned()),
        ..verbs_config(&MapEnv::new("/"), Protocol::GrpcVerbs).unwrap()
    }
}

fn driver(config: &VerbsConfig, inner: Box<dyn Driver>) -> Box<dyn Driver> {
    match VerbsDriver::new(inner, config, false) {
        Ok(driver) => Box::new(driver),
        Err((error, _)) => panic!("{error}"),
    }
}

pub fn epoll() -> Box<dyn Driver> {
    Box::new(EpollDriver::new().unwrap())
}

pub fn sockets() -> [TcpStream; 2] {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    [client, listener.accept().unwrap().0]
}

impl Pair {
    pub fn new(device: &str) -> Pair {
        Self::with(&config(device), epoll(), epoll())
    }

    pub fn with(config: &VerbsConfig, first: Box<dyn Driver>, second: Box<dyn Driver>) -> Pair {
        Self::over(sockets(), config, first, second)
    }

    pub fn over(
        [client, server]: [TcpStream; 2],
        config: &VerbsConfig,
        first: Box<dyn Driver>,
        second: Box<dyn Driver>,
    ) -> Pair {
        let end = |mut driver: Box<dyn Driver>, socket: TcpStream| {
            socket.set_nonblocking(true).unwrap();
            let token = driver.register(OwnedFd::from(socket)).unwrap();
            End { driver, token, seen: Vec::new() }
        };
        let mut pair = Pair { a: end(driver(config, first), client), b: end(driver(config, second), server) };
        let a = pair.a.prepare();
        let b = pair.b.prepare();
        pair.b.connect(&a);
        pair.a.connect(&b);
        pair
    }

    pub fn turn(&mut self) {
        for end in [&mut self.a, &mut self.b] {
            end.driver.wait(Some(Duration::from_millis(1)), &mut end.seen).unwrap();
        }
    }

    pub fn wait<R>(&mut self, what: &str, mut find: impl FnMut(&mut Pair) -> Option<R>) -> R {
        let until = Instant::now() + PATIENCE;
        loop {
            if let Some(found) = find(self) {
                return found;
            }
            assert!(Instant::now() < until, "{what} did not happen");
            self.turn();
        }
    }

    /// Sends pieces from a to b, received in pieces of other lengths, in as many operations as needed.
    pub fn transfer(&mut self, out: &[Vec<u8>], lens: &[usize]) {
        let mut target: Vec<Vec<u8>> = lens.iter().map(|len| vec![0xEE; *len]).collect();
        let to_send = out.iter().map(|p| IoPart { ptr: p.as_ptr().cast_mut(), len: p.len() }).collect();
        let to_fill = target.iter_mut().map(|p| IoPart { ptr: p.as_mut_ptr(), len: p.len() }).collect();
        self.carry(to_send, to_fill);
        assert!(out.concat() == target.concat(), "bytes were changed");
    }

    /// Like `transfer`, with the caller's memory.
    pub fn carry(&mut self, mut to_send: Vec<IoPart>, mut to_fill: Vec<IoPart>) {
        let total: usize = to_send.iter().map(|part| part.len).sum();
        let (mut sent, mut received) = (0, 0);
        let (mut sending, mut receiving) = (false, false);
        while sent < total || received < total {
            if !sending && sent < total {
                let token = self.a.token;
                unsafe { self.a.driver.send(token, &to_send).unwrap() };
                sending = true;
            }
            if !receiving && received < total {
                let token = self.b.token;
                unsafe { self.b.driver.recv(token, &to_fill).unwrap() };
                receiving = true;
            }
            let (by_a, moved) = self.wait("progress", |pair| {
                if let Some(n) = pair.a.take_send() {
                    return Some((true, n.unwrap()));
                }
                pair.b.take_recv().map(|n| (false, n.unwrap()))
            });
            if by_a {
                (sent, sending) = (sent + moved, false);
                skip(&mut to_send, moved);
            } else {
                assert!(moved > 0, "the stream ended early");
                (received, receiving) = (received + moved, false);
                skip(&mut to_fill, moved);
            }
        }
    }
}

fn skip(parts: &mut Vec<IoPart>, mut n: usize) {
    while n > 0 {
        let first = &mut parts[0];
        let step = n.min(first.len);
        first.ptr = first.ptr.wrapping_add(step);
        first.len -= step;
        n -= step;
        if first.len == 0 {
            parts.remove(0);
        }
    }
}

impl End {
    fn prepare(&mut self) -> Vec<u8> {
        self.driver.offload().unwrap().prepare(self.token).unwrap()
    }

    fn connect(&mut self, peer: &[u8]) {
        let offload = self.driver.offload().unwrap();
        offload.connect_pair(self.token, peer).unwrap();
        offload.move_sends(self.token);
    }

    pub fn take_send(&mut self) -> Option<std::io::Result<usize>> {
        let at = self.seen.iter().position(|c| matches!(c, Completion::Send { .. }))?;
        let Completion::Send { result, .. } = self.seen.remove(at) else { return None };
        Some(result)
    }

    pub fn take_recv(&mut self) -> Option<std::io::Result<usize>> {
        let at = self.seen.iter().position(|c| matches!(c, Completion::Recv { .. }))?;
        let Completion::Recv { result, .. } = self.seen.remove(at) else { return None };
        Some(result)
    }

    pub fn stats(&mut self) -> VerbsStats {
        self.driver.wait(Some(Duration::ZERO), &mut self.seen).unwrap();
        self.driver.offload().unwrap().take_stats()
    }
}

pub fn bytes(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 31 + seed * 7 + i / 251) as u8).collect()
}
