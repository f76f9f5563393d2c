//! Behaviour at the limit of descriptors. A separate test binary, because the limit is per process.

#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a test may panic, and its numbers are small"
)]

#[allow(dead_code)]
#[path = "engine/harness.rs"]
mod harness;

use std::fs::File;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{FromRawFd, OwnedFd};
use std::time::Duration;

use harness::{PATIENCE, Task, eventually};

fn set_limit(soft: libc::rlim_t) {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: a local struct of the right type, both ways.
    unsafe {
        assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit), 0);
        limit.rlim_cur = soft;
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &limit), 0);
    }
}

/// Opens files until the process may have no more.
fn use_up() -> Vec<File> {
    std::iter::from_fn(|| File::open("/dev/null").ok()).collect()
}

/// Creates a socket to connect later, when no new descriptors are available.
fn socket() -> TcpStream {
    // SAFETY: a new descriptor, checked, is owned by the stream.
    unsafe {
        let fd = libc::socket(libc::AF_INET, libc::SOCK_STREAM, 0);
        assert!(fd >= 0);
        TcpStream::from(OwnedFd::from_raw_fd(fd))
    }
}

fn connect(socket: &TcpStream, to: SocketAddr) {
    use std::os::fd::AsRawFd;
    let SocketAddr::V4(to) = to else { panic!("{to}") };
    let address = libc::sockaddr_in {
        sin_family: libc::AF_INET as libc::sa_family_t,
        sin_port: to.port().to_be(),
        sin_addr: libc::in_addr { s_addr: u32::from(*to.ip()).to_be() },
        sin_zero: [0; 8],
    };
    // SAFETY: the address has the given length.
    let result = unsafe {
        libc::connect(socket.as_raw_fd(), (&raw const address).cast(), size_of_val(&address) as libc::socklen_t)
    };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}

#[test]
fn the_limit_is_reported_once_and_recovered_from() {
    // It stays as it is during the test: io_uring applies the limit that held when the accept was submitted.
    set_limit(256);
    for driver in ["epoll", "io_uring"] {
        let Ok(task) = Task::try_start("/job:ps/replica:0/task:0", "grpc++", 1, &[("STARWIRE_DRIVER", driver)]) else {
            continue; // no io_uring on this machine
        };
        let mut peers: Vec<TcpStream> = (0..3).map(|_| socket()).collect();
        let files = use_up();
        for peer in &peers {
            connect(peer, task.engine().bound());
        }
        eventually("a line in the log", || task.logged("cannot accept a connection") == 1);
        // It is tried again ten times a second, without another line: this waits for what must not happen.
        std::thread::sleep(Duration::from_millis(350));
        drop(files);
        assert_eq!(task.logged("cannot accept a connection"), 1, "{driver}");
        for peer in &mut peers {
            peer.set_read_timeout(Some(PATIENCE)).unwrap();
            peer.write_all(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
            let mut answer = String::new();
            peer.read_to_string(&mut answer).unwrap();
            assert!(answer.starts_with("HTTP/1.1 200"), "{driver}: {answer}");
        }
    }
}
