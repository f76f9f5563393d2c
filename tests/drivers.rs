//! What every driver promises, checked against each of them.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use starwire::reactor::DriverError;
use starwire::reactor::driver::{Completion, Driver, IoPart, Token};
use starwire::reactor::epoll::EpollDriver;
use starwire::reactor::uring::UringDriver;
use starwire::transport::{SocketAddress, tcp, unix};

/// Far more than any step needs, far less than a hanging test costs.
const PATIENCE: Duration = Duration::from_secs(20);

fn epoll() -> Option<Box<dyn Driver>> {
    Some(Box::new(EpollDriver::new().expect("epoll is part of every kernel")))
}

/// `None`, loudly, where the kernel refuses. STARWIRE_REQUIRE_IO_URING=1 makes that a failure.
fn uring() -> Option<Box<dyn Driver>> {
    unless_refused(UringDriver::new())
}

/// Queues that are nearly always full.
fn small_uring() -> Option<Box<dyn Driver>> {
    unless_refused(UringDriver::with_queues(2, 4))
}

fn unless_refused(result: Result<UringDriver, DriverError>) -> Option<Box<dyn Driver>> {
    match result {
        Ok(driver) => Some(Box::new(driver)),
        Err(error) => {
            assert!(std::env::var_os("STARWIRE_REQUIRE_IO_URING").is_none(), "{error}");
            // Not through print!, which the test harness keeps to itself for tests that pass.
            let _ = writeln!(io::stderr(), "SKIPPED, NOT TESTED: {error}");
            None
        }
    }
}

