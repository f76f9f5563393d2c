//! Sockets and addresses.

/// Where a data port listens or connects to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SocketAddress {
    Inet(std::net::SocketAddr),
    Unix(std::path::PathBuf),
}
