//! Sockets and addresses.

mod address;
pub mod backoff;
pub mod descriptors;
pub mod loopback;
mod raw_address;
pub mod tcp;
pub mod unix;
pub mod verbs;

pub use address::SocketAddress;
pub use raw_address::RawAddress;
pub(crate) use raw_address::socklen;

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

/// Memory of an operation in flight. The caller keeps it valid until it has seen the operation's completion or
/// its descriptor's end.
#[derive(Clone, Copy)]
pub struct IoPart {
    pub ptr: *mut u8,
    pub len: usize,
}

/// A socket error, with the socket or address it belongs to.
#[derive(Debug, thiserror::Error)]
pub enum TransportError {
    #[error("cannot listen on {address}: {source}{}", hint(.source))]
    Listen { address: SocketAddress, source: io::Error },
    #[error("cannot create a socket for {address}: {source}")]
    Socket { address: SocketAddress, source: io::Error },
    #[error("cannot set socket option {option} to {value}: {source}")]
    Option { option: &'static str, value: u64, source: io::Error },
    #[error("cannot query {what}: {source}")]
    Query { what: &'static str, source: io::Error },
    #[error(
        "{needed} file descriptors are needed, the hard limit is {hard}: raise it (ulimit -Hn, LimitNOFILE=, nofile in limits.conf)"
    )]
    Descriptors { needed: u64, hard: u64 },
    #[error(
        "refused a local peer: process {pid} runs as user {uid}, this one as user {own}; local connections require the same user or root"
    )]
    ForeignPeer { pid: i32, uid: u32, own: u32 },
}

/// # Safety
/// `result` is -1 or an open descriptor without another owner.
pub(crate) unsafe fn owned(result: libc::c_int) -> io::Result<OwnedFd> {
    check(result)?;
    // SAFETY: `check` excluded -1, and the caller guarantees that the descriptor has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(result) })
}

pub(crate) fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn hint(source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::AddrInUse => " (another process has this port: choose another one, or 0)",
        io::ErrorKind::AddrNotAvailable => " (this host has no such address)",
        io::ErrorKind::PermissionDenied => " (ports below net.ipv4.ip_unprivileged_port_start are root's)",
        _ => "",
    }
}
