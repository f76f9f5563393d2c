//! Compares the drivers with each other and with blocking sockets: latency of a small round trip, throughput of large
//! messages. Two threads, loopback.
//!
//!     cargo bench --bench drivers [-- FILTER]

#![allow(clippy::print_stdout, reason = "a benchmark prints")]

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use starwire_net::reactor::driver::{Completion, Driver, IoPart, Token};
use starwire_net::reactor::{DriverKind, open_driver};
use starwire_net::transport::tcp::{TcpOptions, configure};

const SMALL: usize = 64;
const LARGE: usize = 1 << 20;
const TIME: Duration = Duration::from_secs(1);

fn main() {
    let filter = std::env::args().skip(1).find(|argument| !argument.starts_with('-')).unwrap_or_default();
    println!("{:<28}{:>12}{:>12}{:>12}{:>12}", "", "p50", "p99", "CPU", "");
    for (transport, pair) in [("tcp", tcp_pair as fn() -> (OwnedFd, OwnedFd)), ("unix", unix_pair)] {
        for (name, end) in [
            ("blocking", Blocking::open as fn(OwnedFd) -> Box<dyn End>),
            ("epoll", |fd| Driven::open(DriverKind::Epoll, fd, None)),
            ("io_uring", |fd| Driven::open(DriverKind::IoUring, fd, None)),
            ("epoll, polling", |fd| Driven::open(DriverKind::Epoll, fd, Some(Duration::ZERO))),
            ("io_uring, polling", |fd| Driven::open(DriverKind::IoUring, fd, Some(Duration::ZERO))),
        ] {
            let case = format!("{transport} {name}");
            if !case.contains(&filter) {
                continue;
            }
            let (near, far) = pair();
            round_trips(&case, end, near, far);
            let (near, far) = pair();
            throughput(&case, end, near, far);
        }
    }
}

fn round_trips(case: &str, end: fn(OwnedFd) -> Box<dyn End>, near: OwnedFd, far: OwnedFd) {
    let echo = std::thread::spawn(move || {
        let mut end = end(far);
        let mut buffer = [0; SMALL];
        while end.recv_exact(&mut buffer) {
            end.send_all(&buffer);
        }
    });
    let mut end = end(near);
    let mut buffer = [1; SMALL];
    let mut times = Vec::new();
    let (start, cpu) = (Instant::now(), cpu_time());
    while start.elapsed() < TIME {
        let before = Instant::now();
        end.send_all(&buffer);
        assert!(end.recv_exact(&mut buffer));
        times.push(before.elapsed());
    }
    let (total, cpu) = (start.elapsed(), cpu_time() - cpu);
    drop(end);
    echo.join().expect("the echo thread does not panic");
    let rate = format!("{:.0} /s", times.len() as f64 / total.as_secs_f64());
    report(&format!("{case}: 64 B"), &mut times, cpu, &rate);
}

/// The receiver answers each message with one byte; two messages are in flight at any time.
fn throughput(case: &str, end: fn(OwnedFd) -> Box<dyn End>, near: OwnedFd, far: OwnedFd) {
    let sink = std::thread::spawn(move || {
        let mut end = end(far);
        let mut buffer = vec![0; LARGE];
        while end.recv_exact(&mut buffer) {
            end.send_all(&[1]);
        }
    });
    let mut end = end(near);
    let message = vec![1; LARGE];
    let mut times = Vec::new();
    let (start, cpu) = (Instant::now(), cpu_time());
    end.send_all(&message);
    while start.elapsed() < TIME {
        let before = Instant::now();
        end.send_all(&message);
        assert!(end.recv_exact(&mut [0]));
        times.push(before.elapsed());
    }
    let (total, cpu) = (start.elapsed(), cpu_time() - cpu);
    assert!(end.recv_exact(&mut [0]));
    drop(end);
    sink.join().expect("the receiving thread does not panic");
    let rate = format!("{:.2} GB/s", (times.len() * LARGE) as f64 / total.as_secs_f64() / 1e9);
    report(&format!("{case}: 1 MB"), &mut times, cpu, &rate);
}

