//! Where a data port listens or connects to: `host:port`, `[v6]:port`, `unix:/path`, `unix:@name`.

use std::fmt;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// An address that a socket can be bound to or connected to.
///
/// A unix path that starts with `@` is a name in Linux' abstract namespace.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum SocketAddress {
    Inet(SocketAddr),
    Unix(PathBuf),
}

/// An address as an operator writes it. Names are looked up each time it is resolved, because a restarted task may have moved.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum HostPort {
    Host { host: String, port: u16 },
    Unix(PathBuf),
}

#[derive(Debug, thiserror::Error)]
pub enum AddressError {
    #[error("\"{text}\" is no address: {reason} (expected host:port, [v6]:port, unix:/path or unix:@name)")]
    Malformed { text: String, reason: &'static str },
    #[error("cannot resolve host \"{host}\": {source}")]
    Resolve { host: String, source: std::io::Error },
    #[error("host \"{host}\" has no address")]
    NoAddress { host: String },
}

/// sockaddr_un holds 108 bytes, one of which ends the path or starts the abstract name.
const MAX_UNIX_PATH: usize = 107;

impl HostPort {
    /// Every address that the host has now, in the resolver's order. Blocks while it asks: not for a reactor's thread.
    pub fn resolve(&self) -> Result<Vec<SocketAddress>, AddressError> {
        let (host, port) = match self {
            HostPort::Unix(path) => return Ok(vec![SocketAddress::Unix(path.clone())]),
            HostPort::Host { host, port } => (host.as_str(), *port),
        };
        let found =
            (host, port).to_socket_addrs().map_err(|source| AddressError::Resolve { host: host.to_owned(), source })?;
        let mut addresses = Vec::new();
        for address in found.map(SocketAddress::Inet) {
            if !addresses.contains(&address) {
                addresses.push(address);
            }
        }
        if addresses.is_empty() {
            return Err(AddressError::NoAddress { host: host.to_owned() });
        }
        Ok(addresses)
    }

    /// The address itself, if it needs no lookup.
    pub fn literal(&self) -> Option<SocketAddress> {
        match self {
            HostPort::Unix(path) => Some(SocketAddress::Unix(path.clone())),
            HostPort::Host { host, port } => {
                let ip: IpAddr = host.parse().ok()?;
                Some(SocketAddress::Inet(SocketAddr::new(ip, *port)))
            }
        }
    }
}

impl FromStr for HostPort {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        parse(text).map_err(|reason| AddressError::Malformed { text: text.to_owned(), reason })
    }
}

fn parse(text: &str) -> Result<HostPort, &'static str> {
    if let Some(path) = text.strip_prefix("unix:") {
        return match path.as_bytes() {
            [] | [b'@'] => Err("the path is empty"),
            [b'@' | b'/', ..] if path.len() > MAX_UNIX_PATH => Err("the path is longer than 107 bytes"),
            path if path.contains(&0) => Err("the path contains a zero byte"),
            [b'@' | b'/', ..] => Ok(HostPort::Unix(PathBuf::from(path))),
            _ => Err("the path is not absolute"),
        };
    }
    let (host, port) = text.rsplit_once(':').ok_or("the port is missing")?;
    if port.is_empty() || !port.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err("the port is not a number");
    }
    let port = port.parse().map_err(|_| "the port is above 65535")?;
    if let Some(inner) = host.strip_prefix('[') {
        let inner = inner.strip_suffix(']').ok_or("a bracket is not closed")?;
        return match literal_v6(inner) {
            true => Ok(HostPort::Host { host: inner.to_owned(), port }),
            false => Err("what stands in brackets is no IPv6 address"),
        };
    }
    match host {
        "" => Err("the host is missing"),
        host if host.contains(':') => Err("an IPv6 address needs brackets"),
        host if host.len() > 253 => Err("the host name is longer than 253 bytes"),
        host if host.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._".contains(&byte)) => {
            Ok(HostPort::Host { host: host.to_owned(), port })
        }
        _ => Err("the host contains a character that no host name has"),
    }
}

/// With or without a zone ("fe80::1%eth0"), which the resolver understands.
fn literal_v6(text: &str) -> bool {
    let (address, zone) = text.split_once('%').map_or((text, None), |(address, zone)| (address, Some(zone)));
    let zone_is_fine = zone.is_none_or(|zone| {
        !zone.is_empty() && zone.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._".contains(&byte))
    });
    zone_is_fine && address.parse::<std::net::Ipv6Addr>().is_ok()
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            HostPort::Host { host, port } if host.contains(':') => write!(f, "[{host}]:{port}"),
            HostPort::Host { host, port } => write!(f, "{host}:{port}"),
            HostPort::Unix(path) => write_unix(f, path),
        }
    }
}

impl fmt::Display for SocketAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SocketAddress::Inet(address) => address.fmt(f),
            SocketAddress::Unix(path) => write_unix(f, path),
        }
    }
}

fn write_unix(f: &mut fmt::Formatter<'_>, path: &Path) -> fmt::Result {
    write!(f, "unix:{}", path.display())
}

impl From<SocketAddr> for SocketAddress {
    fn from(address: SocketAddr) -> Self {
        SocketAddress::Inet(address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn good_addresses_survive_the_round_trip() {
        for text in [
            "localhost:0",
            "ps-0.train.svc.cluster.local:2222",
            "10.0.0.1:65535",
            "[::1]:2222",
            "[fe80::1%eth0]:1",
            "my_host:80",
            "unix:/run/starwire/socket",
            "unix:@starwire-7",
        ] {
            assert_eq!(text.parse::<HostPort>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn bad_addresses_are_named_with_the_reason() {
        for (text, reason) in [
            ("", "port is missing"),
            ("host", "port is missing"),
            ("host:", "not a number"),
            ("host:+1", "not a number"),
            ("host:65536", "above 65535"),
            (":1", "host is missing"),
            ("::1:2222", "needs brackets"),
            ("[::1:2222", "not closed"),
            ("[host]:1", "no IPv6"),
            ("[::1%]:1", "no IPv6"),
            ("ho st:1", "no host name has"),
            ("host,other:1", "no host name has"),
            ("unix:", "path is empty"),
            ("unix:@", "path is empty"),
            ("unix:relative", "not absolute"),
            ("unix:/zero\0", "zero byte"),
        ] {
            let error = text.parse::<HostPort>().unwrap_err().to_string();
            assert!(error.contains(reason) && error.contains(text), "{text:?}: {error}");
        }
        let long = format!("unix:/{}", "x".repeat(107));
        assert!(long.parse::<HostPort>().unwrap_err().to_string().contains("107 bytes"));
    }

    #[test]
    fn literals_need_no_lookup() {
        let address = |text: &str| text.parse::<HostPort>().unwrap();
        assert_eq!(address("[::1]:7").literal().unwrap().to_string(), "[::1]:7");
        assert_eq!(address("127.0.0.1:7").literal().unwrap().to_string(), "127.0.0.1:7");
        assert_eq!(address("localhost:7").literal(), None);
        assert_eq!(address("unix:@x").literal(), Some(SocketAddress::Unix("@x".into())));
    }

    #[test]
    fn localhost_resolves_to_loopback() {
        let found = "localhost:7".parse::<HostPort>().unwrap().resolve().unwrap();
        assert!(!found.is_empty());
        for address in found {
            assert!(matches!(address, SocketAddress::Inet(inet) if inet.ip().is_loopback() && inet.port() == 7));
        }
    }
}
