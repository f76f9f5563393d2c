//! TCP sockets: listeners, and sockets to connect with.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;
use std::{io, ptr};

use super::{RawAddress, SocketAddress, TransportError, check, owned, socklen};

const BACKLOG: libc::c_int = 4096;

/// Options of a data connection, the same on both ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TcpOptions {
    pub keepalive: Option<Keepalive>,
    /// `None`: the kernel sizes the buffer dynamically.
    pub send_buffer: Option<usize>,
    pub receive_buffer: Option<usize>,
}

/// An idle connection is probed after `idle`, then every `interval`; `count` unanswered probes end it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Keepalive {
    pub idle: Duration,
    pub interval: Duration,
    pub count: u32,
}

impl Default for TcpOptions {
    fn default() -> Self {
        TcpOptions {
            keepalive: Some(Keepalive { idle: Duration::from_secs(10), interval: Duration::from_secs(5), count: 4 }),
            send_buffer: None,
            receive_buffer: None,
        }
    }
}

/// A listener on `address` (port 0: the system chooses one, see [`local_address`]). An IPv6 wildcard accepts IPv4
/// connections as well.
pub fn listen(address: SocketAddr) -> Result<OwnedFd, TransportError> {
    let failed = |source| TransportError::Listen { address: address.into(), source };
    let raw = RawAddress::new(&address.into()).map_err(failed)?;
    let fd = stream_socket(raw.family()).map_err(failed)?;
    // A restarted server gets its port back even if old connections linger in TIME_WAIT.
    set(&fd, libc::SOL_SOCKET, libc::SO_REUSEADDR, "SO_REUSEADDR", 1)?;
    if let SocketAddr::V6(v6) = address {
        let only = u64::from(!v6.ip().is_unspecified());
        set(&fd, libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, "IPV6_V6ONLY", only)?;
    }
    bind_and_listen(&fd, &raw).map_err(failed)?;
    Ok(fd)
}

/// A listener on every address of this host: both families, or only IPv4 if the host has no IPv6.
pub fn listen_everywhere(port: u16) -> Result<OwnedFd, TransportError> {
    match listen(SocketAddr::from((Ipv6Addr::UNSPECIFIED, port))) {
        Err(TransportError::Listen { source, .. })
            if matches!(
                source.raw_os_error(),
                Some(libc::EAFNOSUPPORT | libc::EADDRNOTAVAIL | libc::EPROTONOSUPPORT)
            ) =>
        {
            listen(SocketAddr::from((Ipv4Addr::UNSPECIFIED, port)))
        }
        result => result,
    }
}

/// A non-blocking socket for connecting to `address`.
pub fn socket(address: SocketAddr, options: &TcpOptions) -> Result<OwnedFd, TransportError> {
    let family = if address.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    let fd = stream_socket(family).map_err(|source| TransportError::Socket { address: address.into(), source })?;
    configure(&fd, options)?;
    Ok(fd)
}

/// Sets the options of a connected or accepted socket. Always TCP_NODELAY: blocks are coalesced before they are
/// written. Never TCP_USER_TIMEOUT: it also ends a connection whose peer lives and has stopped reading for as long.
pub fn configure(fd: &OwnedFd, options: &TcpOptions) -> Result<(), TransportError> {
    set(fd, libc::IPPROTO_TCP, libc::TCP_NODELAY, "TCP_NODELAY", 1)?;
    if let Some(Keepalive { idle, interval, count }) = &options.keepalive {
        set(fd, libc::SOL_SOCKET, libc::SO_KEEPALIVE, "SO_KEEPALIVE", 1)?;
        set(fd, libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, "TCP_KEEPIDLE", idle.as_secs().max(1))?;
        set(fd, libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, "TCP_KEEPINTVL", interval.as_secs().max(1))?;
        set(fd, libc::IPPROTO_TCP, libc::TCP_KEEPCNT, "TCP_KEEPCNT", (*count).into())?;
    }
    if let Some(bytes) = options.send_buffer {
        set(fd, libc::SOL_SOCKET, libc::SO_SNDBUF, "SO_SNDBUF", bytes as u64)?;
    }
    if let Some(bytes) = options.receive_buffer {
        set(fd, libc::SOL_SOCKET, libc::SO_RCVBUF, "SO_RCVBUF", bytes as u64)?;
    }
    Ok(())
}

/// The address that a socket is bound to; `None` for an unbound or unnamed one.
pub fn local_address(fd: BorrowedFd<'_>) -> Result<Option<SocketAddress>, TransportError> {
    // SAFETY: `query` passes a valid buffer and its length.
    let address = query(|to, len| unsafe { libc::getsockname(fd.as_raw_fd(), to, len) });
    address.map_err(|source| TransportError::Query { what: "the address of a socket", source })
}