macro_rules! conformance {
    ($($test:ident),* $(,)?) => {
        mod on_epoll {
            $(#[test] fn $test() { if let Some(driver) = super::epoll() { super::$test(super::Rig::new(driver, module_path!())) } })*
        }
        mod on_io_uring {
            $(#[test] fn $test() { if let Some(driver) = super::uring() { super::$test(super::Rig::new(driver, module_path!())) } })*
        }
        mod on_io_uring_with_small_queues {
            $(#[test] fn $test() { if let Some(driver) = super::small_uring() { super::$test(super::Rig::new(driver, module_path!())) } })*
        }
    };
}

conformance!(
    echo_over_tcp,
    echo_over_unix,
    nothing_is_reported_twice,
    partial_writes_lose_nothing,
    close_ends_a_receive_in_flight,
    close_ends_a_send_in_flight,
    close_reports_nothing_else,
    connect_refused_is_an_error,
    connect_to_a_missing_unix_name_is_an_error,
    a_closed_connect_reports_closed,
    many_connections_are_accepted,
    accepting_goes_on_after_the_descriptor_limit,
    a_closed_listener_accepts_no_more,
    another_thread_wakes_a_wait,
    a_wake_up_before_the_wait_counts,
    timeouts_are_kept,
    a_peers_reset_is_an_error,
    half_close_ends_one_direction_only,
    data_before_the_end_of_stream_arrives,
    two_hundred_connections,
    many_parts,
    a_large_transfer,
    both_directions_at_once,
    stale_tokens_are_refused,
    released_descriptors_work_on,
    one_operation_per_direction,
    operations_on_no_bytes_are_refused,
    everything_can_be_ended_at_once,
    dropping_the_driver_with_operations_in_flight_is_safe,
);

struct Rig {
    /// Of the tests on this driver.
    module: &'static str,
    driver: Box<dyn Driver>,
    pending: Vec<Completion>,
}

impl Rig {
    fn new(driver: Box<dyn Driver>, path: &'static str) -> Self {
        let (_crate, module) = path.split_once("::").unwrap();
        Rig { module, driver, pending: Vec::new() }
    }

    /// Waits for the first completion that `pick` takes.
    fn take<T>(&mut self, what: &str, mut pick: impl FnMut(Completion) -> Result<T, Completion>) -> T {
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

    fn received(&mut self, wanted: Token) -> io::Result<usize> {
        self.take("receive", |completion| match completion {
            Completion::Recv { token, result } if token == wanted => Ok(result),
            other => Err(other),
        })
    }

    fn sent(&mut self, wanted: Token) -> io::Result<usize> {
        self.take("send", |completion| match completion {
            Completion::Send { token, result } if token == wanted => Ok(result),
            other => Err(other),
        })
    }

    fn connected(&mut self, wanted: Token) -> io::Result<()> {
        self.take("connection", |completion| match completion {
            Completion::Connected { token, result } if token == wanted => Ok(result),
            other => Err(other),
        })
    }

    fn accepted(&mut self, wanted: Token) -> io::Result<OwnedFd> {
        self.take("accepted connection", |completion| match completion {
            Completion::Accepted { listener, result } if listener == wanted => Ok(result),
            other => Err(other),
        })
    }

    fn closed(&mut self, wanted: Token) {
        self.take("closing", |completion| match completion {
            Completion::Closed { token } if token == wanted => Ok(()),
            other => Err(other),
        })
    }

    /// Whatever else arrives within `time`.
    fn quiet(&mut self, time: Duration) {
        let end = Instant::now() + time;
        while Instant::now() < end {
            self.driver.wait(Some(end.saturating_duration_since(Instant::now())), &mut self.pending).unwrap();
        }
        assert!(self.pending.is_empty(), "{} completions nobody waited for", self.pending.len());
    }

    fn recv(&mut self, token: Token, buffer: &mut [u8]) -> io::Result<usize> {
        self.start_recv(token, buffer);
        self.received(token)
    }

    fn send(&mut self, token: Token, bytes: &[u8]) -> io::Result<usize> {
        self.start_send(token, bytes);
        self.sent(token)
    }

    /// The caller keeps the buffer until the completion; every test here does.
    fn start_recv(&mut self, token: Token, buffer: &mut [u8]) {
        // SAFETY: see above.
        unsafe { self.driver.recv(token, &[IoPart { ptr: buffer.as_mut_ptr(), len: buffer.len() }]) }.unwrap();
    }

    fn start_send(&mut self, token: Token, bytes: &[u8]) {
        // SAFETY: see `start_recv`; a send does not write.
        unsafe { self.driver.send(token, &[IoPart { ptr: bytes.as_ptr().cast_mut(), len: bytes.len() }]) }.unwrap();
    }

    fn send_all(&mut self, token: Token, bytes: &[u8]) {
        let mut sent = 0;
        while sent < bytes.len() {
            sent += self.send(token, &bytes[sent..]).unwrap();
        }
    }

    fn recv_exact(&mut self, token: Token, buffer: &mut [u8]) {
        let mut received = 0;
        while received < buffer.len() {
            let count = self.recv(token, &mut buffer[received..]).unwrap();
            assert_ne!(count, 0, "the stream ended after {received} of {} bytes", buffer.len());
            received += count;
        }
    }

    fn listen_tcp(&mut self) -> (Token, SocketAddress) {
        let fd = tcp::listen("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = tcp::local_address(fd.as_fd()).unwrap().unwrap();
        let token = self.driver.register(fd).unwrap();
        self.driver.accept(token).unwrap();
        (token, address)
    }

    fn listen_unix(&mut self) -> (Token, SocketAddress) {
        let (fd, address) = unix::listen().unwrap();
        let token = self.driver.register(fd).unwrap();
        self.driver.accept(token).unwrap();
        (token, address)
    }

    fn start_connect(&mut self, address: &SocketAddress) -> Token {
        let fd = match address {
            SocketAddress::Inet(inet) => tcp::socket(*inet, &tcp::TcpOptions::default()).unwrap(),
            SocketAddress::Unix(_) => unix::socket().unwrap(),
        };
        let token = self.driver.register(fd).unwrap();
        self.driver.connect(token, address).unwrap();
        token
    }

    fn pair(&mut self, listener: Token, address: &SocketAddress) -> (Token, Token) {
        let client = self.start_connect(address);
        self.connected(client).unwrap();
        let fd = self.accepted(listener).unwrap();
        (client, self.driver.register(fd).unwrap())
    }

    fn tcp_pair(&mut self) -> (Token, Token) {
        let (listener, address) = self.listen_tcp();
        self.pair(listener, &address)
    }

    /// One end in the driver, the other one plain.
    fn with_plain_peer(&mut self) -> (Token, TcpStream) {
        let plain = TcpListener::bind("127.0.0.1:0").unwrap();
        let token = self.start_connect(&plain.local_addr().unwrap().into());
        self.connected(token).unwrap();
        let (peer, _) = plain.accept().unwrap();
        peer.set_read_timeout(Some(PATIENCE)).unwrap();
        (token, peer)
    }
}

/// Bytes that differ from place to place.
fn pattern(len: usize) -> Vec<u8> {
    (0..len as u32).map(|index| (index.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
}

fn echo(mut rig: Rig, client: Token, server: Token) {
    for len in [1, 64, 4096, 100_000] {
        let message = pattern(len);
        let mut buffer = vec![0; len];
        rig.start_send(client, &message);
        rig.recv_exact(server, &mut buffer);
        assert_eq!(rig.sent(client).unwrap(), len);
        rig.start_send(server, &buffer);
        let mut back = vec![0; len];
        rig.recv_exact(client, &mut back);
        assert_eq!(rig.sent(server).unwrap(), len);
        assert!(back == message);
    }
}

fn echo_over_tcp(mut rig: Rig) {
    let (client, server) = rig.tcp_pair();
    echo(rig, client, server);
}

fn echo_over_unix(mut rig: Rig) {
    let (listener, address) = rig.listen_unix();
    let (client, server) = rig.pair(listener, &address);
    // A unix socket takes 100,000 bytes at once only if its buffer is larger.
    echo(rig, client, server);
}

fn nothing_is_reported_twice(mut rig: Rig) {
    let (client, server) = rig.tcp_pair();
    let mut buffer = [0; 8];
    rig.start_recv(server, &mut buffer);
    rig.send(client, b"12345678").unwrap();
    assert_eq!(rig.received(server).unwrap(), 8);
    rig.quiet(Duration::from_millis(50));
}

fn partial_writes_lose_nothing(mut rig: Rig) {
    let options = tcp::TcpOptions { send_buffer: Some(4096), ..Default::default() };
    let (listener, address) = rig.listen_tcp();
    let SocketAddress::Inet(inet) = address.clone() else { unreachable!() };
    let client = rig.driver.register(tcp::socket(inet, &options).unwrap()).unwrap();
    rig.driver.connect(client, &address).unwrap();
    rig.connected(client).unwrap();
    let fd = rig.accepted(listener).unwrap();
    tcp::configure(&fd, &options).unwrap();
    let server = rig.driver.register(fd).unwrap();

    let message = pattern(256 << 10);
    let mut buffer = vec![0; message.len()];
    let (mut sent, mut received, mut pieces) = (0, 0, 0);
    rig.start_send(client, &message);
    rig.start_recv(server, &mut buffer);
    while received < message.len() {
        let (was_send, count) = rig.take("progress", |completion| match completion {
            Completion::Send { token, result } if token == client => Ok((true, result.unwrap())),
            Completion::Recv { token, result } if token == server => Ok((false, result.unwrap())),
            other => Err(other),
        });
        assert_ne!(count, 0);
        if was_send {
            sent += count;
            pieces += 1;
            if sent < message.len() {
                rig.start_send(client, &message[sent..]);
            }
        } else {
            received += count;
            if received < message.len() {
                rig.start_recv(server, &mut buffer[received..]);
            }
        }
    }
    assert!(buffer == message);
    // io_uring may finish the whole of a send on its own; a driver that sees short counts has to carry on.
    assert!(pieces > 1 || rig.driver.name() != "epoll");
}

fn close_ends_a_receive_in_flight(mut rig: Rig) {
    let (client, _peer) = rig.with_plain_peer();
    let mut buffer = vec![7; 1000];
    rig.start_recv(client, &mut buffer);
    rig.quiet(Duration::from_millis(10));
    rig.driver.close(client);
    rig.closed(client);
    assert!(buffer.iter().all(|byte| *byte == 7));
    drop(buffer);
    rig.quiet(Duration::from_millis(20));
}

fn close_ends_a_send_in_flight(mut rig: Rig) {
    let (client, mut peer) = rig.with_plain_peer();
    let message = pattern(64 << 20);
    // More than the kernel buffers, so that sooner or later one has to wait.
    rig.start_send(client, &message);
    let mut out = Vec::new();
    let mut sent = 0;
    let end = Instant::now() + Duration::from_millis(300);
    while Instant::now() < end {
        rig.driver.wait(Some(Duration::from_millis(20)), &mut out).unwrap();
        for completion in out.drain(..) {
            let Completion::Send { result, .. } = completion else { panic!("not a send") };
            sent += result.unwrap();
            rig.start_send(client, &message[sent..]);
        }
    }
    rig.driver.close(client);
    rig.closed(client);
    drop(message);
    // What was taken before the close arrives, then the stream ends.
    let mut arrived = Vec::new();
    peer.read_to_end(&mut arrived).unwrap();
    assert!(arrived.len() >= sent && arrived == pattern(arrived.len()));
}

fn close_reports_nothing_else(mut rig: Rig) {
    let (client, server) = rig.tcp_pair();
    let mut buffer = [0; 4];
    rig.send(client, b"data").unwrap();
    std::thread::sleep(Duration::from_millis(10));
    rig.start_recv(server, &mut buffer);
    rig.start_send(server, b"more");
    rig.driver.close(server);
    rig.driver.close(server);
    rig.closed(server);
    rig.quiet(Duration::from_millis(20));
}

fn connect_refused_is_an_error(mut rig: Rig) {
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let token = rig.start_connect(&free.into());
    assert_eq!(rig.connected(token).unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
    rig.driver.close(token);
    rig.closed(token);
}

fn connect_to_a_missing_unix_name_is_an_error(mut rig: Rig) {
    let (listener, address) = unix::listen().unwrap();
    drop(listener);
    let token = rig.start_connect(&address);
    assert_eq!(rig.connected(token).unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
}

fn a_closed_connect_reports_closed(mut rig: Rig) {
    let (_, address) = rig.listen_tcp();
    let token = rig.start_connect(&address);
    rig.driver.close(token);
    rig.closed(token);
}

fn many_connections_are_accepted(mut rig: Rig) {
    let (listener, address) = rig.listen_tcp();
    let SocketAddress::Inet(inet) = address else { unreachable!() };
    let mut clients: Vec<_> = (0..150).map(|_| TcpStream::connect(inet).unwrap()).collect();
    let mut ports = std::collections::HashSet::new();
    for _ in 0..clients.len() {
        let fd = rig.accepted(listener).unwrap();
        // SAFETY: plain queries on a descriptor that is open.
        let flags = unsafe { (libc::fcntl(fd.as_raw_fd(), libc::F_GETFD), libc::fcntl(fd.as_raw_fd(), libc::F_GETFL)) };
        assert_ne!(flags.0 & libc::FD_CLOEXEC, 0);
        assert_ne!(flags.1 & libc::O_NONBLOCK, 0);
        ports.insert(tcp::peer_address(fd.as_fd()).unwrap().unwrap());
    }
    assert_eq!(ports.len(), clients.len());
    clients.clear();
    TcpStream::connect(inet).unwrap();
    rig.accepted(listener).unwrap();
}

/// Runs in a child process, because the limit counts for all threads.
fn accepting_goes_on_after_the_descriptor_limit(mut rig: Rig) {
    const CHILD: &str = "STARWIRE_TEST_DESCRIPTOR_LIMIT";
    let name = format!("{}::accepting_goes_on_after_the_descriptor_limit", rig.module);
    if std::env::var_os(CHILD).is_none() {
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        let output = child.args(["--exact", &name, "--nocapture"]).env(CHILD, "1").output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(
            output.status.success() && text.contains("1 passed"),
            "{text}{}",
            String::from_utf8_lossy(&output.stderr)
        );
        return;
    }
    let (listener, address) = rig.listen_tcp();
    let SocketAddress::Inet(inet) = address else { unreachable!() };
    let _first = TcpStream::connect(inet).unwrap();
    let _second = TcpStream::connect(inet).unwrap();
    let highest = std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u64>().ok())
        .max()
        .unwrap();
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is valid for both calls.
    let set = |limit: &mut libc::rlimit, current| unsafe {
        assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, limit), 0);
        limit.rlim_cur = current;
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, limit), 0);
    };
    let old = {
        // SAFETY: as above.
        unsafe { assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit), 0) };
        limit.rlim_cur
    };
    // Fill every gap below the limit.
    set(&mut limit, highest + 1);
    let mut fillers = Vec::new();
    while let Ok(filler) = std::fs::File::open("/dev/null") {
        fillers.push(filler);
    }
    let error = rig.accepted(listener).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EMFILE));
    // It is reported now and then, not in a busy loop.
    let start = Instant::now();
    let mut waits = 0;
    while start.elapsed() < Duration::from_millis(250) {
        rig.driver.wait(Some(Duration::from_millis(250)), &mut rig.pending).unwrap();
        waits += 1;
    }
    assert!(waits < 20, "{waits} waits");
    rig.pending.clear();
    set(&mut limit, old);
    let mut accepted = 0;
    while accepted < 2 {
        accepted += usize::from(rig.accepted(listener).is_ok());
    }
}

