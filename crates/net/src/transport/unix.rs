//! Unix sockets: the shorter path between tasks of one host.
//!
//! They listen on abstract names, not on paths. A path needs a writable directory that both containers see, and stays
//! behind when a task is killed; an abstract name disappears with its socket and can be reached exactly from the same
//! network namespace, which is easy to compare (see `host`). In place of a directory with mode 0700, the peer's
//! credentials keep others out: both ends call [`check_peer`], which rejects foreign clients as well as a foreign
//! process that took over the name of a dead task. Names contain 128 random bits, so they do not collide.

use std::io::{self, Read};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use super::tcp::{bind_and_listen, stream_socket};
use super::{RawAddress, SocketAddress, TransportError, socklen};

/// A listener on a fresh name, and that name.
pub fn listen() -> Result<(OwnedFd, SocketAddress), TransportError> {
    let mut address = SocketAddress::Unix(PathBuf::from("@starwire"));
    let result = (|| {
        let mut random = [0u8; 16];
        std::fs::File::open("/dev/urandom")?.read_exact(&mut random)?;
        let name = format!("@starwire-{:032x}", u128::from_ne_bytes(random));
        address = SocketAddress::Unix(PathBuf::from(name));
        let fd = stream_socket(libc::AF_UNIX)?;
        bind_and_listen(&fd, &RawAddress::new(&address)?)?;
        Ok(fd)
    })();
    match result {
        Ok(fd) => Ok((fd, address)),
        Err(source) => Err(TransportError::Listen { address, source }),
    }
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
    let result = unsafe { libc::getsockopt(fd.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, to, &mut len) };
    if result < 0 {
        return Err(TransportError::Query {
            what: "the credentials of a socket's peer",
            source: io::Error::last_os_error(),
        });
    }
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
    fn a_fresh_name_can_be_connected_to_and_names_the_peer() {
        let (listener, address) = listen().unwrap();
        let (_, other) = listen().unwrap();
        assert_ne!(address, other);
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
        let (listener, address) = listen().unwrap();
        drop(listener);
        let client = socket().unwrap();
        let raw = RawAddress::new(&address).unwrap();
        // SAFETY: pointer and length describe the address.
        assert_eq!(unsafe { libc::connect(client.as_raw_fd(), raw.as_ptr(), raw.size()) }, -1);
        assert_eq!(io::Error::last_os_error().kind(), io::ErrorKind::ConnectionRefused);
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