/// The address that a socket is connected to; `None` for an unnamed one. An IPv4 peer of a dual-stack listener is
/// returned with its IPv4 address.
pub fn peer_address(fd: BorrowedFd<'_>) -> Result<Option<SocketAddress>, TransportError> {
    // SAFETY: `query` passes a valid buffer and its length.
    let address = query(|to, len| unsafe { libc::getpeername(fd.as_raw_fd(), to, len) });
    let address = address.map_err(|source| TransportError::Query { what: "the address of a socket's peer", source })?;
    Ok(address.map(|address| match address {
        SocketAddress::Inet(SocketAddr::V6(v6)) => match v6.ip().to_ipv4_mapped() {
            Some(v4) => SocketAddress::Inet(SocketAddr::from((v4, v6.port()))),
            None => SocketAddress::Inet(SocketAddr::V6(v6)),
        },
        other => other,
    }))
}

pub(super) fn stream_socket(family: libc::c_int) -> io::Result<OwnedFd> {
    // SAFETY: takes no pointers; `owned` checks the new descriptor, which has no other owner.
    unsafe { owned(libc::socket(family, libc::SOCK_STREAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC, 0)) }
}

pub(super) fn bind_and_listen(fd: &OwnedFd, address: &RawAddress) -> io::Result<()> {
    // SAFETY: pointer and length describe the address, which outlives the call.
    check(unsafe { libc::bind(fd.as_raw_fd(), address.as_ptr(), address.size()) })?;
    // SAFETY: takes no pointers.
    check(unsafe { libc::listen(fd.as_raw_fd(), BACKLOG) })
}

fn set(
    fd: &OwnedFd,
    level: libc::c_int,
    name: libc::c_int,
    option: &'static str,
    value: u64,
) -> Result<(), TransportError> {
    let failed = |source| TransportError::Option { option, value, source };
    let number = libc::c_int::try_from(value).map_err(|_| failed(io::ErrorKind::InvalidInput.into()))?;
    let len = socklen::<libc::c_int>();
    // SAFETY: `number` has `len` bytes and outlives the call.
    check(unsafe { libc::setsockopt(fd.as_raw_fd(), level, name, ptr::from_ref(&number).cast(), len) }).map_err(failed)
}

fn query(
    call: impl FnOnce(*mut libc::sockaddr, *mut libc::socklen_t) -> libc::c_int,
) -> io::Result<Option<SocketAddress>> {
    let mut address = RawAddress::empty();
    let mut len = address.size();
    check(call(address.as_mut_ptr(), &mut len))?;
    *address.size_mut() = len;
    Ok(address.decode())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;

    fn port_of(fd: &OwnedFd) -> u16 {
        match local_address(fd.as_fd()).unwrap() {
            Some(SocketAddress::Inet(address)) => address.port(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn listening_everywhere_takes_ipv4_and_ipv6() {
        let fd = listen_everywhere(0).unwrap();
        let port = port_of(&fd);
        assert_ne!(port, 0);
        let listener = TcpListener::from(fd);
        let arrives_as = |host: &str| {
            let client = TcpStream::connect((host, port)).unwrap();
            // `accept` does not block: connecting has put the connection into the listener's queue.
            let (server, _) = listener.accept().unwrap();
            let seen = peer_address(server.as_fd()).unwrap();
            assert_eq!(seen, Some(SocketAddress::Inet(client.local_addr().unwrap())));
        };
        arrives_as("127.0.0.1");
        if TcpListener::bind("[::1]:0").is_ok() {
            arrives_as("::1");
        }
    }

    #[test]
    fn a_taken_port_is_named() {
        let fd = listen("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port_of(&fd)));
        let error = listen(address).unwrap_err().to_string();
        assert!(error.contains(&address.to_string()) && error.contains("another process"), "{error}");
    }

    #[test]
    fn options_reach_the_kernel() {
        let options = TcpOptions { send_buffer: Some(8192), ..TcpOptions::default() };
        let fd = socket("127.0.0.1:1".parse().unwrap(), &options).unwrap();
        let read = |level, name| {
            let mut value: libc::c_int = 0;
            let mut len = socklen::<libc::c_int>();
            // SAFETY: `value` has `len` bytes.
            check(unsafe { libc::getsockopt(fd.as_raw_fd(), level, name, (&raw mut value).cast(), &mut len) }).unwrap();
            value
        };
        assert_eq!(read(libc::IPPROTO_TCP, libc::TCP_NODELAY), 1);
        assert_eq!(read(libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT), 0, "a peer may stop reading for a while");
        assert_eq!(read(libc::IPPROTO_TCP, libc::TCP_KEEPIDLE), 10);
        assert_eq!(read(libc::SOL_SOCKET, libc::SO_SNDBUF), 16384);
    }

    #[test]
    fn a_value_that_the_kernel_cannot_hold_is_an_error() {
        let options = TcpOptions { send_buffer: Some(usize::MAX), ..TcpOptions::default() };
        let error = socket("127.0.0.1:1".parse().unwrap(), &options).unwrap_err().to_string();
        assert!(error.contains("SO_SNDBUF"), "{error}");
    }
}