fn a_closed_listener_accepts_no_more(mut rig: Rig) {
    let (listener, address) = rig.listen_tcp();
    rig.driver.close(listener);
    rig.closed(listener);
    let SocketAddress::Inet(inet) = address else { unreachable!() };
    assert_eq!(TcpStream::connect(inet).unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
    rig.quiet(Duration::from_millis(10));
}

fn wake(fd: i32) {
    // SAFETY: eight readable bytes; the descriptor is the driver's, which outlives this call in every test here.
    assert_eq!(unsafe { libc::write(fd, 1u64.to_ne_bytes().as_ptr().cast(), 8) }, 8);
}

fn another_thread_wakes_a_wait(mut rig: Rig) {
    let fd = rig.driver.wake_fd();
    for _ in 0..20 {
        let waker = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(5));
            wake(fd);
        });
        let start = Instant::now();
        rig.driver.wait(Some(PATIENCE), &mut rig.pending).unwrap();
        assert!(start.elapsed() < PATIENCE / 2);
        waker.join().unwrap();
    }
    rig.quiet(Duration::from_millis(20));
}

fn a_wake_up_before_the_wait_counts(mut rig: Rig) {
    for times in [1, 2, 3] {
        (0..times).for_each(|_| wake(rig.driver.wake_fd()));
        let start = Instant::now();
        rig.driver.wait(Some(PATIENCE), &mut rig.pending).unwrap();
        assert!(start.elapsed() < PATIENCE / 2);
    }
    // And not for ever.
    rig.driver.wait(Some(Duration::ZERO), &mut rig.pending).unwrap();
    let start = Instant::now();
    rig.driver.wait(Some(Duration::from_millis(30)), &mut rig.pending).unwrap();
    assert!(start.elapsed() >= Duration::from_millis(29), "{:?}", start.elapsed());
}

