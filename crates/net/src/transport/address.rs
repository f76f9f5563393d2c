//! Socket addresses.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;

/// An address that a socket can be bound to or connected to.
///
/// A unix path that starts with `@` is a name in Linux's abstract namespace.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum SocketAddress {
    Inet(SocketAddr),
    Unix(PathBuf),
}

impl fmt::Display for SocketAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SocketAddress::Inet(address) => address.fmt(f),
            SocketAddress::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

impl From<SocketAddr> for SocketAddress {
    fn from(address: SocketAddr) -> Self {
        SocketAddress::Inet(address)
    }
}
