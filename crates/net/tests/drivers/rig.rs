//! A driver under test, with helpers that wait for its completions.

use std::io;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use starwire_net::reactor::driver::{Completion, Driver, IoPart, Token};
use starwire_net::transport::{SocketAddress, tcp, unix};

/// Far more than any step needs, but bearable for a hanging test.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A unix listener with a name of its own.
pub fn listen_unix() -> (OwnedFd, SocketAddress) {
    static MADE: AtomicU32 = AtomicU32::new(0);
    let number = MADE.fetch_add(1, Ordering::Relaxed);
    let address = SocketAddress::Unix(format!("@starwire-test-{}-{number}", std::process::id()).into());
    (unix::listen_at(&address).unwrap(), address)
}

pub struct Rig {
    /// The module of the tests on this driver.
    pub module: &'static str,
    pub driver: Box<dyn Driver>,
    pub pending: Vec<Completion>,
}

impl Rig {
    pub fn new(driver: Box<dyn Driver>, path: &'static str) -> Self {
        let (_crate, module) = path.split_once("::").unwrap();
        Rig { module, driver, pending: Vec::new() }
    }

    /// Waits for the first completion that `pick` takes.
    pub fn take<T>(&mut self, what: &str, mut pick: impl FnMut(Completion) -> Result<T, Completion>) -> T {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let mut found = None;
            for completion in std::mem::take(&mut self.pending) {
                match found {
                    Some(_) => self.pending.push(completion),
                    None => match pick(completion) {
                        Ok(value) => found = Some(value),
                        Err(completion) => self.pending.push(completion),
                    },
                }
            }
            if let Some(value) = found {
                return value;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "no {what} on {}", self.driver.name());
            self.driver.wait(Some(left), &mut self.pending).unwrap();
        }
    }

    pub fn received(&mut self, wanted: Token) -> io::Result<usize> {
        self.take("receive", |completion| match completion {
            Completion::Recv { token, result } if token == wanted => Ok(result),
            other => Err(other),
        })
    }

    pub fn sent(&mut self, wanted: Token) -> io::Result<usize> {
        self.take("send", |completion| match completion {
            Completion::Send { token, result } if token == wanted => Ok(result),
            other => Err(other),
        })
    }

    pub fn connected(&mut self, wanted: Token) -> io::Result<()> {
        self.take("connection", |completion| match completion {
            Completion::Connected { token, result } if token == wanted => Ok(result),
            other => Err(other),
        })
    }

    pub fn accepted(&mut self, wanted: Token) -> io::Result<OwnedFd> {
        self.take("accepted connection", |completion| match completion {
            Completion::Accepted { listener, result } if listener == wanted => Ok(result),
            other => Err(other),
        })
    }

    pub fn closed(&mut self, wanted: Token) {
        self.take("closing", |completion| match completion {
            Completion::Closed { token } if token == wanted => Ok(()),
            other => Err(other),
        })
    }

    /// Collects whatever else arrives within `time`.
    pub fn quiet(&mut self, time: Duration) {
        let end = Instant::now() + time;
        while Instant::now() < end {
            self.driver.wait(Some(end.saturating_duration_since(Instant::now())), &mut self.pending).unwrap();
        }
        assert!(self.pending.is_empty(), "{} completions nobody waited for", self.pending.len());
    }

    pub fn recv(&mut self, token: Token, buffer: &mut [u8]) -> io::Result<usize> {
        self.start_recv(token, buffer);
        self.received(token)
    }

    pub fn send(&mut self, token: Token, bytes: &[u8]) -> io::Result<usize> {
        self.start_send(token, bytes);
        self.sent(token)
    }

    /// The caller keeps the buffer until the completion; every test here does.
    pub fn start_recv(&mut self, token: Token, buffer: &mut [u8]) {
        // SAFETY: see above.
        unsafe { self.driver.recv(token, &[IoPart { ptr: buffer.as_mut_ptr(), len: buffer.len() }]) }.unwrap();
    }

    pub fn start_send(&mut self, token: Token, bytes: &[u8]) {
        // SAFETY: see `start_recv`; a send does not write.
        unsafe { self.driver.send(token, &[IoPart { ptr: bytes.as_ptr().cast_mut(), len: bytes.len() }]) }.unwrap();
    }

    pub fn send_all(&mut self, token: Token, bytes: &[u8]) {
        let mut sent = 0;
        while sent < bytes.len() {
            sent += self.send(token, &bytes[sent..]).unwrap();
        }
    }

    pub fn recv_exact(&mut self, token: Token, buffer: &mut [u8]) {
        let mut received = 0;
        while received < buffer.len() {
            let count = self.recv(token, &mut buffer[received..]).unwrap();
            assert_ne!(count, 0, "the stream ended after {received} of {} bytes", buffer.len());
            received += count;
        }
    }

    pub fn listen_tcp(&mut self) -> (Token, SocketAddress) {
        let fd = tcp::listen("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = tcp::local_address(fd.as_fd()).unwrap().unwrap();
        let token = self.driver.register(fd).unwrap();
        self.driver.accept(token).unwrap();
        (token, address)
    }

    pub fn listen_unix(&mut self) -> (Token, SocketAddress) {
        let (fd, address) = listen_unix();
        let token = self.driver.register(fd).unwrap();
        self.driver.accept(token).unwrap();
        (token, address)
    }

    pub fn start_connect(&mut self, address: &SocketAddress) -> Token {
        let fd = match address {
            SocketAddress::Inet(inet) => tcp::socket(*inet, &tcp::TcpOptions::default()).unwrap(),
            SocketAddress::Unix(_) => unix::socket().unwrap(),
        };
        let token = self.driver.register(fd).unwrap();
        self.driver.connect(token, address).unwrap();
        token
    }

    pub fn pair(&mut self, listener: Token, address: &SocketAddress) -> (Token, Token) {
        let client = self.start_connect(address);
        self.connected(client).unwrap();
        let fd = self.accepted(listener).unwrap();
        (client, self.driver.register(fd).unwrap())
    }

    pub fn tcp_pair(&mut self) -> (Token, Token) {
        let (listener, address) = self.listen_tcp();
        self.pair(listener, &address)
    }

    /// A connection with one end in the driver and the other a plain `TcpStream`.
    pub fn with_plain_peer(&mut self) -> (Token, TcpStream) {
        let plain = TcpListener::bind("127.0.0.1:0").unwrap();
        let token = self.start_connect(&plain.local_addr().unwrap().into());
        self.connected(token).unwrap();
        let (peer, _) = plain.accept().unwrap();
        peer.set_read_timeout(Some(PATIENCE)).unwrap();
        (token, peer)
    }
}

/// Bytes that vary with their position.
pub fn pattern(len: usize) -> Vec<u8> {
    (0..len as u32).map(|index| (index.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
}