fn timeouts_are_kept(mut rig: Rig) {
    // Never early. Nor milliseconds late, at least once in a while: the machine may be busy.
    for micros in [0, 200, 1500, 20_000] {
        let timeout = Duration::from_micros(micros);
        let end = Instant::now() + PATIENCE;
        loop {
            let start = Instant::now();
            rig.driver.wait(Some(timeout), &mut rig.pending).unwrap();
            let took = start.elapsed();
            assert!(took >= timeout, "{took:?} of {timeout:?}");
            if took < timeout + Duration::from_millis(2) {
                break;
            }
            assert!(Instant::now() < end, "{took:?} for {timeout:?}");
        }
    }
    assert!(rig.pending.is_empty());
}

fn a_peers_reset_is_an_error(mut rig: Rig) {
    let (client, peer) = rig.with_plain_peer();
    let mut buffer = [0; 16];
    rig.start_recv(client, &mut buffer);
    let linger = libc::linger { l_onoff: 1, l_linger: 0 };
    let len = size_of::<libc::linger>() as libc::socklen_t;
    // SAFETY: `linger` has `len` bytes.
    let set = unsafe {
        libc::setsockopt(peer.as_raw_fd(), libc::SOL_SOCKET, libc::SO_LINGER, (&raw const linger).cast(), len)
    };
    assert_eq!(set, 0);
    drop(peer);
    assert_eq!(rig.received(client).unwrap_err().kind(), io::ErrorKind::ConnectionReset);
    // No SIGPIPE, an error.
    let kind = rig.send(client, b"too late").unwrap_err().kind();
    assert!(matches!(kind, io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset), "{kind:?}");
}

