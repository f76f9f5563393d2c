//! Unix sockets: the shorter path between tasks of one host.
//!
//! They listen on abstract names, not on paths. A path needs a writable directory that both containers see, and stays
//! behind when a task is killed; an abstract name disappears with its socket and can be reached exactly from the same
//! network namespace. In place of a directory with mode 0700, the peer's credentials keep others out: both ends call
//! [`check_peer`], which rejects foreign clients as well as a foreign process that took over the name of a dead task. A
//! name follows from the address of the task's data port (see [`beside`]).

use std::io;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use super::tcp::{bind_and_listen, stream_socket};
use super::{RawAddress, SocketAddress, TransportError, check, socklen};

/// A listener on this name.
pub fn listen_at(address: &SocketAddress) -> Result<OwnedFd, TransportError> {
    let made = || {
        let fd = stream_socket(libc::AF_UNIX)?;
        bind_and_listen(&fd, &RawAddress::new(address)?)?;
        Ok(fd)
    };
    made().map_err(|source| TransportError::Listen { address: address.clone(), source })
}

/// The name beside a TCP listener on this address, for peers, which know no more than the address. Two processes of a
/// network namespace cannot have the same one, as they cannot listen on the same port.
pub fn beside(listener: SocketAddr) -> SocketAddress {
    let (ip, port) = (listener.ip().to_canonical(), listener.port());
    if ip.is_unspecified() { named(&format!("starwire-*:{port}")) } else { named(&format!("starwire-{ip}:{port}")) }
}

/// The names that may be beside the listener that answers at this address, if the address is one of this host's.
pub fn possibly_beside(address: SocketAddr) -> Vec<SocketAddress> {
    // Only an own address can be bound to.
    if UdpSocket::bind((address.ip(), 0)).is_err() {
        return Vec::new();
    }
    let everywhere = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), address.port());
    vec![beside(address), beside(everywhere)]
}

fn named(name: &str) -> SocketAddress {
    SocketAddress::Unix(PathBuf::from(format!("@{name}")))
}

/// A non-blocking socket for connecting to a unix address.
pub fn socket() -> io::Result<OwnedFd> {
    stream_socket(libc::AF_UNIX)
}

/// The process at the other end: the one that connected, or that listened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// 0 if the peer is in another pid namespace.
    pub pid: i32,
    pub uid: u32,
}

pub fn peer(fd: BorrowedFd<'_>) -> Result<Peer, TransportError> {
    let mut credentials = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = socklen::<libc::ucred>();
    let to = (&raw mut credentials).cast();
    // SAFETY: `credentials` has `len` bytes.
    check(unsafe { libc::getsockopt(fd.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, to, &mut len) })
        .map_err(|source| TransportError::Query { what: "the credentials of a socket's peer", source })?;
    Ok(Peer { pid: credentials.pid, uid: credentials.uid })
}

/// Accepts as peers only processes of the same user or root.
pub fn check_peer(fd: BorrowedFd<'_>) -> Result<Peer, TransportError> {
    let peer = peer(fd)?;
    // SAFETY: geteuid has no preconditions and always succeeds.
    judge(peer, unsafe { libc::geteuid() })
}

fn judge(peer: Peer, own: u32) -> Result<Peer, TransportError> {
    let Peer { pid, uid } = peer;
    if uid == own || uid == 0 { Ok(peer) } else { Err(TransportError::ForeignPeer { pid, uid, own }) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn a_name_can_be_connected_to_and_names_the_peer() {
        let address = named(&format!("starwire-test-{}", std::process::id()));
        let listener = listen_at(&address).unwrap();
        assert_eq!(super::super::tcp::local_address(listener.as_fd()).unwrap(), Some(address.clone()));
        let client = socket().unwrap();
        let raw = RawAddress::new(&address).unwrap();
        // SAFETY: pointer and length describe the address.
        assert_eq!(unsafe { libc::connect(client.as_raw_fd(), raw.as_ptr(), raw.size()) }, 0);
        let peer = check_peer(client.as_fd()).unwrap();
        assert_eq!(peer.pid, std::process::id() as i32);
    }

    #[test]
    fn a_dead_listeners_name_is_gone() {
        let address = named(&format!("starwire-dead-{}", std::process::id()));
        drop(listen_at(&address).unwrap());
        let client = socket().unwrap();
        let raw = RawAddress::new(&address).unwrap();
        // SAFETY: pointer and length describe the address.
        assert_eq!(unsafe { libc::connect(client.as_raw_fd(), raw.as_ptr(), raw.size()) }, -1);
        assert_eq!(io::Error::last_os_error().kind(), io::ErrorKind::ConnectionRefused);
    }

    #[test]
    fn names_beside_a_listener_follow_from_its_address() {
        let beside = |address: &str| super::beside(address.parse().unwrap()).to_string();
        assert_eq!(beside("10.0.0.7:2222"), "unix:@starwire-10.0.0.7:2222");
        assert_eq!(beside("[::1]:2222"), "unix:@starwire-::1:2222");
        assert_eq!(beside("[::ffff:10.0.0.7]:2222"), beside("10.0.0.7:2222"));
        assert_eq!([beside("0.0.0.0:2222"), beside("[::]:2222")], ["unix:@starwire-*:2222", "unix:@starwire-*:2222"]);
        let possible = |address: &str| possibly_beside(address.parse().unwrap());
        let names = possible("127.0.0.1:2222").iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(names, [beside("127.0.0.1:2222"), beside("0.0.0.0:2222")]);
        // A documentation address (RFC 5737) is no host's.
        assert_eq!(possible("192.0.2.1:2222"), []);
        let address = super::beside("127.0.0.1:1".parse().unwrap());
        let first = listen_at(&address).unwrap();
        assert!(listen_at(&address).unwrap_err().to_string().contains("another process"));
        drop(first);
    }

    #[test]
    fn foreign_users_are_refused_with_a_reason() {
        assert!(judge(Peer { pid: 7, uid: 1000 }, 1000).is_ok());
        assert!(judge(Peer { pid: 7, uid: 0 }, 1000).is_ok());
        for own in [0, 1001] {
            let error = judge(Peer { pid: 7, uid: 1000 }, own).unwrap_err().to_string();
            assert!(error.contains("process 7 runs as user 1000") && error.contains(&own.to_string()), "{error}");
        }
    }
}