fn report(case: &str, times: &mut [Duration], cpu: Duration, rate: &str) {
    times.sort_unstable();
    let micros = |time: Duration| format!("{:.1} us", time.as_secs_f64() * 1e6);
    let part = |percent: usize| micros(times[(times.len() - 1) * percent / 100]);
    let each = cpu / u32::try_from(times.len()).unwrap_or(u32::MAX);
    println!("{case:<28}{:>12}{:>12}{:>12}{rate:>12}", part(50), part(99), micros(each));
}

/// CPU time of both threads, user and kernel: other load disturbs it least.
fn cpu_time() -> Duration {
    // SAFETY: all-zero is a valid rusage.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: `usage` is a valid, writable rusage.
    unsafe { libc::getrusage(libc::RUSAGE_SELF, &mut usage) };
    let time =
        |t: libc::timeval| Duration::new(t.tv_sec.unsigned_abs(), 0) + Duration::from_micros(t.tv_usec.unsigned_abs());
    time(usage.ru_utime) + time(usage.ru_stime)
}

trait End {
    fn send_all(&mut self, bytes: &[u8]);
    /// False at the end of the stream.
    fn recv_exact(&mut self, buffer: &mut [u8]) -> bool;
}

struct Blocking(std::fs::File);

impl Blocking {
    fn open(fd: OwnedFd) -> Box<dyn End> {
        // SAFETY: takes no pointers.
        unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, libc::O_RDWR) };
        Box::new(Blocking(fd.into()))
    }
}

impl End for Blocking {
    fn send_all(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).expect("the other end listens");
    }

    fn recv_exact(&mut self, buffer: &mut [u8]) -> bool {
        match self.0.read_exact(buffer) {
            Ok(()) => true,
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => false,
            Err(error) => panic!("{error}"),
        }
    }
}

/// One operation at a time; a send's completion arrives in a later wait.
struct Driven {
    driver: Box<dyn Driver>,
    token: Token,
    /// `Some(ZERO)` spins, `None` sleeps.
    timeout: Option<Duration>,
    out: Vec<Completion>,
}

impl Driven {
    fn open(kind: DriverKind, fd: OwnedFd, timeout: Option<Duration>) -> Box<dyn End> {
        let mut driver = open_driver(kind).expect("the driver works here");
        let token = driver.register(fd).expect("a fresh socket");
        Box::new(Driven { driver, token, timeout, out: Vec::new() })
    }

    fn next(&mut self) -> Completion {
        while self.out.is_empty() {
            self.driver.wait(self.timeout, &mut self.out).expect("waiting works");
        }
        self.out.remove(0)
    }
}

impl End for Driven {
    fn send_all(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let part = IoPart { ptr: bytes.as_ptr().cast_mut(), len: bytes.len() };
            // SAFETY: `bytes` is borrowed until the completion below.
            unsafe { self.driver.send(self.token, &[part]) }.expect("nothing else is being sent");
            let Completion::Send { result, .. } = self.next() else { panic!("not a send") };
            bytes = &bytes[result.expect("the other end listens")..];
        }
    }

    fn recv_exact(&mut self, mut buffer: &mut [u8]) -> bool {
        while !buffer.is_empty() {
            let part = IoPart { ptr: buffer.as_mut_ptr(), len: buffer.len() };
            // SAFETY: `buffer` is borrowed mutably until the completion below.
            unsafe { self.driver.recv(self.token, &[part]) }.expect("nothing else is being received");
            let Completion::Recv { result, .. } = self.next() else { panic!("not a receive") };
            match result.expect("the other end lives") {
                0 => return false,
                count => buffer = &mut buffer[count..],
            }
        }
        true
    }
}

fn tcp_pair() -> (OwnedFd, OwnedFd) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
    let near = TcpStream::connect(listener.local_addr().expect("bound")).expect("it listens");
    let (far, _) = listener.accept().expect("somebody connected");
    nonblocking(near.into(), far.into(), true)
}

fn unix_pair() -> (OwnedFd, OwnedFd) {
    let (near, far) = UnixStream::pair().expect("unix sockets");
    nonblocking(near.into(), far.into(), false)
}

fn nonblocking(near: OwnedFd, far: OwnedFd, tcp: bool) -> (OwnedFd, OwnedFd) {
    for fd in [&near, &far] {
        // SAFETY: takes no pointers.
        unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, libc::O_RDWR | libc::O_NONBLOCK) };
        if tcp {
            configure(fd, &TcpOptions::default()).expect("ordinary options");
        }
    }
    (near, far)
}