fn half_close_ends_one_direction_only(mut rig: Rig) {
    let (client, mut peer) = rig.with_plain_peer();
    peer.write_all(b"last").unwrap();
    peer.shutdown(std::net::Shutdown::Write).unwrap();
    let mut buffer = [0; 16];
    assert_eq!(rig.recv(client, &mut buffer).unwrap(), 4);
    for _ in 0..3 {
        assert_eq!(rig.recv(client, &mut buffer).unwrap(), 0);
    }
    rig.send_all(client, b"still here");
    let mut answer = [0; 10];
    peer.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"still here");
}

fn data_before_the_end_of_stream_arrives(mut rig: Rig) {
    for round in 0..50 {
        let (client, mut peer) = rig.with_plain_peer();
        let mut buffer = [0; 4];
        rig.start_recv(client, &mut buffer);
        peer.write_all(b"123456").unwrap();
        if round % 2 == 0 {
            std::thread::yield_now();
        }
        drop(peer);
        let mut got = rig.received(client).unwrap();
        assert_eq!(&buffer[..got], &b"123456"[..got]);
        loop {
            match rig.recv(client, &mut buffer).unwrap() {
                0 => break,
                count => got += count,
            }
        }
        assert_eq!(got, 6);
        rig.driver.close(client);
        rig.closed(client);
    }
}

fn two_hundred_connections(mut rig: Rig) {
    let (listener, address) = rig.listen_tcp();
    let pairs: Vec<_> = (0..200).map(|_| rig.pair(listener, &address)).collect();
    let mut buffers = vec![[0u8; 8]; pairs.len()];
    for round in 0..5u64 {
        let messages: Vec<_> = (0..pairs.len() as u64).map(|index| (round << 32 | index).to_le_bytes()).collect();
        for (index, (client, server)) in pairs.iter().enumerate() {
            rig.start_recv(*server, &mut buffers[index]);
            rig.start_send(*client, &messages[index]);
        }
        for (client, server) in &pairs {
            assert_eq!(rig.sent(*client).unwrap(), 8);
            assert_eq!(rig.received(*server).unwrap(), 8);
        }
        assert!(buffers == messages);
    }
    for (client, server) in &pairs {
        rig.driver.close(*client);
        rig.driver.close(*server);
    }
    for (client, server) in &pairs {
        rig.closed(*client);
        rig.closed(*server);
    }
    rig.quiet(Duration::from_millis(10));
}

fn parts_of(bytes: &[u8], len: usize) -> Vec<IoPart> {
    bytes.chunks(len).map(|chunk| IoPart { ptr: chunk.as_ptr().cast_mut(), len: chunk.len() }).collect()
}

/// Moves `message` from one token to the other in parts of the given sizes, both directions of the driver at work at once.
fn transfer(rig: &mut Rig, from: Token, to: Token, message: &[u8], send_part: usize, recv_part: usize) {
    let mut buffer = vec![0; message.len()];
    let base = buffer.as_mut_ptr();
    let (mut sent, mut received) = (0, 0);
    let start_send = |rig: &mut Rig, sent: usize| {
        // SAFETY: `message` outlives the loop below, which ends when all was received.
        unsafe { rig.driver.send(from, &parts_of(&message[sent..], send_part)) }.unwrap();
    };
    let start_recv = |rig: &mut Rig, received: usize| {
        let parts: Vec<_> = (received..message.len())
            .step_by(recv_part)
            // SAFETY: the offset is inside the buffer.
            .map(|at| IoPart { ptr: unsafe { base.add(at) }, len: recv_part.min(message.len() - at) })
            .collect();
        // SAFETY: `buffer` outlives the loop below and is not touched meanwhile.
        unsafe { rig.driver.recv(to, &parts) }.unwrap();
    };
    start_send(rig, 0);
    start_recv(rig, 0);
    while sent < message.len() || received < message.len() {
        let (was_send, count) = rig.take("progress", |completion| match completion {
            Completion::Send { token, result } if token == from => Ok((true, result.unwrap())),
            Completion::Recv { token, result } if token == to => Ok((false, result.unwrap())),
            other => Err(other),
        });
        assert_ne!(count, 0);
        if was_send {
            sent += count;
            if sent < message.len() {
                start_send(rig, sent);
            }
        } else {
            received += count;
            if received < message.len() {
                start_recv(rig, received);
            }
        }
    }
    assert_eq!((sent, received), (message.len(), message.len()));
    assert!(buffer == message);
}

fn many_parts(mut rig: Rig) {
    let (client, server) = rig.tcp_pair();
    // 10,000 and 3,334 parts: far above what the kernel takes at once.
    transfer(&mut rig, client, server, &pattern(100_000), 10, 30);
    let (listener, address) = rig.listen_unix();
    let (client, server) = rig.pair(listener, &address);
    transfer(&mut rig, client, server, &pattern(100_000), 30, 10);
}

fn a_large_transfer(mut rig: Rig) {
    let message = pattern(48 << 20);
    let (client, server) = rig.tcp_pair();
    transfer(&mut rig, client, server, &message, 1 << 20, 3 << 20);
    let (listener, address) = rig.listen_unix();
    let (client, server) = rig.pair(listener, &address);
    transfer(&mut rig, server, client, &message, 3 << 20, 1 << 20);
}

fn both_directions_at_once(mut rig: Rig) {
    let (client, server) = rig.tcp_pair();
    let (there, back) = (pattern(8 << 20), pattern(6 << 20));
    let mut buffers = [vec![0; there.len()], vec![0; back.len()]];
    let flows = [(client, server, &there), (server, client, &back)];
    let (mut sent, mut received) = ([0; 2], [0; 2]);
    for (flow, (from, to, message)) in flows.iter().enumerate() {
        rig.start_send(*from, message);
        rig.start_recv(*to, &mut buffers[flow]);
    }
    while (0..2).any(|flow| received[flow] < flows[flow].2.len()) {
        let (token, was_send, count) = rig.take("progress", |completion| match completion {
            Completion::Send { token, result } => Ok((token, true, result.unwrap())),
            Completion::Recv { token, result } => Ok((token, false, result.unwrap())),
            other => Err(other),
        });
        let flow = usize::from((token == client) != was_send);
        let message = flows[flow].2;
        let done = if was_send { &mut sent[flow] } else { &mut received[flow] };
        *done += count;
        let done = *done;
        match was_send {
            true if done < message.len() => rig.start_send(token, &message[done..]),
            false if done < message.len() => rig.start_recv(token, &mut buffers[flow][done..]),
            _ => {}
        }
    }
    assert!(buffers[0] == there && buffers[1] == back);
}

fn stale_tokens_are_refused(mut rig: Rig) {
    let (client, server) = rig.tcp_pair();
    rig.driver.close(client);
    let mut byte = [0];
    let part = [IoPart { ptr: byte.as_mut_ptr(), len: 1 }];
    let refused = |rig: &mut Rig, token: Token| {
        let address = SocketAddress::Inet("127.0.0.1:1".parse().unwrap());
        // SAFETY: refused operations touch nothing.
        let results = unsafe { [rig.driver.recv(token, &part), rig.driver.send(token, &part)] };
        results.into_iter().for_each(|result| assert_eq!(result.unwrap_err().kind(), io::ErrorKind::NotFound));
        assert_eq!(rig.driver.accept(token).unwrap_err().kind(), io::ErrorKind::NotFound);
        assert_eq!(rig.driver.connect(token, &address).unwrap_err().kind(), io::ErrorKind::NotFound);
        assert_eq!(rig.driver.release(token).unwrap_err().kind(), io::ErrorKind::NotFound);
        rig.driver.close(token);
    };
    refused(&mut rig, client);
    rig.closed(client);
    refused(&mut rig, client);
    // The next tenant of its slot is somebody else.
    let (listener, address) = rig.listen_tcp();
    let (next, _) = rig.pair(listener, &address);
    assert_ne!(next, client);
    refused(&mut rig, client);
    refused(&mut rig, Token(0));
    refused(&mut rig, Token(u64::MAX));
    rig.send(next, b"alive").unwrap();
    assert_eq!(rig.recv(server, &mut byte).unwrap(), 0);
    rig.quiet(Duration::from_millis(10));
}

fn released_descriptors_work_on(mut rig: Rig) {
    let (client, mut peer) = rig.with_plain_peer();
    let mut buffer = [0; 4];
    rig.start_recv(client, &mut buffer);
    assert_eq!(rig.driver.release(client).unwrap_err().kind(), io::ErrorKind::ResourceBusy);
    peer.write_all(b"abcdefgh").unwrap();
    assert_eq!(rig.received(client).unwrap(), 4);
    let fd = rig.driver.release(client).unwrap();
    // SAFETY: a plain query on a descriptor that is open.
    let flags = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFL) };
    assert_ne!(flags & libc::O_NONBLOCK, 0, "it comes back non-blocking, as it was taken");
    let mut stream = TcpStream::from(fd);
    stream.set_nonblocking(false).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.read_exact(&mut buffer).unwrap();
    assert_eq!(&buffer, b"efgh");
    // Also into another driver, or this one again.
    stream.set_nonblocking(true).unwrap();
    let again = rig.driver.register(stream.into()).unwrap();
    assert_ne!(again, client);
    rig.start_recv(again, &mut buffer);
    peer.write_all(b"more").unwrap();
    assert_eq!(rig.received(again).unwrap(), 4);
    rig.quiet(Duration::from_millis(10));
}

fn one_operation_per_direction(mut rig: Rig) {
    let (client, _peer) = rig.with_plain_peer();
    let (mut first, mut second) = ([0; 4], [0; 4]);
    rig.start_recv(client, &mut first);
    let part = [IoPart { ptr: second.as_mut_ptr(), len: 4 }];
    // SAFETY: the buffer outlives the call, which is refused.
    let error = unsafe { rig.driver.recv(client, &part) }.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
    rig.driver.close(client);
    rig.closed(client);
}

fn operations_on_no_bytes_are_refused(mut rig: Rig) {
    let (client, _peer) = rig.with_plain_peer();
    let empty = [IoPart { ptr: std::ptr::null_mut(), len: 0 }];
    // SAFETY: no memory is involved.
    let results = unsafe {
        [
            rig.driver.recv(client, &[]),
            rig.driver.recv(client, &empty),
            rig.driver.send(client, &[]),
            rig.driver.send(client, &empty),
        ]
    };
    results.into_iter().for_each(|result| assert_eq!(result.unwrap_err().kind(), io::ErrorKind::InvalidInput));
    // And leave the descriptor usable.
    rig.send(client, b"x").unwrap();
}

fn everything_can_be_ended_at_once(mut rig: Rig) {
    let (client, mut peer) = rig.with_plain_peer();
    let (listener, address) = rig.listen_tcp();
    let (other, server) = rig.pair(listener, &address);
    rig.start_connect(&address);
    let message = pattern(64 << 20);
    let mut buffer = vec![7u8; 4096];
    rig.start_send(other, &message);
    rig.start_recv(client, &mut buffer);
    rig.driver.wait(Some(Duration::ZERO), &mut rig.pending).unwrap();
    assert!(rig.driver.quiesce(PATIENCE));
    drop(message);
    let _ = peer.write_all(&[9; 4096]);
    assert!(buffer.iter().all(|byte| *byte == 7));
    rig.pending.clear();
    rig.quiet(Duration::from_millis(10));
    for token in [client, listener, other, server] {
        assert_eq!(rig.driver.release(token).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
    // The driver itself lives on.
    let (client, server) = rig.tcp_pair();
    rig.send(client, b"again").unwrap();
    assert_eq!(rig.recv(server, &mut buffer).unwrap(), 5);
}

fn dropping_the_driver_with_operations_in_flight_is_safe(mut rig: Rig) {
    let (client, mut peer) = rig.with_plain_peer();
    let (_listener, _) = rig.listen_tcp();
    let mut buffer = vec![7u8; 4096];
    rig.start_recv(client, &mut buffer);
    rig.driver.wait(Some(Duration::ZERO), &mut rig.pending).unwrap();
    drop(rig);
    // The peer sees the end (or a refusal to take more), and nobody writes into the buffer any more.
    let _ = peer.write_all(&[9; 4096]);
    let mut rest = Vec::new();
    let _ = peer.read_to_end(&mut rest);
    assert!(buffer.iter().all(|byte| *byte == 7));
}
